"""The figure that answers: the paired difference of each variant against its relative cost.

Both have intervals, the better and cheaper corner is shaded, a line joins the Pareto front, and names are
beside their marks. Where a name goes is worked out here, for a wide figure and for a narrow one, so that none
covers another or a mark; a name without room is left to the tooltip and the table.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from headgate.report.painting import (
    BARE_ZERO,
    BEYOND_EDGE,
    SHORT_NAME,
    VARIANT,
    FigureView,
    PageFigure,
    Painter,
    Rows,
    at_edge,
    finished,
    level,
    picked,
    tooltips,
)

HEIGHT = 340
WIDE, NARROW = 560, 255
"""Widths of the drawing area for which names are placed; below SWITCH the narrow places count."""
SWITCH = 540
LETTER, LINE = 7.0, 14.0
"""Room for a character and a line of 12 pixels."""
TICKS = (
    (0.01, 0.1, 1.0, 10.0, 100.0),
    (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
    (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0),
    (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5),
    (0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15),
    (0.96, 0.98, 1.0, 1.02, 1.04),
)


@dataclass(frozen=True)
class Effect:
    """What a study's differences are shown as."""

    fields: tuple[str, str, str]
    """Mean, low and high in a difference."""
    words: str
    format: str
    """For an axis, in d3's notation."""
    fine: str
    """For a table."""


SHARE = Effect(("relative", "relative_low", "relative_high"), "loss", "+.2~%", "+.2%")
NATS = Effect(("mean", "low", "high"), "loss, nats per token", "+.3~f", "+.4f")


def effect(results: Mapping[str, Any]) -> Effect:
    """As a share of the baseline's loss, unless that is so small that shares say nothing."""
    shares = [
        abs(v["difference"]["relative"])
        for v in results["variants"]
        if v["difference"] and v["difference"]["relative"] is not None
    ]
    return SHARE if shares and max(shares) <= 1 else NATS


def difference_rows(results: Mapping[str, Any], shown_as: Effect) -> Rows:
    """A row for each variant with a difference."""
    names = [*shown_as.fields, *(f"plain_{name}" for name in shown_as.fields[1:])]
    return [
        {
            "label": v["label"],
            **picked(v["difference"], *names, "verdict"),
            "shown": v["difference"]["verdict"] in ("better", "worse"),
        }
        for v in results["variants"][1:]
        if v["difference"] and v["difference"][shown_as.fields[0]] is not None
    ]


def difference_columns(shown_as: Effect) -> list[tuple[str, str, str]]:
    mean, low, high = shown_as.fields
    fine = shown_as.fine
    return [
        VARIANT,
        (mean, "difference", fine),
        (f"plain_{low}", "95% from", fine),
        (f"plain_{high}", "to", fine),
        (low, "corrected from", fine),
        (high, "to ", fine),
        ("verdict", "verdict", ""),
    ]


def around_zero(rows: Rows, shown_as: Effect, painter: Painter) -> list[float]:
    """The domain of differences: 0, the means except those of far controls, and as much of the intervals as
    leaves the means legible."""
    mean, low, high = shown_as.fields
    plain = [row[f"plain_{high}"] - row[mean] for row in rows if row[f"plain_{high}"] is not None]
    typical = sorted(plain)[len(plain) // 2] if plain else 0.0
    rows = painter.near(rows, mean, 0.0, least=typical)
    means = [0.0, *(row[mean] for row in rows)]
    least, most = min(means), max(means)
    span = 1.2 * max(most - least, typical) or 1.0
    lows = [row[low] for row in rows if row[low] is not None]
    highs = [row[high] for row in rows if row[high] is not None]
    room = 0.04 * span
    return [
        max(min([least, *lows]), least - span) - room,
        min(max([most, *highs]), most + span) + room,
    ]


def tradeoff_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    if not results["costs"]:
        return None
    context = results["config"]["train"]["context"]
    costs = {(c["label"], c["length"]): c for c in results["costs"]["costs"]}
    longest = max(length for _, length in costs)
    shown_as = effect(results)
    crowd = {v["label"] for v in results["variants"] if painter.crowded and v["ablation"]}
    base = {"label": results["baseline"], "verdict": "baseline"}
    base |= dict.fromkeys((*shown_as.fields, *(f"plain_{n}" for n in shown_as.fields[1:])), 0.0)
    rows = [base, *(row for row in difference_rows(results, shown_as) if row["label"] not in crowd)]
    if len(rows) < 2:
        return None
    names = {
        "training time": f"time to train on a token, context {context:,}",
        "memory": f"memory in training, context {context:,}",
        "decoding time": f"time to decode a token after {longest:,}",
        "cache": f"cache after {longest:,} tokens",
    }
    views = {}
    for name, words in names.items():
        priced = []
        for row in rows:
            length = context if name in ("training time", "memory") else longest
            cost, reference = costs.get((row["label"], length)), costs.get((results["baseline"], length))
            if cost is not None and reference is not None:
                priced.append(row | _price(name, cost, reference))
        known = [row for row in priced if row["cost"]]
        if len(known) > 1:
            views[name] = _view(results, painter, shown_as, known, words)
    return PageFigure("tradeoff", "What each gains, and what it costs", views)


def _price(name: str, cost: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float | None]:
    """Relative to the baseline, with the middle half of the rounds where time was measured."""
    if name in ("training time", "decoding time"):
        ratio = cost[name.removesuffix(" time")]
        return {
            "cost": 1 / ratio["ratio"],
            "cost_low": 1 / ratio["high"],
            "cost_high": 1 / ratio["low"],
        }
    if name == "memory":
        return {"cost": cost["peak_ratio"], "cost_low": None, "cost_high": None}
    whole = reference["cache_bytes"]
    return {"cost": cost["cache_bytes"] / whole if whole else None, "cost_low": None, "cost_high": None}


def _view(
    results: Mapping[str, Any], painter: Painter, shown_as: Effect, rows: Rows, words: str
) -> FigureView:
    mean, low, high = shown_as.fields
    costs = [end for row in rows for end in (row["cost"], row["cost_low"], row["cost_high"]) if end]
    least, most = min(costs) / 1.06, max(costs) * 1.06
    ticks = _ratio_ticks(least, most)
    across, up = [min(least, ticks[0]), max(most, ticks[-1])], around_zero(rows[1:], shown_as, painter)
    far = at_edge(rows, mean, up)
    front = frontier(rows, "cost", mean)
    for width, suffix, letters in ((WIDE, "wide", None), (NARROW, "narrow", SHORT_NAME)):
        names = [_shortened(row["label"], letters) + _beyond(row, shown_as) for row in rows]
        places = place_names(rows, names, shown_as, across, up, width, front | {results["baseline"]})
        for row, name, place in zip(rows, names, places, strict=True):
            row[f"name_{suffix}"] = "" if place is None else name
            row[f"dx_{suffix}"], row[f"dy_{suffix}"] = place or (0.0, 0.0)
    baseline = results["baseline"]
    x_axis = alt.Axis(values=ticks, labelExpr="format(datum.value, '~g') + '×'", grid=True)
    x_scale = alt.Scale(type="log", domain=across, nice=False)
    x_title = f"{words}, relative to {baseline}"
    x = alt.X("cost:Q", title=x_title, scale=x_scale, axis=x_axis)
    y_title = f"{shown_as.words} against {baseline}"
    y_axis = alt.Axis(format=shown_as.format, tickCount=6, labelExpr=BARE_ZERO)
    y_scale = alt.Scale(domain=up, nice=False)
    chart = painter.chart(rows)
    corner = alt.Chart(alt.Data(values=[{"left": across[0], "right": 1.0, "top": 0.0, "bottom": up[0]}]))
    corner_at = {
        "x": alt.X("left:Q", title=x_title, scale=x_scale, axis=x_axis),
        "y": alt.Y("bottom:Q", title=y_title, scale=y_scale, axis=y_axis),
    }
    shade = corner.mark_rect(opacity=0.1, color="#00805c", clip=True).encode(
        **corner_at, x2="right:Q", y2="top:Q"
    )
    note = corner.mark_text(align="left", baseline="bottom", dx=6, dy=-6, fontSize=12, fontStyle="italic")
    note = note.encode(**corner_at, text=alt.value("better and cheaper"))
    on_front = [row["label"] for row in rows if row["label"] in front]
    front_line = (
        chart.transform_filter(alt.FieldOneOfPredicate(field="label", oneOf=on_front))
        .mark_line(strokeDash=[1, 3], strokeWidth=1.5, color="#808890", clip=True)
        .encode(x, alt.Y("at:Q", title=y_title), order=alt.Order("cost:Q"))
    )
    thin = chart.mark_rule(strokeWidth=1.2, clip=True).encode(
        x, alt.Y(f"{low}:Q", title=y_title), alt.Y2(f"{high}:Q"), painter.colour
    )
    thick = chart.mark_rule(strokeWidth=3.5, clip=True).encode(
        x, alt.Y(f"plain_{low}:Q", title=y_title), alt.Y2(f"plain_{high}:Q"), painter.colour
    )
    price = chart.mark_rule(strokeWidth=1.2).encode(
        alt.X("cost_low:Q", title=x_title, scale=x_scale, axis=x_axis),
        alt.X2("cost_high:Q"),
        alt.Y("at:Q", title=y_title),
        painter.colour,
    )
    columns = [*difference_columns(shown_as), ("cost", "relative cost", ".2f")]
    if any(row["cost_low"] for row in rows):
        columns += [("cost_low", "cost from", ".2f"), ("cost_high", "cost to", ".2f")]
    points = chart.mark_point(size=110, opacity=1, strokeWidth=2).encode(
        x,
        alt.Y("at:Q", title=y_title),
        painter.colour,
        painter.shape,
        fill=painter.fill,
        tooltip=tooltips(columns),
    )
    layers: list[Any] = [shade, note, level(0.0, "y"), _one(), front_line, thin, thick, price, points]
    for suffix, when in (("wide", f"width >= {SWITCH}"), ("narrow", f"width < {SWITCH}")):
        layers.append(
            chart.transform_filter(f"{when} && datum.name_{suffix} !== ''")
            .mark_text(
                align="left",
                baseline="middle",
                dx=alt.expr(f"datum.dx_{suffix}"),
                dy=alt.expr(f"datum.dy_{suffix}"),
                fontSize=12,
            )
            .encode(x, alt.Y("at:Q", title=y_title), alt.Text(f"name_{suffix}:N"), painter.colour)
        )
    caption = (
        "Down is better, left is cheaper; the shaded corner is both. Vertical lines: thick the variant's own "
        "95% interval, thin the interval it is judged by, corrected for the number of variants; at "
        "the edge they continue. A filled mark is a difference that is shown. The dotted line joins those "
        "that no other beats in both."
    )
    if any(row["cost_low"] for row in rows):
        caption += " Horizontal lines: the middle half of interleaved rounds."
    if far:
        caption += BEYOND_EDGE
    if painter.crowded and any(v["ablation"] for v in results["variants"]):
        caption += " Ablations have their own figure."
    return FigureView(finished(layers, rows, height=HEIGHT), columns, caption)


def _one() -> alt.Chart:
    return level(1.0, "x")


def _ratio_ticks(low: float, high: float) -> list[float]:
    """At least three round ratios around 1, the coarsest that are enough."""
    for ticks in TICKS:
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= 4:
            return inside
    return [tick for tick in TICKS[-1] if min(low, 0.975) <= tick <= max(high, 1.025)]


def frontier(rows: Rows, cost: str, loss: str) -> set[str]:
    """Labels on the Pareto front: no other is better in both."""
    found, best = set(), math.inf
    for row in sorted(rows, key=lambda row: (row[cost], row[loss])):
        if row[loss] < best:
            found.add(row["label"])
            best = row[loss]
    return found


def _beyond(row: Mapping[str, Any], shown_as: Effect) -> str:
    """The difference, where the mark does not show it."""
    value = row[shown_as.fields[0]]
    if row["at"] == value:
        return ""
    return f", {value:+.0%}" if shown_as is SHARE else f", {value:+.2f}"


def _shortened(name: str, letters: int | None) -> str:
    return name if letters is None or len(name) <= letters else f"{name[: letters - 1]}…"


def place_names(
    rows: Rows,
    names: Sequence[str],
    shown_as: Effect,
    across: Sequence[float],
    up: Sequence[float],
    width: float,
    first: set[str],
) -> list[tuple[float, float] | None]:
    """Where each of `names`, one for a row, begins, in pixels from its mark; None if there is no room for it.

    Those in `first` choose first, then those that are shown to differ. Marks may move apart when the figure
    is wider, never together, so what is free at this width stays free.
    """
    plain = [f"plain_{name}" for name in shown_as.fields[1:]]
    turn = math.log(across[1] / across[0])
    marks = [
        (
            math.log(row["cost"] / across[0]) / turn * width,
            (up[1] - row["at"]) / (up[1] - up[0]) * HEIGHT,
        )
        for row in rows
    ]
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in marks]
    taken.append((0.0, HEIGHT - 24.0, 130.0, float(HEIGHT)))  # "better and cheaper"
    lines = [(0.0, up[1] / (up[1] - up[0]) * HEIGHT - 1, width, up[1] / (up[1] - up[0]) * HEIGHT + 1)]
    for row, (x, y) in zip(rows, marks, strict=True):
        ends = [
            math.log((row[end] or row["cost"]) / across[0]) / turn * width
            for end in ("cost_low", "cost_high")
        ]
        lines += [(ends[0], y - 1, ends[1], y + 1)]
        if row[plain[0]] is not None:
            high, low = ((up[1] - row[end]) / (up[1] - up[0]) * HEIGHT for end in reversed(plain))
            lines += [(x - 2, high, x + 2, low)]
    found: list[tuple[float, float] | None] = [None] * len(rows)
    turns = sorted(range(len(rows)), key=lambda n: (rows[n]["label"] not in first, not rows[n].get("shown")))
    for n in turns:
        (x, y), long = marks[n], LETTER * len(names[n])
        best = math.inf
        for rank, (dx, dy) in enumerate(_around(long)):
            box = (x + dx, y + dy - LINE / 2, x + dx + long, y + dy + LINE / 2)
            outside = box[0] < 2 or box[2] > width or box[1] < 0 or box[3] > HEIGHT - 2
            if outside or any(_meet(box, other) for other in taken):
                continue
            worth = rank + 10 * sum(_meet(box, line) for line in lines)  # a line through a name is only ugly
            if worth < best:
                best, found[n], chosen = worth, (dx, dy), box
        if found[n] is not None:
            taken.append(chosen)
    return found


def _around(long: float) -> list[tuple[float, float]]:
    """Places for a name of this length around its mark, the best first."""
    right, left = 10.0, -10.0 - long
    places = [(right, 0.0), (left, 0.0)]
    for dy in (12.0, 20.0, 30.0):
        for side in (right - 3, left + 3, -long / 2):
            places += [(side, -dy), (side, dy)]
    return places


def _meet(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
