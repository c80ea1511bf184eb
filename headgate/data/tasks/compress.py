"""compress: a random sequence to be kept whole, after MAD's compression (arXiv 2403.17844)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headgate import config
from headgate.data.tasks.contract import DrawnTask, Samples, SuiteSize, numbered, register_task
from headgate.data.tasks.draws import Draws


@register_task("compress")
@dataclass(frozen=True)
class Compress(DrawnTask):
    """Random tokens, a mark, and the same tokens again: each of these is asked for.

    The tokens follow no rule, so all of them must be kept: as keys by attention, in its state by a
    recurrence. MAD has another network decode them from one token's output; here the model itself does it.
    """

    small: ClassVar[Mapping[str, Any]] = {"tokens": 8}
    suite: ClassVar[SuiteSize] = SuiteSize(steps=200, batch_size=32, quick=True)

    tokens: int = 31
    """Tokens to keep; a sample is twice as long, plus the marks."""
    alphabet: int = 15
    """Different tokens."""

    def check_options(self) -> None:
        config.require_at_least(self, 1, "tokens")
        config.require_at_least(self, 2, "alphabet")
        self.check_size()

    @property
    def context(self) -> int:
        return 2 * self.tokens + 2

    @property
    def words(self) -> Sequence[str]:
        return ["mark", *numbered(t=self.alphabet)]

    @property
    def guesses(self) -> int:
        return self.alphabet

    def draw(self, draws: Draws, rows: np.ndarray) -> Samples:
        half = 1 + self.tokens
        tokens = np.ones((len(rows), 2 * half), dtype=np.int64)
        tokens[:, 1:half] = 2 + draws.below(self.alphabet, len(rows), self.tokens)
        tokens[:, half + 1 :] = tokens[:, 1:half]
        far = np.zeros(tokens.shape, dtype=np.int64)
        far[:, half + 1 :] = half - 1
        return Samples(tokens, far, far)
