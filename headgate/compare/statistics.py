"""What the losses of a study show: paired differences, intervals, tests, and a verdict in words.

A variant is compared with the baseline seed by seed. The mean of the differences is tested by a paired
two-sided t-test, and the p-values of a study's variants are corrected together by Holm's method, so that a
study without any true difference says "better" or "worse" in at most 5% of cases, however many variants it
has. The test assumes that the differences are roughly normal.

Two cases need a rule of their own:
- a seed that one side lacks (a crashed run) is left out of the pairs;
- a loss that is not finite (a diverged run) counts as larger than any other. The p-value is the limit as that
  loss grows, by the same amount on every diverged seed: one diverged seed of three shows nothing (p = 0.42),
  three of three show "worse". So a variant that diverged where the baseline did not is never called better
  for its other seeds. The mean and its interval are None, and `diverged` counts those seeds. Where both
  diverged, the pair counts as 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Literal

Verdict = Literal["better", "worse", "no difference shown", "not tested"]
Curve = Sequence[tuple[float, float]]
"""(x, loss) points, ascending in x."""

ALPHA = 0.05
POWER = 0.8


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval. One value has no interval; a value that is not finite leaves no
    mean either."""

    mean: float | None
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Difference:
    """A variant's losses minus the baseline's, over the seeds that both have."""

    seeds: int
    mean: float | None
    low: float | None
    high: float | None
    """Ends of the interval of the mean difference, not corrected for the number of variants."""
    relative: float | None
    relative_low: float | None
    relative_high: float | None
    """The three as shares of the baseline's mean over the same seeds, taken as exact."""
    p: float | None
    p_holm: float | None
    """The p-value of the paired t-test, alone and corrected over the study's tested variants."""
    verdict: Verdict
    seeds_needed: int | None
    """Seeds that would show a difference of this size with a power of 0.8 at the level of Holm's first step;
    None if nothing was tested, the difference is 0 or a run diverged."""
    diverged: int
    baseline_diverged: int
    """Shared seeds on which the loss of the variant, or of the baseline, is not finite."""


def interval(values: Sequence[float], confidence: float = 1 - ALPHA) -> Interval:
    n = len(values)
    if not n or not all(map(math.isfinite, values)):
        return Interval(None, None, None, n)
    mean = fmean(values)
    if n < 2:
        return Interval(mean, None, None, n)
    half = _t_quantile((1 + confidence) / 2, n - 1) * _deviation(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired_differences(
    baseline: Mapping[int, float],
    variants: Mapping[str, Mapping[int, float]],
    *,
    alpha: float = ALPHA,
    lower_is_better: bool = True,
) -> dict[str, Difference]:
    """Each variant against the baseline, by name; losses are given by seed."""
    pairs = {
        name: [(losses[seed], baseline[seed]) for seed in sorted(baseline.keys() & losses.keys())]
        for name, losses in variants.items()
    }
    steps = {name: _steps(pairs[name], lower_is_better) for name in variants if len(pairs[name]) >= 2}
    p_values = {name: paired_p(differences) for name, differences in steps.items()}
    corrected = dict(zip(steps, holm(list(p_values.values())), strict=True))
    result = {}
    for name, of_seeds in pairs.items():
        differences = [ours - theirs for ours, theirs in of_seeds]
        around = interval(differences, 1 - alpha)
        scale = 0.0 if around.mean is None else abs(fmean(theirs for _, theirs in of_seeds))
        verdict: Verdict = "not tested"
        needed = None
        if name in corrected:
            verdict = "no difference shown"
            if corrected[name] <= alpha:
                verdict = "better" if (fmean(steps[name]) < 0) == lower_is_better else "worse"
            if around.mean is not None:
                needed = seeds_needed(around.mean, _deviation(differences), alpha / len(corrected))
        result[name] = Difference(
            seeds=len(of_seeds),
            mean=around.mean,
            low=around.low,
            high=around.high,
            relative=_relative(around.mean, scale),
            relative_low=_relative(around.low, scale),
            relative_high=_relative(around.high, scale),
            p=p_values.get(name),
            p_holm=corrected.get(name),
            verdict=verdict,
            seeds_needed=needed,
            diverged=sum(not math.isfinite(ours) for ours, _ in of_seeds),
            baseline_diverged=sum(not math.isfinite(theirs) for _, theirs in of_seeds),
        )
    return result


def paired_p(differences: Sequence[float]) -> float:
    """The two-sided p-value of "their mean is 0" for at least two differences: 1 if all are 0, 0 if all are
    equal but not 0."""
    mean, deviation, n = fmean(differences), _deviation(differences), len(differences)
    if mean == 0:
        return 1.0
    if deviation == 0:
        return 0.0
    from scipy.special import stdtr

    return 2 * float(stdtr(n - 1, -abs(mean) / (deviation / math.sqrt(n))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the smallest of m p-values times m, the next times m - 1, and so on; never
    decreasing, at most 1."""
    corrected = [0.0] * len(p_values)
    reached = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = reached
    return corrected


def seeds_needed(mean: float, deviation: float, level: float) -> int | None:
    """The fewest pairs that show a mean difference at `level` with a power of 0.8; None if the mean is 0."""
    if mean == 0:
        return None
    if deviation == 0:
        return 2
    effect = abs(mean) / deviation
    normal = NormalDist()
    critical = normal.inv_cdf(1 - level / 2)
    of_normal = ((critical + normal.inv_cdf(POWER)) / effect) ** 2
    if of_normal > 10_000:  # where Student's t adds a few seeds to thousands
        return math.ceil(of_normal)
    n = max(2, math.ceil(of_normal + critical**2 / 2))
    while n > 2 and power(effect, n - 1, level) >= POWER:
        n -= 1
    while power(effect, n, level) < POWER:
        n += 1
    return n


def power(effect: float, n: int, level: float) -> float:
    """The chance that a two-sided t-test at `level` shows a mean of `effect` standard deviations over n
    differences."""
    from scipy.special import nctdtr

    def below(t: float) -> float:
        chance = float(nctdtr(n - 1, abs(effect) * math.sqrt(n), t))
        return 0.0 if math.isnan(chance) else chance  # scipy has no value for some that are next to 0

    critical = _t_quantile(1 - level / 2, n - 1)
    return 1 - below(critical) + below(-critical)


def _t_quantile(probability: float, df: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(df, probability))


def reaches(curve: Curve, level: float) -> float | None:
    """The first x at which the loss is at or below the level, on straight lines between the points."""
    before: tuple[float, float] | None = None
    for x, loss in curve:
        if loss <= level:
            if before is None or not math.isfinite(before[1]):
                return x
            return before[0] + (x - before[0]) * (before[1] - level) / (before[1] - loss)
        before = (x, loss)
    return None


def value_at(curve: Curve, x: float) -> float | None:
    """The loss at x, on straight lines between the points; None beyond them and beside a diverged one."""
    for (left, loss), (right, next_loss) in zip(curve, [*curve[1:], *curve[-1:]], strict=True):
        if left == x:
            return loss if math.isfinite(loss) else None
        if left < x < right:
            value = loss + (next_loss - loss) * (x - left) / (right - left)
            return value if math.isfinite(value) else None
    return None


def _steps(pairs: Sequence[tuple[float, float]], lower_is_better: bool) -> list[float]:
    """The differences to test; next to the infinite one of a diverged run, finite ones vanish."""
    diverged = [(not math.isfinite(ours)) - (not math.isfinite(theirs)) for ours, theirs in pairs]
    if any(diverged):
        return [float(step if lower_is_better else -step) for step in diverged]
    return [ours - theirs if math.isfinite(ours) else 0.0 for ours, theirs in pairs]


def _relative(part: float | None, whole: float) -> float | None:
    return part / whole if part is not None and whole else None


def _deviation(values: Sequence[float]) -> float:
    """The sample's standard deviation: exactly 0 where all values are equal, without overflow elsewhere."""
    if min(values) == max(values):
        return 0.0
    mean = fmean(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)
