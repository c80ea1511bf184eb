"""suite.html: the tables of a suite as one plain page that opens from disk."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from headgate.errors import HeadgateError
from headgate.files import read_json, write_text


def write_suite_page(folder: str | os.PathLike[str]) -> Path:
    """Write suite.html beside suite.json."""
    source = Path(folder) / "suite.json"
    if not source.is_file():
        raise HeadgateError(f"{str(folder)!r} has no suite.json; headgate suite writes one")
    path = Path(folder) / "suite.html"
    write_text(path, suite_page(read_json(source)))
    return path


def suite_page(results: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headgate.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("suite.html.jinja").render(
        suite=results,
        shade=lambda score: 0 if score is None else round(max(0.0, min(1.0, score)) * 0.45, 3),
    )
