"""A study as files small enough to commit: its results without each run's course, its figures as SVG."""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert

from headgate.errors import HeadgateError
from headgate.files import write_json, write_text
from headgate.report.collect import read_study
from headgate.report.figures import figures

WIDTH = 640
LEGEND = {"title": None, "orient": "bottom", "symbolOpacity": 1, "symbolLimit": 0, "labelLimit": 0}
"""Below the figure and whole, however many variants a study has."""
FONT = "Verdana, DejaVu Sans, sans-serif"
"""Two of one width, the widest in use: a label takes no more room where it is read than where it is drawn."""

OF_A_RUN = ("seed", "state", "reason", "loss", "tokens", "bits_per_byte")
"""What is kept of it."""


def publish(study: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[Path]:
    """Write a study folder's results.json, results.md and papers.md, what the papers say beside it, and every
    view of every figure in a file named after both."""
    target, results = Path(folder), read_study(study)
    texts = {name: (Path(study) / name).read_text(encoding="utf-8") for name in ("results.md", "papers.md")}
    for figure in figures(results).values():
        for view, spec in figure.views.items():
            name = re.sub(r"[^A-Za-z0-9]+", "-", f"{figure.name} {view}").strip("-").lower()
            texts[f"{name}.svg"] = vl_convert.vegalite_to_svg(standing_alone(spec))
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_json(target / "results.json", digest(results))
        for name, text in texts.items():
            write_text(target / name, text)
    except OSError as error:
        raise HeadgateError(
            f"cannot write into {str(folder)!r} ({error.strerror}); --publish takes a folder, old or new"
        ) from None
    return [target / name for name in ("results.json", *texts)]


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
    drawing["config"] = {**drawing.get("config", {}), "font": FONT}
    layers = [layer.get("encoding", {}) for layer in drawing.get("layer", [drawing])]
    if any(channels.get("y", {}).get("field") == "label" for channels in layers):
        return drawing
    told = "strokeDash" if any("strokeDash" in channels for channels in layers) else "shape"
    for channels in layers:
        if channels.get(told, {}).get("field") == "label":
            legend = _legend(channels[told]["scale"]["domain"], lines=told == "strokeDash")
            channels["color"]["legend"] = channels[told]["legend"] = legend
            # Else the legends of all layers become one, with dashes around the shapes.
            drawing["resolve"] = {"legend": dict.fromkeys(("color", "shape", "strokeDash"), "independent")}
    return drawing


def _legend(labels: Sequence[str], *, lines: bool) -> dict[str, Any]:
    """Of lines it shows colour and dash, of points alone colour and shape."""
    columns = max(1, WIDTH // (50 + 7 * max(map(len, labels))))
    line = {"symbolType": "stroke", "symbolSize": 500, "symbolStrokeWidth": 2}
    return LEGEND | {"columns": columns} | (line if lines else {})
