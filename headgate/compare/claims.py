"""What the four papers report, beside what a study measured.

Every figure of the papers' tables and texts that this package can measure is a `Claim`, with that paper's own
baseline; only relative differences are compared, since scale and data differ. A claim keeps its figures as
the paper prints them: what follows "±" is its error, and where there is none, half a unit of the last digit,
since a difference below that is not one the paper states.

How a claim is judged. A measured direction counts once it is shown:
- loss: the study's own verdict (`statistics.py`), "better" or "worse";
- speed: the measured range leaves out "no difference";
- convergence: so does its range, and the loss itself is shown to differ, since a variant that ends lower by
  chance has also reached the baseline's loss sooner;
- memory, which hardly varies between runs: a ratio beyond 1%.
A shown direction is "same direction" or "opposite". Otherwise the verdict is "no difference shown"; so it is
for convergence where the variant never reached the baseline's final loss.

A claim whose difference lies within its own error says "equal to the baseline". It is borne out ("same
direction") only by a measured range that lies wholly within that error: a study too small to see anything
confirms nothing, and says "no difference shown". A difference shown beyond that error is "opposite".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Metric = Literal["loss", "speed", "memory", "convergence"]
Outcome = Literal["same direction", "opposite", "no difference shown", "not run"]

MEMORY_MARGIN = 0.01


@dataclass(frozen=True)
class Claim:
    paper: str
    row: str
    """The row, or the sentence, as the paper has it."""
    mechanism: str
    ablation: str | None
    metric: Metric
    printed: str
    baseline_printed: str
    """The paper's figure and that of its own baseline, as printed there."""
    unit: str
    note: str = ""

    @property
    def value(self) -> float:
        return _figure(self.printed)[0]

    @property
    def baseline(self) -> float:
        return _figure(self.baseline_printed)[0]

    @property
    def relative(self) -> float:
        """The difference as a share of the baseline: a positive one is a higher loss, more memory, later
        convergence, more speed."""
        if self.metric == "speed" and self.unit == "hours":
            return self.baseline / self.value - 1
        return self.value / self.baseline - 1

    @property
    def error(self) -> float:
        """What the paper leaves open in its difference, as a share of the baseline."""
        return math.hypot(_figure(self.printed)[1], _figure(self.baseline_printed)[1]) / self.baseline

    @property
    def direction(self) -> int:
        """-1 or 1, the sign of `relative`; 0 where the difference lies within the paper's error."""
        return 0 if abs(self.value / self.baseline - 1) <= self.error else _sign(self.relative)

    def to_dict(self) -> dict[str, Any]:
        return {
            "paper": self.paper,
            "row": self.row,
            "mechanism": self.mechanism,
            "ablation": self.ablation,
            "metric": self.metric,
            "printed": self.printed,
            "baseline_printed": self.baseline_printed,
            "value": self.value,
            "baseline": self.baseline,
            "unit": self.unit,
            "relative": self.relative,
            "error": self.error,
            "direction": self.direction,
            "note": self.note,
        }


@dataclass(frozen=True)
class Contradiction:
    """Something the papers say that does not fit what they say elsewhere."""

    title: str
    explanation: str
    where: str

    def to_dict(self) -> dict[str, str]:
        return {"title": self.title, "explanation": self.explanation, "where": self.where}


@dataclass(frozen=True)
class Judged:
    """A claim with what the study measured for it: the variant's label and relative difference, as
    `Claim.relative` counts it, with the ends of its range."""

    claim: Claim
    verdict: Outcome
    label: str | None = None
    relative: float | None = None
    low: float | None = None
    high: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "claim": self.claim.to_dict(),
            "verdict": self.verdict,
            "label": self.label,
            "relative": self.relative,
            "low": self.low,
            "high": self.high,
        }


def judge(claims: Sequence[Claim], measured: Sequence[Mapping[str, Any]]) -> list[Judged]:
    """Each claim beside the first variant of its mechanism and ablation that has no options of its own.

    A variant of the study is a dictionary with `label`, `mechanism`, `ablation`, `own_options`, and, each
    possibly None: `difference` (`relative`, `relative_low`, `relative_high`, `verdict`), `speed` (`ratio`,
    `low`, `high`; more is faster), `memory` (`ratio`), `convergence` (`relative`, `low`, `high`; less is
    sooner).
    """
    return [_judge(claim, next((v for v in measured if _matches(claim, v)), None)) for claim in claims]


def _matches(claim: Claim, variant: Mapping[str, Any]) -> bool:
    return (
        variant["mechanism"] == claim.mechanism
        and variant["ablation"] == claim.ablation
        and not variant["own_options"]
    )


def _judge(claim: Claim, variant: Mapping[str, Any] | None) -> Judged:
    found = None if variant is None else variant["difference" if claim.metric == "loss" else claim.metric]
    if variant is None or found is None:
        return Judged(claim, "not run")
    if claim.metric == "loss":
        relative, low, high = found["relative"], found["relative_low"], found["relative_high"]
        shown = {"better": -1, "worse": 1}.get(found["verdict"], 0)
    elif claim.metric == "memory":
        relative = low = high = found["ratio"] - 1
        shown = _sign(relative) if abs(relative) > MEMORY_MARGIN else 0
    else:
        if claim.metric == "speed":
            relative, low, high = (_less_one(found[key]) for key in ("ratio", "low", "high"))
        else:
            relative, low, high = found["relative"], found["low"], found["high"]
        shown = _sign(low) if _sign(low) == _sign(high) else 0
        if claim.metric == "convergence" and variant["difference"]["verdict"] not in ("better", "worse"):
            shown = 0
    verdict: Outcome
    if claim.direction == 0 and all(end is not None and abs(end) <= claim.error for end in (low, high)):
        verdict = "same direction"
    elif shown == 0:
        verdict = "no difference shown"
    else:
        verdict = "same direction" if shown == claim.direction else "opposite"
    return Judged(claim, verdict, variant["label"], relative, low, high)


def _less_one(ratio: float | None) -> float | None:
    return None if ratio is None else ratio - 1


def _sign(number: float | None) -> int:
    return 0 if number is None else (number > 0) - (number < 0)


def _figure(printed: str) -> tuple[float, float]:
    """A printed figure and its error: 4.927 ± 0.012, or half a unit of the last digit."""
    value, _, error = printed.replace(",", "").partition("±")
    if error:
        return float(value), float(error)
    return float(value), 0.5 * 10.0 ** -len(value.partition(".")[2])


Row = tuple[str, str, str | None, str, str]
"""Row of the paper, mechanism, ablation, printed figure, note."""


def _rows(paper: str, metric: Metric, unit: str, baseline: str, *rows: Row) -> tuple[Claim, ...]:
    return tuple(
        Claim(paper, row, mechanism, ablation, metric, printed, baseline, unit, note)
        for row, mechanism, ablation, printed, note in rows
    )


_READING = "No description of it was found; the mechanism measured here is a reading of its name."
_EFFICIENCY = 'The paper says "relative efficiency" and does not define it; taken as throughput.'

CLAIMS: tuple[Claim, ...] = (
    *_rows(
        "dynamic-sparse",
        "loss",
        "validation loss",
        "4.9266",
        ("Full Model", "dynamic-sparse", None, "4.904", "Dynamic sparse attention."),
        ("No Gating", "dynamic-sparse", "no-gate", "4.918", ""),
        (
            "Fixed Window",
            "dynamic-sparse",
            "fixed-window",
            "4.927",
            "Equal to the baseline in the digits printed.",
        ),
        ("No Window", "dynamic-sparse", "no-window", "5.012", "Full attention with the gate."),
        ("Probabilistic Positional Attention", "positional", None, "5.1300", _READING),
    ),
    *_rows(
        "dynamic-sparse", "memory", "GB", "28", ("Memory usage", "dynamic-sparse", None, "22", "21% less.")
    ),
    *_rows(
        "dynamic-sparse",
        "speed",
        "tokens/s",
        "13,200",
        ("Training speed", "dynamic-sparse", None, "12,500", "5% slower."),
    ),
    *_rows(
        "dynamic-sparse",
        "convergence",
        "% of the baseline's tokens",
        "100",
        (
            "Convergence",
            "dynamic-sparse",
            None,
            "85",
            '"Reached minimum loss 15% faster", in steps or in hours is not said; taken as tokens until the '
            "baseline's final loss.",
        ),
    ),
    *_rows(
        "head-gated",
        "loss",
        "validation loss",
        "4.9266",
        ("Our Method", "head-gated", None, "4.6498", 'The paper says "5.7%"; its figures make 5.6%.'),
    ),
    *_rows(
        "head-gated",
        "speed",
        "hours",
        "24.5",
        ("Our Method", "head-gated", None, "25.1", "Training time; its inverse is compared as speed."),
    ),
    *_rows(
        "context-adaptive",
        "loss",
        "validation loss",
        "4.9266",
        ("Sparse", "combiner", None, "4.904", "Combiner, arXiv 2107.05768."),
        ("Local", "local", None, "5.021", "Longformer, arXiv 2004.05150."),
        ("CAA", "context-adaptive", None, "4.712", ""),
    ),
    *_rows(
        "context-adaptive",
        "memory",
        "GB",
        "31.5",
        ("Sparse", "combiner", None, "29.8", ""),
        ("Local", "local", None, "30.2", ""),
        ("CAA", "context-adaptive", None, "66.6", "2.1 times the baseline's, as the text says too."),
    ),
    *_rows(
        "context-adaptive",
        "speed",
        "x",
        "1.00",
        ("Sparse", "combiner", None, "1.05", ""),
        ("Local", "local", None, "1.03", ""),
        ("CAA", "context-adaptive", None, "0.82", ""),
    ),
    *_rows(
        "sparse-geometric",
        "loss",
        "validation loss",
        "4.927 ± 0.012",
        ("Dynamic Sparse", "dynamic-sparse", None, "4.904 ± 0.011", "What ± stands for is not said."),
        ("ASGA (Ours)", "sparse-geometric", None, "5.148 ± 0.015", ""),
        ("Removing geometric scaling", "sparse-geometric", "no-geometric", "5.201", ""),
        ("Fixed sparsity patterns", "sparse-geometric", "fixed-pattern", "5.087", ""),
        (
            "Disabling both components",
            "sparse-geometric",
            "neither",
            "4.930",
            '"Matched baseline": within its ±; by construction it is the baseline.',
        ),
    ),
    *_rows(
        "sparse-geometric",
        "speed",
        "x",
        "1.00",
        ("Dynamic Sparse", "dynamic-sparse", None, "1.15", _EFFICIENCY),
        ("ASGA (Ours)", "sparse-geometric", None, "0.92", _EFFICIENCY),
    ),
)

CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "134M parameters that make 1.5 billion",
        "28 layers of width 1536 with a hidden size of 8960 and Qwen's vocabulary have about 1.5 billion "
        'parameters, not "134M".',
        "dynamic-sparse, Model Architecture",
    ),
    Contradiction(
        "One baseline loss from different trainings",
        "The baseline ends at 4.9266 (4.927) after 399 steps of 16.8 million tokens at a learning rate of "
        "3e-4, and after 50,000 steps of batch 32 at 6e-4; with batch 512; and with 132M as with 134M "
        "parameters.",
        "all four papers: training setups and result tables",
    ),
    Contradiction(
        "One baseline, two memories",
        "The baseline with the loss 4.9266 uses 28 GB in one paper and 31.5 GB in another.",
        "dynamic-sparse, Training Efficiency; context-adaptive, Results",
    ),
    Contradiction(
        "Dynamic sparse attention is slower, and faster",
        "Its own paper measures 12,500 tokens/s against 13,200, 5% slower; another gives it a relative "
        "efficiency of 1.15x.",
        "dynamic-sparse, Training Efficiency; sparse-geometric, Table 1",
    ),
    Contradiction(
        "One loss for two mechanisms",
        '4.904 is the loss of dynamic sparse attention in two papers, and that of Combiner ("Sparse") in '
        "a third, to the last digit.",
        "dynamic-sparse, Main Results; sparse-geometric, Table 1; context-adaptive, Results",
    ),
    Contradiction(
        "Window attention is worse, and better",
        "A window without a gate loses to the baseline in one paper (Local, 5.021) and beats it in "
        "another (No Gating, 4.918), against the same 4.9266.",
        "context-adaptive, Results; dynamic-sparse, Table 1",
    ),
    Contradiction(
        "A window that saves no time",
        "At 32,768 tokens a window of 256 leaves about one key in 64, yet training is 5% slower: the "
        "window was masked, it seems, and not skipped.",
        "dynamic-sparse, Training Configuration and Training Efficiency",
    ),
    Contradiction(
        "The gate helps, and hurts",
        "With the window the gate lowers the loss (4.918 to 4.904); on full attention it raises it from "
        "the baseline's 4.9266 to 5.012 (No Window). The text does not mention it.",
        "dynamic-sparse, Table 1",
    ),
    Contradiction(
        "Adaptive windows of a fixed size",
        'The contributions name "Adaptive Window Patterns ... automatically adjusting"; the limitations '
        'say "Window size fixed during training".',
        "dynamic-sparse, Introduction and Limitations",
    ),
    Contradiction(
        '"Consistent improvements across multiple metrics"',
        "Of the paper's own metrics, training speed got worse.",
        "dynamic-sparse, Conclusion and Training Efficiency",
    ),
    Contradiction(
        "5.7% that are 5.6%",
        "4.6498 against 4.9266 is 5.6% lower; abstract and limitations say 5.7%.",
        "head-gated, Abstract, Results and Limitations",
    ),
    Contradiction(
        "Only within the window, and global",
        'Scores are computed "only within a 256-token window", and the same paragraph adds global '
        "attention; training takes longer than the baseline's (25.1 hours against 24.5).",
        "head-gated, Local Windowed Attention and Results",
    ),
    Contradiction(
        "Ablations announced, none shown",
        "Two papers announce ablation studies and an analysis of their gates or patterns; neither has a "
        "table or a figure of them.",
        "head-gated, Abstract and Introduction; context-adaptive, Abstract",
    ),
    Contradiction(
        "A comparison that is not there",
        "The abstract lists FAST among the methods compared with; the table has no such row.",
        "context-adaptive, Abstract and Results",
    ),
    Contradiction(
        "Better efficiency at 2.1 times the memory",
        'The abstract claims "improved efficiency"; the table has 0.82x the throughput and 66.6 GB '
        "against 31.5.",
        "context-adaptive, Abstract and Results",
    ),
    Contradiction(
        "A harmful interaction that the ablation shows to help",
        'The discussion calls the interaction of sparsity and scaling "detrimental"; removing the scaling '
        "from the gated model makes it worse (5.148 to 5.201).",
        "sparse-geometric, Ablation Studies and Discussion",
    ),
    Contradiction(
        '"Maintains computational efficiency"',
        "The table gives 0.92x.",
        "sparse-geometric, Introduction and Table 1",
    ),
    Contradiction(
        "Differences without seeds",
        "No paper says how many seeds it trained, three give no spread at all, and one of these calls its "
        'result "consistent". Where a spread is given, dynamic sparse and the baseline meet at its edges '
        "(4.904 + 0.011 = 4.927 - 0.012).",
        "head-gated, Limitations; sparse-geometric, Table 1; dynamic-sparse; context-adaptive",
    ),
)
