"""One price: how many times the baseline's compute would reach a variant's loss.

The baseline is trained at several multiples of the study's budget, the ladder, each with its own schedule.
Its losses follow L(C) = L_inf + A C^-alpha, fitted by least squares. A variant whose loss differs by d at
budget 1 is worth the C at which L(C) = L(1) + d, at equal tokens; times its relative speed, at equal time.
One that differs by d at another budget M is worth C / M in the same way, which shows the trend.
Above 1 it is worth having. For the interval, the baseline's means and the difference are redrawn, each with
its own error, and fitted again. A price far outside the ladder is marked: the curve is not known there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headgate.compare.statistics import Difference, interval
from headgate.errors import HeadgateError

ALPHAS = np.exp(np.linspace(math.log(0.05), math.log(2.0), 80))
DRAWS = 1000
BEYOND = 2.0
"""A price is given up to this many times outside the ladder."""


@dataclass(frozen=True)
class Curve:
    """Loss against compute in units of the study's budget; each is an array with one value per draw."""

    floor: Any
    scale: Any
    alpha: Any

    def compute_at(self, loss: Any) -> Any:
        """The compute that reaches a loss; infinite for one below the floor."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (self.scale / (loss - self.floor)) ** (1 / self.alpha)
        return np.where(loss > self.floor, found, np.inf)


def parse_ladder(text: str) -> tuple[float, ...]:
    """Multiples of the budget, as in 0.25,1,4; 1 is always included."""
    if not text:
        return ()
    try:
        found = sorted({1.0, *(float(part) for part in text.split(","))})
    except ValueError:
        found = []
    if len(found) < 3 or not all(0 < multiple < math.inf for multiple in found):
        raise HeadgateError(f"ladder={text!r} is not a ladder of at least three budgets; write 0.25,1,4")
    return tuple(found)


def fit_curve(multiples: Sequence[float], losses: Any) -> Curve:
    """Fit by least squares, for each row of losses (draws, multiples)."""
    losses = np.atleast_2d(np.asarray(losses, dtype=float))
    x = np.asarray(multiples, dtype=float)[None, :] ** -ALPHAS[:, None]  # (alphas, multiples)
    centred = x - x.mean(1, keepdims=True)
    y = losses - losses.mean(1, keepdims=True)
    slope = np.maximum(y @ centred.T / np.square(centred).sum(1), 1e-12)  # (draws, alphas)
    floor = np.maximum(losses.mean(1, keepdims=True) - slope * x.mean(1), 0.0)
    slope = np.where(floor > 0, slope, np.maximum((losses @ x.T) / np.square(x).sum(1), 1e-12))
    left = losses[:, None, :] - floor[..., None] - slope[..., None] * x
    best = np.square(left).sum(-1).argmin(1)
    rows = np.arange(len(losses))
    return Curve(floor[rows, best], slope[rows, best], ALPHAS[best])


def prices(
    ladder: Mapping[float, Sequence[float]],
    differences: Mapping[str, Difference],
    speeds: Mapping[str, Mapping[str, float] | None],
    at: float = 1.0,
) -> dict[str, dict[str, Any] | None]:
    """By label: the compute multiplier at equal tokens and, with a speed, at equal time, with intervals; from
    the baseline's losses over the seeds at each multiple, for differences found at the multiple `at`."""
    multiples = sorted(ladder)
    means = [interval(list(ladder[multiple])) for multiple in multiples]
    if any(one.mean is None or one.low is None for one in means):
        return dict.fromkeys(differences)
    draw = np.random.default_rng(0)
    drawn = np.stack(
        [
            np.full(DRAWS + 1, one.mean)
            + np.concatenate([[0.0], draw.standard_t(max(1, one.n - 1), DRAWS)]) * _error(ladder[multiple])
            for multiple, one in zip(multiples, means, strict=True)
        ],
        axis=1,
    )
    curve = fit_curve(multiples, drawn)
    reached = curve.floor + curve.scale * at**-curve.alpha
    found: dict[str, dict[str, Any] | None] = {}
    for label, difference in differences.items():
        if difference.mean is None or difference.error is None:
            found[label] = None
            continue
        noise = np.concatenate([[0.0], draw.standard_t(max(1, difference.seeds - 1), DRAWS)])
        compute = curve.compute_at(reached + difference.mean + noise * difference.error)
        # Draws themselves, since nothing lies between two that are infinite.
        low, high = np.quantile(compute[1:], [0.025, 0.975], method="nearest")
        ends = multiples[0] / BEYOND, multiples[-1] * BEYOND
        price = {
            "tokens": {"value": float(compute[0] / at), "low": float(low / at), "high": float(high / at)},
            "ladder": [multiples[0], multiples[-1]],
            "beyond": not ends[0] <= compute[0] <= ends[1],
        }
        speed = speeds.get(label)
        if speed is not None:
            parts = zip(("value", "low", "high"), ("ratio", "low", "high"), strict=True)
            price["time"] = {to: price["tokens"][to] * speed[of] for to, of in parts}  # type: ignore[index]
        found[label] = price
    return found


def _error(losses: Sequence[float]) -> float:
    return float(np.std(losses, ddof=1) / math.sqrt(len(losses)))
