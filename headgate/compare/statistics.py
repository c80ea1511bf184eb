"""What the losses of a study show: differences over seeds and documents, intervals, and a verdict in words.

A variant is compared with the baseline seed by seed and, where the runs kept them, document by document. The
quantity is the difference in nats per token over all text like the validation split, so a document counts by
its tokens: with a difference D_sd per token and the document's share of all tokens w_d, it is the mean of
sum_d w_d D_sd over seeds, and

    D_sd = mu + a_s + b_d + e_sd      SE^2 = var_a/S + var_b/K + var_e/(S K)      K = 1 / sum_d w_d^2

K is Kish's number of equally long documents. That takes documents of all lengths to vary alike: where short
ones vary more the error is overstated, where long ones do it is understated.

The variances are those of the two-way analysis of variance; runs and documents each have their own degrees of
freedom (`Estimate.tail`). Without documents it is the paired t-test over the seeds, which says nothing about
other documents.

Variants that the user named, ablations and controls each form a family. Within a family each of m comparisons
is made at 5% / m (Bonferroni), and so is its interval: the interval excludes 0 exactly where the verdict is
"better" or "worse". Planned looks (`looks.py`) share that level among them.

Three cases have their own rules:
- losses that are equal bit for bit on every shared seed are "same by construction", and nothing is tested;
- a seed that one side lacks (a crashed run) is left out of the pairs;
- a loss that is not finite (a diverged run) counts as larger than any other. The p-value is the limit as that
  loss grows, by the same amount on every diverged seed: one diverged seed of three shows nothing (p = 0.42),
  three of three show "worse". So a variant that diverged where the baseline did not is never called better
  for its other seeds. The mean and its interval are None, and `diverged` counts those seeds. Where both
  diverged, the pair counts as 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from headgate.compare.looks import nominal_levels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Verdict = Literal["better", "worse", "no difference shown", "same by construction", "not tested"]
Curve = Sequence[tuple[float, float]]
"""(x, loss) points, ascending in x."""

ALPHA = 0.05
POWER = 0.8
NAMED, ABLATIONS, CONTROLS = "named", "ablations", "controls"
"""The families."""


@dataclass(frozen=True)
class Losses:
    """A variant's losses by seed, and by document too if its runs kept them."""

    by_seed: Mapping[int, float]
    documents: Mapping[int, "NDArray[np.float64]"] = field(default_factory=dict)
    """By seed: nats summed over each document, the same documents in the same order for all."""
    tokens: "NDArray[np.float64] | None" = None
    """Tokens in each document."""


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval. One value has no interval; a value that is not finite leaves no
    mean either."""

    mean: float | None
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class VariancePart:
    """A share of a mean's variance, and the degrees of freedom that it was estimated with."""

    variance: float
    df: float


@dataclass(frozen=True)
class Estimate:
    """A mean difference and the sources of its error."""

    mean: float
    seeds: VariancePart
    """The part of the mean's variance that varies from run to run."""
    documents: VariancePart | None = None
    """The part that varies from document to document; None where documents were not kept."""
    rest: float = 0.0
    """What both parts hold of the variance of a document in a run, and the mean only once."""
    components: Mapping[str, float] | None = None
    """Variances of a seed, of a document, and of a document in a run; one estimated below 0 is given as 0."""

    @property
    def _parts(self) -> list[VariancePart]:
        """Those of which the error consists, each without what the other holds already."""
        parts = [self.seeds]
        if self.documents:
            parts.append(VariancePart(self.documents.variance - self.rest, self.documents.df))
        return [part for part in parts if part.variance > 0]

    @property
    def error(self) -> float:
        return math.sqrt(sum(part.variance for part in self._parts))

    def tail(self, distance: float) -> float:
        """The chance of an error of this size or more, to either side.

        While documents are not shown to differ by more than the rest explains, their variance may be 0. Then
        it must not vouch for the runs' variance: the chance is at least what the runs alone give.
        """
        parts = self._parts
        if not parts:
            return float(distance == 0)
        if len(parts) == 1:
            return t_tail(distance, parts[0])
        from scipy.special import ndtr

        deviations, weights = two_part_errors(*parts)
        both = 2 * float(weights @ ndtr(-distance / deviations))
        return both if self._documents_differ else max(both, t_tail(distance, self.seeds))

    @property
    def _documents_differ(self) -> bool:
        """Whether the mean square of documents is above that of the rest, by the F-test of 5%."""
        from scipy.special import fdtrc

        if self.documents is None or not self.rest:
            return True
        df = self.documents.df
        return float(fdtrc(df, self.seeds.df * df, self.documents.variance / self.rest)) <= ALPHA

    @property
    def p(self) -> float:
        """Two-sided, of "the mean is 0": 1 if it is, 0 if there is no error at all."""
        return min(1.0, self.tail(abs(self.mean)))

    def half(self, level: float) -> float:
        """Half the width of the interval of 1 - level."""
        return half_width(self.seeds, self.documents, self.rest, level)

    def power(self, difference: float, level: float) -> float:
        """The chance that a test at `level` shows this difference if the variances are as estimated."""
        return shown_share(difference, self.error, *self._half_widths(level))

    def detectable(self, level: float) -> float:
        """The smallest difference that a test at `level` with this error shows with a power of 0.8."""
        if self.error == 0:
            return 0.0
        if self.documents is None:
            return detectable_shift(self.seeds.df, level) * self.error
        from scipy.optimize import brentq

        widths, weights = self._half_widths(level)
        far = float(widths.max()) + 3 * self.error
        return float(
            brentq(
                lambda shift: shown_share(shift, self.error, widths, weights) - POWER,
                0.0,
                far,
                xtol=1e-9 * far,
            )
        )

    def _half_widths(self, level: float) -> "tuple[NDArray[np.float64], NDArray[np.float64]]":
        """The half widths that studies with these variances find, and how likely each is."""
        import numpy as np
        from scipy.interpolate import make_interp_spline
        from scipy.special import gammaincinv, ndtr

        documents = self.documents or VariancePart(0.0, 1.0)
        truth = self.seeds, VariancePart(max(documents.variance, self.rest), documents.df)
        few, many = np.linspace(-4, 4, 9), np.linspace(-4, 4, 65)
        drawn, wanted = (
            [part.variance * 2 / part.df * gammaincinv(part.df / 2, ndtr(z)) for part in truth]
            for z in (few, many)
        )
        ones, others = (
            [VariancePart(float(variance), part.df) for variance in of]
            for part, of in zip(truth, drawn, strict=True)
        )
        widths = np.array([[half_width(one, other, self.rest, level) for other in others] for one in ones])
        # A width goes with a power of either variance, so straight lines between logarithms serve.
        for axis in (axis for axis in range(2) if truth[axis].variance):
            logs = np.log(np.maximum(widths, np.finfo(float).tiny))
            line = make_interp_spline(np.log(drawn[axis]), logs, k=1, axis=axis)
            widths = np.exp(line(np.log(wanted[axis])))
        weights = [np.exp(-np.square(np.linspace(-4, 4, count)) / 2) for count in widths.shape]
        both = np.outer(*weights).ravel()
        return widths.ravel(), both / both.sum()


@lru_cache(maxsize=1024)
def half_width(seeds: VariancePart, documents: VariancePart | None, rest: float, level: float) -> float:
    """Half the width of an estimate's interval."""
    estimate = Estimate(0.0, seeds, documents, rest)
    parts = estimate._parts
    quantiles = [t_quantile(1 - level / 2, part.df) * math.sqrt(part.variance) for part in parts]
    if len(parts) < 2:
        return sum(quantiles)
    from scipy.optimize import brentq

    most = 3 * sum(quantiles)
    return float(brentq(lambda half: estimate.tail(half) - level, 0.0, most, xtol=1e-9 * most))


@lru_cache(maxsize=8)
def two_part_errors(
    one: VariancePart, other: VariancePart
) -> "tuple[NDArray[np.float64], NDArray[np.float64]]":
    """What the standard deviation of an error of two parts may be, and how likely each value is.

    Each variance is known with few degrees of freedom, so a few seeds are never credited with the many
    documents' certainty. Behrens and Fisher's distribution for that is too wide: 97.5% where 95% is asked,
    with three to five seeds. The prior of Ghosh and Kim (2001), (u + v) / (u v)^2 for the two variances, is
    the one whose intervals hold as often as they say.
    """
    import numpy as np
    from scipy.special import gammaincinv, ndtr

    z = np.linspace(-6.5, 6.5, 91)
    normal = np.exp(-z * z / 2)
    u, v = (part.variance * part.df / 2 / gammaincinv(part.df / 2, ndtr(z)) for part in (one, other))
    square = u[:, None] + v
    weights = (normal / u)[:, None] * (normal / v) * square
    return np.sqrt(square).ravel(), (weights / weights.sum()).ravel()


@dataclass(frozen=True)
class Difference:
    """A variant's losses minus the baseline's, over the seeds that both have."""

    seeds: int
    documents: int | None
    """None if the runs did not keep the losses of documents: then only seeds are judged over."""
    mean: float | None
    low: float | None
    high: float | None
    """Ends of the interval of the mean difference, corrected for the family and the looks."""
    relative: float | None
    relative_low: float | None
    relative_high: float | None
    """The three as shares of the baseline's mean over the same seeds, taken as exact."""
    p: float | None
    p_corrected: float | None
    """The p-value alone, and times 5% over `level`: at most 0.05 where a difference is shown."""
    level: float | None
    """The level at which p is read: 5% over the number of variants in the family, and less at an early
    look."""
    family: str
    of_family: int
    """How many variants of the family are tested."""
    verdict: Verdict
    detectable: float | None
    """The smallest difference that these seeds and documents would show with a power of 0.8."""
    error: float | None
    """Standard error of the mean."""
    variances: Mapping[str, float] | None
    """Variances of a seed, of a document, and of a document in a run; None without documents."""
    pairing: float | None
    """The share of the variance over seeds removed by comparing equal seeds; below 0 it added some."""
    diverged: int
    baseline_diverged: int
    """Shared seeds on which the loss of the variant, or of the baseline, is not finite."""
    look: int | None = None
    looks: int | None = None
    """The planned look that this comes from, counted from 1, and how many were planned."""

    @property
    def decided(self) -> bool:
        """Whether more seeds would change nothing."""
        return self.verdict in ("better", "worse", "same by construction")


def interval(values: Sequence[float], confidence: float = 1 - ALPHA) -> Interval:
    n = len(values)
    if not n or not all(map(math.isfinite, values)):
        return Interval(None, None, None, n)
    if n < 2:
        return Interval(fmean(values), None, None, n)
    found = over_seeds(values)
    half = found.half(1 - confidence)
    return Interval(found.mean, found.mean - half, found.mean + half, n)


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of at least two independent values."""
    n, variance = len(values), _deviation(values) ** 2
    return Estimate(fmean(values), VariancePart(variance / n, n - 1))


def over_seeds_and_documents(sums: "NDArray[np.float64]", tokens: "NDArray[np.float64]") -> Estimate:
    """The mean difference per token from the differences (S,N) of documents' sums and their tokens (N)."""
    import numpy as np

    counted = tokens > 0  # a document may have nothing to predict
    seeds, sums, tokens = len(sums), sums[:, counted], tokens[counted]
    mean = float(sums.sum() / (seeds * tokens.sum()))
    share = tokens / tokens.sum()
    residual = sums / tokens - mean
    of_seeds, of_documents = residual @ share, residual.mean(0)
    rest = residual - of_seeds[:, None] - of_documents
    many, df = documents_worth(tokens)
    from_runs = float(np.square(of_seeds).sum()) / (seeds - 1) / seeds
    from_documents = float(np.square(of_documents) @ share) / (many - 1)
    from_rest = float((np.square(rest) @ share).sum()) / (seeds - 1) / seeds / (many - 1)
    components = {
        "seeds": max(0.0, from_runs - from_rest) * seeds,
        "documents": max(0.0, from_documents - from_rest) * many,
        "residual": from_rest * seeds * many,
    }
    return Estimate(
        mean, VariancePart(from_runs, seeds - 1), VariancePart(from_documents, df), from_rest, components
    )


def documents_worth(tokens: "NDArray[np.float64]") -> tuple[float, float]:
    """How many documents of one length these lengths (N) are worth (Kish), and the degrees of freedom of the
    variance over them: their number and one less if all are equally long, far fewer if a few are long.

    The variance is a quadratic form b'Gb in the documents' deviations, where G = diag(share) - share share'.
    Bell and McCaffrey (2002) take as its degrees of freedom trace(G)^2 / trace(G^2), exact to two moments.
    """
    import numpy as np

    share = tokens / tokens.sum()
    square, cube = float(np.square(share).sum()), float((share**3).sum())
    return 1 / square, (1 - square) ** 2 / (square - 2 * cube + square**2)


def compare_losses(
    baseline: Losses,
    variants: Mapping[str, Losses],
    *,
    families: Mapping[str, str] | None = None,
    looks: Sequence[int] = (),
    reached: int | None = None,
    alpha: float = ALPHA,
    lower_is_better: bool = True,
) -> dict[str, Difference]:
    """Each variant against the baseline, by name.

    `families` names the family of each, "named" if it says nothing. With planned `looks`, the numbers of
    seeds judged at, of which the first `reached` are in, the first look that shows a difference decides.
    """
    family_of = {name: (families or {}).get(name, NAMED) for name in variants}
    pairs = {name: Pairs(baseline, losses) for name, losses in variants.items()}
    sizes: dict[str, int] = {}
    for name, pair in pairs.items():
        sizes[family_of[name]] = sizes.get(family_of[name], 0) + (not pair.same)
    planned = tuple(looks) if len(looks) > 1 else ()
    found = {}
    for name, pair in pairs.items():
        family = (family_of[name], max(1, sizes[family_of[name]]))
        level = alpha / family[1]
        if not planned:
            found[name] = pair.judge(level, alpha, family, lower_is_better)
            continue
        levels = nominal_levels(planned, level)
        for number in range(max(1, len(planned) if reached is None else reached)):
            at = pair.first(planned[number])
            if reached == 0:
                at = at.first(1)  # before the first planned look nothing is tested
            found[name] = at.judge(
                levels[number], alpha, family, lower_is_better, look=(number + 1, len(planned))
            )
            if found[name].decided:
                break
    return found


class Pairs:
    """A variant's losses beside the baseline's on the seeds that both have."""

    def __init__(self, theirs: Losses, ours: Losses, seeds: Sequence[int] | None = None) -> None:
        shared = sorted(theirs.by_seed.keys() & ours.by_seed.keys())
        self.seeds = shared if seeds is None else [seed for seed in shared if seed in set(seeds)]
        self.theirs, self.ours = theirs, ours
        self.losses = [(ours.by_seed[seed], theirs.by_seed[seed]) for seed in self.seeds]

    def first(self, seeds: int) -> "Pairs":
        return Pairs(self.theirs, self.ours, range(seeds))

    @property
    def same(self) -> bool:
        """Whether every loss is the same number on both sides."""
        return bool(self.losses) and all(a == b and math.isfinite(a) for a, b in self.losses)

    @property
    def tokens(self) -> "NDArray[np.float64] | None":
        """The documents' tokens, if both sides kept the same ones on every seed."""
        mine, others = self.ours.tokens, self.theirs.tokens
        kept = all(seed in side.documents for seed in self.seeds for side in (self.ours, self.theirs))
        if mine is None or others is None or not kept or (mine > 0).sum() < 2 or len(mine) != len(others):
            return None
        return mine if bool((mine == others).all()) else None

    def estimate(self) -> Estimate:
        tokens = self.tokens
        if tokens is None:
            return over_seeds([ours - theirs for ours, theirs in self.losses])
        import numpy as np

        sums = np.stack([self.ours.documents[s] - self.theirs.documents[s] for s in self.seeds])
        return over_seeds_and_documents(sums, tokens)

    def judge(
        self,
        level: float,
        alpha: float,
        family: tuple[str, int],
        lower_is_better: bool,
        look: tuple[int | None, int | None] = (None, None),
    ) -> Difference:
        finite = all(math.isfinite(value) for pair in self.losses for value in pair)
        values: dict[str, Any] = dict.fromkeys(
            ("mean", "low", "high", "p", "p_corrected", "detectable", "error", "variances", "pairing")
        )
        tested = len(self.losses) >= 2 and not self.same
        verdict: Verdict = (
            "same by construction" if self.same else "no difference shown" if tested else "not tested"
        )
        direction = 0.0
        if finite and self.losses:
            values["mean"] = fmean(ours - theirs for ours, theirs in self.losses)
        if tested and finite:
            found = self.estimate()
            half = found.half(level)
            values |= {"mean": found.mean, "low": found.mean - half, "high": found.mean + half}
            values |= {"p": found.p, "error": found.error, "detectable": found.detectable(level)}
            values["variances"] = found.components
            values["pairing"] = self._pairing()
            direction = found.mean
        elif tested:
            steps = over_seeds(self._steps(lower_is_better))
            values["p"], direction = steps.p, steps.mean
        if tested:
            values["p_corrected"] = min(1.0, values["p"] * alpha / level)
            if values["p"] <= level:
                verdict = "better" if (direction < 0) == lower_is_better else "worse"
        scale = 0.0 if values["mean"] is None else abs(fmean(theirs for _, theirs in self.losses))
        return Difference(
            seeds=len(self.losses),
            documents=None if self.tokens is None else len(self.tokens),
            relative=_relative(values["mean"], scale),
            relative_low=_relative(values["low"], scale),
            relative_high=_relative(values["high"], scale),
            level=level if tested else None,
            family=family[0],
            of_family=family[1],
            verdict=verdict,
            diverged=sum(not math.isfinite(ours) for ours, _ in self.losses),
            baseline_diverged=sum(not math.isfinite(theirs) for _, theirs in self.losses),
            look=look[0],
            looks=look[1],
            **values,
        )

    def _pairing(self) -> float | None:
        ours, theirs = zip(*self.losses, strict=True)
        apart = _deviation(ours) ** 2 + _deviation(theirs) ** 2
        together = _deviation([a - b for a, b in self.losses]) ** 2
        return 1 - together / apart if apart else None

    def _steps(self, lower_is_better: bool) -> list[float]:
        """The differences to test where a run diverged: beside an infinite one, finite ones vanish."""
        diverged = [(not math.isfinite(ours)) - (not math.isfinite(theirs)) for ours, theirs in self.losses]
        if any(diverged):
            return [float(step if lower_is_better else -step) for step in diverged]
        return [ours - theirs if math.isfinite(ours) else 0.0 for ours, theirs in self.losses]


def power(shift: float, df: float, level: float) -> float:
    """The chance that a two-sided t-test at `level` shows a mean `shift` standard errors from 0."""
    from scipy.special import nctdtr

    def below(t: float) -> float:
        chance = float(nctdtr(df, abs(shift), t))
        return 0.0 if math.isnan(chance) else chance  # scipy has no value for some that are next to 0

    critical = t_quantile(1 - level / 2, df)
    return 1 - below(critical) + below(-critical)


def detectable_shift(df: float, level: float) -> float:
    """How many standard errors from 0 a mean must be to be shown with a power of 0.8."""
    from scipy.optimize import brentq

    critical = t_quantile(1 - level / 2, df)
    return float(brentq(lambda shift: power(shift, df, level) - POWER, 0.0, 3 * critical + 3, xtol=1e-9))


def shown_share(
    shift: float, error: float, widths: "NDArray[np.float64]", weights: "NDArray[np.float64]"
) -> float:
    """How often a mean around `shift` is farther from 0 than the half width beside it."""
    from scipy.special import ndtr

    return float(weights @ (ndtr((shift - widths) / error) + ndtr((-shift - widths) / error)))


def t_tail(distance: float, part: VariancePart) -> float:
    """The chance of an error of this size or more, to either side, if its variance is this part alone."""
    from scipy.special import stdtr

    return 2 * float(stdtr(part.df, -distance / math.sqrt(part.variance)))


def t_quantile(probability: float, df: float) -> float:
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
    """The loss at x, on straight lines between the points; None outside them and beside a diverged one."""
    for (left, loss), (right, next_loss) in zip(curve, [*curve[1:], *curve[-1:]], strict=True):
        if left == x:
            return loss if math.isfinite(loss) else None
        if left < x < right:
            value = loss + (next_loss - loss) * (x - left) / (right - left)
            return value if math.isfinite(value) else None
    return None


def _relative(part: float | None, whole: float) -> float | None:
    return part / whole if part is not None and whole else None


def _deviation(values: Sequence[float]) -> float:
    """The sample's standard deviation: exactly 0 where all values are equal, and without overflow
    elsewhere."""
    if min(values) == max(values):
        return 0.0
    mean = fmean(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)
