"""copy: selective copying, after MAD (arXiv 2403.17844)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headgate import config
from headgate.data.tasks.contract import DrawnTask, Samples, SuiteSize, numbered, register_task
from headgate.data.tasks.draws import Draws
from headgate.errors import HeadgateError


@register_task("copy")
@dataclass(frozen=True)
class Copy(DrawnTask):
    """Tokens scattered among blanks, a mark, and then the same tokens in order without the blanks.

    Where a token is does not tell its place in the order, so blanks must be told from tokens. The tokens of a
    sample differ unless `repeats=true`, as in MAD: a token that occurs twice has two successors, and only
    what came before it tells which. `copy:mad` uses MAD's sizes.
    """

    small: ClassVar[Mapping[str, Any]] = {"length": 20, "tokens": 4}
    suite: ClassVar[SuiteSize] = SuiteSize(
        {"length": 64, "tokens": 8, "alphabet": 16}, batch_size=32, quick=True
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "mad": {"length": 256, "tokens": 16, "alphabet": 14, "repeats": True}
    }

    length: int = 128
    """Tokens in a sample."""
    tokens: int = 16
    """To copy."""
    alphabet: int = 32
    """Different tokens."""
    repeats: bool = False
    """Whether a token may occur twice in a sample."""

    def check_options(self) -> None:
        config.require_at_least(self, 1, "tokens")
        config.require_at_least(self, 2, "alphabet")
        if self.length < 2 * self.tokens + 1:
            raise HeadgateError(
                f"length={self.length} is too short for tokens={self.tokens} to appear twice with a mark "
                f"between; give at least {2 * self.tokens + 1}"
            )
        if not self.repeats and self.tokens > self.alphabet:
            raise HeadgateError(
                f"alphabet={self.alphabet} is too small for tokens={self.tokens} different ones; give more, "
                "or repeats=true"
            )
        self.check_size()

    @property
    def context(self) -> int:
        return self.length

    @property
    def words(self) -> Sequence[str]:
        return ["mark", "blank", *numbered(t=self.alphabet)]

    @property
    def guesses(self) -> int:
        return self.alphabet

    def draw(self, draws: Draws, rows: np.ndarray) -> Samples:
        count, room = len(rows), self.length - self.tokens - 1
        if self.repeats:
            copied = 3 + draws.below(self.alphabet, count, self.tokens)
        else:
            copied = 3 + draws.distinct(count, self.alphabet, self.tokens)
        places = np.sort(draws.shuffled(count, room)[:, : self.tokens], axis=1)
        tokens = np.full((count, self.length), 2, dtype=np.int64)
        np.put_along_axis(tokens, places, copied, axis=1)
        tokens[:, room], tokens[:, room + 1 :] = 1, copied
        far = np.zeros(tokens.shape, dtype=np.int64)
        far[:, room + 1 :] = room + np.arange(self.tokens) - places
        return Samples(tokens, far, far)
