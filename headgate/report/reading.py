"""Reads what the page shows: results.json of a study folder or a published one, gates.json, skipping.json."""

import os
from pathlib import Path
from typing import Any

from headgate import files
from headgate.errors import HeadgateError


def read_results(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The results, with the gates on a passage under "passage" and gate skipping under "skipping".

    A published folder lacks the gates and the commands, and an older one lists claims that were not measured.
    """
    path = Path(folder) / "results.json"
    results = _read_json_file(path)
    if results is None:
        raise HeadgateError(f"{str(folder)!r} has no results.json; headgate compare writes one")
    results["passage"] = _read_json_file(path.with_name("gates.json"))
    results["skipping"] = _read_json_file(path.with_name("skipping.json"))
    results.setdefault("commands", None)
    for variant in results["variants"]:
        variant.setdefault("gates", None)
    results["claims"] = [judged for judged in results["claims"] if judged["verdict"] != "not run"]
    return dict(results)


def _read_json_file(path: Path) -> Any:
    if files.kind(path) == "missing":
        return None
    try:
        return files.unsealed(files.read_json(path), path)
    except HeadgateError as error:
        raise HeadgateError(f"{error}; remove it and run the study again") from None
