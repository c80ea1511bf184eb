"""A study in Python: `headgate.read_study(FOLDER)` gives its tables and the page's figures as objects.

In a notebook a study shows its verdict and its table, and a figure shows itself. Nothing is trained, and
torch is not imported.
"""

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from headgate.errors import HeadgateError, suggestion
from headgate.report.figures import figures
from headgate.report.page import result_table
from headgate.report.painting import FigureView, PageFigure
from headgate.report.publish import standing_alone
from headgate.report.reading import read_results, results_path
from headgate.report.verdict import answer_sentence


class StudyTable(Sequence[dict[str, Any]]):
    """Rows as dictionaries, as `pandas.DataFrame(table)` takes them."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = [dict(row) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return StudyTable(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __repr__(self) -> str:
        return f"StudyTable of {len(self.rows)} rows: {', '.join(self.rows[0]) if self.rows else ''}"

    def _repr_html_(self) -> str:
        names = list(self.rows[0]) if self.rows else []
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_cell(row[name]))}</td>' for name in names)}</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class StudyFigure:
    """A figure of the page; it shows its first view. `figure["loss by tokens"]` is another, as a chart."""

    def __init__(self, figure: PageFigure) -> None:
        self._figure = figure

    @property
    def title(self) -> str:
        return self._figure.title

    @property
    def views(self) -> list[str]:
        return list(self._figure.views)

    @property
    def chart(self) -> alt.TopLevelMixin:
        return self[self.views[0]]

    def __getitem__(self, view: str) -> alt.TopLevelMixin:
        return _chart(self._view(view))

    def caption(self, view: str | None = None) -> str:
        return self._view(view).caption

    def table(self, view: str | None = None) -> StudyTable:
        """The numbers that a view draws."""
        of = self._view(view)
        return StudyTable([{name: row.get(name) for name, _, _ in of.columns} for row in of.rows])

    def _view(self, view: str | None) -> FigureView:
        name = self.views[0] if view is None else view
        if name not in self._figure.views:
            raise HeadgateError(f"the figure has no view {name!r}; {suggestion(name, self.views)}")
        return self._figure.views[name]

    def __repr__(self) -> str:
        return f"StudyFigure {self.title!r}, views: {', '.join(map(repr, self.views))}"

    def _repr_mimebundle_(self, *arguments: Any, **keywords: Any) -> Any:
        return self.chart._repr_mimebundle_(*arguments, **keywords)


class StudyFigures(Mapping[str, StudyFigure]):
    def __init__(self, made: Mapping[str, PageFigure]) -> None:
        self._made = made

    def __getitem__(self, name: str) -> StudyFigure:
        if name not in self._made:
            raise HeadgateError(f"the study has no figure {name!r}; {suggestion(name, self._made)}")
        return StudyFigure(self._made[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __repr__(self) -> str:
        return f"figures: {', '.join(self._made)}"


@dataclass(frozen=True, repr=False)
class StudyReading:
    """What a study found."""

    path: Path
    results: Mapping[str, Any]
    """Everything that results.json holds."""

    @property
    def headline(self) -> str:
        """The answer in a sentence or two."""
        return answer_sentence(self.results)

    @property
    def conditions(self) -> str:
        return str(self.results["conditions"])

    @property
    def table(self) -> StudyTable:
        """A row for each variant: losses, differences with the intervals they are judged by, verdicts,
        costs."""
        names, *rows = result_table(self.results)
        return StudyTable([dict(zip(names, row, strict=True)) for row in rows])

    @property
    def figures(self) -> StudyFigures:
        """The figures of the page, by name."""
        return StudyFigures(figures(self.results))

    def __getitem__(self, label: str) -> Mapping[str, Any]:
        """All that is known about a variant."""
        known = {variant["label"]: variant for variant in self.results["variants"]}
        if label not in known:
            raise HeadgateError(f"the study has no variant {label!r}; {suggestion(label, known)}")
        found: Mapping[str, Any] = known[label]
        return found

    def __repr__(self) -> str:
        return f"{self.headline}\n{self.conditions}."

    def _repr_html_(self) -> str:
        words = f"<p><b>{html.escape(self.headline)}</b></p><p>{html.escape(self.conditions)}.</p>"
        return words + self.table._repr_html_()


def read_study(source: str | os.PathLike[str]) -> StudyReading:
    """Read a study folder, a published one, or a results.json."""
    return StudyReading(results_path(source), read_results(source))


def _chart(view: FigureView) -> alt.TopLevelMixin:
    """The view as a chart that stands alone, with its own legend and width."""
    chart: alt.TopLevelMixin = alt.Chart.from_dict(standing_alone(view.spec))
    return chart


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
