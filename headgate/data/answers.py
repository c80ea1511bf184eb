"""Answers: the tokens that a loss mask marks, and what is known about each.

A task marks every answer in its `.ds.loss` mask with the number of its group, from 1 up. The manifest lists
the groups: how far back the answer has to look, and among how many pairs. A mask of ones, as `recall` writes
it, has no groups; the distances are then worked out.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np

MOST_GROUPS = 255


@dataclass(frozen=True)
class AnswerGroup:
    """Answers of one kind; None where something does not apply to a task."""

    distance: tuple[int, int] | None = None
    """What is asked for is this many tokens before the query: from the first number up to but not including
    the second."""
    pairs: int | None = None
    """Key-value pairs in the sample."""


@dataclass(frozen=True)
class Level:
    """A loss in nats per answer, and the share of answers that are right."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class TaskRecord:
    """What the manifest says about a task besides its options."""

    name: str
    context: int
    """Tokens in a sample; train with this context."""
    judged_by: Literal["accuracy", "loss"]
    chance: Level
    """The level of a model that knows the task but not the sample."""
    optimum: Level
    """The level of the best possible model on the validation split."""
    test_optimum: Level
    """The same on the test split."""
    groups: tuple[AnswerGroup, ...] = ()
    """Group n is marked n + 1 in the loss mask."""

    def score(self, loss: float | None, accuracy: float | None, split: str = "val") -> float | None:
        """How far a split's result is from chance to the optimum, as a share; below 0 if worse than
        chance."""
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
    """How far before each query its key last appeared, or a token that joins it to its value; 0 where neither
    did, or where no answer is asked: (B,T).

    `tokens` (B,T) are what a model reads, `targets` the next tokens, `asked` where the target is an answer.
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
