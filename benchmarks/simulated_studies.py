"""Whether the statistics of a study keep what they promise, by simulating studies.

    python benchmarks/simulated_studies.py [--studies 4000] [--json FILE]

A simulated study draws losses as D_sd = mu + a_s + b_d + e_sd for every variant and the baseline, over
documents of very different lengths, and judges them with `headgate.compare.statistics`. Counted are:

- false verdicts: studies without any true difference that call a variant better or worse (at most 5%, which
  an exact binomial test must not refuse at a level of 1%);
- coverage: how often the interval of a single variant holds the true difference (93% to 97%);
- power: how often a true difference is shown, beside what `detectable` and `power` predict (within 5 points).
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from headgate.compare.looks import nominal_levels
from headgate.compare.statistics import (
    ALPHA,
    Estimate,
    Losses,
    Pairs,
    VariancePart,
    documents_worth,
)

DRAWS = 2027
"""Seeds all that is drawn. The statistics were chosen by other draws than these."""


@dataclass(frozen=True)
class World:
    """Where losses come from: deviations of a seed, of a document, and of a document in a run."""

    name: str
    seed: float
    document: float
    rest: float
    documents: int = 100
    lengths: float = 1.0
    """Deviation of the logarithm of a document's length."""

    def tokens(self, draw: np.random.Generator) -> NDArray[np.float64]:
        """Of each document."""
        return np.ceil(np.exp(draw.normal(5, self.lengths, self.documents)))

    def losses(
        self,
        draw: np.random.Generator,
        shifts: Sequence[float],
        seeds: int,
        tokens: NDArray[np.float64] | None = None,
    ) -> list[Losses]:
        """The baseline, then a variant for each shift. Seeds and documents also have a part common to all."""
        tokens = self.tokens(draw) if tokens is None else tokens
        common = 5 + draw.normal(0, 0.3, (seeds, 1)) + draw.normal(0, 1, self.documents)
        found = []
        for shift in (0.0, *shifts):
            a = draw.normal(0, self.seed, (seeds, 1))
            b = draw.normal(0, self.document, self.documents)
            e = draw.normal(0, self.rest, (seeds, self.documents))
            sums = (common + shift + a + b + e) * tokens
            by_seed = {seed: float(sums[seed].sum() / tokens.sum()) for seed in range(seeds)}
            found.append(Losses(by_seed, dict(enumerate(sums)), tokens))
        return found

    def estimate(self, seeds: int, tokens: NDArray[np.float64]) -> Estimate:
        """What a study would estimate of a difference between two variants if it met the true variances."""
        (as_many, df), a, b = documents_worth(tokens), 2 * self.seed**2, 2 * self.document**2
        rest = 2 * self.rest**2 / (seeds * as_many)
        return Estimate(
            0.0, VariancePart(a / seeds + rest, seeds - 1), VariancePart(b / as_many + rest, df), rest
        )


WORLDS = (
    World("seeds alone", 0.01, 0.0, 0.02),
    World("documents alone", 0.0, 0.05, 0.02),
    World("both", 0.01, 0.05, 0.05),
    World("few documents", 0.01, 0.03, 0.05, documents=17),
    World("only the rest", 0.0, 0.0, 0.05),
)


def shows_difference(baseline: Losses, one: Losses, *, looks: tuple[int, ...], variants: int) -> bool:
    """Whether the verdict on one of so many variants is better or worse: that of `compare_losses`, without
    its figures."""
    levels = nominal_levels(looks, ALPHA / variants)
    pairs = Pairs(baseline, one)
    return any(pairs.first(seeds).estimate().p <= level for seeds, level in zip(looks, levels, strict=True))


def false_verdicts(world: World, studies: int, *, looks: tuple[int, ...], variants: int = 4) -> float:
    """The share of studies without a true difference that claim one."""
    draw, claimed = np.random.default_rng((DRAWS, 1)), 0
    for _ in range(studies):
        baseline, *others = world.losses(draw, [0.0] * variants, looks[-1])
        claimed += any(shows_difference(baseline, one, looks=looks, variants=variants) for one in others)
    return claimed / studies


def coverage(
    world: World, studies: int, *, seeds: int, shift: float = -0.02, with_documents: bool = True
) -> float:
    """The share of studies whose interval of a single variant holds the true difference."""
    draw, held = np.random.default_rng((DRAWS, 2)), 0
    for _ in range(studies):
        baseline, one = world.losses(draw, [shift], seeds)
        if not with_documents:
            baseline, one = Losses(baseline.by_seed), Losses(one.by_seed)
        found = Pairs(baseline, one).estimate()
        held += found.tail(abs(found.mean - shift)) > ALPHA
    return held / studies


def shown(world: World, studies: int, *, looks: tuple[int, ...], variants: int = 4) -> tuple[float, float]:
    """Of true differences that the last look alone has a power of 0.8 for: the share of studies that show it,
    and the share predicted; with several looks at least that. All have documents of the same lengths, which a
    study knows."""
    seeds, tokens = looks[-1], world.tokens(np.random.default_rng(0))
    truth = world.estimate(seeds, tokens)
    level = nominal_levels(looks, ALPHA / variants)[-1]
    shift = truth.detectable(level)
    draw, found = np.random.default_rng((DRAWS, 3)), 0
    for _ in range(studies):
        baseline, one = world.losses(draw, [shift], seeds, tokens)
        found += shows_difference(baseline, one, looks=looks, variants=variants)
    return found / studies, truth.power(shift, level)


def keeps_promises(row: dict[str, Any], studies: int) -> bool:
    """Whether a row of the table is as promised above, as far as so many studies can tell."""
    claimed = round(row["false verdicts"] * studies)
    few_false = stats.binomtest(claimed, studies, ALPHA, alternative="greater").pvalue > 0.01
    return bool(
        few_false and 0.93 <= row["coverage"] <= 0.97 and abs(row["power"] - row["predicted"]) <= 0.05
    )


def table(studies: int, worlds: Sequence[World] = WORLDS) -> list[dict[str, Any]]:
    rows = []
    for world in worlds:
        for looks in ((3,), (5,), (4, 8, 12)):
            reached, predicted = shown(world, studies, looks=looks)
            rows.append(
                {
                    "world": world.name,
                    "looks": list(looks),
                    "false verdicts": false_verdicts(world, studies, looks=looks),
                    "coverage": coverage(world, studies, seeds=looks[-1]),
                    "power": reached,
                    "predicted": predicted,
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=4000)
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = table(options.studies)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"studies": options.studies, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
