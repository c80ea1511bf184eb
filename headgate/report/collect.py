"""What the page shows, from the files of a study folder: results.json, gates.json, skipping.json."""

import json
import os
from pathlib import Path
from typing import Any

from headgate.errors import HeadgateError


def read_study(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The results, with what the gates did on a passage under "passage" and skipping under "skipping"."""
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise HeadgateError(f"{str(folder)!r} has no results.json; headgate report {folder} writes it first")
    results: dict[str, Any] = _read(path)
    results["passage"] = _read(Path(folder) / "gates.json")
    results["skipping"] = _read(Path(folder) / "skipping.json")
    return results


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HeadgateError(
            f"{str(path)!r} is not JSON ({error}); remove it and run the study again"
        ) from None
