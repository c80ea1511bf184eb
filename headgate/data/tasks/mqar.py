"""mqar: multi-query associative recall, as in Zoology (arXiv 2312.04927)."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headgate.data.tasks.contract import DrawnTask, Samples, SuiteSize, numbered, register_task
from headgate.data.tasks.draws import Draws
from headgate.errors import HeadgateError


@register_task("mqar")
@dataclass(frozen=True)
class Mqar(DrawnTask):
    """Key-value pairs, then every key once more among filler: its value is asked for.

    Keys and values differ within a sample and are paired anew in each. Queries are at every second place
    after the pairs, drawn by a power law, so that most come soon. Several lengths and numbers of pairs, as in
    `mqar:length=[64,128],pairs=[4,8]`, are mixed: a sample has one of them and is padded to the longest.
    """

    small: ClassVar[Mapping[str, Any]] = {"length": 20, "pairs": 3, "keys": 8, "values": 8}
    suite: ClassVar[SuiteSize] = SuiteSize(
        {
            "length": [64, 64, 128],
            "pairs": [4, 8, 16],
            "shares": [4, 1, 1],
            "keys": 16,
            "values": 16,
            "filler": 8,
        },
        steps=800,
        quick=True,
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "zoology": {
            "length": (64, 128, 256, 256, 256),
            "pairs": (4, 8, 16, 32, 64),
            "shares": (5, 1, 1, 1, 1),
            "keys": 4095,
            "values": 4096,
            "filler": 0,
            "samples": 180_000,
            "held_out": 9_000,
        }
    }

    length: tuple[int, ...] = (128,)
    """Tokens in a sample."""
    pairs: tuple[int, ...] = (8,)
    """Pairs in a sample; as many numbers as lengths, or a single number for all."""
    shares: tuple[int, ...] = (1,)
    """How often each of them occurs."""
    keys: int = 64
    """Different keys, of which a sample uses `pairs`."""
    values: int = 64
    filler: int = 32
    """Different tokens between the queries; with 0 they are keys and values too, as in Zoology."""
    power: float = 0.01
    """The exponent of the law by which the queries' places are drawn: 1 is even, near 0 most come soon."""

    def check_options(self) -> None:
        sizes = {len(self.length), len(self.pairs), len(self.shares)} - {1}
        if len(sizes) > 1 or not (self.length and self.pairs and self.shares):
            raise HeadgateError(
                f"length={list(self.length)}, pairs={list(self.pairs)} and shares={list(self.shares)} do not "
                "match; give the same number of each, or one"
            )
        if min(self.shares) < 1 or sum(self.shares) > 1000:
            raise HeadgateError(
                f"shares={list(self.shares)} are not whole numbers above 0 with a sum of at most 1000"
            )
        for length, pairs in self.mixture:
            if pairs < 1 or 4 * pairs > length:
                raise HeadgateError(
                    f"length={length} does not fit pairs={pairs}; a pair and its query take two tokens each, "
                    f"so {max(1, pairs)} of them need at least {4 * max(1, pairs)}"
                )
            for name, known in (("keys", self.keys), ("values", self.values)):
                if known < pairs:
                    raise HeadgateError(
                        f"{name}={known} are too few for pairs={pairs} different ones; give more"
                    )
        if self.filler < 0 or not 0 < self.power <= 1:
            raise HeadgateError(
                f"filler={self.filler} and power={self.power} do not fit; expected filler of at least 0, and "
                "power above 0 and up to 1"
            )
        self.check_size()

    @property
    def mixture(self) -> list[tuple[int, int]]:
        """Length and pairs of each part."""
        parts = max(len(self.length), len(self.pairs), len(self.shares))
        each = (values * parts if len(values) == 1 else values for values in (self.length, self.pairs))
        return list(zip(*each, strict=True))

    @property
    def context(self) -> int:
        return max(self.length)

    @property
    def words(self) -> Sequence[str]:
        return numbered(k=self.keys, v=self.values, n=self.filler)

    @property
    def guesses(self) -> int:
        return self.values

    @property
    def pair_counts(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.pairs)))

    def draw(self, draws: Draws, rows: np.ndarray) -> Samples:
        tokens = np.zeros((len(rows), self.context), dtype=np.int64)
        far = np.zeros(tokens.shape, dtype=np.int64)
        counts = np.zeros(len(rows), dtype=np.int64)
        shares = self.shares * len(self.mixture) if len(self.shares) == 1 else self.shares
        ends = list(itertools.accumulate(shares))
        part = np.searchsorted(ends, rows % ends[-1], side="right")
        for number, (length, pairs) in enumerate(self.mixture):
            mine = np.nonzero(part == number)[0]
            if len(mine):
                tokens[mine, :length], far[mine, :length] = self._draw(draws, len(mine), length, pairs)
                counts[mine] = pairs
        return Samples(tokens, far, far, counts)

    def _draw(self, draws: Draws, rows: int, length: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (N,T), and at each answer how far back its key is."""
        keys = 1 + draws.distinct(rows, self.keys, pairs)
        values = 1 + self.keys + draws.distinct(rows, self.values, pairs)
        first, fillers = (
            (1 + self.keys + self.values, self.filler) if self.filler else (1, self.vocab_size - 1)
        )
        tokens = first + draws.below(fillers, rows, length)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        weights = np.arange(1, length // 2 - pairs + 1) ** (self.power - 1)
        queries = 2 * pairs + 2 * draws.race(rows, weights, pairs)
        np.put_along_axis(tokens, queries, keys, axis=1)
        np.put_along_axis(tokens, queries + 1, values, axis=1)
        far = np.zeros(tokens.shape, dtype=np.int64)
        np.put_along_axis(far, queries + 1, queries - 2 * np.arange(pairs), axis=1)
        return tokens, far
