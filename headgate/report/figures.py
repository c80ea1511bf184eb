"""The figures of the page, made with Altair from the results of a study; painting.py defines a figure."""

from collections.abc import Mapping
from typing import Any

import altair as alt

from headgate.report.budgets import ladder_figure, tuning_figure
from headgate.report.painting import (
    BARE_ZERO,
    FROM_ZERO,
    LOGARITHMIC,
    ROWS,
    VARIANT,
    FigureView,
    PageFigure,
    Painter,
    Rows,
    finished,
    picked,
    powers_of_two,
    tooltips,
)
from headgate.report.spread import spread_figure
from headgate.report.tradeoff import (
    around_zero,
    difference_columns,
    difference_rows,
    effect,
    tradeoff_figure,
)

AS_JUDGED = (
    "Thick: the variant's own 95% interval. Thin: the interval it is judged by, corrected for the number of "
    "variants; at the edge it continues. A filled mark is a difference that is shown."
)


def figures(results: Mapping[str, Any]) -> dict[str, PageFigure]:
    """Every figure for which the results have data, by name."""
    painter = Painter(results["variants"])
    makers = (
        tradeoff_figure,
        difference_figure,
        spread_figure,
        curve_figure,
        tuning_figure,
        ladder_figure,
        cost_against_length,
        position_figure,
        answer_figure,
        ablation_figure,
        skipping_figure,
    )
    made = [figure for maker in makers if (figure := maker(results, painter)) is not None]
    made += [figure for maker in (head_figure, movement_figure) if (figure := maker(results)) is not None]
    return {figure.name: figure for figure in made if figure.views}


def difference_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    ablations = {v["label"] for v in results["variants"] if painter.crowded and v["ablation"]}
    shown_as = effect(results)
    rows = [row for row in difference_rows(results, shown_as) if row["label"] not in ablations]
    caption = AS_JUDGED + (" Ablations have their own figure." if ablations else "")
    views = {"": _forest(results, painter, rows, caption)} if rows else {}
    return PageFigure("differences", "How far from the baseline", views)


def _forest(results: Mapping[str, Any], painter: Painter, rows: Rows, caption: str) -> FigureView:
    """A row for each variant, the best on top."""
    shown_as = effect(results)
    order = [row["label"] for row in sorted(rows, key=lambda row: row[shown_as.fields[0]])]
    title = f"{shown_as.words} against {results['baseline']}; left of 0 is better"
    return painter.intervals(
        rows,
        shown_as.fields,
        title,
        order,
        difference_columns(shown_as),
        caption,
        rule=0.0,
        format=shown_as.format,
        domain=around_zero(rows, shown_as, painter),
    )


def curve_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    rows = [
        {"label": v["label"], **picked(point, "tokens", "seconds", "mean")}
        for v in results["variants"]
        for point in v["curve"]
        if point["mean"] is not None
    ]
    paired = [
        {"label": v["label"], "tokens": point["tokens"], **picked(point["difference"], "mean", "low", "high")}
        for v in results["variants"][1:]
        for point in v["curve"]
        if point["difference"]["mean"] is not None
    ]
    if not rows:
        return None
    tokens = alt.X("tokens:Q", title="training tokens", axis=counts_axis(), scale=FROM_ZERO)
    seconds = alt.X("seconds:Q", title="seconds of training", axis=alt.Axis(tickCount=5), scale=FROM_ZERO)
    columns = [VARIANT, ("tokens", "tokens", ",.0f"), ("seconds", "seconds", ",.1f"), ("mean", "loss", ".4f")]
    y = ("mean", "validation loss")
    whose = (
        "Seconds are from the runs, which may have shared the machine."
        if not results["costs"]
        else "Seconds come from the separate measurement of speed, with the machine to itself."
    )
    timed = all(row["seconds"] is not None for row in rows)
    if not timed:
        columns.pop(2)
    views = {}
    if paired:
        views["difference by tokens"] = painter.lines(
            paired,
            tokens,
            ("mean", f"loss minus that of {results['baseline']}"),
            [
                VARIANT,
                columns[1],
                ("mean", "difference", "+.4f"),
                ("low", "95% from", "+.4f"),
                ("high", "to", "+.4f"),
            ],
            f"The difference to the baseline with the same seed, mean over the seeds; {painter.band} is its "
            "95% interval, not corrected. Below 0 is better.",
            format="+.3~f",
            band=("low", "high"),
            rule=0.0,
        )
    mean = (
        "Mean over the seeds. The spread between seeds is not drawn: it is not the doubt about a difference. "
    )
    views["loss by tokens"] = painter.lines(rows, tokens, y, columns, mean.strip())
    if timed:
        views["loss by seconds"] = painter.lines(rows, seconds, y, columns, mean + whose)
    return PageFigure("curves", "Learning curves", views)


def counts_axis() -> alt.Axis:
    return alt.Axis(format="~s", tickCount=5, labelExpr=BARE_ZERO)


def cost_against_length(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    if not results["costs"]:
        return None
    lengths = sorted({cost["length"] for cost in results["costs"]["costs"]})
    if len(lengths) < 2:
        return None
    rows = []
    for cost in results["costs"]["costs"]:
        row = {"label": cost["label"], "length": cost["length"]}
        row["peak"], row["cache"] = cost["peak_bytes"] / 1e6, cost["cache_bytes"] / 1e6
        for kind in ("training", "decoding"):
            row[kind] = cost[kind]["ratio"]
            row[f"{kind}_low"], row[f"{kind}_high"] = cost[kind]["low"], cost[kind]["high"]
            row[f"{kind}_tokens"] = cost[kind]["tokens_per_second"]
        rows.append(row)
    marks = [
        {**crossover, "one": 1.0}
        for crossover in results["costs"]["crossovers"]
        if crossover["wins_at"] is not None and crossover["not_at"] is not None
    ]
    x = alt.X(
        "length:Q",
        title="context length",
        scale=alt.Scale(type="log", base=2, padding=12),
        axis=alt.Axis(values=lengths, format=",d", labelOverlap=True),
    )
    named = [VARIANT, ("length", "context", ",.0f")]
    views = {}
    for kind, words in (("training", "training speed"), ("decoding", "decoding speed")):
        columns = [
            *named,
            (kind, "relative speed", ".2f"),
            (f"{kind}_low", "from", ".2f"),
            (f"{kind}_high", "to", ".2f"),
            (f"{kind}_tokens", "tokens/s", ",.0f"),
        ]
        crossings = [mark for mark in marks if mark["kind"] == kind]
        caption = (
            f"Speeds are interleaved with the baseline's; {painter.band} is the middle half of the rounds. "
        )
        if crossings:
            caption += (
                "A diamond marks the length from which a variant is faster, found by measuring between the "
                "lengths shown."
            )
        views[words] = painter.lines(
            rows,
            x,
            (kind, f"{words} relative to {results['baseline']}"),
            columns,
            caption.strip(),
            scale=LOGARITHMIC,
            format="~g",
            band=(f"{kind}_low", f"{kind}_high"),
            rule=1.0,
            layers=[_crossings(painter, crossings)] if crossings else [],
        )
    for name, field, title, caption in (
        ("memory", "peak", "MB of memory in training", "The peak of two training steps in a fresh process."),
        ("cache", "cache", "MB of cache", "What decoding keeps after a context of this length."),
    ):
        known = [row for row in rows if row[field] > 0]
        if known:
            views[name] = painter.lines(
                known,
                x,
                (field, title),
                [*named, (field, "MB", ",.2f")],
                caption,
                scale=LOGARITHMIC,
                format="~g",
            )
    return PageFigure("cost-against-length", "Cost against context length", views)


def _crossings(painter: Painter, marks: Rows) -> alt.Chart:
    return (
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
    )


def position_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    baseline = {place["first"]: place["mean"] for place in results["variants"][0]["by_position"]}
    rows = []
    for variant in results["variants"]:
        for place in variant["by_position"]:
            if place["mean"] is None:
                continue
            row = {"label": variant["label"], "place": place["first"] + 1, "last": place["end"]}
            row["mean"] = place["mean"]
            if baseline.get(place["first"]) is not None:
                row["difference"] = place["mean"] - baseline[place["first"]]
            rows.append(row)
    if not rows:
        return None
    x = doubling(rows, "place", "position in the context")
    columns = [
        VARIANT,
        ("place", "from position", ",.0f"),
        ("last", "to", ",.0f"),
        ("mean", "loss", ".4f"),
    ]
    where = "Mean over the seeds at positions that double in width. "
    compared = [row for row in rows if "difference" in row and row["label"] != results["baseline"]]
    views = {}
    if compared:
        views["difference"] = painter.lines(
            compared,
            x,
            ("difference", f"loss minus that of {results['baseline']}"),
            [*columns[:3], ("difference", "difference", "+.4f")],
            where + "A mechanism that forgets distant tokens rises on the right.",
            format="+.3~f",
            rule=0.0,
        )
    falls = "Where attention helps, the loss falls to the right."
    views["loss"] = painter.lines(rows, x, ("mean", "validation loss"), columns, where + falls)
    return PageFigure("positions", "Loss by position in the context", views)


def doubling(rows: Rows, field: str, title: str) -> alt.X:
    """An axis on which every step is twice as far."""
    places = [row[field] for row in rows]
    axis = alt.Axis(values=powers_of_two(min(places), max(places)), format=",d")
    return alt.X(f"{field}:Q", title=title, scale=alt.Scale(type="log", base=2, nice=False), axis=axis)


def answer_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    """For data with answers: the share of right ones, by distance to the key."""
    rows = [
        {
            "label": v["label"],
            "distance": place["first"],
            "last": place["end"] - 1,
            "mean": place["mean"],
            # The interval of a mean may go beyond what a share can be.
            "low": None if place["low"] is None else max(place["low"], 0.0),
            "high": None if place["high"] is None else min(place["high"], 1.0),
        }
        for v in results["variants"]
        for place in (v["answers"] or {"by_distance": []})["by_distance"]
    ]
    if not rows:
        return None
    view = painter.lines(
        rows,
        doubling(rows, "distance", "distance to the key, in tokens"),
        ("mean", "share of right answers"),
        [
            VARIANT,
            ("distance", "from distance", ",.0f"),
            ("last", "to distance", ",.0f"),
            ("mean", "right", ".1%"),
            ("low", "95% from", ".1%"),
            ("high", "to", ".1%"),
        ],
        f"Mean over the seeds; {painter.band} is its 95% interval, cut off at 0 and 1. What a window "
        "cannot reach shows as a fall to the right.",
        scale=alt.Scale(domain=[0, 1]),
        format=".0%",
        band=("low", "high"),
    )
    return PageFigure("answers", "Answers by distance", {"": view})


def ablation_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    """Each mechanism that has ablations here, beside them."""
    families = dict.fromkeys(v["mechanism"] for v in results["variants"] if v["ablation"])
    every = difference_rows(results, effect(results))
    views = {}
    for family in families:
        labels = {v["label"] for v in results["variants"] if v["mechanism"] == family}
        rows = [row for row in every if row["label"] in labels]
        if rows:
            caption = f"What is left of {family}'s difference when a part of it is removed. {AS_JUDGED}"
            views[family] = _forest(results, painter, rows, caption)
    return PageFigure("ablations", "Ablations", views)


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
        columns = [("layer", "layer", ""), ("head", "head", ""), ("gate", "gate", ".3f")]
        base = alt.Chart(alt.NamedData(ROWS)).encode(
            alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0)), alt.Y("layer:O", title="layer")
        )
        cells = base.mark_rect().encode(
            alt.Color("gate:Q", scale=alt.Scale(domain=[0, 1], scheme="viridis"), title="gate"),
            tooltip=tooltips(columns),
        )
        numbers = base.mark_text(fontSize=11).encode(
            alt.Text("gate:Q", format=".2f"),
            # On viridis black and white both have a contrast of 4.5 here.
            color=alt.condition("datum.gate > 0.44", alt.value("#000000"), alt.value("#ffffff")),
        )
        layers = (cells, numbers) if len(rows) <= 160 else (cells,)
        views[variant["label"]] = FigureView(
            finished(layers, rows, height=26 * len(variant["gates"]["heads"])),
            columns,
            f"{variant['label']}: mean gate of each head at the end of training, over the seeds and the "
            "first evaluated batch.",
        )
    return PageFigure("heads", "The gates by layer and head", views)


def movement_figure(results: Mapping[str, Any]) -> PageFigure | None:
    views = {}
    for variant in results["variants"]:
        rows = [row for row in (variant["gates"] or {"moved": []})["moved"] if row["mean"] is not None]
        if not rows:
            continue
        columns = [("layer", "layer", ""), ("tokens", "tokens", ",.0f"), ("mean", "mean gate", ".3f")]
        chart = alt.Chart(alt.NamedData(ROWS)).encode(
            alt.X("tokens:Q", title="training tokens", axis=counts_axis(), scale=FROM_ZERO),
            alt.Y("mean:Q", title="mean gate of the layer", scale=alt.Scale(domain=[0, 1])),
            alt.Color("layer:O", title="layer", scale=alt.Scale(scheme="viridis")),
            tooltip=tooltips(columns),
        )
        views[variant["label"]] = FigureView(
            finished([chart.mark_line(), chart.mark_point(filled=True)], rows),
            columns,
            f"{variant['label']}: mean gate of each layer at each evaluation.",
        )
    return PageFigure("movement", "How the gates moved", views)


def skipping_figure(results: Mapping[str, Any], painter: Painter) -> PageFigure | None:
    """The loss that skipping nearly closed gates costs, against the share skipped."""
    by_label = results["skipping"] or {}
    rows = [{"label": label, **row} for label, thresholds in by_label.items() for row in thresholds]
    if not rows:
        return None
    view = painter.lines(
        rows,
        alt.X("skipped:Q", title="share not computed", axis=alt.Axis(format=".0%", tickCount=5)),
        ("loss_cost", "added loss"),
        [
            VARIANT,
            ("skip_below", "gates below", ".2f"),
            ("skipped", "not computed", ".1%"),
            ("time", "time per decoded token", ".2f"),
            ("loss_cost", "added loss", "+.4f"),
        ],
        "Each point is a threshold: what is behind a gate below it is not computed in decoding.",
        format="+.3~f",
        rule=0.0,
    )
    return PageFigure("skipping", "Computation that follows the gate", {"": view})
