"""Random numbers for tasks: the same on every machine and with every version of numpy.

Philox is a counter-based generator whose raw output numpy promises to keep, unlike its distributions. So
whole numbers are made from the raw bits here, and sorting never meets two equal numbers, whose order would
depend on the machine.
"""

import numpy as np

DENSE = 2
"""Numbers are redrawn until they differ if their count squared is at most this many times their range; a
third of the rows then succeeds. Otherwise the whole range is shuffled."""


class Draws:
    """The numbers of one block of samples, a function of (seed, split, block) alone."""

    def __init__(self, seed: int, split: int, block: int) -> None:
        self._bits = np.random.Philox(key=[seed, (split << 56) | block])

    def raw(self, *shape: int) -> np.ndarray:
        """uint64, all values equally likely."""
        return self._bits.random_raw(int(np.prod(shape))).reshape(shape)

    def below(self, bound: int, *shape: int) -> np.ndarray:
        """Whole numbers from 0 up to but not including `bound`; a bound of b has a bias of b / 2**32."""
        return ((self.raw(*shape) >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)).astype(np.int64)

    def happens(self, chance: float, *shape: int) -> np.ndarray:
        """True with this probability."""
        return self.below(1 << 31, *shape) < round(chance * (1 << 31))

    def shuffled(self, rows: int, count: int) -> np.ndarray:
        """A permutation of `range(count)` in each row."""
        mask = np.uint64((1 << max(1, (count - 1).bit_length())) - 1)
        numbered = (self.raw(rows, count) & ~mask) | np.arange(count, dtype=np.uint64)
        numbered.sort(axis=1)
        return (numbered & mask).astype(np.int64)

    def distinct(self, rows: int, bound: int, count: int) -> np.ndarray:
        """`count` different numbers below `bound` in each row, every order of them equally likely."""
        if count * count > DENSE * bound:
            return self.shuffled(rows, bound)[:, :count]
        found = self.below(bound, rows, count)
        todo = np.arange(rows)
        while len(todo):
            ordered = np.sort(found[todo], axis=1)
            todo = todo[(ordered[:, 1:] == ordered[:, :-1]).any(axis=1)]
            found[todo] = self.below(bound, len(todo), count)
        return found

    def race(self, rows: int, weights: np.ndarray, count: int) -> np.ndarray:
        """`count` different places of `weights` in each row, drawn one after another by weight, in the order
        drawn: the first to arrive if each place arrives after an exponential time with its weight as rate."""
        uniform = ((self.raw(rows, len(weights)) >> np.uint64(11)).astype(np.float64) + 0.5) / (1 << 53)
        return np.argsort(-np.log(uniform) / weights, axis=1, kind="stable")[:, :count]
