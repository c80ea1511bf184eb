"""A study in files small enough to commit: results without each run's curve, figures as SVG."""

import copy
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert

from headgate.errors import HeadgateError
from headgate.files import write_sealed, write_text
from headgate.report.figures import figures
from headgate.report.painting import ROWS
from headgate.report.reading import read_results

WIDTH = 640
LEGEND = {"title": None, "orient": "bottom", "symbolOpacity": 1, "symbolLimit": 0, "labelLimit": 0}
"""Below the figure, never cut off, however many variants a study has."""
FONT = "Verdana, DejaVu Sans, sans-serif"
"""Equally wide, and the widest in use, so that a label never needs more room than it was given."""

OF_A_RUN = ("seed", "state", "reason", "loss", "tokens", "bits_per_byte")
"""What a published run keeps."""


def publish_study(study: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[Path]:
    """Write a study's results.json, its tables (results.md, papers.md), the words of caution beside it
    (note.txt), and each view of each figure as an SVG file named after both."""
    target, results = Path(folder), read_results(study)
    tables = [Path(study) / name for name in ("results.md", "papers.md", "note.txt")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in tables if path.is_file()}
    for figure in figures(results).values():
        for title, view in figure.views.items():
            name = re.sub(r"[^A-Za-z0-9]+", "-", f"{figure.name} {title}").strip("-").lower()
            texts[f"{name}.svg"] = vl_convert.vegalite_to_svg(standing_alone(view.spec))
    made = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_sealed(target / "results.json", digest(results))
        for name, text in texts.items():
            write_text(target / name, text)
    except OSError as error:
        if made:
            shutil.rmtree(target, ignore_errors=True)
        raise HeadgateError(
            f"cannot write into {str(folder)!r} ({error.strerror}); --publish takes a folder, old or new"
        ) from None
    return [target / name for name in ("results.json", *texts)]


def digest(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results without each run's curve and command, the gates, and this machine's paths."""
    left_out = ("passage", "skipping", "documents", "note")
    kept = {key: value for key, value in results.items() if key not in left_out}
    if kept["commands"] is not None:
        kept["commands"] = {**kept["commands"], "runs": []}
    kept["data"] = {key: value for key, value in results["data"].items() if key != "folder"}
    kept["variants"] = []
    for variant in results["variants"]:
        row = {key: value for key, value in variant.items() if key != "gates"}
        row["runs"] = [{key: run[key] for key in OF_A_RUN if key in run} for run in variant["runs"]]
        kept["variants"].append(row)
    return kept


def standing_alone(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The figure with a fixed width and, unless its rows are named, a legend of what it draws."""
    drawing = dict(copy.deepcopy(spec), width=WIDTH, background="white")
    drawing["config"] = {**drawing.get("config", {}), "font": FONT}
    layers = [layer.get("encoding", {}) for layer in drawing.get("layer", [drawing])]
    if any(channels.get("y", {}).get("field") == "label" for channels in layers):
        return drawing
    channel = "strokeDash" if any("strokeDash" in channels for channels in layers) else "shape"
    for channels in layers:
        if channels.get(channel, {}).get("field") == "label":
            drawn = {row["label"] for row in drawing["datasets"][ROWS]}
            labels = [label for label in channels[channel]["scale"]["domain"] if label in drawn]
            legend = _legend(labels, lines=channel == "strokeDash")
            channels["color"]["legend"] = channels[channel]["legend"] = legend
            # Otherwise Vega merges the legends of all layers and draws dashes around the shapes.
            drawing["resolve"] = {"legend": dict.fromkeys(("color", "shape", "strokeDash"), "independent")}
    return drawing


def _legend(labels: Sequence[str], *, lines: bool) -> dict[str, Any]:
    """For lines it shows colour and dash, for points colour and shape."""
    columns = max(1, WIDTH // (50 + 7 * max(map(len, labels))))
    line = {"symbolType": "stroke", "symbolSize": 500, "symbolStrokeWidth": 2}
    return LEGEND | {"columns": columns, "values": list(labels)} | (line if lines else {})
