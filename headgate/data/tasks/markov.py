"""markov: a new Markov chain in each sample, to be learnt in context (arXiv 2402.11004)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from headgate import config
from headgate.data.tasks.contract import DrawnTask, Samples, SuiteSize, numbered, register_task
from headgate.data.tasks.draws import Draws
from headgate.errors import HeadgateError


@register_task("markov")
@dataclass(frozen=True)
class Markov(DrawnTask):
    """Tokens of a Markov chain that is redrawn for each sample: every next token is asked for.

    Each row of the chain's table is uniform over all distributions (Dirichlet with ones). The best prediction
    counts what followed the same token (for order 2, the same two tokens) and adds one to each count: its
    loss is the optimum, computed over the validation split.
    """

    small: ClassVar[Mapping[str, Any]] = {"states": 3, "length": 20}
    suite: ClassVar[SuiteSize] = SuiteSize({"states": 4}, quick=True)
    judged_by: ClassVar[Literal["accuracy", "loss"]] = "loss"

    order: int = 1
    """How many tokens the next one depends on."""
    states: int = 8
    """Different tokens."""
    length: int = 128
    """Tokens in a sample."""

    def check_options(self) -> None:
        config.require_at_least(self, 1, "order")
        config.require_at_least(self, 2, "states")
        if self.order >= self.length:
            raise HeadgateError(f"length={self.length} is too short for order={self.order}; give more")
        self.check_size()
        if self.states ** (self.order + 1) > 1 << 12:
            raise HeadgateError(
                f"order={self.order} with states={self.states} makes a table of "
                f"{self.states ** (self.order + 1)} entries for each sample; choose one of at most 4096"
            )

    @property
    def context(self) -> int:
        return self.length

    @property
    def words(self) -> Sequence[str]:
        return numbered(s=self.states)

    @property
    def guesses(self) -> int:
        return self.states

    @property
    def has_distances(self) -> bool:
        return False

    @property
    def block(self) -> int:
        return max(1, min(super().block, (1 << 22) // self.states ** (self.order + 1)))

    def draw(self, draws: Draws, rows: np.ndarray) -> Samples:
        count, states = len(rows), self.states
        # Sorted uniform numbers cut a line into pieces that are uniform over all distributions.
        cuts = np.sort(draws.raw(count, states**self.order, states - 1) >> np.uint64(32), axis=2)
        chosen = (draws.raw(count, self.length) >> np.uint64(32))[:, :, None]
        tokens = np.empty((count, self.length), dtype=np.int64)
        tokens[:, : self.order] = draws.below(states, count, self.order)
        each = np.arange(count)
        for place in range(self.order, self.length):
            row = cuts[each, self._before(tokens, place)]
            tokens[:, place] = (row <= chosen[:, place]).sum(axis=1)
        answers = np.zeros(tokens.shape, dtype=np.int64)
        answers[:, self.order :] = 1
        return Samples(tokens + 1, answers)

    def _before(self, states: np.ndarray, place: int) -> np.ndarray:
        """The row of the table that the tokens before a place select: (N,)."""
        row = np.zeros(len(states), dtype=np.int64)
        for state in range(place - self.order, place):
            row = row * self.states + states[:, state]
        return row

    def optimum(self, samples: Samples) -> tuple[float, float]:
        states = samples.tokens - 1
        seen = np.ones((len(states), self.states**self.order, self.states))
        each, loss, right = np.arange(len(states)), 0.0, 0.0
        for place in range(self.order, self.length):
            row = self._before(states, place)
            counts = seen[each, row]
            total = counts.sum(axis=1)
            loss -= float(np.log(counts[each, states[:, place]] / total).sum())
            right += float((counts.max(axis=1) / total).sum())
            seen[each, row, states[:, place]] += 1
        return loss, right
