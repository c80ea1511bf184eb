"""memorise: pairs that are the same in every sample, after MAD (arXiv 2403.17844)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headgate import config
from headgate.data.tasks.contract import PairsTask, Samples, SuiteSize, register_task
from headgate.data.tasks.draws import Draws
from headgate.errors import HeadgateError

TABLE = 3
"""The number, like that of a fourth split, under which the table is drawn."""


@register_task("memorise")
@dataclass(frozen=True)
class Memorise(PairsTask):
    """Keys, each followed by its value, which is the same in every sample and must be learnt by heart.

    A key appears at most once in a sample, so the context does not help: this tests what the weights can
    hold, and how much a mechanism's mixing of tokens disturbs it.
    """

    small: ClassVar[Mapping[str, Any]] = {"length": 12}
    suite: ClassVar[SuiteSize] = SuiteSize(steps=150, batch_size=32)

    length: int = 32
    """Tokens in a sample, an even number."""
    keys: int = 128
    values: int = 128

    def check_options(self) -> None:
        config.require_at_least(self, 2, "length", "values")
        if self.length % 2 or self.keys < self.length // 2:
            raise HeadgateError(
                f"length={self.length} and keys={self.keys} do not go together; expected an even length, and "
                "a key for every second token of it"
            )
        self.check_size()

    @property
    def has_distances(self) -> bool:
        return False

    def draw(self, draws: Draws, rows: np.ndarray) -> Samples:
        table = Draws(self.seed, TABLE, 0).shuffled(1, self.keys)[0] % self.values
        keys = draws.distinct(len(rows), self.keys, self.length // 2)
        tokens = np.empty((len(rows), self.length), dtype=np.int64)
        tokens[:, 0::2], tokens[:, 1::2] = 1 + keys, 1 + self.keys + table[keys]
        answers = np.zeros(tokens.shape, dtype=np.int64)
        answers[:, 1::2] = 1
        return Samples(tokens, answers)
