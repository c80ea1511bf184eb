"""The statistics, against scipy, against tables worked by hand, and by simulating studies."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from headgate.compare.looks import nominal_levels
from headgate.compare.statistics import (
    Difference,
    Estimate,
    Interval,
    Losses,
    VariancePart,
    compare_losses,
    detectable_shift,
    documents_worth,
    interval,
    over_seeds,
    over_seeds_and_documents,
    power,
    reaches,
    value_at,
)
from headgate.errors import HeadgateError
from headgate.options import parse_seeds

NAN, INF = math.nan, math.inf


def paired(
    baseline: dict[int, float], variants: dict[str, dict[int, float]], **how: Any
) -> dict[str, Difference]:
    """Over the seeds alone."""
    return compare_losses(Losses(baseline), {name: Losses(of) for name, of in variants.items()}, **how)


def test_power_is_that_of_the_noncentral_t() -> None:
    compared = 0
    for df in (1, 2, 4, 7, 19, 99, 999):
        for shift in (0.01, 0.1, 1.0, 2.0, 5.0, 20.0):
            for level in (0.05, 0.0125, 0.001):
                critical = stats.t.ppf(1 - level / 2, df)
                truth = stats.nct.sf(critical, df, shift) + stats.nct.cdf(-critical, df, shift)
                if math.isfinite(truth):  # scipy has no value for some large shifts
                    compared += 1
                    assert power(shift, df, level) == pytest.approx(truth, abs=1e-9)
    assert compared > 100
    assert power(0.0, 3, 0.05) == pytest.approx(0.05, abs=1e-12)
    assert power(1e9, 1, 0.05) == 1
    assert power(detectable_shift(4, 0.0125), 4, 0.0125) == pytest.approx(0.8)


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


def test_families_are_corrected_apart() -> None:
    baseline = {0: 5.00, 1: 5.10, 2: 4.90, 3: 5.05, 4: 4.97}
    better = {0: 4.90, 1: 4.99, 2: 4.81, 3: 4.94, 4: 4.88}
    noisy = {0: 5.10, 1: 4.95, 2: 5.00, 3: 4.90, 4: 5.02}
    found = paired(
        baseline, {"better": better, "noisy": noisy, "part": noisy}, families={"part": "ablations"}
    )
    for name, losses in (("better", better), ("noisy", noisy), ("part", noisy)):
        ours, theirs = list(losses.values()), list(baseline.values())
        test, row = stats.ttest_rel(ours, theirs), found[name]
        size = 1 if name == "part" else 2
        ends = test.confidence_interval(1 - 0.05 / size)
        mean, scale = sum(ours) / 5 - sum(theirs) / 5, sum(theirs) / 5
        assert row.p == pytest.approx(test.pvalue, rel=1e-9)
        assert row.p_corrected == pytest.approx(min(1, size * test.pvalue))
        assert (row.mean, row.low, row.high) == pytest.approx((mean, ends.low, ends.high))
        assert (row.relative, row.relative_low, row.relative_high) == pytest.approx(
            (mean / scale, ends.low / scale, ends.high / scale)
        )
        assert (row.seeds, row.of_family, row.documents) == (5, size, None)
        assert row.detectable == pytest.approx(row.error * detectable_shift(4, 0.05 / size))
    assert found["better"].verdict == "better"
    assert found["noisy"].verdict == "no difference shown"
    assert found["better"].pairing is not None
    assert found["better"].pairing > 0.9 > 0 > (found["noisy"].pairing or 0)
    assert paired(better, {"v": baseline})["v"].verdict == "worse"
    assert paired(baseline, {"v": better}, lower_is_better=False)["v"].verdict == "worse"


def test_no_interval_contradicts_its_verdict() -> None:
    baseline = {0: 5.0, 1: 5.0, 2: 5.0}
    close = {0: 4.89, 1: 4.90, 2: 4.94}
    others = {str(k): {0: 5.01, 1: 4.99, 2: 5.02} for k in range(9)}
    alone, among = paired(baseline, {"v": close})["v"], paired(baseline, {"v": close, **others})["v"]
    assert (alone.verdict, among.verdict) == ("better", "no difference shown")
    assert alone.high is not None
    assert among.high is not None
    assert alone.high < 0 < among.high
    assert among.p_corrected == pytest.approx(10 * (among.p or 0))
    assert among.detectable is not None
    assert alone.detectable is not None
    assert among.detectable > alone.detectable


def test_losses_that_are_equal_bit_for_bit_are_the_same_by_construction() -> None:
    baseline = {0: 5.0, 1: 6.0, 2: 7.0}
    found = paired(baseline, {"same": baseline, "shifted": {0: 4.5, 1: 5.5, 2: 6.5}})
    same, shifted = found["same"], found["shifted"]
    assert (same.verdict, same.p, same.mean, same.low) == ("same by construction", None, 0, None)
    assert (shifted.p, shifted.low, shifted.high) == (0, -0.5, -0.5)
    assert (shifted.verdict, shifted.detectable, shifted.of_family) == ("better", 0, 1)
    almost = paired(baseline, {"v": baseline | {2: math.nextafter(7.0, 8.0)}})["v"]
    assert almost.verdict == "no difference shown"


def test_seeds_that_one_side_lacks_are_left_out() -> None:
    baseline = {0: 5.0, 1: 5.1, 3: 5.2}
    found = paired(baseline, {"v": {0: 4.9, 1: 5.05, 2: 1.0}, "one": {1: 4.0}, "none": {7: 4.0}})
    assert found["v"].seeds == 2
    assert found["v"].mean == pytest.approx(-0.075)
    assert found["v"].relative == pytest.approx(-0.075 / 5.05)
    assert (found["one"].seeds, found["one"].mean, found["one"].low) == (1, pytest.approx(-1.1), None)
    assert (found["one"].verdict, found["one"].p) == ("not tested", None)
    assert (found["none"].seeds, found["none"].mean, found["none"].verdict) == (0, None, "not tested")


@pytest.mark.parametrize("lost", [NAN, INF])
def test_a_diverged_run_is_a_loss_beyond_every_other(lost: float) -> None:
    baseline = {0: 5.0, 1: 5.1, 2: 5.2}
    cases = {
        "once": {0: 4.0, 1: 4.1, 2: lost},
        "twice": {0: 4.0, 1: lost, 2: lost},
        "always": {0: lost, 1: lost, 2: lost},
    }
    for name, losses in cases.items():
        found = paired(baseline, {"v": losses})["v"]
        huge = [1e12 if loss is lost else loss for loss in losses.values()]
        if name == "always":
            assert (found.p, found.verdict) == (0, "worse")
        else:
            assert found.p == pytest.approx(stats.ttest_rel(huge, list(baseline.values())).pvalue, rel=1e-6)
            assert found.verdict == "no difference shown"
        assert found.diverged == huge.count(1e12)
        assert (found.mean, found.low, found.relative, found.detectable) == (None,) * 4
    other_way = paired(cases["always"], {"v": baseline})["v"]
    assert (other_way.verdict, other_way.diverged, other_way.baseline_diverged) == ("better", 0, 3)
    higher = paired(baseline, {"v": cases["always"]}, lower_is_better=False)["v"]
    assert higher.verdict == "worse"


def test_a_seed_on_which_both_diverged_says_nothing() -> None:
    finite = {0: 5.0, 1: 5.1, 2: 5.2, 3: 5.05}
    ours = {0: 4.9, 1: 5.01, 2: 5.09, 3: 4.96}
    found = paired({**finite, 4: INF}, {"v": {**ours, 4: NAN}})["v"]
    assert found.p == pytest.approx(over_seeds([*(ours[s] - finite[s] for s in finite), 0.0]).p)
    assert found.p < 0.05
    assert (found.mean, found.diverged, found.baseline_diverged) == (None, 1, 1)


def test_over_seeds_and_documents_as_worked_by_the_analysis_of_variance() -> None:
    """Documents of equal length: a table of two factors, whose mean squares are those of the textbook."""
    draw = np.random.default_rng(0)
    sums = 10 * (0.02 + draw.normal(0, 0.01, (4, 1)) + draw.normal(0, 0.03, 6) + draw.normal(0, 0.02, (4, 6)))
    found = over_seeds_and_documents(sums, np.full(6, 10.0))
    table = sums / 10
    rest = table - table.mean(1)[:, None] - table.mean(0) + table.mean()
    a = 6 * table.mean(1).var(ddof=1)
    b = 4 * table.mean(0).var(ddof=1)
    e = np.square(rest).sum() / 15
    assert found.mean == pytest.approx(table.mean())
    assert found.seeds == VariancePart(pytest.approx(a / 24), 3)  # type: ignore[arg-type]
    assert found.documents == VariancePart(pytest.approx(b / 24), pytest.approx(5))  # type: ignore[arg-type]
    assert found.rest == pytest.approx(e / 24)
    assert found.error**2 == pytest.approx((a + b - e) / 24)
    assert found.components == pytest.approx({"seeds": (a - e) / 6, "documents": (b - e) / 4, "residual": e})


def test_a_document_counts_by_its_tokens() -> None:
    tokens = np.array([10.0, 1000.0])
    ours = {seed: np.array([50.0, 4000.0 + seed]) for seed in range(3)}
    theirs = {seed: np.array([60.0, 4100.0]) for seed in range(3)}

    def losses(sums: dict[int, np.ndarray]) -> Losses:
        return Losses({seed: float(of.sum() / 1010) for seed, of in sums.items()}, sums, tokens)

    found = compare_losses(losses(theirs), {"v": losses(ours)})["v"]
    assert found.documents == 2
    assert found.mean == pytest.approx((-10 - 100 + 1) / 1010)
    without = compare_losses(Losses(losses(theirs).by_seed), {"v": losses(ours)})["v"]
    assert (without.documents, without.mean) == (None, pytest.approx(found.mean))
    assert without.error is not None
    assert found.error is not None
    assert without.error < found.error  # two documents are few, and that was not known


def test_a_document_with_nothing_to_predict_counts_for_nothing() -> None:
    rng = np.random.default_rng(0)
    sums, tokens = rng.normal(size=(4, 5)), np.array([3.0, 8.0, 2.0, 9.0, 4.0])
    with_empty = over_seeds_and_documents(np.insert(sums, 2, 0.0, 1), np.insert(tokens, 2, 0.0))
    assert with_empty == over_seeds_and_documents(sums, tokens)


def test_an_error_of_two_parts_has_the_distribution_of_ghosh_and_kim() -> None:
    """Their posterior, sampled: true variances given the estimated ones, weighted by the matching prior."""
    estimate = Estimate(0.02, VariancePart(0.3e-4, 2), VariancePart(0.7e-4, 10))
    draw, count = np.random.default_rng(0), 1_000_000
    one, other = 0.3e-4 * 2 / draw.chisquare(2, count), 0.7e-4 * 10 / draw.chisquare(10, count)
    errors, weights = draw.normal(0, np.sqrt(one + other)), 1 / one + 1 / other
    assert estimate.p == pytest.approx(np.average(abs(errors) >= 0.02, weights=weights), rel=0.02)
    beyond = np.average(abs(errors) >= estimate.half(0.05), weights=weights)
    assert beyond == pytest.approx(0.05, rel=0.02)
    assert estimate.tail(estimate.half(1e-4)) == pytest.approx(1e-4, rel=1e-6)
    one_part = Estimate(0.02, VariancePart(1e-4, 5), VariancePart(1e-12, 50))
    assert one_part.half(0.05) == pytest.approx(stats.t.ppf(0.975, 5) * 0.01, rel=1e-3)


def test_long_documents_count_for_fewer() -> None:
    """Kish's number, and the variance that its estimate has, by drawing documents of these lengths."""
    tokens = np.array([1000.0, 500.0, 300.0, *[100.0] * 7])
    many, df = documents_worth(tokens)
    assert many == pytest.approx(2500**2 / (1000**2 + 500**2 + 300**2 + 7 * 100**2))
    assert documents_worth(np.full(12, 7.0)) == (pytest.approx(12), pytest.approx(11))
    share, draw = tokens / tokens.sum(), np.random.default_rng(0)
    deviations = draw.normal(0, 1, (200_000, 10))
    residual = deviations - (deviations @ share)[:, None]
    squares = np.square(residual) @ share / (many - 1)
    assert squares.mean() == pytest.approx(1 / many, rel=0.02)  # unbiased for the mean's variance
    assert 2 * squares.mean() ** 2 / squares.var() == pytest.approx(df, rel=0.03)


def test_documents_that_may_not_differ_do_not_vouch_for_the_runs() -> None:
    seeds, rest = VariancePart(1e-6, 2), 1e-6
    chance = Estimate(0.01, seeds, VariancePart(1.2e-6, 20), rest)
    alone = Estimate(0.01, seeds)
    assert chance.p >= alone.p
    shown = Estimate(0.01, seeds, VariancePart(3e-6, 20), rest)
    assert stats.f.sf(3, 20, 40) < 0.05 < stats.f.sf(1.2, 20, 40)
    assert shown.p < alone.p
    assert shown.error > chance.error > alone.error
    below = Estimate(0.01, seeds, VariancePart(0.5e-6, 20), rest)
    assert (below.p, below.error) == (alone.p, alone.error)


def test_what_is_detectable_is_shown_in_four_of_five_studies() -> None:
    seeds, documents, rest = VariancePart(2e-4, 2), VariancePart(3e-4, 12), 0.5e-4
    truth, draw = Estimate(0.0, seeds, documents, rest), np.random.default_rng(0)
    difference = truth.detectable(0.0125)
    assert truth.power(difference, 0.0125) == pytest.approx(0.8)
    found = [
        Estimate(
            draw.normal(difference, truth.error),
            VariancePart(2e-4 * draw.chisquare(2) / 2, 2),
            VariancePart(3e-4 * draw.chisquare(12) / 12, 12),
            rest,
        )
        for _ in range(4000)
    ]
    assert np.mean([one.p <= 0.0125 for one in found]) == pytest.approx(0.8, abs=0.02)
    same_runs = Estimate(0.0, VariancePart(0.0, 2), documents)
    of_documents = detectable_shift(12, 0.05) * same_runs.error
    assert same_runs.detectable(0.05) == pytest.approx(of_documents, rel=0.02)


def test_the_looks_of_obrien_and_fleming() -> None:
    """Bounds as published for five equal looks at 5% (DeMets and Lan 1994)."""
    bounds = stats.norm.isf(np.array(nominal_levels((1, 2, 3, 4, 5), 0.05)) / 2)
    assert bounds == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=2e-4)
    assert nominal_levels((7,), 0.05) == (0.05,)
    assert sum(nominal_levels((4, 8, 12), 0.01)) > 0.01 > nominal_levels((4, 8, 12), 0.01)[-1]


def test_a_study_with_looks_stops_for_what_it_has_shown() -> None:
    draw = np.random.default_rng(0)
    baseline = dict.fromkeys(range(12), 5.0)
    clear = {seed: 4.0 + draw.normal(0, 0.01) for seed in range(4)}
    small = {seed: 4.99 + draw.normal(0, 0.01) for seed in range(12)}
    variants = {"clear": clear, "small": small}
    early = paired(baseline, variants, looks=(4, 8, 12), reached=1)
    assert (early["clear"].verdict, early["clear"].look, early["clear"].seeds) == ("better", 1, 4)
    assert (early["small"].verdict, early["small"].seeds) == ("no difference shown", 4)
    late = paired(baseline, variants, looks=(4, 8, 12), reached=3)
    assert late["clear"] == early["clear"]
    assert (late["small"].verdict, late["small"].seeds, late["small"].looks) == ("better", 12, 3)
    assert paired(baseline, variants, looks=(4, 8, 12), reached=0)["clear"].verdict == "not tested"


def test_numbers_of_seeds_are_written_in_three_ways() -> None:
    assert parse_seeds("5") == (5,)
    assert parse_seeds("4..12") == (4, 8, 12)
    assert parse_seeds("4..10") == (4, 8, 10)
    assert parse_seeds("3,5,9") == (3, 5, 9)
    for text in ("", "0", "x", "12..4", "4..", "5,3", "1..4", "4..2000", "1,2"):
        with pytest.raises(HeadgateError, match="seeds="):
            parse_seeds(text)


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
