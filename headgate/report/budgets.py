"""Figures about effort: tuning each variant, and training the baseline at other budgets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from headgate.report.painting import (
    LOGARITHMIC,
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

COMPUTE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
FAR = 1e6
"""Outside every figure."""
SIDEWAYS = 0.06
"""Of the width of a figure: how far apart the marks of one trial's variants lie."""
FINE_COMPUTE = (0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)


def tuning_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    """The loss of every trial against each setting that was tuned, and what more trials are worth."""
    tuning = results["tuning"]
    if not tuning:
        return None
    views = {}
    for setting in dict.fromkeys(
        name for one in tuning["variants"] for trial in one["trials"] for name in trial["settings"]
    ):
        view = _against(results, painter, setting)
        if view is not None:
            views[setting.rpartition(".")[2].replace("_", " ")] = view
    best = [
        {"label": one["label"], "trials": n, "loss": loss}
        for one in tuning["variants"]
        for n, loss in enumerate(one["expected_best"], 1)
        if loss is not None
    ]
    if best:
        views["best of n trials"] = painter.lines(
            best,
            alt.X("trials:Q", title="trials", axis=alt.Axis(tickMinStep=1, format="d", tickCount=6)),
            ("loss", "expected best loss, first rung"),
            [VARIANT, ("trials", "trials", ",.0f"), ("loss", "expected best", ".4f")],
            "The best loss to expect from this many trials taken at random, at the first rung. A line that "
            "still falls on the right would gain from more trials; one that is above another at every number "
            "of trials does not lag for lack of tuning.",
        )
    return PageFigure("tuning", "What tuning tried", views)


def _against(results: Mapping[str, Any], painter: Painter, setting: str) -> FigureView | None:
    own, tuning = _of_recipe(results["config"], setting), results["tuning"]
    rows: Rows = []
    lost = 0
    for one in tuning["variants"]:
        for trial in one["trials"]:
            value, losses = trial["settings"].get(setting, own), trial["losses"]
            if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
                continue
            if not losses or losses[0] is None:
                lost += 1
                continue
            wins = trial["number"] == one["winner"]
            row = {"label": one["label"], "value": value, "loss": losses[0], "shown": wins}
            rows.append(row | {"trial": trial["number"], "rungs": len(losses), "wins": "yes" if wins else ""})
    if len({row["value"] for row in rows}) < 2:
        return None
    edges = _edges(tuning["space"], setting)
    _side_by_side(rows, [one["label"] for one in tuning["variants"]], edges)
    columns = [VARIANT, ("trial", "trial", ""), ("value", setting, ".3~g"), ("loss", "loss", ".4f")]
    columns += [("rungs", "rungs reached", ""), ("wins", "winner", "")]
    axis = alt.Axis(format="~g", tickCount=5, labelOverlap=True)
    points = (
        painter.chart(rows)
        .mark_point(opacity=0.9, strokeWidth=1.5)
        .encode(
            alt.X("drawn:Q", title=setting, scale=LOGARITHMIC, axis=axis),
            alt.Y(
                "loss:Q",
                title="validation loss, first rung",
                scale=alt.Scale(zero=False),
                axis=alt.Axis(tickCount=5),
            ),
            painter.colour,
            painter.shape,
            fill=painter.fill,
            size=alt.condition("datum.shown", alt.value(130), alt.value(50)),
            tooltip=tooltips(columns),
        )
    )
    caption = (
        f"Every trial after {tuning['rungs'][0]:.0%} of its steps. The large filled mark is the trial that "
        "won at the end, which need not be the lowest here. The other settings were drawn with this one. All "
        "variants try the same values; their marks stand side by side."
    )
    if edges:
        caption += " Dashed: the edges of what was tried."
    if lost:
        caption += f" Not drawn because they failed or diverged: {lost}."
    layers = [*(level(edge, "x") for edge in edges), points]
    return FigureView(finished(layers, rows), columns, caption, key=True)


def _edges(space: Sequence[str], setting: str) -> list[float]:
    """The ends of a setting's range; nothing if it had a list of values."""
    for one in space:
        name, _, values = one.partition("=")
        low, between, high = values.partition("..")
        if name == setting and between:
            return [float(low), float(high)]
    return []


def _side_by_side(rows: Rows, labels: Sequence[str], edges: Sequence[float]) -> None:
    """Give each row the place where it is drawn: its value, moved a little for each variant so that none
    covers another."""
    values = [*edges, *(row["value"] for row in rows)]
    step = SIDEWAYS * math.log(max(values) / min(values)) / max(1, len(labels) - 1)
    for row in rows:
        row["drawn"] = row["value"] * math.exp(step * (labels.index(row["label"]) - (len(labels) - 1) / 2))


def _of_recipe(config: Mapping[str, Any], setting: str) -> Any:
    """The recipe's own value of a dotted setting, which the trial as published uses."""
    value: Any = config
    for name in setting.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def ladder_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    """What each variant is worth in the baseline's compute, and where that is read from."""
    if not results["ladder"]:
        return None
    views = {}
    for kind in ("time", "tokens"):
        rows = _worth(results, kind)
        if rows:
            views[f"worth at equal {kind}"] = _worth_view(results, painter, rows, kind)
    budget = alt.X("multiple:Q", title="times the budget", scale=LOGARITHMIC, axis=_multiples(results))
    rungs = [
        {"label": results["baseline"], **{name: rung[name] for name in ("multiple", "mean", "low", "high")}}
        for rung in results["ladder"]
        if rung["mean"] is not None
    ]
    if rungs:
        views[f"{results['baseline']} by budget"] = painter.lines(
            rungs,
            budget,
            ("mean", "validation loss"),
            [VARIANT, ("multiple", "budget", ".3~g"), ("mean", "loss", ".4f")],
            f"What {results['baseline']} reaches with less training and with more, each with its own "
            "schedule: the curve that compute is read from. Mean over the seeds.",
        )
    trend = [
        {
            "label": v["label"],
            "multiple": at["multiple"],
            **{name: at["difference"][name] for name in ("mean", "low", "high")},
        }
        for v in results["variants"][1:]
        for at in v["trend"] or ()
        if at["difference"]["mean"] is not None
    ]
    if trend:
        views["differences by budget"] = painter.lines(
            trend,
            budget,
            ("mean", f"loss minus that of {results['baseline']}"),
            [
                VARIANT,
                ("multiple", "budget", ".3~g"),
                ("mean", "difference", "+.4f"),
                ("low", "corrected from", "+.4f"),
                ("high", "to", "+.4f"),
            ],
            f"The difference at each budget; {painter.band} is the interval it is judged by. Below 0 is "
            "better; a difference that shrinks to the right is one of early training.",
            format="+.3~f",
            band=("low", "high"),
            rule=0.0,
        )
    worth = [
        {"label": v["label"], "multiple": at["multiple"], **at["price"]["tokens"]}
        for v in results["variants"][1:]
        for at in v["trend"] or ()
        if at.get("price") and not at["price"]["beyond"] and at["price"]["tokens"]["high"] is not None
    ]
    if worth:
        views["worth by budget"] = painter.lines(
            worth,
            budget,
            ("value", f"times {results['baseline']}'s compute"),
            [
                VARIANT,
                ("multiple", "budget", ".3~g"),
                ("value", "worth", ".2f"),
                ("low", "95% from", ".2f"),
                ("high", "to", ".2f"),
            ],
            f"A variant at 2× reaches what {results['baseline']} would need twice that budget for; "
            f"{painter.band} is the 95% interval, not corrected. A line that falls to 1 is a lead that more "
            "training ends.",
            band=("low", "high"),
            rule=1.0,
        )
    return PageFigure("ladder", "What a difference is worth in compute", views)


def _multiples(results: Mapping[str, Any]) -> alt.Axis:
    values = [rung["multiple"] for rung in results["ladder"]]
    return alt.Axis(values=values, labelExpr="format(datum.value, '~g') + '×'")


def _worth(results: Mapping[str, Any], kind: str) -> Rows:
    rows = []
    for v in results["variants"][1:]:
        found = (v["price"] or {}).get(kind)
        if found is None or v["price"]["beyond"] or not found["value"]:
            continue
        # No compute of the baseline's ends an interval without a high end.
        end = math.inf if found["high"] is None else found["high"]
        shown = found["low"] is not None and not found["low"] <= 1 <= end
        rows.append({"label": v["label"], **found, "end": min(end, FAR), "shown": shown})
    return rows


def _worth_view(results: Mapping[str, Any], painter: Painter, rows: Rows, kind: str) -> FigureView:
    order = [row["label"] for row in sorted(rows, key=lambda row: -row["value"])]
    reach = [row["value"] for row in rows] + [1.0]
    reach += [end for row in rows for end in (row["low"], row["high"]) if end]
    lowest, highest = results["ladder"][0]["multiple"] / 4, results["ladder"][-1]["multiple"] * 4
    ends = max(min(reach), lowest) / 1.1, min(max(reach), highest) * 1.1
    ticks = next(
        (
            inside
            for all_ in (COMPUTE, FINE_COMPUTE)
            if len(inside := [t for t in all_ if ends[0] <= t <= ends[1]]) >= 4
        ),
        [tick for tick in FINE_COMPUTE if min(ends[0], 0.9) <= tick <= max(ends[1], 1.1)],
    )
    domain = [min(ends[0], ticks[0]), max(ends[1], ticks[-1])]
    chart, y = row_for_each(order)
    title = f"times {results['baseline']}'s compute, at equal {kind}; right of 1 is a gain"
    axis = alt.Axis(values=ticks, labelExpr="format(datum.value, '~g') + '×'", labelFlush=False)
    x = alt.X("low:Q", title=title, scale=alt.Scale(type="log", domain=domain, nice=False), axis=axis)
    columns = [
        VARIANT,
        ("value", "worth", ".2f"),
        ("low", "95% from", ".2f"),
        ("high", "to", ".2f"),
    ]
    lines = chart.mark_rule(strokeWidth=4, clip=True, opacity=1).encode(x, alt.X2("end:Q"), y, painter.colour)
    points = chart.mark_point(size=90, opacity=1, strokeWidth=2, clip=True).encode(
        alt.X("value:Q", title=title),
        y,
        painter.colour,
        painter.shape,
        fill=painter.fill,
        tooltip=tooltips(columns),
    )
    beyond = [v["label"] for v in results["variants"][1:] if v["price"] and v["price"]["beyond"]]
    caption = (
        f"A variant at 2× reaches what {results['baseline']} would need twice the compute for. Lines are 95% "
        "intervals, not corrected for the number of variants; at the edge they continue. A filled mark "
        "is one whose interval excludes 1."
    )
    if kind == "time":
        caption += " At equal time: times the relative speed that was measured."
    if beyond:
        caption += f" Too far outside the ladder to say: {', '.join(beyond)}."
    drawing = finished([level(1.0, "x"), lines, points], rows, height=ROW * len(rows))
    return FigureView(drawing, columns, caption)
