"""The statistics, against scipy, against tables worked by hand, and by simulating studies."""

import math
import random

import pytest
from scipy import stats

from headgate.compare.statistics import (
    Difference,
    Interval,
    holm,
    interval,
    paired_differences,
    paired_p,
    power,
    reaches,
    seeds_needed,
    value_at,
)

NAN, INF = math.nan, math.inf


def test_power_is_that_of_the_noncentral_t() -> None:
    compared = 0
    for n in (2, 3, 5, 8, 20, 100, 1000):
        for effect in (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0):
            for level in (0.05, 0.0125, 0.001):
                critical, shift = stats.t.ppf(1 - level / 2, n - 1), effect * math.sqrt(n)
                truth = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
                if math.isfinite(truth):  # scipy has no value for some large shifts
                    compared += 1
                    assert power(effect, n, level) == pytest.approx(truth, abs=1e-9)
    assert compared > 100
    assert power(0.0, 4, 0.05) == pytest.approx(0.05, abs=1e-12)
    assert power(1e9, 2, 0.05) == 1


def test_interval() -> None:
    values = [4.9, 5.1, 5.3, 4.8]
    low, high = stats.t.interval(0.95, 3, loc=5.025, scale=stats.sem(values))
    found = interval(values)
    assert (found.mean, found.n) == (pytest.approx(5.025), 4)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert interval([2.0]) == Interval(2.0, None, None, 1)
    assert interval([2.0, 2.0]) == Interval(2.0, 2.0, 2.0, 2)
    assert interval([]) == Interval(None, None, None, 0)
    assert interval([2.0, NAN]) == Interval(None, None, None, 2)


def test_holm_as_worked_by_hand() -> None:
    # Sorted: 0.005 x 4 = 0.02, 0.01 x 3 = 0.03, 0.03 x 2 = 0.06, then 0.04 x 1 rises to 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9, 0.02]) == pytest.approx([1.0, 1.0, 0.06])
    assert holm([0.02, 0.02]) == pytest.approx([0.04, 0.04])
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def test_differences_are_paired_by_seed_and_corrected_over_the_variants() -> None:
    baseline = {0: 5.00, 1: 5.10, 2: 4.90, 3: 5.05, 4: 4.97}
    better = {0: 4.90, 1: 4.99, 2: 4.81, 3: 4.94, 4: 4.88}
    noisy = {0: 5.10, 1: 4.95, 2: 5.00, 3: 4.90, 4: 5.02}
    found = paired_differences(baseline, {"better": better, "noisy": noisy})
    for name, losses in (("better", better), ("noisy", noisy)):
        ours, theirs = list(losses.values()), list(baseline.values())
        test = stats.ttest_rel(ours, theirs)
        ends = test.confidence_interval(0.95)
        row, mean = found[name], sum(ours) / 5 - sum(theirs) / 5
        assert row.p == pytest.approx(test.pvalue, rel=1e-9)
        assert (row.mean, row.low, row.high) == pytest.approx((mean, ends.low, ends.high))
        scale = sum(theirs) / 5
        assert (row.relative, row.relative_low, row.relative_high) == pytest.approx(
            (mean / scale, ends.low / scale, ends.high / scale)
        )
        assert row.seeds == 5
    assert found["better"].p_holm == pytest.approx(2 * found["better"].p)
    assert found["better"].verdict == "better"
    assert found["noisy"].verdict == "no difference shown"
    assert found["noisy"].seeds_needed > 5
    assert paired_differences(better, {"v": baseline})["v"].verdict == "worse"
    assert paired_differences(baseline, {"v": better}, lower_is_better=False)["v"].verdict == "worse"


def test_a_variant_that_is_better_alone_may_not_be_among_many() -> None:
    baseline = {0: 5.0, 1: 5.0, 2: 5.0}
    close = {0: 4.89, 1: 4.90, 2: 4.94}
    others = {str(k): {0: 5.01, 1: 4.99, 2: 5.02} for k in range(9)}
    assert paired_differences(baseline, {"v": close})["v"].verdict == "better"
    among = paired_differences(baseline, {"v": close, **others})["v"]
    assert among.verdict == "no difference shown"
    assert among.p_holm == pytest.approx(10 * among.p)
    # A first step of Holm's has a tenth of the level to spend, and so needs more seeds.
    deviation = stats.tstd([close[seed] - baseline[seed] for seed in baseline])
    assert among.seeds_needed == seeds_needed(-0.09, deviation, 0.005)
    assert among.seeds_needed > paired_differences(baseline, {"v": close})["v"].seeds_needed


def test_seeds_that_one_side_lacks_are_left_out() -> None:
    baseline = {0: 5.0, 1: 5.1, 3: 5.2}
    found = paired_differences(baseline, {"v": {0: 4.9, 1: 5.05, 2: 1.0}})["v"]
    assert found.seeds == 2
    assert found.mean == pytest.approx(-0.075)
    assert found.relative == pytest.approx(-0.075 / 5.05)


def test_too_few_seeds_are_not_tested_and_do_not_count_among_the_tested() -> None:
    baseline = {0: 5.0, 1: 5.1, 2: 5.2}
    tested = {0: 4.9, 1: 5.03, 2: 5.12}
    found = paired_differences(baseline, {"one": {1: 4.0}, "none": {7: 4.0}, "v": tested})
    assert found["one"] == Difference(
        seeds=1,
        mean=pytest.approx(-1.1),  # type: ignore[arg-type]
        low=None,
        high=None,
        relative=pytest.approx(-1.1 / 5.1),  # type: ignore[arg-type]
        relative_low=None,
        relative_high=None,
        p=None,
        p_holm=None,
        verdict="not tested",
        seeds_needed=None,
        diverged=0,
        baseline_diverged=0,
    )
    assert (found["none"].seeds, found["none"].mean, found["none"].verdict) == (0, None, "not tested")
    assert found["v"].p_holm == found["v"].p


def test_differences_without_spread() -> None:
    baseline = {0: 5.0, 1: 6.0, 2: 7.0}
    found = paired_differences(baseline, {"same": baseline, "shifted": {0: 4.5, 1: 5.5, 2: 6.5}})
    same, shifted = found["same"], found["shifted"]
    assert (same.p, same.mean, same.low, same.high) == (1, 0, 0, 0)
    assert (same.verdict, same.seeds_needed) == ("no difference shown", None)
    assert (shifted.p, shifted.low, shifted.high) == (0, -0.5, -0.5)
    assert (shifted.verdict, shifted.seeds_needed) == ("better", 2)


@pytest.mark.parametrize("lost", [NAN, INF])
def test_a_diverged_run_is_a_loss_beyond_every_other(lost: float) -> None:
    baseline = {0: 5.0, 1: 5.1, 2: 5.2}
    cases = {
        "once": {0: 4.0, 1: 4.1, 2: lost},
        "twice": {0: 4.0, 1: lost, 2: lost},
        "always": {0: lost, 1: lost, 2: lost},
    }
    for name, losses in cases.items():
        found = paired_differences(baseline, {"v": losses})["v"]
        huge = [1e12 if loss is lost else loss for loss in losses.values()]
        if name == "always":
            assert (found.p, found.verdict) == (0, "worse")
        else:
            assert found.p == pytest.approx(stats.ttest_rel(huge, list(baseline.values())).pvalue, rel=1e-6)
            assert found.verdict == "no difference shown"
        assert found.diverged == huge.count(1e12)
        assert (found.mean, found.low, found.relative, found.seeds_needed) == (None,) * 4
    other_way = paired_differences(cases["always"], {"v": baseline})["v"]
    assert (other_way.verdict, other_way.diverged, other_way.baseline_diverged) == ("better", 0, 3)
    higher = paired_differences(baseline, {"v": cases["always"]}, lower_is_better=False)["v"]
    assert higher.verdict == "worse"


def test_a_seed_on_which_both_diverged_says_nothing() -> None:
    finite = {0: 5.0, 1: 5.1, 2: 5.2, 3: 5.05}
    ours = {0: 4.9, 1: 5.01, 2: 5.09, 3: 4.96}
    found = paired_differences({**finite, 4: INF}, {"v": {**ours, 4: NAN}})["v"]
    assert found.p == pytest.approx(paired_p([*(ours[s] - finite[s] for s in finite), 0.0]))
    assert found.p < 0.05
    assert (found.mean, found.diverged, found.baseline_diverged) == (None, 1, 1)


def test_seeds_needed_is_the_first_number_with_the_power() -> None:
    for mean, deviation, level in (
        (1.0, 1.0, 0.05),
        (-0.3, 1.0, 0.0125),
        (1.0, 0.2, 0.01),
        (0.05, 1.0, 0.05),
    ):
        n = seeds_needed(mean, deviation, level)
        assert n is not None
        fewer, enough = (
            stats.nct.sf(stats.t.ppf(1 - level / 2, k - 1), k - 1, abs(mean) / deviation * math.sqrt(k))
            for k in (n - 1, n)
        )
        assert fewer < 0.8 <= enough
    assert seeds_needed(1.0, 1e-6, 0.05) == 2
    assert seeds_needed(0.0, 1.0, 0.05) is None
    # Where the normal distribution stands in, the two agree to a few in ten thousand.
    assert seeds_needed(0.0281, 1.0, 0.05) == pytest.approx(seeds_needed(0.0280, 1.0, 0.05), rel=0.01)
    assert seeds_needed(1e-9, 1.0, 0.05) > 10**18


def plausible(count: int, trials: int, rate: float) -> bool:
    """Whether an exact binomial test, at one in a thousand, lets the count come from the rate."""
    return bool(stats.binomtest(count, trials, rate).pvalue > 0.001)


@pytest.mark.parametrize(("seeds", "variants"), [(2, 4), (3, 4), (5, 4), (5, 8)])
def test_without_a_true_difference_at_most_one_study_in_twenty_claims_one(seeds: int, variants: int) -> None:
    """Seeds share a part of their loss with every variant, and variants share the baseline, as in a study."""
    draw, studies = random.Random(17 * seeds + variants), 1000
    claimed = uncorrected = 0
    for _ in range(studies):
        of_seed = [draw.gauss(5.0, 0.05) for _ in range(seeds)]
        baseline, *others = (
            {seed: of_seed[seed] + draw.gauss(0, 0.01) for seed in range(seeds)} for _ in range(variants + 1)
        )
        found = paired_differences(baseline, {str(k): losses for k, losses in enumerate(others)}).values()
        claimed += any(row.verdict in ("better", "worse") for row in found)
        uncorrected += any(row.p is not None and row.p <= 0.05 for row in found)
    assert stats.binomtest(claimed, studies, 0.05, alternative="greater").pvalue > 0.001
    assert claimed > 0
    # The same test would have caught a study that does not correct for its number of variants.
    assert stats.binomtest(uncorrected, studies, 0.05, alternative="greater").pvalue < 0.001


@pytest.mark.parametrize("n", [2, 3, 5])
def test_intervals_cover_the_truth_as_often_as_they_say(n: int) -> None:
    draw, trials = random.Random(n), 4000
    covered = 0
    for _ in range(trials):
        found = interval([draw.gauss(-0.02, 0.01) for _ in range(n)])
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= -0.02 <= found.high
    assert plausible(covered, trials, 0.95)


@pytest.mark.parametrize(("effect", "level"), [(0.8, 0.05), (1.5, 0.0125)])
def test_seeds_needed_give_their_power(effect: float, level: float) -> None:
    n = seeds_needed(effect, 1.0, level)
    assert n is not None
    draw, trials = random.Random(n), 4000
    shown = sum(paired_p([draw.gauss(effect, 1.0) for _ in range(n)]) <= level for _ in range(trials))
    assert plausible(shown, trials, power(effect, n, level))
    assert power(effect, n - 1, level) < 0.8 <= power(effect, n, level)


CURVE = [(0.0, 10.0), (100.0, 6.0), (200.0, 7.0), (400.0, 5.0)]


def test_reaches() -> None:
    assert reaches(CURVE, 8.0) == 50
    assert reaches(CURVE, 6.0) == 100
    assert reaches(CURVE, 5.5) == pytest.approx(350)
    assert reaches(CURVE, 11.0) == 0
    assert reaches(CURVE, 4.9) is None
    assert reaches([], 5.0) is None
    assert reaches([(0.0, NAN), (100.0, 5.0)], 6.0) == 100
    assert reaches([(0.0, 9.0), (100.0, NAN), (200.0, INF)], 6.0) is None


def test_value_at() -> None:
    assert value_at(CURVE, 0) == 10
    assert value_at(CURVE, 50) == 8
    assert value_at(CURVE, 200) == 7
    assert value_at(CURVE, 300) == 6
    assert value_at(CURVE, 400) == 5
    assert value_at(CURVE, -1) is None
    assert value_at(CURVE, 401) is None
    assert value_at([], 0) is None
    assert value_at([(5.0, 3.0)], 5) == 3
    assert value_at([(0.0, 5.0), (10.0, NAN)], 5) is None
    assert value_at([(0.0, 5.0), (10.0, INF)], 10) is None
