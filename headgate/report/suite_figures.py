"""The figures of a suite's page, a view for each task: right answers by distance and pairs, and learning."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import altair as alt

from headgate.report.figures import counts_axis, doubling
from headgate.report.painting import FROM_ZERO, VARIANT, PageFigure, Painter, Rows

SHARE = alt.Scale(domain=[0, 1])


def suite_figures(suite: Mapping[str, Any]) -> dict[str, PageFigure]:
    """Every figure for which the suite has data, by name."""
    painter = Painter([with_family(variant) for variant in suite["variants"]])
    made = [
        answers_figure(suite, painter, "by_distance", "Right answers by distance"),
        answers_figure(suite, painter, "by_pairs", "Right answers by number of pairs"),
        learning_figure(suite, painter),
    ]
    return {figure.name: figure for figure in made if figure.views}


def with_family(variant: Mapping[str, Any]) -> dict[str, Any]:
    """Suites from older versions name no mechanism."""
    return {"mechanism": variant["label"].partition(":")[0], "ablation": None, **variant}


def answers_figure(suite: Mapping[str, Any], painter: Painter, key: str, title: str) -> PageFigure:
    """The share of right answers of each variant, with its interval."""
    field = {"by_distance": "first", "by_pairs": "pairs"}[key]
    axis = {"by_distance": "distance to what is asked for, in tokens", "by_pairs": "pairs to hold"}[key]
    views = {}
    for task in suite["tasks"]:
        rows = [_place(row["label"], place, field) for row in task["variants"] for place in row[key]]
        rows = [row for row in rows if row["mean"] is not None and row["at"] > 0]
        if len({row["at"] for row in rows}) < 2:
            continue
        columns = [VARIANT, ("at", "from" if field == "first" else "pairs", ",.0f")]
        columns += [("last", "to", ",.0f")] * (field == "first")
        columns += [("mean", "right", ".1%"), ("low", "95% from", ".1%"), ("high", "to ", ".1%")]
        chance = task["chance"]["accuracy"]
        views[task["name"]] = painter.lines(
            rows,
            doubling(rows, "at", axis),
            ("mean", "share of right answers"),
            columns,
            f"{task['name']}: mean over the seeds; {painter.band} is its 95% interval, cut off at 0 and 1. "
            f"Guessing is right {chance:.1%} of the time: the dashed line.",
            scale=SHARE,
            format=".0%",
            band=("low", "high"),
            rule=chance,
        )
    return PageFigure(key.replace("_", "-"), title, views)


def _place(label: str, place: Mapping[str, Any], field: str) -> dict[str, Any]:
    row = {"label": label, "at": place[field], "mean": place["mean"]}
    if field == "first":
        row["last"] = place["end"] - 1
    # The interval of a mean may go beyond what a share can be.
    for end, bound in (("low", max), ("high", min)):
        row[end] = None if place[end] is None else bound(place[end], float(end == "high"))
    return row


def learning_figure(suite: Mapping[str, Any], painter: Painter) -> PageFigure:
    views = {}
    for task in suite["tasks"]:
        rows = [point for row in task["variants"] for point in _curve(row["label"], row["runs"])]
        if not rows:
            continue
        views[task["name"]] = painter.lines(
            rows,
            alt.X("tokens:Q", title="training tokens", axis=counts_axis(), scale=FROM_ZERO),
            ("score", "score"),
            [VARIANT, ("tokens", "tokens", ",.0f"), ("score", "score", ".3f")],
            f"{task['name']}: mean score over the seeds on the validation split, at the learning rate that "
            f"won. 0 is chance, 1 the optimum; from {suite['solved_at']} up a task counts as solved (the "
            "dashed line).",
            format=".1~f",
            rule=suite["solved_at"],
        )
    return PageFigure("learning", "How they learn", views)


def _curve(label: str, runs: Sequence[Mapping[str, Any]]) -> Rows:
    """The mean score at each evaluation that all finished runs have; a published suite has no curves."""
    curves = [run.get("curve", ()) for run in runs if run["state"] == "finished"]
    found = []
    for points in zip(*curves, strict=False):
        scores = [point["score"] for point in points]
        if all(score is not None for score in scores):
            found.append({"label": label, "tokens": points[0]["tokens"], "score": fmean(scores)})
    return found
