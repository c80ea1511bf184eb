"""What a task is: options, words, and samples that are a function of (seed, index).

A sample is one sequence as long as the context, and one document. Only its answers count in the loss. A new
task is one file here: a frozen dataclass with `@register_task("name")`, whose fields are its options and
whose docstring is its explanation. Names are listed nowhere else.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from headgate import config
from headgate.data.answers import MOST_GROUPS, AnswerGroup, Level, TaskRecord, position_bins
from headgate.data.shards import SPLITS
from headgate.data.splits import Shares
from headgate.data.tasks.draws import Draws
from headgate.errors import HeadgateError
from headgate.grammar import split_assignments
from headgate.registry import Registry

LARGEST = 1 << 20
"""The largest context and vocabulary: anything beyond is a typing error that would fill the memory."""
BLOCK_TOKENS, BLOCK_SAMPLES = 1 << 20, 1024
"""Samples are drawn in blocks of at most this many."""


@dataclass(frozen=True)
class Samples:
    """N samples of T tokens."""

    tokens: np.ndarray
    """(N,T)"""
    answers: np.ndarray
    """(N,T): nonzero at answers."""
    distances: np.ndarray | None = None
    """(N,T), read at answers: how far before the query (the token before the answer) is what it needs."""
    pairs: np.ndarray | None = None
    """(N,): the number of pairs in each sample."""


@dataclass(frozen=True)
class SuiteSize:
    """How `headgate suite` trains on a task: enough for full attention to solve it."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's options."""
    steps: int = 400
    batch_size: int = 16
    quick: bool = False
    """Whether it is part of the suite's short form."""


@dataclass(frozen=True)
class SyntheticTask:
    """The base of all tasks."""

    name: ClassVar[str]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named sets of options, given as a bare word: mqar:zoology."""
    small: ClassVar[Mapping[str, Any]] = {}
    """Options that make a sample short enough to read."""
    suite: ClassVar[SuiteSize] = SuiteSize()
    judged_by: ClassVar[Literal["accuracy", "loss"]] = "accuracy"

    @property
    def context(self) -> int:
        """Tokens in a sample; train with the same context."""
        raise NotImplementedError

    @property
    def words(self) -> Sequence[str]:
        """The tokens from number 1 up; number 0 ends a text."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        return 1 + len(self.words)

    @property
    def guesses(self) -> int:
        """How many answers are equally likely to a model that knows nothing about the sample."""
        raise NotImplementedError

    @property
    def chance(self) -> Level:
        return Level(math.log(self.guesses), 1 / self.guesses)

    @property
    def request(self) -> dict[str, Any]:
        """The options as the manifest keeps them."""
        return config.to_dict(self)

    @property
    def groups(self) -> tuple[AnswerGroup, ...]:
        return ()

    def parts(self, shares: Shares) -> Iterator[tuple[str, Samples]]:
        """All samples, split by split, a block at a time."""
        raise NotImplementedError

    def marks(self, samples: Samples) -> np.ndarray:
        """The loss mask (N,T)."""
        return (samples.answers != 0).astype(np.uint8)

    def optimum(self, samples: Samples) -> tuple[float, float]:
        """The best model's losses and right answers on these samples, both summed."""
        return 0.0, float(np.count_nonzero(samples.answers))

    def record(self, val: Level, test: Level) -> TaskRecord:
        """What the manifest says, given the optimum on both splits."""
        return TaskRecord(self.name, self.context, self.judged_by, self.chance, val, test, self.groups)

    def check_size(self) -> None:
        for name in ("context", "vocab_size"):
            value = getattr(self, name)
            if value > LARGEST:
                raise HeadgateError(f"{name}={value} is too large; it must be at most {LARGEST}")


@dataclass(frozen=True)
class DrawnTask(SyntheticTask):
    """A task whose sample number i of a split is a function of (seed, split, i) and its other options."""

    samples: int = 20_000
    """Training samples; all are fresh if training uses no more."""
    held_out: int = 1_000
    """Validation samples, and as many test samples: the same however many there are to train on."""
    seed: int = 0

    def __post_init__(self) -> None:
        config.require_at_least(self, 1, "samples", "held_out")
        config.require_at_least(self, 0, "seed")
        if self.seed >= 1 << 64:
            raise HeadgateError(f"seed={self.seed} is too large; it must be below 2**64")
        self.check_options()
        if len(self.groups) > MOST_GROUPS:
            raise HeadgateError(
                f"{self.name} would have {len(self.groups)} kinds of answers, by distance and number of "
                f"pairs, but at most {MOST_GROUPS} fit in the loss mask; use a shorter length or fewer pairs"
            )

    def check_options(self) -> None:
        """Raise if the options do not go together."""

    def draw(self, draws: Draws, rows: np.ndarray) -> Samples:
        """The samples with these numbers; their contents come from `draws` alone."""
        raise NotImplementedError

    @property
    def pair_counts(self) -> tuple[int, ...]:
        """The distinct numbers of pairs that samples have, if answers are judged by them."""
        return ()

    @property
    def has_distances(self) -> bool:
        return True

    @property
    def groups(self) -> tuple[AnswerGroup, ...]:
        places = position_bins(self.context) if self.has_distances else [None]
        return tuple(AnswerGroup(place, pairs) for pairs in self.pair_counts or (None,) for place in places)

    def marks(self, samples: Samples) -> np.ndarray:
        asked = samples.answers != 0
        marks = np.zeros(asked.shape, dtype=np.uint8)
        group = np.zeros(np.count_nonzero(asked), dtype=np.int64)
        if samples.distances is not None:
            firsts = np.array([first for first, _ in position_bins(self.context)])
            group += np.searchsorted(firsts, samples.distances[asked], side="right") - 1
        if samples.pairs is not None:
            counts = np.array(sorted(self.pair_counts))
            each = np.searchsorted(counts, samples.pairs)[:, None].repeat(asked.shape[1], 1)[asked]
            group += each * (len(self.groups) // len(counts))
        marks[asked] = 1 + group
        return marks

    @property
    def block(self) -> int:
        return max(1, min(BLOCK_SAMPLES, BLOCK_TOKENS // self.context))

    def sample(self, split: str, first: int, count: int) -> Iterator[Samples]:
        """Samples number `first` up to `first + count` of a split, a block at a time."""
        block, end = self.block, first + count
        for number in range(first // block, -(-end // block)):
            rows = np.arange(number * block, (number + 1) * block)
            drawn = self.draw(Draws(self.seed, SPLITS.index(split), number), rows)
            kept = slice(max(0, first - rows[0]), min(block, end - rows[0]))
            far, pairs = drawn.distances, drawn.pairs
            yield Samples(
                drawn.tokens[kept],
                drawn.answers[kept],
                None if far is None else far[kept],
                None if pairs is None else pairs[kept],
            )

    def parts(self, shares: Shares) -> Iterator[tuple[str, Samples]]:
        for split, count in zip(SPLITS, (self.samples, self.held_out, self.held_out), strict=True):
            for samples in self.sample(split, 0, count):
                yield split, samples


class PairsTask(DrawnTask):
    """A task of keys and their values, of which the value is asked for; its options have these names too."""

    length: int
    keys: int
    values: int

    @property
    def context(self) -> int:
        return self.length

    @property
    def words(self) -> Sequence[str]:
        return numbered(k=self.keys, v=self.values)

    @property
    def guesses(self) -> int:
        return self.values


def numbered(**counts: int) -> list[str]:
    """k0 k1 ... v0 v1 ... for k=8, v=16."""
    return [f"{letter}{number}" for letter, count in counts.items() for number in range(count)]


TASKS: Registry[type[SyntheticTask]] = Registry("task", package="headgate.data.tasks")


def register_task(name: str) -> Callable[[type[SyntheticTask]], type[SyntheticTask]]:
    def add(task: type[SyntheticTask]) -> type[SyntheticTask]:
        task.name = name
        return TASKS.register(name)(task)

    return add


def parse_task(source: str) -> SyntheticTask | None:
    """The task that a source such as `mqar:pairs=8` asks for; None for any other source."""
    name, colon, tail = source.partition(":")
    if name not in TASKS.names():
        return None
    if not colon and Path(source).exists():
        raise HeadgateError(
            f"{source!r} is a task and also a file or folder here; write ./{source} for the file, {source}: "
            "for the task"
        )
    task = TASKS.get(name)
    assignments, bare = split_assignments(tail)
    options: dict[str, Any] = {}
    for word in bare:
        if word not in task.presets:
            known = f"; its presets are {', '.join(task.presets)}" if task.presets else ""
            raise HeadgateError(
                f"option {word!r} in {source!r} has no value; write {name}:option=value{known}"
            )
        options |= task.presets[word]
    keys = [key for key, _ in assignments]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice:
        raise HeadgateError(f"option {twice!r} is given twice in {source!r}; keep one of them")
    return config.from_dict(task, options | dict(assignments), where=name)
