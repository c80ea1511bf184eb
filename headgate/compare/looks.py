"""Planned looks: a study may judge its results at numbers of seeds chosen beforehand, and stop once it knows.

Each look is a chance to be wrong, so the looks share one error rate. O'Brien and Fleming's rule, which Lan
and DeMets made a function of the share t of the seeds, has spent

    2 (1 - Phi(z_{a/2} / sqrt(t)))     of a = level / 2, on each side

when that share is in: next to nothing early, almost everything at the end. `nominal_levels` turns that into
the level at which an ordinary test is read at each look. It takes the means at two looks to be correlated
like sums of independent seeds. What seeds share, such as the documents, only correlates them more, which
makes false verdicts rarer than allowed.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

FARTHEST = 8.5
"""Standard deviations beyond which no bound is searched for."""
HALF = 600
"""Half the number of steps in the grid."""


def spent(level: float, share: float) -> float:
    """How much of a two-sided level is spent when this share of the seeds is in."""
    from scipy.special import ndtr, ndtri

    return float(4 * ndtr(ndtri(level / 4) / share**0.5))


@lru_cache
def nominal_levels(looks: Sequence[int], level: float) -> tuple[float, ...]:
    """The two-sided level at which the test at each look is read, so that all looks together have `level`.

    Integrates the density of a sum of independent steps that has not left the bounds so far (Armitage,
    McPherson and Rowe 1969).
    """
    if len(looks) == 1:
        return (level,)
    import numpy as np
    from scipy.optimize import brentq
    from scipy.special import ndtr

    levels: list[float] = []
    grid = np.zeros(1)  # where the sum may be if no look has decided, in units of one seed's deviation
    mass = np.ones(1)
    before, used = 0, 0.0
    for look in looks:
        step, spent_now = (look - before) ** 0.5, spent(level, look / looks[-1])

        def too_much(
            bound: float,
            grid: Any = grid,
            mass: Any = mass,
            step: float = step,
            due: float = spent_now - used,
        ) -> float:
            return float(2 * (mass * ndtr((-bound - grid) / step)).sum()) - due

        far = FARTHEST * look**0.5
        bound = far if too_much(far) >= 0 else float(brentq(too_much, 0.0, far, xtol=1e-12))
        levels.append(float(2 * ndtr(-bound / look**0.5)))
        points = np.linspace(-bound, bound, 2 * HALF + 1)
        density = np.exp(-0.5 * ((points[:, None] - grid) / step) ** 2) / (step * (2 * np.pi) ** 0.5)
        simpson = np.array([1, *[4, 2] * (HALF - 1), 4, 1]) * (points[1] - points[0]) / 3
        grid, mass = points, (density * mass).sum(1) * simpson
        before, used = look, spent_now
    return tuple(levels)
