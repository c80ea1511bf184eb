"""A study or suite in files small enough to commit: results without each run's curve, figures as SVG."""

import copy
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import vl_convert

from headgate.errors import HeadgateError
from headgate.files import write_bytes, write_sealed, write_text
from headgate.report.figures import figures
from headgate.report.painting import ROWS, PageFigure
from headgate.report.reading import read_results, read_suite, source_of
from headgate.report.suite_figures import suite_figures

WIDTH = 640
LEGEND = {"title": None, "orient": "bottom", "symbolOpacity": 1, "symbolLimit": 0, "labelLimit": 0}
"""Below the figure, never cut off, however many variants a study has."""
FONT = "Verdana, DejaVu Sans, sans-serif"
"""Equally wide, and the widest in use, so that a label never needs more room than it was given."""

LOSSES = "losses.safetensors"
OF_A_RUN = ("seed", "state", "reason", "loss", "tokens", "bits_per_byte")
"""What a published run keeps."""


def publish_study(study: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[Path]:
    """Write a study's results.json, its tables (results.md, papers.md), the words of caution beside it
    (note.txt), the losses of its documents, and each view of each figure as an SVG file named after both."""
    results = read_results(study)
    texts = _beside(study, "results.md", "papers.md", "note.txt") | _drawn(figures(results))
    losses = Path(study) / LOSSES
    kept = {LOSSES: losses.read_bytes()} if losses.is_file() else {}
    return _write(folder, "results.json", digest(results), texts, kept)


def publish_suite(suite: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[Path]:
    """Write a suite's suite.json, its tables (suite.md), and each view of each figure as an SVG file."""
    results = read_suite(suite)
    texts = _beside(suite, "suite.md") | _drawn(suite_figures(results))
    return _write(folder, "suite.json", suite_digest(results), texts)


def _beside(folder: str | os.PathLike[str], *names: str) -> dict[str, str]:
    paths = [Path(folder) / name for name in names]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def _drawn(made: Mapping[str, PageFigure]) -> dict[str, str]:
    texts = {}
    for figure in made.values():
        for title, view in figure.views.items():
            name = re.sub(r"[^A-Za-z0-9]+", "-", f"{figure.name} {title}").strip("-").lower()
            texts[f"{name}.svg"] = vl_convert.vegalite_to_svg(standing_alone(view.spec))
    return texts


def _write(
    folder: str | os.PathLike[str],
    name: str,
    results: Mapping[str, Any],
    texts: Mapping[str, str],
    kept: Mapping[str, bytes] = MappingProxyType({}),
) -> list[Path]:
    target = Path(folder)
    made = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_sealed(target / name, results)
        for other, text in texts.items():
            write_text(target / other, text)
        for other, data in kept.items():
            write_bytes(target / other, data)
    except OSError as error:
        if made:
            shutil.rmtree(target, ignore_errors=True)
        raise HeadgateError(
            f"cannot write into {str(folder)!r} ({error.strerror}); --publish takes a folder, old or new"
        ) from None
    return [target / each for each in (name, *texts, *kept)]


def digest(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results without each run's curve and command, the gates, and this machine's paths."""
    left_out = ("passage", "skipping", "documents", "note")
    kept = {key: value for key, value in results.items() if key not in left_out}
    if kept["commands"] is not None:
        kept["commands"] = {**kept["commands"], "runs": []}
    kept["data"] = {key: value for key, value in results["data"].items() if key != "folder"}
    if kept["data"].get("request"):
        kept["data"]["request"] = {**kept["data"]["request"], "source": source_of(results)}
    kept["variants"] = []
    for variant in results["variants"]:
        row = {key: value for key, value in variant.items() if key != "gates"}
        row["runs"] = [{key: run[key] for key in OF_A_RUN if key in run} for run in variant["runs"]]
        kept["variants"].append(row)
    return kept


def suite_digest(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results without each run's curve."""
    tasks = []
    for task in results["tasks"]:
        rows = [
            {**row, "runs": [{key: run[key] for key in run if key != "curve"} for run in row["runs"]]}
            for row in task["variants"]
        ]
        tasks.append({**task, "variants": rows})
    return {**results, "tasks": tasks}


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
