"""needle: key-value pairs hidden in filler text, asked for at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headgate import config
from headgate.data.tasks.contract import PairsTask, Samples, SuiteSize, numbered, register_task
from headgate.data.tasks.draws import Draws
from headgate.errors import HeadgateError

TEXT = 3
"""The number, like that of a fourth split, under which the filler's language is drawn."""
SUCCESSORS = 4
"""Words that may follow each word of the filler."""


@register_task("needle")
@dataclass(frozen=True)
class Needle(PairsTask):
    """Filler text that hides key-value pairs at any depth; at the end the keys come again.

    The filler is text in a small language that is the same in every sample: each word has four successors,
    one of them as likely as the others together. What matters is how far back a needle is: distances are
    spread evenly over the length.
    """

    small: ClassVar[Mapping[str, Any]] = {"length": 24, "needles": 2}
    suite: ClassVar[SuiteSize] = SuiteSize(
        {"length": 128, "keys": 8, "values": 8, "filler": 16}, steps=400, batch_size=32
    )

    length: int = 256
    """Tokens in a sample."""
    needles: int = 4
    """Pairs hidden in it."""
    keys: int = 16
    values: int = 16
    filler: int = 64
    """Different words in the filler."""

    def check_options(self) -> None:
        config.require_at_least(self, 1, "needles", "filler")
        config.require_at_least(self, 2, "values")
        if self.length < 4 * self.needles:
            raise HeadgateError(
                f"length={self.length} is too short for needles={self.needles}, which take four tokens each "
                "with their queries; give more"
            )
        if self.keys < self.needles:
            raise HeadgateError(
                f"keys={self.keys} are too few for needles={self.needles} different ones; give more"
            )
        self.check_size()

    @property
    def words(self) -> Sequence[str]:
        return numbered(k=self.keys, v=self.values, w=self.filler)

    def draw(self, draws: Draws, rows: np.ndarray) -> Samples:
        count, asked = len(rows), 2 * self.needles
        keys = 1 + draws.distinct(count, self.keys, self.needles)
        values = 1 + self.keys + draws.below(self.values, count, self.needles)
        tokens = 1 + self.keys + self.values + self._filler(draws, count)
        slots = (self.length - asked) // 2
        places = 2 * draws.distinct(count, slots, self.needles)
        queries = self.length - asked + np.arange(0, asked, 2)
        for where, what in ((places, keys), (places + 1, values)):
            np.put_along_axis(tokens, where, what, axis=1)
        tokens[:, queries], tokens[:, queries + 1] = keys, values
        far = np.zeros(tokens.shape, dtype=np.int64)
        far[:, queries + 1] = queries - places
        return Samples(tokens, far, far)

    def _filler(self, draws: Draws, rows: int) -> np.ndarray:
        """Words (N,T): half the time a word's first successor follows it, otherwise one of the others."""
        after = Draws(self.seed, TEXT, 0).below(self.filler, self.filler, SUCCESSORS)
        others = np.minimum(draws.below(2 * (SUCCESSORS - 1), rows, self.length), SUCCESSORS - 1)
        words = np.empty((rows, self.length), dtype=np.int64)
        words[:, 0] = draws.below(self.filler, rows)
        for place in range(1, self.length):
            words[:, place] = after[words[:, place - 1], SUCCESSORS - 1 - others[:, place]]
        return words
