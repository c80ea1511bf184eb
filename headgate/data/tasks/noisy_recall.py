"""noisy-recall: MAD's in-context recall among noise (arXiv 2403.17844); without noise, its plain recall."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headgate import config
from headgate.data.tasks.contract import PairsTask, Samples, SuiteSize, numbered, register_task
from headgate.data.tasks.draws import Draws
from headgate.errors import HeadgateError


@register_task("noisy-recall")
@dataclass(frozen=True)
class NoisyRecall(PairsTask):
    """Keys that keep coming back, each with its value for this sample, with noise between them.

    From its second appearance on, a key's value is asked for. `noisy-recall:clean` leaves the noise out,
    which is MAD's in-context recall.
    """

    small: ClassVar[Mapping[str, Any]] = {"length": 20, "keys": 3}
    suite: ClassVar[SuiteSize] = SuiteSize(steps=250, quick=True)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"clean": {"share": 0.0}}

    length: int = 128
    """Tokens in a sample, an even number."""
    keys: int = 8
    values: int = 8
    noise: int = 16
    """Different noise tokens."""
    share: float = 0.2
    """The share of pairs that are noise."""

    def check_options(self) -> None:
        config.require_at_least(self, 2, "length", "values")
        config.require_at_least(self, 1, "keys", "noise")
        if self.length % 2 or not 0 <= self.share < 1:
            raise HeadgateError(
                f"length={self.length} and share={self.share} do not fit; expected an even length, and a "
                "share from 0 to below 1"
            )
        self.check_size()

    @property
    def words(self) -> Sequence[str]:
        return numbered(k=self.keys, v=self.values, n=self.noise)

    def draw(self, draws: Draws, rows: np.ndarray) -> Samples:
        count, slots = len(rows), self.length // 2
        values = draws.below(self.values, count, self.keys)
        keys = draws.below(self.keys, count, slots)
        noise = draws.happens(self.share, count, slots)
        tokens = 1 + self.keys + self.values + draws.below(self.noise, count, self.length)
        answers = 1 + self.keys + np.take_along_axis(values, keys, axis=1)
        tokens[:, 0::2] = np.where(noise, tokens[:, 0::2], 1 + keys)
        tokens[:, 1::2] = np.where(noise, tokens[:, 1::2], answers)
        far = np.zeros(tokens.shape, dtype=np.int64)
        far[:, 1::2] = 2 * slots_since(np.where(noise, -1, keys), self.keys)
        return Samples(tokens, far, far)


def slots_since(keys: np.ndarray, count: int) -> np.ndarray:
    """How many slots ago the key of each slot (N,S) last appeared; 0 for the first time, and for keys below
    0."""
    each = np.arange(len(keys))
    last = np.full((len(keys), count), -1, dtype=np.int64)
    since = np.zeros(keys.shape, dtype=np.int64)
    for slot in range(keys.shape[1]):
        shown = keys[:, slot] >= 0
        rows, mine = each[shown], keys[shown, slot]
        before = last[rows, mine]
        since[rows, slot] = np.where(before >= 0, slot - before, 0)
        last[rows, mine] = slot
    return since
