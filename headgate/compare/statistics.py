"""What the losses of a study can show: paired differences, intervals, tests, and a verdict in words.

A variant is compared with the baseline seed by seed. The mean of the differences is tested by a paired
two-sided t-test, and the p-values of a study's variants are corrected together by Holm's method, so that a
study without any true difference says "better" or "worse" in at most 5% of cases, however many variants it
has. The test assumes that the differences are roughly normal. The standard library is all this needs, so that
reading a study stays light.

Two things that a mean cannot hold:
- a seed that one side lacks (a crashed run) is left out of the pairs;
- a loss that is not finite (a diverged run) stays in them as a loss beyond every other. The test then takes
  the value it tends to as that loss grows, the same on every diverged seed: 1 seed of 3 shows nothing
  (p = 0.42), all of them show "worse". A variant that diverged where the baseline did not is thus never
  called better for its other seeds; the mean and its interval are None, and `diverged` counts those seeds.
  Where both diverged, neither was better: the pair counts as 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import Literal

Verdict = Literal["better", "worse", "no difference shown", "not tested"]
Curve = Sequence[tuple[float, float]]
"""(x, loss) points, ascending in x."""

ALPHA = 0.05
POWER = 0.8


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval: none of one value, no mean either where a value is not finite."""

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
    """Seeds that would show a difference of the size seen, with a power of 0.8, at the level of Holm's first
    step; None where nothing was tested, the difference is 0 or a run diverged."""
    diverged: int
    baseline_diverged: int
    """Shared seeds on which the variant's, and the baseline's, loss is not finite."""


def interval(values: Sequence[float], confidence: float = 1 - ALPHA) -> Interval:
    n = len(values)
    if not n or not all(map(math.isfinite, values)):
        return Interval(None, None, None, n)
    mean = fmean(values)
    if n < 2:
        return Interval(mean, None, None, n)
    half = t_quantile((1 + confidence) / 2, n - 1) * _deviation(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def compare(
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
            relative=_share(around.mean, scale),
            relative_low=_share(around.low, scale),
            relative_high=_share(around.high, scale),
            p=p_values.get(name),
            p_holm=corrected.get(name),
            verdict=verdict,
            seeds_needed=needed,
            diverged=sum(not math.isfinite(ours) for ours, _ in of_seeds),
            baseline_diverged=sum(not math.isfinite(theirs) for _, theirs in of_seeds),
        )
    return result


def paired_p(differences: Sequence[float]) -> float:
    """The two-sided p-value of "their mean is 0", over at least two differences.

    Differences that are all 0 give 1; all equal, and not 0, give 0.
    """
    mean, deviation, n = fmean(differences), _deviation(differences), len(differences)
    if mean == 0:
        return 1.0
    if deviation == 0:
        return 0.0
    return 2 * t_cdf(-abs(mean) / (deviation / math.sqrt(n)), n - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the smallest of m times m, the next times m - 1, never decreasing, at
    most 1."""
    corrected = [0.0] * len(p_values)
    reached = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = reached
    return corrected


def seeds_needed(mean: float, deviation: float, level: float) -> int | None:
    """The fewest pairs that show a mean difference at `level` with a power of 0.8; None for none."""
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
    while n > 2 and t_power(effect, n - 1, level) >= POWER:
        n -= 1
    while t_power(effect, n, level) < POWER:
        n += 1
    return n


def t_power(effect: float, n: int, level: float) -> float:
    """The chance that a two-sided t-test of n differences, whose mean is `effect` standard deviations, comes
    out at `level`.

    With Z normal around shift = effect * sqrt(n) and s the sample's deviation over the true one, it is the
    mean over s of P(|Z| > critical * s). Over u = log s the weight is smooth and fades at both ends, where
    the trapezoid rule is exact to rounding once its step is finer than the narrowest feature.
    """
    df, shift = n - 1, abs(effect) * math.sqrt(n)
    critical = t_quantile(1 - level / 2, df)
    if shift > 10 * critical + 10:
        return 1.0
    step = min(0.12, 0.5 / math.sqrt(2 * df), 0.5 / (2 + shift))
    total = weights = 0.0
    for direction in (step, -step):
        u = 0.0 if direction > 0 else direction
        while (log_weight := df * (u - math.exp(2 * u) / 2 + 0.5)) > -40:
            weight, bound = math.exp(log_weight), critical * math.exp(u)
            total += weight * (_normal_cdf(shift - bound) + _normal_cdf(-shift - bound))
            weights += weight
            u += direction
    return total / weights


def t_cdf(t: float, df: float) -> float:
    """Student's t distribution: the chance of a value up to t with df degrees of freedom."""
    if math.isinf(t):
        return 0.0 if t < 0 else 1.0
    tail = _beta_share(df / 2, 0.5, df / (df + t * t), t * t / (df + t * t)) / 2
    return tail if t < 0 else 1 - tail


@lru_cache(maxsize=1024)
def t_quantile(probability: float, df: float) -> float:
    """The value that Student's t stays below with the given probability, between 0 and 1."""
    if probability < 0.5:
        return -t_quantile(1 - probability, df)
    if probability == 0.5:
        return 0.0
    tail, value = 1 - probability, 0.0
    while t_cdf(-max(1.0, 2 * value), df) > tail:
        value = max(1.0, 2 * value)
    # The tail falls ever more slowly, so Newton's steps from its left come closer and never overshoot.
    while (further := value + (t_cdf(-value, df) - tail) / t_density(value, df)) > value * (1 + 1e-15):
        value = further
    return value


def t_density(t: float, df: float) -> float:
    log_scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2)
    return math.exp(log_scale - (df + 1) / 2 * math.log1p(t * t / df)) / math.sqrt(math.pi * df)


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
    """The differences to test; beside one that a diverged run makes infinite, the finite ones vanish."""
    diverged = [(not math.isfinite(ours)) - (not math.isfinite(theirs)) for ours, theirs in pairs]
    if any(diverged):
        return [float(step if lower_is_better else -step) for step in diverged]
    return [ours - theirs if math.isfinite(ours) else 0.0 for ours, theirs in pairs]


def _share(part: float | None, whole: float) -> float | None:
    return part / whole if part is not None and whole else None


def _deviation(values: Sequence[float]) -> float:
    """The sample's standard deviation: exactly 0 where all values are equal, without overflow elsewhere."""
    if min(values) == max(values):
        return 0.0
    mean = fmean(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)


def _normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _beta_share(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function I_x(a, b); rest is 1 - x, given apart to keep its digits."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    # The fraction converges fast below the mean of the distribution; above it, the other tail does.
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) / (a * _beta_fraction(a, b, x))
    return 1 - math.exp(log_front) / (b * _beta_fraction(b, a, rest))


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction 1 + d1/(1 + d2/(1 + ...)) of the incomplete beta function, by Lentz's method."""
    tiny = 1e-300
    value, above, below = 1.0, 1.0, 0.0
    for k in range(1, 100_000):
        m = k // 2
        if k % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        below = 1 / (1 + term * below or tiny)
        above = 1 + term / above or tiny
        value *= above * below
        if abs(above * below - 1) < 1e-15:
            break
    return value
