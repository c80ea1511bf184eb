"""Answers: the tokens that a loss mask picks out, and what is known of each of them.

A task marks every answer in its `.ds.loss` mask with the number of a group, from 1 on. The groups stand in
the manifest: how far back the answer has to look, and among how many pairs. A mask of ones, as `recall`
writes it, has no groups; the distances are then searched for.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np

MOST_GROUPS = 255


@dataclass(frozen=True)
class AnswerGroup:
    """Answers of one kind; None is for what does not apply to a task."""

    distance: tuple[int, int] | None = None
    """What is asked for stands this many tokens before the query: from the first up to, not including, the
    second."""
    pairs: int | None = None
    """Pairs of key and value in the sample."""


@dataclass(frozen=True)
class Level:
    """A loss in nats an answer, and the share of answers that are right."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class TaskRecord:
    """What the manifest says of a task besides its options."""

    name: str
    context: int
    """Tokens of a sample; train with this context."""
    judged_by: Literal["accuracy", "loss"]
    chance: Level
    """Of a model that knows the task but not the sample."""
    optimum: Level
    """Of the best model there can be, over the validation split."""
    test_optimum: Level
    """The same over the test split."""
    groups: tuple[AnswerGroup, ...] = ()
    """Group n has the mark n + 1 in the loss mask."""

    def score(self, loss: float | None, accuracy: float | None, split: str = "val") -> float | None:
        """The share of the way from chance to the optimum of a split; below 0 if worse than chance."""
        value = loss if self.judged_by == "loss" else accuracy
        if value is None:
            return None
        best = self.test_optimum if split == "test" else self.optimum
        chance, optimum = getattr(self.chance, self.judged_by), getattr(best, self.judged_by)
        return float((value - chance) / (optimum - chance))


def position_bins(length: int) -> list[tuple[int, int]]:
    """Bins of positions that double in width: 0, 1, 2-3, 4-7, and so on to the end of the context."""
    edges = [0, *(1 << n for n in range(length.bit_length()) if 1 << n < length), length]
    return list(itertools.pairwise(edges))


def distances(tokens: np.ndarray, targets: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """How far before each query its key last stood, or a token that joins it to its value; 0 where neither
    did, or where no answer is asked: (B,T).

    `tokens` (B,T) are what a model reads, `targets` what comes next, `asked` where that is an answer.
    """
    found = np.zeros(tokens.shape, dtype=np.int64)
    for row, place in zip(*np.nonzero(asked), strict=True):
        before = tokens[row, :place]
        for sought in (tokens[row, place], targets[row, place]):
            places = np.nonzero(before == sought)[0]
            if len(places):
                found[row, place] = place - places[-1]
                break
    return found
