"""One price: the curve that was put in comes out, and with it the compute that a difference is worth."""

import math

import numpy as np
import pytest

from headgate.compare.price import fit_curve, parse_ladder, prices
from headgate.compare.statistics import Losses, compare_losses
from headgate.errors import HeadgateError


def loss(compute: float) -> float:
    return 1.5 + 0.8 * compute**-0.3


def test_a_curve_of_three_budgets_is_found_again() -> None:
    curve = fit_curve([0.25, 1, 4], [loss(c) for c in (0.25, 1, 4)])
    assert curve.compute_at(loss(2.0))[0] == pytest.approx(2.0, rel=0.01)
    assert math.isinf(curve.compute_at(0.5)[0])


def test_a_variant_is_worth_the_compute_that_reaches_its_loss() -> None:
    draw = np.random.default_rng(0)

    def seeds(mean: float) -> list[float]:
        return [mean + draw.normal(0, 0.002) for _ in range(5)]

    ladder = {c: seeds(loss(c)) for c in (0.25, 1.0, 4.0)}
    base = Losses(dict(enumerate(ladder[1.0])))
    variants = {"double": seeds(loss(2.0)), "half": seeds(loss(0.5)), "far": seeds(loss(1000.0))}
    found = compare_losses(base, {name: Losses(dict(enumerate(of))) for name, of in variants.items()})
    speeds = {"double": {"ratio": 0.5, "low": 0.4, "high": 0.6}, "half": None, "far": None}
    worth = prices(ladder, found, speeds)
    for name, value in (("double", 2.0), ("half", 0.5)):
        price = worth[name]
        assert price is not None
        assert price["tokens"]["value"] == pytest.approx(value, rel=0.1)
        assert price["tokens"]["low"] < value < price["tokens"]["high"]
        assert not price["beyond"]
    assert worth["double"] is not None
    assert worth["double"]["time"]["value"] == pytest.approx(worth["double"]["tokens"]["value"] / 2)
    assert worth["half"] is not None
    assert "time" not in worth["half"]
    assert worth["far"] is not None
    assert worth["far"]["beyond"]


def test_at_another_budget_it_is_worth_as_many_times_that_budget() -> None:
    noise = [-0.002, 0.0, 0.002]
    ladder = {c: [loss(c) + end for end in noise] for c in (0.25, 1.0, 4.0)}
    for at in ladder:
        base = Losses(dict(enumerate(ladder[at])))
        half_more = [loss(1.5 * at) + end for end in (0.002, -0.002, 0.0)]
        found = compare_losses(base, {"half more": Losses(dict(enumerate(half_more)))})
        price = prices(ladder, found, {}, at=at)["half more"]
        assert price is not None
        assert price["tokens"]["value"] == pytest.approx(1.5, rel=0.02)
        assert price["tokens"]["low"] < 1.5 < price["tokens"]["high"]


def test_an_interval_that_no_compute_ends_is_infinite(recwarn: pytest.WarningsRecorder) -> None:
    noise = [-0.1, 0.0, 0.1]
    ladder = {c: [loss(c) + end for end in noise] for c in (0.25, 1.0, 4.0)}
    better = [loss(4.0) + end for end in (0.1, -0.1, 0.0)]
    base = Losses(dict(enumerate(ladder[1.0])))
    found = compare_losses(base, {"better": Losses(dict(enumerate(better)))})
    price = prices(ladder, found, {})["better"]
    assert price is not None
    assert price["tokens"]["high"] == math.inf
    assert not recwarn.list


def test_ladders_are_written_as_multiples() -> None:
    assert parse_ladder("4,0.25") == (0.25, 1.0, 4.0)
    assert parse_ladder("") == ()
    for text in ("1,2", "a", "0,1,2", "-1,2,4", "1,2,inf"):
        with pytest.raises(HeadgateError, match="is not a ladder"):
            parse_ladder(text)
