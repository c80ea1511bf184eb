"""For the site: pictures and studies' pages outside docs/ are taken along; links to other files there lead to
the repository."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = os.environ.get("HEADGATE_REPOSITORY", "").rstrip("/")
"""Where the sources are published, as in https://example.org/headgate/blob/main; without it such links are
plain text."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)]+)\)")


def on_files(files: Files, config: Any) -> Files:
    root = Path(config.docs_dir).parent
    for page in sorted(Path(config.docs_dir).glob("*.md")):
        for picture, _, target in LINK.findall(page.read_text(encoding="utf-8")):
            if _taken_along(picture, target) and files.get_file_from_path(f"outside/{target}") is None:
                files.append(File.generated(config, f"outside/{target}", abs_src_path=str(root / target)))
    return files


def _taken_along(picture: str, target: str) -> bool:
    return bool(picture) or target.endswith(".html")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if "/" in page.file.src_uri:  # from a folder of docs/, .. is docs/ itself
        return markdown

    def elsewhere(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if _taken_along(picture, target):
            return f"{picture}[{words}](outside/{target})"
        return f"[{words}]({REPOSITORY}/{target})" if REPOSITORY else words

    return LINK.sub(elsewhere, markdown)
