"""What the mean difference consists of: a figure of its spread over seeds and over documents."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from headgate.report.painting import (
    BARE_ZERO,
    ROW,
    VARIANT,
    FigureView,
    PageFigure,
    Painter,
    Rows,
    finished,
    level,
    row_for_each,
    tooltips,
)
from headgate.report.tradeoff import SHARE, effect


def spread_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    """A dot for each seed; and for documents the middle half, the middle nine tenths, and the farthest."""
    crowd = {v["label"] for v in results["variants"] if painter.crowded and v["ablation"]}
    order = [
        v["label"]
        for v in sorted(results["variants"][1:], key=_mean)
        if v["label"] not in crowd and v["difference"] and v["difference"]["mean"] is not None
    ]
    views = {}
    seeds = [row for row in seed_rows(results) if row["label"] in order]
    if len({row["seed"] for row in seeds}) > 1:
        views["by seed"] = _by_seed(results, painter, seeds, order)
    documents = [row for row in document_rows(results) if row["label"] in order]
    if documents:
        views["by document"] = _by_document(results, painter, documents, order)
    return PageFigure("spread", "Seed by seed, document by document", views)


def _mean(variant: Mapping[str, Any]) -> float:
    mean = (variant["difference"] or {}).get("mean")
    return float("inf") if mean is None else float(mean)


def seed_differences(variant: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[int, float]:
    """The loss minus the baseline's, by seed, where both have one."""
    theirs = {run["seed"]: run.get("loss") for run in baseline["runs"] if run["state"] == "finished"}
    return {
        run["seed"]: run["loss"] - theirs[run["seed"]]
        for run in variant["runs"]
        if run["state"] == "finished" and run["loss"] is not None and theirs.get(run["seed"]) is not None
    }


def seed_rows(results: Mapping[str, Any]) -> Rows:
    baseline = results["variants"][0]
    share, whole = effect(results) is SHARE, baseline["loss"]["mean"]
    return [
        {"label": v["label"], "seed": seed, "nats": nats, "difference": nats / whole if share else nats}
        for v in results["variants"][1:]
        for seed, nats in seed_differences(v, baseline).items()
    ]


def document_rows(results: Mapping[str, Any]) -> Rows:
    found = results["documents"]
    if not found:
        return []
    names = ("p5", "p25", "middle", "p75", "p95")
    return [
        {"label": label, **dict(zip(names, of["quantiles"], strict=True)), "lower": of["lower"]}
        for label, of in found["variants"].items()
    ]


def _by_seed(results: Mapping[str, Any], painter: Painter, rows: Rows, order: Sequence[str]) -> FigureView:
    shown_as = effect(results)
    title = f"{shown_as.words} of each seed against {results['baseline']}; left of 0 is better"
    columns = [VARIANT, ("seed", "seed", ""), ("difference", "difference", shown_as.fine)]
    if shown_as is SHARE:
        columns.append(("nats", "nats per token", "+.4f"))
    chart, y = row_for_each(order)
    axis = alt.Axis(format=shown_as.format, tickCount=5, labelFlush=False, labelExpr=BARE_ZERO)
    x = alt.X("difference:Q", title=title, axis=axis, scale=alt.Scale(zero=True, padding=12))
    dots = chart.mark_point(size=55, opacity=0.9, strokeWidth=1.5).encode(
        x, y, painter.colour, tooltip=tooltips(columns)
    )
    means = chart.mark_tick(thickness=3, size=16, opacity=1).encode(
        alt.X("mean(difference):Q", title=title), y, painter.colour
    )
    caption = "A ring for each seed, a bar at their mean. Seeds on both sides of 0 are chance at work."
    return FigureView(
        finished([level(0.0, "x"), dots, means], rows, height=ROW * len(order)), columns, caption
    )


def _by_document(
    results: Mapping[str, Any], painter: Painter, rows: Rows, order: Sequence[str]
) -> FigureView:
    count = results["documents"]["count"]
    title = f"nats per token of each document against {results['baseline']}; left of 0 is better"
    columns = [
        VARIANT,
        ("p5", "5% of documents below", "+.4f"),
        ("p25", "a quarter below", "+.4f"),
        ("middle", "half below", "+.4f"),
        ("p75", "three quarters below", "+.4f"),
        ("p95", "95% below", "+.4f"),
        ("lower", "documents with a lower loss", ".0%"),
    ]
    chart, y = row_for_each(order)
    axis = alt.Axis(format="+.3~f", tickCount=5, labelFlush=False, labelExpr=BARE_ZERO)
    x = alt.X("p5:Q", title=title, axis=axis, scale=alt.Scale(zero=True, padding=12))
    thin = chart.mark_rule(strokeWidth=1.2).encode(x, alt.X2("p95:Q"), y, painter.colour)
    thick = chart.mark_rule(strokeWidth=5, opacity=1).encode(
        alt.X("p25:Q", title=title), alt.X2("p75:Q"), y, painter.colour
    )
    middle = chart.mark_point(size=70, opacity=1, filled=True).encode(
        alt.X("middle:Q", title=title), y, painter.colour, painter.shape, tooltip=tooltips(columns)
    )
    caption = (
        f"Differences of {count:,} documents, each the mean over the seeds: the mark is the median document, "
        "the thick line the middle half of them, the thin one nine of ten. This is how far documents "
        "differ, not how sure the mean is. Each counts once here, and by its length in the verdict."
    )
    return FigureView(
        finished([level(0.0, "x"), thin, thick, middle], rows, height=ROW * len(order)),
        columns,
        caption,
    )
