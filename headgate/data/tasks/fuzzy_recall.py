"""fuzzy-recall: in-context recall whose keys and values take several tokens, after MAD (arXiv 2403.17844)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headgate import config
from headgate.data.tasks.contract import PairsTask, Samples, SuiteSize, register_task
from headgate.data.tasks.draws import Draws
from headgate.data.tasks.noisy_recall import slots_since
from headgate.errors import HeadgateError


@register_task("fuzzy-recall")
@dataclass(frozen=True)
class FuzzyRecall(PairsTask):
    """Keys of several tokens that keep coming back, each with its value, which has several tokens too.

    Keys share tokens, so no single token tells which key it is: the tokens before it must be put together
    first. From a key's second appearance on, every token of its value is asked for. `fuzzy-recall:mad` uses
    the longest keys and values of MAD, whose own have one to three tokens.
    """

    small: ClassVar[Mapping[str, Any]] = {"length": 24, "pairs": 3}
    suite: ClassVar[SuiteSize] = SuiteSize({"pairs": 4, "keys": 4, "values": 4}, steps=450)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "mad": {"key_size": 3, "value_size": 3, "keys": 7, "values": 7}
    }

    length: int = 128
    """Tokens in a sample."""
    pairs: int = 8
    """Different keys in a sample."""
    keys: int = 8
    """Different tokens that keys are made of."""
    values: int = 8
    """Different tokens that values are made of."""
    key_size: int = 2
    """Tokens in a key."""
    value_size: int = 2
    """Tokens in a value."""

    def check_options(self) -> None:
        config.require_at_least(self, 1, "pairs", "keys", "values", "key_size", "value_size")
        if self.length < 2 * self.slot:
            raise HeadgateError(
                f"length={self.length} is too short for a key to appear twice; give at least {2 * self.slot}"
            )
        self.check_size()
        if not self.pairs <= self.keys**self.key_size <= 1 << 31:
            raise HeadgateError(
                f"keys={self.keys} and key_size={self.key_size} make {self.keys**self.key_size} keys; "
                f"expected at least pairs={self.pairs} and at most {1 << 31}"
            )

    @property
    def slot(self) -> int:
        """Tokens in a key and its value."""
        return self.key_size + self.value_size

    def draw(self, draws: Draws, rows: np.ndarray) -> Samples:
        count, slots = len(rows), self.length // self.slot
        each = np.arange(count)[:, None]
        keys = draws.distinct(count, self.keys**self.key_size, self.pairs)
        spelt = np.stack([keys // self.keys**place % self.keys for place in range(self.key_size)], axis=2)
        values = self.keys + draws.below(self.values, count, self.pairs, self.value_size)
        chosen = draws.below(self.pairs, count, slots)
        both = np.concatenate([spelt, values], axis=2)[each, chosen]  # (N,slots,slot)
        since = self.slot * slots_since(chosen, self.pairs)
        far = np.zeros(both.shape, dtype=np.int64)
        far[:, :, self.key_size :] = since[:, :, None]
        tokens = np.zeros((count, self.length), dtype=np.int64)
        tokens[:, : slots * self.slot] = 1 + both.reshape(count, -1)
        distances = np.zeros(tokens.shape, dtype=np.int64)
        distances[:, : slots * self.slot] = far.reshape(count, -1)
        return Samples(tokens, distances, distances)
