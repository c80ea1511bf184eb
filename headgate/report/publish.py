"""A study as files small enough to commit: its results without each run's course, its figures as SVG."""

import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vl_convert

from headgate.config import write_json, write_text
from headgate.report.collect import read_study
from headgate.report.figures import figures

WIDTH = 640
LEGEND = {
    "title": None,
    "symbolOpacity": 1,
    "orient": "bottom",
    "columns": 3,
    "symbolLimit": 0,
    "labelLimit": 0,
}
"""Below the figure and whole, however many variants a study has."""

OF_A_RUN = ("seed", "state", "reason", "loss", "tokens", "bits_per_byte")
"""What is kept of it."""


def publish(study: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[Path]:
    """Write a study folder's results.json, results.md and papers.md, what the papers say beside it, and every
    view of every figure in a file named after both."""
    target, results = Path(folder), read_study(study)
    target.mkdir(parents=True, exist_ok=True)
    write_json(target / "results.json", digest(results))
    written = [target / "results.json"]
    for name in ("results.md", "papers.md"):
        written.append(target / name)
        write_text(written[-1], (Path(study) / name).read_text(encoding="utf-8"))
    for figure in figures(results).values():
        for view, spec in figure.views.items():
            name = re.sub(r"[^A-Za-z0-9]+", "-", f"{figure.name} {view}").strip("-").lower()
            written.append(target / f"{name}.svg")
            write_text(written[-1], vl_convert.vegalite_to_svg(standing_alone(spec)))
    return written


def digest(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results without each run's course, the gates, and where on a machine anything lay."""
    kept = {key: value for key, value in results.items() if key not in ("commands", "passage", "skipping")}
    kept["data"] = {key: value for key, value in results["data"].items() if key != "folder"}
    kept["variants"] = []
    for variant in results["variants"]:
        told = {key: value for key, value in variant.items() if key not in ("folder", "gates")}
        told["runs"] = [{key: run[key] for key in OF_A_RUN if key in run} for run in variant["runs"]]
        kept["variants"].append(told)
    return kept


def standing_alone(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The figure with a width of its own and, where colours alone tell variants apart, a legend."""
    drawing = dict(copy.deepcopy(spec), width=WIDTH, background="white")
    layers = [layer.get("encoding", {}) for layer in drawing.get("layer", [drawing])]
    named = any(channels.get("y", {}).get("field") == "label" for channels in layers)
    for channels in layers:
        for channel in ("color", "strokeDash", "shape"):
            if channels.get(channel, {}).get("field") == "label" and not named:
                channels[channel]["legend"] = LEGEND
    return drawing
