"""For the site: pictures outside docs/ are taken along; links to other files there lead to the repository."""

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
            if picture and files.get_file_from_path(f"outside/{target}") is None:
                files.append(File.generated(config, f"outside/{target}", abs_src_path=str(root / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if "/" in page.file.src_uri:  # from a folder of docs/, .. is docs/ itself
        return markdown

    def elsewhere(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if picture:
            return f"![{words}](outside/{target})"
        return f"[{words}]({REPOSITORY}/{target})" if REPOSITORY else words

    return LINK.sub(elsewhere, markdown)
