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
LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+)([^.)][^)]*)\)")


def on_files(files: Files, config: Any) -> Files:
    docs = Path(config.docs_dir)
    for page in sorted(docs.rglob("*.md")):
        depth = len(page.relative_to(docs).parents)
        for picture, _, up, target in LINK.findall(page.read_text(encoding="utf-8")):
            taken = _leads_outside(up, depth) and _taken_along(picture, target)
            if taken and files.get_file_from_path(f"outside/{target}") is None:
                source = str(docs.parent / target)
                files.append(File.generated(config, f"outside/{target}", abs_src_path=source))
    return files


def _leads_outside(up: str, depth: int) -> bool:
    """Whether so many steps up lead from a page that is this deep out of docs/."""
    return up.count("../") == depth


def _taken_along(picture: str, target: str) -> bool:
    return bool(picture) or target.endswith(".html")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = page.file.src_uri.count("/") + 1

    def elsewhere(link: re.Match[str]) -> str:
        picture, words, up, target = link.groups()
        if not _leads_outside(up, depth):
            return link[0]
        if _taken_along(picture, target):
            return f"{picture}[{words}]({'../' * (depth - 1)}outside/{target})"
        return f"[{words}]({REPOSITORY}/{target})" if REPOSITORY else words

    return LINK.sub(elsewhere, markdown)
