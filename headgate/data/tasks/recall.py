"""recall: multi-query associative recall by distance, to show what a mechanism forgets.

A sequence as long as the training context first pairs keys with values, `k7 v3 k1 v9 ...`; the rest is noise,
in which keys come back, each once and followed by its value again. Only those values count in the loss (the
`.ds.loss` mask): to predict one, the model must find the pair at a known distance before. Queries are at
distances that are equally likely in each doubling, up to the length of the context.

    recall:context=1024,pairs=32,queries=32,noise=64,sequences=8000,seed=0

To find a key's value, one layer must mark each value with the key before it, and a second must look for the
mark: that takes millions of tokens to learn. With `joined=true` a pair is a single token, `k7=v3`, and so is
the answer: one layer can look it up, and learns to do so within minutes on a laptop.

Pairs are new in every sequence, so nothing can be learnt by heart. A sequence is a document; its length, with
the closing token, is the context, so the windows that a loader cuts are the sequences.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headgate import config
from headgate.data.shards import SPLITS
from headgate.data.splits import Shares
from headgate.data.tasks.contract import Samples, SuiteSize, SyntheticTask, register_task
from headgate.errors import HeadgateError

AT_ONCE = 512
"""Sequences made together."""


@register_task("recall")
@dataclass(frozen=True)
class Recall(SyntheticTask):
    """Key-value pairs, then keys that come back among noise, at distances even in their doublings.

    With `joined=true` a pair is one token, and one layer can look up its answer.
    """

    small: ClassVar[Mapping[str, Any]] = {"context": 20, "pairs": 3, "queries": 2}
    suite: ClassVar[SuiteSize] = SuiteSize(
        {"context": 128, "pairs": 8, "queries": 8, "keys": 16, "values": 16, "noise": 16}, steps=300
    )

    context: int = 1024
    """Tokens in a sequence; train with the same context."""
    pairs: int = 32
    """Keys that a sequence pairs with values at its start."""
    queries: int = 32
    """How many of them come back, each once."""
    keys: int = 128
    """Different keys, of which a sequence uses `pairs`."""
    values: int = 128
    joined: bool = False
    """Whether a pair is one token instead of two."""
    noise: int = 64
    """Different tokens between the queries."""
    sequences: int = 8000
    """Sequences over all splits."""
    seed: int = 0

    def __post_init__(self) -> None:
        config.require_at_least(self, 1, "pairs", "queries", "values", "noise", "sequences")
        config.require_at_least(self, 0, "seed")
        if self.queries > self.pairs:
            raise HeadgateError(
                f"queries={self.queries} are more than pairs={self.pairs}; each key comes back once"
            )
        if self.keys < self.pairs:
            raise HeadgateError(
                f"keys={self.keys} are too few for pairs={self.pairs} of different keys; give more"
            )
        self.check_size()
        room = self.context - 1 - self.head
        if 2 * self.queries > room:
            raise HeadgateError(
                f"context={self.context} is too short for pairs={self.pairs} and queries={self.queries}: it "
                f"leaves {max(0, room)} tokens for the queries, which take two each"
            )

    @property
    def head(self) -> int:
        """Tokens that the pairs at the start take."""
        return self.pairs if self.joined else 2 * self.pairs

    @property
    def answers(self) -> int:
        """Different answers: values, or pairs of a key and a value."""
        return self.keys * self.values if self.joined else self.values

    @property
    def vocab_size(self) -> int:
        return 1 + self.keys + self.answers + self.noise

    @property
    def guesses(self) -> int:
        return self.values

    @property
    def words(self) -> Sequence[str]:
        """k0 k1 ..., then v0 v1 ... or k0=v0 k0=v1 ..., then n0 n1 ..."""
        values = [f"v{number}" for number in range(self.values)]
        keys = [f"k{number}" for number in range(self.keys)]
        answers = [f"{key}={value}" for key in keys for value in values] if self.joined else values
        return [*keys, *answers, *(f"n{number}" for number in range(self.noise))]

    def parts(self, shares: Shares) -> Iterator[tuple[str, Samples]]:
        """All sequences come from one stream of random numbers, so number i depends on those before it."""
        draw = np.random.default_rng(self.seed)
        ends = [round(part / sum(shares) * self.sequences) for part in itertools.accumulate(shares)]
        for split, first, end in zip(SPLITS, [0, *ends[:-1]], ends, strict=True):
            for begin in range(first, end, AT_ONCE):
                yield split, Samples(*sequences(self, min(AT_ONCE, end - begin), draw))


def sequences(recall: Recall, count: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (count, context), and where there is an answer (1) or not (0)."""
    head, room = recall.head, recall.context - 1 - recall.head
    first_answer = 1 + recall.keys
    first_noise = first_answer + recall.answers
    tokens = first_noise + draw.integers(recall.noise, size=(count, recall.context))
    tokens[:, -1] = 0
    counted = np.zeros(tokens.shape, dtype=np.uint8)
    for row in range(count):
        keys = draw.permutation(recall.keys)[: recall.pairs]
        answers = first_answer + draw.integers(recall.values, size=recall.pairs)
        if recall.joined:
            answers += keys * recall.values
            tokens[row, :head] = answers
        else:
            tokens[row, 0:head:2], tokens[row, 1:head:2] = 1 + keys, answers
        slots = head + 2 * _places(recall.queries, room // 2, draw)
        which = draw.permutation(recall.pairs)[: recall.queries]
        tokens[row, slots], tokens[row, slots + 1] = 1 + keys[which], answers[which]
        counted[row, slots + 1] = 1
    return tokens, counted


def _places(queries: int, slots: int, draw: np.random.Generator) -> np.ndarray:
    """Different slots out of 0 to `slots`, equally likely in each doubling of the distance."""
    weights = 1.0 / (1.0 + np.arange(slots))
    # The earliest of exponential times with these rates: a draw without replacement by weight.
    times = draw.exponential(size=slots) / weights
    return np.sort(np.argpartition(times, queries - 1)[:queries])
