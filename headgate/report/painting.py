"""What figures are made of: views as Vega-Lite specifications in which a variant looks the same everywhere.

A view keeps its rows once, as the dataset `rows`: the figure draws them, and the page shows them as a table.
Views are as wide as the page allows. Unless a view has a row for each variant, its parameter `hidden` lists
the variants not to draw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from headgate.report.looks import PAPER, looks
from headgate.report.reading import is_control

Rows = list[dict[str, Any]]

CROWD = 8
"""With more variants than this a figure draws no bands and leaves ablations to their own figure."""
HEIGHT = 300
ROW = 24
"""Height of a row in a figure with one for each variant."""
SHORT_NAME = 20
"""Letters of a name, at most, in a figure on a telephone."""
ROWS = "rows"
NEAR = 1.0
"""A control farther from the others than this many times what they lie apart is not drawn to scale."""
FROM_ZERO = alt.Scale(zero=True)
ANYWHERE = alt.Scale(zero=False)
LOGARITHMIC = alt.Scale(type="log", nice=False, padding=12)
BARE_ZERO = "datum.value === 0 ? '0' : datum.label"
VARIANT = ("label", "variant", "")
BEYOND_EDGE = " A mark at the edge lies beyond it, by the difference beside it."


@dataclass(frozen=True)
class FigureView:
    """One picture of a figure."""

    spec: dict[str, Any]
    columns: Sequence[tuple[str, str, str]]
    """Columns of the table behind it: field, title, and d3 format, or nothing for text."""
    caption: str
    key: bool = False
    """Whether it takes a list of colours, dashes and shapes beside it to tell the variants apart."""

    @property
    def rows(self) -> Rows:
        found: Rows = self.spec["datasets"][ROWS]
        return found


@dataclass(frozen=True)
class PageFigure:
    name: str
    title: str
    views: Mapping[str, FigureView] = field(default_factory=dict)
    """By name; the first is the one shown."""


class Painter:
    """Charts in which a variant looks the same everywhere."""

    def __init__(self, variants: Sequence[Mapping[str, Any]]) -> None:
        self.labels = [variant["label"] for variant in variants]
        self.controls = {variant["label"] for variant in variants if is_control(variant)}
        of_variants = looks(variants)

        def scale(values: Sequence[Any]) -> alt.Scale:
            return alt.Scale(domain=self.labels, range=list(values))

        self.scale = scale([one.colour for one in of_variants])
        self.colour = alt.Color("label:N", scale=self.scale, legend=None)
        self.dash = alt.StrokeDash("label:N", scale=scale([one.dash for one in of_variants]), legend=None)
        self.shape = alt.Shape("label:N", scale=scale([one.shape for one in of_variants]), legend=None)
        # Filled where a difference is shown, or where none is in question.
        self.fill = alt.condition(
            "datum.shown === false", alt.value(PAPER), alt.Fill("label:N", scale=self.scale, legend=None)
        )
        self.crowded = len(self.labels) > CROWD
        self.band = f"the band, drawn for up to {CROWD} variants at a time," if self.crowded else "the band"

    def chart(self, rows: Rows) -> alt.Chart:
        hidden = alt.param(name="hidden", value=[])
        return (
            alt.Chart(alt.NamedData(ROWS))
            .add_params(hidden)
            .transform_filter("indexof(hidden, datum.label) < 0")
        )

    def near(self, rows: Rows, value: str, *levels: float, least: float = 0.0) -> Rows:
        """The rows to draw to scale: all but those of controls that would press all others into one line."""
        named = [row[value] for row in rows if row["label"] not in self.controls and row[value] is not None]
        if not named:
            return rows
        low, high = min((*levels, *named)), max((*levels, *named))
        room = NEAR * max(high - low, least)
        return [row for row in rows if row[value] is None or low - room <= row[value] <= high + room]

    def lines(
        self,
        rows: Rows,
        x: alt.X,
        y: tuple[str, str],
        columns: Sequence[tuple[str, str, str]],
        caption: str,
        *,
        scale: alt.Scale = ANYWHERE,
        format: str | None = None,
        band: tuple[str, str] | None = None,
        rule: float | None = None,
        layers: Sequence[alt.Chart] = (),
    ) -> FigureView:
        """A line for each variant: y is a field and its title, band two fields, rule a level to mark."""
        chart = self.chart(rows)
        title = y[1]
        near = self.near(rows, y[0], *(() if rule is None else (rule,))) if scale is ANYWHERE else rows
        far = len(near) < len(rows)
        if far:
            values = [row[y[0]] for row in near if row[y[0]] is not None] + ([] if rule is None else [rule])
            room = 0.05 * (max(values) - min(values))
            scale = alt.Scale(domain=[min(values) - room, max(values) + room], nice=False)
            caption += " Controls that lie far off leave the figure; the table below has their numbers."
        axis = alt.Axis(tickCount=5, labelExpr=BARE_ZERO, format=alt.Undefined if format is None else format)
        middle = alt.Y(f"{y[0]}:Q", title=title, scale=scale, axis=axis)
        parts: list[Any] = [] if rule is None else [level(rule, "y")]
        if band is not None:
            few = f"{len(self.labels)} - length(hidden) <= {CROWD}"
            known = chart.transform_filter(f"{few} && isValid(datum.{band[0]})").mark_area(
                opacity=0.15, clip=far
            )
            ends = alt.Y(f"{band[0]}:Q", title=title), alt.Y2(f"{band[1]}:Q")
            parts.append(known.encode(x, *ends, self.colour))
        parts.append(chart.mark_line(strokeWidth=2, clip=far).encode(x, middle, self.colour, self.dash))
        points = chart.mark_point(filled=True, size=45, opacity=1, clip=far)
        parts.append(points.encode(x, middle, self.colour, self.shape, tooltip=tooltips(columns)))
        return FigureView(finished([*parts, *layers], rows), columns, caption, key=True)

    def intervals(
        self,
        rows: Rows,
        fields: tuple[str, str, str],
        title: str,
        order: Sequence[str],
        columns: Sequence[tuple[str, str, str]],
        caption: str,
        *,
        rule: float,
        format: str,
        domain: Sequence[float],
    ) -> FigureView:
        """A row for each variant: `fields` are its mean and its interval as judged; its own uncorrected
        interval has the same names with the prefix plain_. What lies outside the domain is drawn at its edge,
        with its value beside it."""
        chart, y = row_for_each(order)
        mean, low, high = fields
        axis = alt.Axis(format=format, tickCount=5, labelFlush=False, labelExpr=BARE_ZERO)
        x = alt.X(f"{low}:Q", title=title, scale=alt.Scale(domain=list(domain), nice=False), axis=axis)
        thin = chart.mark_rule(strokeWidth=1.2, clip=True).encode(x, alt.X2(f"{high}:Q"), y, self.colour)
        thick = chart.mark_rule(strokeWidth=4, clip=True, opacity=1).encode(
            alt.X(f"plain_{low}:Q", title=title), alt.X2(f"plain_{high}:Q"), y, self.colour
        )
        if at_edge(rows, mean, domain):
            caption += BEYOND_EDGE
        inwards = f"datum.at < datum['{mean}']"
        beyond = chart.transform_filter(f"datum.at !== datum['{mean}']").mark_text(
            align=alt.expr(f"{inwards} ? 'right' : 'left'"), dx=alt.expr(f"{inwards} ? -10 : 10"), fontSize=12
        )
        beyond = beyond.encode(
            alt.X("at:Q", title=title), y, alt.Text(f"{mean}:Q", format=format), self.colour
        )
        points = chart.mark_point(size=90, opacity=1, strokeWidth=2).encode(
            alt.X("at:Q", title=title),
            y,
            self.colour,
            self.shape,
            fill=self.fill,
            tooltip=tooltips(columns),
        )
        drawing = finished([level(rule, "x"), thin, thick, points, beyond], rows, height=ROW * len(rows))
        return FigureView(drawing, columns, caption)


def row_for_each(order: Sequence[str]) -> tuple[alt.Chart, alt.Y]:
    """A chart with a named row for each variant, which none of the page's switches hides."""
    room = min(8 * max(map(len, order)), 320)
    # The page's room, not the drawing's: that is what the names leave of it.
    short = f"containerSize()[0] < 480 ? truncate(datum.label, {SHORT_NAME}) : datum.label"
    axis = alt.Axis(labelLimit=room, labelExpr=short)
    return alt.Chart(alt.NamedData(ROWS)), alt.Y("label:N", sort=list(order), title=None, axis=axis)


def at_edge(rows: Rows, value: str, domain: Sequence[float]) -> bool:
    """Give each row the place of its mark, `at`: its value, or the end of the domain that it lies beyond.
    Whether any does."""
    for row in rows:
        row["at"] = min(max(row[value], domain[0]), domain[1])
    return any(row["at"] != row[value] for row in rows)


def level(at: float, axis: str) -> alt.Chart:
    """A thin line at a value, across the figure."""
    channel = alt.X("at:Q") if axis == "x" else alt.Y("at:Q")
    return alt.Chart(alt.Data(values=[{"at": at}])).mark_rule(strokeDash=[4, 4]).encode(channel)


def tooltips(columns: Sequence[tuple[str, str, str]]) -> list[alt.Tooltip]:
    return [
        alt.Tooltip(f"{name}:Q", title=title, format=form) if form else alt.Tooltip(f"{name}:N", title=title)
        for name, title, form in columns
    ]


def finished(layers: Sequence[alt.Chart], rows: Rows, height: int = HEIGHT) -> dict[str, Any]:
    """The specification of these layers over one another. Made here, since Altair's own layering copies every
    chart over and over, which took half of a page's time. So would checking the whole against Vega-Lite's
    schema; a test does."""
    drawn = [layer.to_dict(validate=False, context={"top_level": False}) for layer in layers]
    params = {param["name"]: param for layer in drawn for param in layer.pop("params", ())}
    return {
        "$schema": alt.SCHEMA_URL,
        # A title that ends with its axis can also use the room below the other axis's labels.
        "config": {"axisX": {"titleAnchor": "end"}},
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "params": list(params.values()),
        "layer": drawn,
        "datasets": {ROWS: rows},
    }


def picked(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def powers_of_two(low: float, high: float) -> list[int]:
    """Ticks for a scale that doubles: every power of two in range, or every other if there are many."""
    found = [1 << n for n in range(40) if low <= 1 << n <= high]
    return found if len(found) <= 8 else found[:: -(-len(found) // 8)]
