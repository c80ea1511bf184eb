"""What papers report beside what a study measured.

Only relative differences to each one's own baseline are compared, since scale and data differ. A measured
direction counts once it is shown:
- loss: the study's own verdict (`statistics.py`) is "better" or "worse";
- speed: the measured range excludes "no difference";
- convergence: so does its range, and the loss is shown to differ too, since a variant that ends lower by
  chance has also reached the baseline's loss sooner;
- memory, which hardly varies between runs: the ratio differs from 1 by more than 1%.
A direction that is shown is "same direction" or "opposite". Everything else is "no difference shown",
including a variant that never reached the baseline's final loss.

A claim whose difference is within its own error says "equal to the baseline". Only a measured range wholly
within that error supports it ("same direction"): a study too small to see anything confirms nothing. A
difference shown beyond that error is "opposite".
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from headgate.compare.variants import Variant
from headgate.config import ModelConfig
from headgate.errors import HeadgateError
from headgate.papers.paper import Claim, Paper

Outcome = Literal["same direction", "opposite", "no difference shown"]

MEMORY_MARGIN = 0.01


@dataclass(frozen=True)
class Judged:
    """A claim and what the study measured for it: the variant's label and its relative difference, with the
    same sign as `Claim.relative`, and the ends of its range."""

    claim: Claim
    verdict: Outcome
    label: str
    relative: float | None
    low: float | None
    high: float | None


def check_variants(paper: Paper, model: ModelConfig) -> None:
    """Refuse a claim about a variant that no study could run."""
    for claim in paper.claims:
        try:
            Variant.parse(claim.variant).options(model)
        except HeadgateError as error:
            raise HeadgateError(f"claims of {paper.paper!r}, row {claim.row!r}: {error}") from None


def judge_papers(
    papers: Sequence[Paper], variants: Sequence[Variant], measured: Sequence[Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """For results.json: the claims that the study measured, and the contradictions in their papers."""
    claims, contradictions = [], []
    for paper in papers:
        found = []
        for claim in paper.claims:
            meaning = Variant.parse(claim.variant).meaning
            pairs = zip(variants, measured, strict=True)
            row = next((row for variant, row in pairs if variant.meaning == meaning), None)
            judged = None if row is None else judge(claim, row)
            if judged is not None:
                found.append(asdict(judged) | {"claim": {"paper": paper.paper, **claim.to_dict()}})
        if found:
            claims += found
            contradictions += [asdict(contradiction) for contradiction in paper.contradictions]
    return {"claims": claims, "contradictions": contradictions}


def judge(claim: Claim, measured: Mapping[str, Any]) -> Judged | None:
    """A claim beside its variant's results; None if the study has not measured it, or if it is the baseline.

    The results hold `label` and, each possibly None, `difference` (`seeds`, `relative`, `relative_low`,
    `relative_high`, `verdict`), `speed` (`ratio`, `low`, `high`; more is faster), `memory` (`ratio`) and
    `convergence` (`relative`, `low`, `high`; less is sooner).
    """
    difference = measured["difference"]
    found = difference if claim.metric == "loss" else measured[claim.metric]
    if difference is None or found is None or (claim.metric == "loss" and not difference["seeds"]):
        return None
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
        if claim.metric == "convergence" and difference["verdict"] not in ("better", "worse"):
            shown = 0
    verdict: Outcome
    if claim.direction == 0 and all(end is not None and abs(end) <= claim.error for end in (low, high)):
        verdict = "same direction"
    elif shown == 0:
        verdict = "no difference shown"
    else:
        verdict = "same direction" if shown == claim.direction else "opposite"
    return Judged(claim, verdict, measured["label"], relative, low, high)


def _less_one(ratio: float | None) -> float | None:
    return None if ratio is None else ratio - 1


def _sign(number: float | None) -> int:
    return 0 if number is None else (number > 0) - (number < 0)
