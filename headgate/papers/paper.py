"""What a paper reports: figures that a study can measure, and statements in it that contradict each other.

A file holds one paper:

    {
      "paper": "my-paper",
      "claims": [
        {"row": "Ours", "variant": "local:window=64", "metric": "loss", "printed": "4.904 ± 0.011",
         "baseline_printed": "4.927 ± 0.012"},
        {"row": "Ours", "variant": "local:window=64", "metric": "speed", "printed": "25.1",
         "baseline_printed": "24.5", "unit": "hours", "note": "Training time."}
      ],
      "contradictions": [{"title": "...", "explanation": "...", "where": "Table 1 and Discussion"}]
    }

Figures stay as the paper prints them, since their digits show how exact they are.
"""

import math
import os
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from headgate import config
from headgate.errors import HeadgateError

Metric = Literal["loss", "speed", "memory", "convergence"]


@dataclass(frozen=True)
class Claim:
    row: str
    """The row of a table, or the sentence, as in the paper."""
    variant: str
    """What it is about, as `headgate compare` takes it: dynamic-sparse:no-gate."""
    metric: Metric
    printed: str
    baseline_printed: str
    """The paper's figure and that of its own baseline. The error follows a ±; without one it is half a unit
    of the last digit."""
    unit: str = ""
    """Shown beside the figures. A speed in "hours" is a time: less is faster."""
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("printed", "baseline_printed"):
            try:
                value, _ = _figure(getattr(self, name))
            except ValueError:
                value = math.nan
            if not 0 < value < math.inf:
                raise HeadgateError(
                    f"row {self.row!r}: {name}={getattr(self, name)!r} is not a figure above 0; write it as "
                    '"4.904" or "4.904 ± 0.011"'
                )

    @property
    def value(self) -> float:
        return _figure(self.printed)[0]

    @property
    def baseline(self) -> float:
        return _figure(self.baseline_printed)[0]

    @property
    def relative(self) -> float:
        """The difference as a share of the baseline; above 0 means a higher loss, more speed, more memory,
        later convergence."""
        if self.metric == "speed" and self.unit == "hours":
            return self.baseline / self.value - 1
        return self.value / self.baseline - 1

    @property
    def error(self) -> float:
        """The error of the difference, as a share of the baseline."""
        return math.hypot(_figure(self.printed)[1], _figure(self.baseline_printed)[1]) / self.baseline

    @property
    def direction(self) -> int:
        """The sign of `relative`; 0 if the difference is within the error."""
        if abs(self.value / self.baseline - 1) <= self.error:
            return 0
        return 1 if self.relative > 0 else -1

    def to_dict(self) -> dict[str, Any]:
        derived = ("value", "baseline", "relative", "error", "direction")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class Contradiction:
    """Something a paper says that does not agree with what it, or another paper, says elsewhere."""

    title: str
    explanation: str
    where: str


@dataclass(frozen=True)
class Paper:
    paper: str
    """The name used in tables."""
    claims: tuple[Claim, ...]
    contradictions: tuple[Contradiction, ...] = ()

    def __post_init__(self) -> None:
        rows = [(claim.row, claim.variant, claim.metric) for claim in self.claims]
        for n, (row, variant, metric) in enumerate(rows):
            if rows[n] in rows[:n]:
                raise HeadgateError(f"row {row!r} gives the {metric} of {variant} twice; leave one out")


def load_paper(path: str | os.PathLike[str]) -> Paper:
    try:
        return config.load(Paper, path)
    except HeadgateError as error:
        raise HeadgateError(f"the claims in {str(path)!r} cannot be used: {error}") from None


def shipped_papers() -> list[Paper]:
    """The papers that come with headgate."""
    with resources.as_file(resources.files("headgate.papers")) as folder:
        return [load_paper(path) for path in sorted(Path(folder).glob("*.json"))]


def _figure(printed: str) -> tuple[float, float]:
    """A printed figure and its error."""
    value, _, error = printed.replace(",", "").partition("±")
    return float(value), float(error) if error else 0.5 * 10.0 ** -len(value.strip().partition(".")[2])
