"""Which keys a query sees, as one value passed from a mechanism through the ops to the kernels."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from headgate.errors import HeadgateError


class Span(NamedTuple):
    """The keys i-window <= j <= i of a query at position i, with the exceptions below; always causal."""

    window: int | None = None
    """Keys at a distance up to this are seen, including the query's own; None for all."""
    dense_prefix: int = 0
    """Queries at positions below this see all keys up to themselves."""
    pinned: int = 0
    """The first positions of the sequence, which every later query sees."""
    ring: int = 0
    """Keys beyond the window up to this distance enter with a log-weight of the query's own."""
    start: int = 0
    """Position of the first key given."""
    first_keys: Tensor | None = None
    """(B,Tq) where there are several documents: the index of the first key of each query's document, before
    which it sees nothing, and from which the dense prefix and the pinned positions count. It rises along a
    row."""

    @property
    def reach(self) -> int | None:
        """The greatest distance seen, apart from pinned keys and the dense prefix."""
        return None if self.window is None else max(self.window, self.ring)

    def check(self) -> None:
        """Raise if a number is negative or the ring is not around a plain window."""
        for name, value in zip(self._fields[:5], self[:5], strict=True):
            if value is not None and value < 0:
                raise HeadgateError(f"{name}={value} is negative; it must be at least 0")
        if self.ring and (self.window is None or self.ring < self.window or self.pinned or self.dense_prefix):
            raise HeadgateError(
                f"ring={self.ring} must be around a plain window: window={self.window}, "
                f"dense_prefix={self.dense_prefix} and pinned={self.pinned} were given, expected "
                "window <= ring and 0 for the others"
            )

    def simplest(self, keys: int) -> "Span":
        """The same span over this many keys: a window that hides nothing becomes a full span, which is
        fastest."""
        if self.window is None or self.ring or self.window < keys - 1:
            return self
        return Span(start=self.start, first_keys=self.first_keys)

    def seen_by_last(self, keys: int) -> tuple[int, int]:
        """For a single query after this many keys, without a ring: how many pinned keys it sees, and from
        which key on it sees all."""
        if self.window is None or self.start + keys - 1 < self.dense_prefix:
            return 0, 0
        first = max(0, keys - 1 - self.window)
        return min(first, max(0, self.pinned - self.start)), first

    def numbers(self) -> list[int]:
        """Everything except the documents, for an op's schema, which allows no None inside a list."""
        return [-1 if self.window is None else self.window, *self[1:5]]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Span":
        window, *others = numbers
        dense_prefix, pinned, ring, start = others
        return cls(None if window < 0 else window, dense_prefix, pinned, ring, start)
