"""What `headgate runs` prints: the runs below a folder, how far they have come and how well they do."""

import json
import os
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from headgate import files
from headgate.errors import HeadgateError
from headgate.progress import duration, table_console
from headgate.train.folder import RunFolder, last_step, read_config, read_evaluations


def list_runs(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every run in the folder and below it, by name; one that cannot be read says why."""
    top = files.named(folder, "the folder to look through")
    if files.kind(top) != "a folder":
        raise HeadgateError(f"{str(top)!r} is {files.kind(top) or 'a file'}; expected a folder with runs")
    found = []
    for here, folders, names in os.walk(top):
        if "config.json" in names and "data.json" in names and "checkpoints" in folders:
            found.append(_describe(Path(here)))
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return found


def print_runs(folder: str | os.PathLike[str], *, as_json: bool) -> None:
    runs = list_runs(folder)
    if as_json:
        print(json.dumps(runs, allow_nan=False))
        return
    if not runs:
        raise HeadgateError(f"{str(folder)!r} holds no run, and neither does any folder below it")
    table = Table(
        "run", "mechanism", "seed", "step", "validation loss", "time", "state", box=None, pad_edge=False
    )
    for column in table.columns[2:6]:
        column.justify = "right"
    for run in runs:
        cells = [run["run"], run.get("mechanism", ""), str(run.get("seed", ""))]
        cells.append(f"{run['step']:,} of {run['steps']:,}" if "steps" in run else "")
        cells.append("" if run.get("loss") is None else f"{run['loss']:.4f}")
        cells += ["" if run.get("seconds") is None else duration(run["seconds"]), run["state"]]
        table.add_row(*map(Text, cells))
    table_console().print(table)


def _describe(path: Path) -> dict[str, Any]:
    run, named = RunFolder(path), {"run": str(path)}
    try:
        asked = read_config(path)
        lines = read_evaluations(path)
        last = lines[-1] if lines else {}
        summary = run.read_summary() if files.kind(run.summary) != "missing" else None
    except HeadgateError as error:
        return {**named, "state": f"not readable: {error}"}
    return {
        **named,
        "mechanism": "+".join(spec.name for spec in asked.model.mechanism),
        "seed": asked.seed,
        "step": last_step(path),
        "steps": asked.train.steps,
        "loss": summary["final"]["loss"] if summary else last.get("validation", {}).get("loss"),
        "seconds": last.get("seconds"),
        "state": "finished" if summary else _state(run),
    }


def _state(run: RunFolder) -> str:
    """Whether a process is working on an unfinished run, as its lock shows."""
    lock = run.path / ".lock"
    if files.kind(lock, follow=False):
        return "stopped"
    return "training" if files.is_locked(lock) else "stopped"
