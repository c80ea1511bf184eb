"""The figures of the page as Vega-Lite specifications, made with Altair from the results of a study.

A figure has one or more views, and the page shows one of them at a time. A variant has the same colour, dash
and shape in all of them. Views are as wide as the page allows; unless a view has a row for each variant, its
parameter `hidden` lists the variants not to draw.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

Rows = list[dict[str, Any]]

COLOURS = (
    "#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7b3294", "#a6611a",
)  # fmt: skip
"""For a light page, distinct to readers who confuse red and green; the first is the baseline's."""
DARK_COLOURS = (
    "#cfcfcf", "#4da3e0", "#ff8c42", "#2fd3a0", "#f0a3cb", "#e6c04a", "#8fd3f7", "#c39bd9", "#d9a26b",
)  # fmt: skip
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
SHAPES = (
    "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z",
    "M-0.9,-0.9H0.9V0.9H-0.9Z",
    "M0,-1L1,0.8H-1Z",
    "M0,-1.2L1,0L0,1.2L-1,0Z",
    "M-0.4,-1H0.4V-0.4H1V0.4H0.4V1H-0.4V0.4H-1V-0.4H-0.4Z",
    "M0,1L1,-0.8H-1Z",
)
"""Circle, square, triangle, diamond, cross, triangle upside down: as paths, which Vega and SVG both draw."""
CROWD = 8
"""With more variants than this a figure draws no bands and names only those that matter."""
HEIGHT = 300
FROM_ZERO = alt.Scale(zero=True)
ANYWHERE = alt.Scale(zero=False)
LOGARITHMIC = alt.Scale(type="log", nice=False, padding=12)


@dataclass(frozen=True)
class PageFigure:
    name: str
    title: str
    caption: str
    views: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Specifications by the name of the view."""


@dataclass(frozen=True)
class Look:
    colour: str
    dash: Sequence[int]
    shape: str


def look(index: int) -> Look:
    """How a variant is drawn: unique among 36 by dash and colour, among 54 by shape and colour."""
    again, first = divmod(index, len(COLOURS))
    return Look(COLOURS[first], DASHES[again % len(DASHES)], SHAPES[(first + again) % len(SHAPES)])


class Painter:
    """Charts in which a variant looks the same everywhere."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)
        looks = [look(n) for n in range(len(labels))]

        def scale(values: Sequence[Any]) -> alt.Scale:
            return alt.Scale(domain=self.labels, range=list(values))

        self.colour = alt.Color("label:N", scale=scale([one.colour for one in looks]), legend=None)
        self.dash = alt.StrokeDash("label:N", scale=scale([one.dash for one in looks]), legend=None)
        self.shape = alt.Shape("label:N", scale=scale([one.shape for one in looks]), legend=None)
        crowded = len(self.labels) > CROWD
        self.band = f"the band, drawn for up to {CROWD} variants at a time," if crowded else "the band"

    def chart(self, rows: Rows) -> alt.Chart:
        hidden = alt.param(name="hidden", value=[])
        return (
            alt.Chart(alt.Data(values=rows))
            .add_params(hidden)
            .transform_filter("indexof(hidden, datum.label) < 0")
        )

    def lines(
        self,
        rows: Rows,
        x: alt.X,
        y: tuple[str, str],
        tooltip: Sequence[alt.Tooltip],
        *,
        scale: alt.Scale = ANYWHERE,
        band: tuple[str, str] | None = None,
        rule: float | None = None,
    ) -> dict[str, Any]:
        """A line for each variant: y is a field and its title, band two fields, rule a level to mark."""
        chart = self.chart(rows)
        title = y[1]
        middle = alt.Y(f"{y[0]}:Q", title=title, scale=scale)
        layers: list[Any] = [] if rule is None else [_level(rule, "y")]
        if band is not None:
            few = f"{len(self.labels)} - length(hidden) <= {CROWD}"
            known = chart.transform_filter(f"{few} && isValid(datum.{band[0]})").mark_area(opacity=0.15)
            ends = alt.Y(f"{band[0]}:Q", title=title), alt.Y2(f"{band[1]}:Q")
            layers.append(known.encode(x, *ends, self.colour))
        layers.append(chart.mark_line(strokeWidth=2).encode(x, middle, self.colour, self.dash))
        points = chart.mark_point(filled=True, size=45)
        layers.append(points.encode(x, middle, self.colour, self.shape, tooltip=list(tooltip)))
        return _finish(alt.layer(*layers))

    def intervals(
        self, rows: Rows, x: str, title: str, order: Sequence[str], *, rule: float
    ) -> dict[str, Any]:
        """A row for each variant: its mean and interval, the fields mean, low and high."""
        chart = alt.Chart(alt.Data(values=rows))
        room = min(8 * max(map(len, order)), 320)
        y = alt.Y("label:N", sort=list(order), title=None, axis=alt.Axis(labelLimit=room, grid=False))
        tooltip = [
            alt.Tooltip("label:N", title="variant"),
            alt.Tooltip("mean:Q", title=x, format="+.4f"),
            alt.Tooltip("low:Q", title="from", format="+.4f"),
            alt.Tooltip("high:Q", title="to", format="+.4f"),
            alt.Tooltip("verdict:N"),
        ]
        span = chart.mark_rule(strokeWidth=2).encode(
            alt.X("low:Q", title=title, scale=alt.Scale(zero=True)), alt.X2("high:Q"), y, self.colour
        )
        points = chart.mark_point(filled=True, size=90, opacity=1).encode(
            alt.X("mean:Q", title=title), y, self.colour, self.shape, tooltip=tooltip
        )
        return _finish(alt.layer(_level(rule, "x"), span, points), height=30 * len(rows))


def _level(at: float, axis: str) -> alt.Chart:
    """A thin line at a value, across the figure."""
    channel = alt.X("at:Q") if axis == "x" else alt.Y("at:Q")
    return alt.Chart(alt.Data(values=[{"at": at}])).mark_rule(strokeDash=[4, 4], opacity=0.6).encode(channel)


def _finish(chart: Any, height: int = HEIGHT) -> dict[str, Any]:
    sized = chart.properties(
        width="container", height=height, autosize={"type": "fit-x", "contains": "padding"}
    )
    # A title that ends with its axis has the room below the labels of the other axis too.
    spec: dict[str, Any] = sized.configure_axisX(titleAnchor="end").to_dict()
    return spec


def figures(results: Mapping[str, Any]) -> dict[str, PageFigure]:
    """Every figure that the results have anything for, by name."""
    painter = Painter([variant["label"] for variant in results["variants"]])
    makers = (
        difference_figure,
        curve_figure,
        loss_against_cost,
        cost_against_length,
        tuning_figure,
        position_figure,
        answer_figure,
        ablation_figure,
        skipping_figure,
    )
    made = [figure for maker in makers if (figure := maker(results, painter)) is not None]
    made += [figure for maker in (head_figure, movement_figure) if (figure := maker(results)) is not None]
    return {figure.name: figure for figure in made if figure.views}


def difference_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    rows = [
        {"label": v["label"], **_picked(v["difference"], "mean", "low", "high", "verdict")}
        for v in results["variants"][1:]
        if v["difference"]["mean"] is not None
    ]
    order = [row["label"] for row in sorted(rows, key=lambda row: row["mean"])]
    title = f"loss minus that of {results['baseline']}; left of 0 is better"
    views = {"": painter.intervals(rows, "difference", title, order, rule=0.0)} if rows else {}
    caption = (
        "Mean over the seeds with its interval, corrected like the verdict: it lies beside 0 exactly where a "
        "difference is shown."
    )
    return PageFigure("differences", "How far from the baseline", caption, views)


def curve_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    rows = [
        {"label": v["label"], **_picked(point, "tokens", "seconds", "mean", "low", "high")}
        for v in results["variants"]
        for point in v["curve"]
        if point["mean"] is not None
    ]
    paired = [
        {
            "label": v["label"],
            "tokens": point["tokens"],
            **_picked(point["difference"], "mean", "low", "high"),
        }
        for v in results["variants"][1:]
        for point in v["curve"]
        if point["difference"]["mean"] is not None
    ]
    if not rows:
        return None
    tooltip = [
        alt.Tooltip("label:N", title="variant"),
        alt.Tooltip("tokens:Q", format=",.0f"),
        alt.Tooltip("seconds:Q", format=",.1f"),
        alt.Tooltip("mean:Q", title="loss", format=".4f"),
    ]
    y = ("mean", "validation loss")
    tokens = alt.X("tokens:Q", title="training tokens", axis=alt.Axis(format="~s"), scale=FROM_ZERO)
    seconds = alt.X("seconds:Q", title="seconds of training", scale=FROM_ZERO)
    views = {
        "by tokens": painter.lines(rows, tokens, y, tooltip, band=("low", "high")),
        "by seconds": painter.lines(rows, seconds, y, tooltip, band=("low", "high")),
    }
    if paired:
        title = f"loss minus that of {results['baseline']}"
        views["difference by tokens"] = painter.lines(
            paired,
            tokens,
            ("mean", title),
            [tooltip[0], tooltip[1], alt.Tooltip("mean:Q", title="difference", format="+.4f")],
            band=("low", "high"),
            rule=0.0,
        )
    caption = f"Mean over the seeds; {painter.band} is its 95% interval. " + (
        "Seconds are those of the runs, which may have shared the machine."
        if results["costs"] is None
        else "Seconds are those of the separate measurement of speed, with the machine to itself."
    )
    return PageFigure("curves", "Learning curves", caption, views)


def loss_against_cost(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    if results["costs"] is None:
        return None
    context = results["config"]["train"]["context"]
    costs = {(c["label"], c["length"]): c for c in results["costs"]["costs"]}
    longest = max(length for _, length in costs)
    rows = []
    for variant in results["variants"]:
        near, far = costs.get((variant["label"], context)), costs.get((variant["label"], longest))
        if near is None or far is None or variant["loss"]["mean"] is None:
            continue
        rows.append(
            {
                "label": variant["label"],
                **_picked(variant["loss"], "mean", "low", "high"),
                "training": near["training"]["seconds"] * 1e6 / (near["length"] * near["sequences"]),
                "peak": near["peak_bytes"] / 1e6,
                "decoding": far["decoding"]["seconds"] * 1e3,
                "cache": far["cache_bytes"] / 1e6,
            }
        )
    if not rows:
        return None
    crowded = len(rows) > CROWD
    ablations = {variant["label"] for variant in results["variants"] if variant["ablation"]}
    mechanisms = [row for row in rows if row["label"] not in ablations]
    asked = {
        "training time": ("training", f"microseconds a token of training, context {context:,}"),
        "memory": ("peak", f"MB of memory in training, context {context:,}"),
        "decoding time": ("decoding", f"milliseconds a new token after {longest:,}"),
        "cache": ("cache", f"MB of cache after {longest:,} tokens"),
    }
    views = {}
    for name, (field_name, title) in asked.items():
        chart = painter.chart(rows)
        x = alt.X(f"{field_name}:Q", title=title, scale=alt.Scale(zero=False, padding=20))
        y_title = "validation loss"
        tooltip = [
            alt.Tooltip("label:N", title="variant"),
            alt.Tooltip("mean:Q", title="loss", format=".4f"),
            alt.Tooltip(f"{field_name}:Q", title=title, format=",.3~f"),
        ]
        span = chart.mark_rule(strokeWidth=2).encode(
            x,
            alt.Y("low:Q", title=y_title, scale=alt.Scale(zero=False, padding=10)),
            alt.Y2("high:Q"),
            painter.colour,
        )
        points = chart.mark_point(filled=True, size=110, opacity=1).encode(
            x, alt.Y("mean:Q", title=y_title), painter.colour, painter.shape, tooltip=tooltip
        )
        named = {results["baseline"]} | _frontier(mechanisms, field_name)
        labels = [row["label"] for row in rows if row["label"] in named or not crowded]
        middle = (min(row[field_name] for row in rows) + max(row[field_name] for row in rows)) / 2
        inward = f"datum.{field_name} > {middle}"
        text = (
            chart.transform_filter(alt.FieldOneOfPredicate(field="label", oneOf=labels))
            .mark_text(
                align=alt.expr(f"{inward} ? 'right' : 'left'"),
                dx=alt.expr(f"{inward} ? -9 : 9"),
                dy=-9,
                fontSize=12,
            )
            .encode(x, alt.Y("mean:Q"), alt.Text("label:N"), painter.colour)
        )
        views[name] = _finish(alt.layer(span, points, text))
    caption = "Down and to the left is better. The bar is the 95% interval of the loss." + (
        " Named are the baseline and, ablations aside, those that no other beats in both." if crowded else ""
    )
    return PageFigure("loss-against-cost", "Loss against cost", caption, views)


def _frontier(rows: Rows, cost: str) -> set[str]:
    """Labels on the Pareto front of loss and cost."""
    found, best = set(), math.inf
    for row in sorted(rows, key=lambda row: (row[cost], row["mean"])):
        if row["mean"] < best:
            found.add(row["label"])
            best = row["mean"]
    return found


def cost_against_length(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    if results["costs"] is None:
        return None
    rows, marks = [], []
    lengths = sorted({cost["length"] for cost in results["costs"]["costs"]})
    if len(lengths) < 2:
        return None
    for cost in results["costs"]["costs"]:
        row = {"label": cost["label"], "length": cost["length"], "memory": cost["peak_ratio"]}
        row["peak"], row["cache"] = cost["peak_bytes"] / 1e6, cost["cache_bytes"] / 1e6
        for kind in ("training", "decoding"):
            row[kind] = cost[kind]["ratio"]
            row[f"{kind}_low"], row[f"{kind}_high"] = cost[kind]["low"], cost[kind]["high"]
            row[f"{kind}_seconds"] = cost[kind]["seconds"]
        rows.append(row)
    for crossover in results["costs"]["crossovers"]:
        if crossover["wins_at"] is not None and crossover["not_at"] is not None:
            marks.append({**crossover, "one": 1.0})
    x = alt.X(
        "length:Q", title="context length", scale=alt.Scale(type="log", base=2), axis=alt.Axis(values=lengths)
    )
    named = [alt.Tooltip("label:N", title="variant"), alt.Tooltip("length:Q", format=",.0f")]
    views = {}
    for kind, words in (("training", "training speed"), ("decoding", "decoding speed")):
        y = (kind, f"{words} relative to {results['baseline']}")
        tooltip = [
            *named,
            alt.Tooltip(f"{kind}:Q", title="relative speed", format=".2f"),
            alt.Tooltip(f"{kind}_low:Q", title="from", format=".2f"),
            alt.Tooltip(f"{kind}_high:Q", title="to", format=".2f"),
            alt.Tooltip(f"{kind}_seconds:Q", title="seconds", format=".4~g"),
        ]
        band = (f"{kind}_low", f"{kind}_high")
        spec = painter.lines(rows, x, y, tooltip, scale=LOGARITHMIC, band=band, rule=1.0)
        crossings = [mark for mark in marks if mark["kind"] == kind]
        if crossings:
            spec["layer"] += _crossings(painter, crossings, x)
        views[words] = spec
    for name, title in (("peak", "MB of memory in training"), ("cache", "MB of cache after the context")):
        shown = [row for row in rows if row[name] > 0]
        views["memory" if name == "peak" else "cache"] = painter.lines(
            shown,
            x,
            (name, title),
            [*named, alt.Tooltip(f"{name}:Q", title="MB", format=",.2f")],
            scale=LOGARITHMIC,
        )
    caption = (
        f"Speeds are interleaved with the baseline's; {painter.band} is the middle half of the rounds. "
        "A diamond marks the length from which a variant is faster, found by measuring between the lengths "
        "shown."
    )
    return PageFigure("cost-against-length", "Cost against context length", caption, views)


def _crossings(painter: Painter, marks: Rows, x: alt.X) -> list[dict[str, Any]]:
    layer = (
        alt.Chart(alt.Data(values=marks))
        .transform_filter("indexof(hidden, datum.label) < 0")
        .mark_point(shape="diamond", size=220, strokeWidth=2.5, filled=False)
        .encode(
            alt.X("wins_at:Q", title="context length"),
            alt.Y("one:Q"),
            painter.colour,
            tooltip=[
                alt.Tooltip("label:N", title="variant"),
                alt.Tooltip("wins_at:Q", title="faster at", format=",.0f"),
                alt.Tooltip("not_at:Q", title="not yet at", format=",.0f"),
            ],
        )
        .to_dict()
    )
    return [{key: layer[key] for key in ("data", "transform", "mark", "encoding")}]


def tuning_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    """How sensitive each variant is to the learning rate."""
    name = "train.learning_rate"
    own = results["config"]["train"]["learning_rate"]
    rows = [
        {"label": one["label"], "rate": trial["settings"].get(name, own), "loss": trial["losses"][0]}
        for one in (results["tuning"] or {"variants": []})["variants"]
        for trial in one["trials"]
        if trial["losses"] and trial["losses"][0] is not None
    ]
    if len({row["rate"] for row in rows}) < 2:
        return None
    rows.sort(key=lambda row: row["rate"])
    x = alt.X("rate:Q", title="learning rate", scale=LOGARITHMIC)
    tooltip = [
        alt.Tooltip("label:N", title="variant"),
        alt.Tooltip("rate:Q", title="learning rate", format=".3~g"),
        alt.Tooltip("loss:Q", format=".4f"),
    ]
    views = {"": painter.lines(rows, x, ("loss", "validation loss at the first rung"), tooltip)}
    caption = "Every trial after a quarter of its steps; other settings were drawn along with it."
    return PageFigure("tuning", "Loss against learning rate", caption, views)


def position_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    baseline = {place["first"]: place["mean"] for place in results["variants"][0]["by_position"]}
    rows = []
    for variant in results["variants"]:
        for place in variant["by_position"]:
            if place["mean"] is None:
                continue
            row = {"label": variant["label"], "place": place["first"] + 1, "last": place["end"], **place}
            if baseline.get(place["first"]) is not None:
                row["difference"] = place["mean"] - baseline[place["first"]]
            rows.append(row)
    if not rows:
        return None
    x = alt.X("place:Q", title="position in the context", scale=alt.Scale(type="log", base=2))
    tooltip = [
        alt.Tooltip("label:N", title="variant"),
        alt.Tooltip("place:Q", title="from position"),
        alt.Tooltip("last:Q", title="to position"),
        alt.Tooltip("mean:Q", title="loss", format=".4f"),
    ]
    y = ("mean", "validation loss")
    compared = [row for row in rows if "difference" in row and row["label"] != results["baseline"]]
    views = {"loss": painter.lines(rows, x, y, tooltip, band=("low", "high"))}
    if compared:
        difference = ("difference", f"loss minus that of {results['baseline']}")
        shown = [*tooltip[:3], alt.Tooltip("difference:Q", format="+.4f")]
        views = {"difference": painter.lines(compared, x, difference, shown, rule=0.0), **views}
    caption = (
        "Mean over the seeds at positions that double in width. A mechanism that forgets what is far shows "
        "it on the right."
    )
    return PageFigure("positions", "Loss by position in the context", caption, views)


def answer_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    """On data with answers: the share of right ones, by distance to the key."""
    rows = [
        {
            "label": v["label"],
            "distance": place["first"],
            "last": place["end"] - 1,
            "mean": place["mean"],
            # The interval of a mean may go where no share can.
            "low": None if place["low"] is None else max(place["low"], 0.0),
            "high": None if place["high"] is None else min(place["high"], 1.0),
        }
        for v in results["variants"]
        for place in (v["answers"] or {"by_distance": []})["by_distance"]
    ]
    if not rows:
        return None
    x = alt.X("distance:Q", title="distance to the key, in tokens", scale=alt.Scale(type="log", base=2))
    tooltip = [
        alt.Tooltip("label:N", title="variant"),
        alt.Tooltip("distance:Q", title="from distance"),
        alt.Tooltip("last:Q", title="to distance"),
        alt.Tooltip("mean:Q", title="right", format=".1%"),
    ]
    whole = alt.Scale(domain=[0, 1])
    views = {
        "": painter.lines(
            rows, x, ("mean", "share of right answers"), tooltip, scale=whole, band=("low", "high")
        )
    }
    caption = (
        f"Mean over the seeds; {painter.band} is its 95% interval, as far as a share can go. What a window "
        "cannot reach shows as a fall to the right."
    )
    return PageFigure("answers", "Answers by distance", caption, views)


def ablation_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    """Each mechanism that has ablations here, beside them."""
    families = dict.fromkeys(v["mechanism"] for v in results["variants"] if v["ablation"])
    views = {}
    for family in families:
        rows = [
            {"label": v["label"], **_picked(v["difference"], "mean", "low", "high", "verdict")}
            for v in results["variants"][1:]
            if v["mechanism"] == family and v["difference"]["mean"] is not None
        ]
        if rows:
            title = f"loss minus that of {results['baseline']}; left of 0 is better"
            order = [row["label"] for row in rows]
            views[family] = painter.intervals(rows, "difference", title, order, rule=0.0)
    caption = "What is left of a mechanism's difference when a part of it is taken away."
    return PageFigure("ablations", "Ablations", caption, views)


def head_figure(results: Mapping[str, Any]) -> PageFigure | None:
    views = {}
    for variant in results["variants"]:
        if not variant["gates"]:
            continue
        rows = [
            {"layer": layer["layer"], "head": head, "gate": value}
            for layer in variant["gates"]["heads"]
            for head, value in enumerate(layer["by_head"])
            if value is not None
        ]
        scale = alt.Scale(domain=[0, 1], scheme="viridis")
        base = alt.Chart(alt.Data(values=rows)).encode(
            alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0)), alt.Y("layer:O", title="layer")
        )
        cells = base.mark_rect().encode(
            alt.Color("gate:Q", scale=scale, title="gate"),
            tooltip=["layer:O", "head:O", alt.Tooltip("gate:Q", format=".3f")],
        )
        numbers = base.mark_text(fontSize=11).encode(
            alt.Text("gate:Q", format=".2f"),
            color=alt.condition("datum.gate > 0.55", alt.value("#111111"), alt.value("#f4f4f4")),
        )
        layers = (cells, numbers) if len(rows) <= 160 else (cells,)
        views[variant["label"]] = _finish(alt.layer(*layers), height=26 * len(variant["gates"]["heads"]))
    caption = "Mean gate of each head at the end of training, over the seeds and the first evaluated batch."
    return PageFigure("heads", "The gates by layer and head", caption, views)


def movement_figure(results: Mapping[str, Any]) -> PageFigure | None:
    views = {}
    for variant in results["variants"]:
        rows = [row for row in (variant["gates"] or {"moved": []})["moved"] if row["mean"] is not None]
        if not rows:
            continue
        chart = alt.Chart(alt.Data(values=rows)).encode(
            alt.X("tokens:Q", title="training tokens", axis=alt.Axis(format="~s"), scale=FROM_ZERO),
            alt.Y("mean:Q", title="mean gate of the layer", scale=alt.Scale(domain=[0, 1])),
            alt.Color("layer:O", title="layer", scale=alt.Scale(scheme="viridis")),
            tooltip=["layer:O", alt.Tooltip("tokens:Q", format=",.0f"), alt.Tooltip("mean:Q", format=".3f")],
        )
        views[variant["label"]] = _finish(alt.layer(chart.mark_line(), chart.mark_point(filled=True)))
    return PageFigure("movement", "How the gates moved", "Mean gate of each layer at each evaluation.", views)


def skipping_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    """The loss that skipping nearly closed gates costs, against the share skipped."""
    by_label = results["skipping"] or {}
    rows = [{"label": label, **row} for label, thresholds in by_label.items() for row in thresholds]
    if not rows:
        return None
    tooltip = [
        alt.Tooltip("label:N", title="variant"),
        alt.Tooltip("skip_below:Q", title="gates below"),
        alt.Tooltip("skipped:Q", title="share skipped", format=".1%"),
        alt.Tooltip("loss_cost:Q", title="loss it costs", format="+.4f"),
        alt.Tooltip("time:Q", title="time a decoded token", format=".2f"),
    ]
    x = alt.X("skipped:Q", title="share not computed", axis=alt.Axis(format="%"))
    y = ("loss_cost", "loss it costs")
    caption = "Each point is a threshold: what lies behind a gate below it is not computed in decoding."
    views = {"": painter.lines(rows, x, y, tooltip, rule=0.0)}
    return PageFigure("skipping", "Computation that follows the gate", caption, views)


def _picked(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}
