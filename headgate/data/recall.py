"""The source `recall`: multi-query associative recall, made here, to show what a mechanism forgets.

A sequence as long as the training context first pairs keys with values, `k7 v3 k1 v9 ...`; the rest is noise,
in which keys come back, each once and followed by its value again. Only those values count in the loss (the
`.ds.loss` mask): to predict one, the model must find the pair that stands at a known distance before. Queries
lie at distances that are as likely in each doubling, up to the length of the context.

    recall:context=1024,pairs=32,queries=32,noise=64,sequences=8000,seed=0

To find the value of a key, one layer must mark each value with the key before it, and a second one look for
the mark: that takes millions of tokens to learn. With `joined=true` a pair is a single token, `k7=v3`, and so
is the answer: one layer can look it up, and learns to within minutes on a laptop.

Pairs are new in every sequence, so nothing can be learnt by heart. A sequence is a document; its length, with
the closing token, is the context, so that the windows a loader cuts are the sequences.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headgate import config, files
from headgate.data import shards
from headgate.data.folder import PrepareState, begun, is_finished, remove, remove_all, writing
from headgate.data.shards import SPLITS, Manifest, ShardWriter, SplitState
from headgate.data.splits import Shares, require_training
from headgate.data.tokenizers import END_OF_TEXT, Tokenizer
from headgate.errors import HeadgateError
from headgate.version import __version__

NAME = "recall"
AT_ONCE = 512
"""Sequences made together."""
LARGEST = 1 << 20
"""Of context and vocabulary: beyond, they are a slip of the hand that would fill the memory."""


@dataclass(frozen=True)
class Recall:
    """What is asked for."""

    context: int = 1024
    """Tokens of a sequence; train with the same context."""
    pairs: int = 32
    """Keys that a sequence pairs with values at its beginning."""
    queries: int = 32
    """How many of them come back, each once."""
    keys: int = 128
    """Different keys, of which a sequence uses `pairs`."""
    values: int = 128
    joined: bool = False
    """Whether a pair is one token instead of two."""
    noise: int = 64
    """Different tokens that stand between the queries."""
    sequences: int = 8000
    """Over all splits."""
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
        for name in ("context", "vocab_size"):
            value = getattr(self, name)
            if value > LARGEST:
                raise HeadgateError(f"{name}={value} is too large; it must be at most {LARGEST}")
        room = self.context - 1 - self.head
        if 2 * self.queries > room:
            raise HeadgateError(
                f"context={self.context} is too short for pairs={self.pairs} and queries={self.queries}: it "
                f"leaves {max(0, room)} tokens for the queries, which take two each"
            )

    @property
    def head(self) -> int:
        """Tokens that the pairs at the beginning take."""
        return self.pairs if self.joined else 2 * self.pairs

    @property
    def answers(self) -> int:
        """Different answers: values, or pairs of a key and a value."""
        return self.keys * self.values if self.joined else self.values

    @property
    def vocab_size(self) -> int:
        return 1 + self.keys + self.answers + self.noise


def parse(source: str) -> Recall | None:
    """The recall that a source such as `recall:context=256` asks for; None for another source."""
    name, _, tail = source.partition(":")
    if name != NAME:
        return None
    assignments, bare = config.split_assignments(tail)
    if bare:
        raise HeadgateError(f"option {bare[0]!r} in {source!r} has no value; write {NAME}:option=value")
    keys = [key for key, _ in assignments]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice:
        raise HeadgateError(f"option {twice!r} stands twice in {source!r}; keep one of them")
    return config.from_dict(Recall, dict(assignments), where=NAME)


def prepare_recall(recall: Recall, source: str, shares: Shares, out: Path) -> Manifest:
    """Write the folder, whole or not at all; one that is there already must be the same."""
    require_training(shares)
    out = files.named(out, "the folder to write")
    request = {"source": source, "tokenizer": NAME, "splits": list(shares), **config.to_dict(recall)}
    if is_finished(out):
        return _finished(out, request)
    with writing(out):
        if not (out / "manifest.json").exists():
            progress = begun(out)
            if progress is not None:
                _refuse_another(out, progress.request, request)
            config.save(PrepareState(request), out / "progress.json", seal=True)
            try:
                _write(recall, request, shares, out)
            finally:
                if not (out / "manifest.json").exists():
                    remove_all(out)
        manifest = _finished(out, request)
        remove(out, "progress.json")
    return manifest


def _finished(out: Path, request: dict[str, object]) -> Manifest:
    manifest = shards.check_data(out, verify=False)
    assert manifest is not None
    _refuse_another(out, manifest.request, request)
    return manifest


def _refuse_another(out: Path, made: Mapping[str, object], request: dict[str, object]) -> None:
    found = config.differences(made, request)
    if found:
        raise HeadgateError(f"{str(out)!r} was made with {'; '.join(found)}; choose another folder")


def _write(recall: Recall, request: dict[str, object], shares: Shares, folder: Path) -> None:
    tokenizer = Tokenizer(definition(recall))
    files.write_text(folder / "tokenizer.json", tokenizer.definition)
    files.write_text(folder / "sources.jsonl", "")
    records = []
    draw = np.random.default_rng(recall.seed)
    ends = [round(part / sum(shares) * recall.sequences) for part in itertools.accumulate(shares)]
    for name, first, end in zip(SPLITS, [0, *ends[:-1]], ends, strict=True):
        writer = ShardWriter(folder, SplitState(name), tokenizer.dtype)
        for begin in range(first, end, AT_ONCE):
            tokens, counted = sequences(recall, min(AT_ONCE, end - begin), draw)
            lengths = np.full(len(tokens), recall.context)
            writer.append(tokens.ravel(), lengths, text_bytes=0, counted=counted.ravel())
        writer.flush()
        writer.close()
        records.append(shards.publish(folder, writer.state, tokenizer.dtype))
    manifest = Manifest(
        format=shards.FORMAT,
        headgate=__version__,
        request=request,
        sources=shards.SourcesRecord(files=0, bytes=0, sha256=shards.sha256(folder / "sources.jsonl")),
        tokenizer=shards.TokenizerRecord(
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            end_of_text_id=tokenizer.end_of_text_id,
            sha256=shards.sha256(folder / "tokenizer.json"),
        ),
        repeats_dropped=0,
        splits=tuple(records),
    )
    config.save(manifest, folder / "manifest.json", seal=True)


def definition(recall: Recall) -> str:
    """A tokenizer.json whose words are the tokens: the end, then k0 k1 ..., v0 v1 ... or k0=v0 k0=v1 ...,
    n0 n1 ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    values = [f"v{number}" for number in range(recall.values)]
    keys = [f"k{number}" for number in range(recall.keys)]
    answers = [f"{key}={value}" for key in keys for value in values] if recall.joined else values
    words = [END_OF_TEXT, *keys, *answers, *(f"n{number}" for number in range(recall.noise))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="n0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return str(tokenizer.to_str())


def sequences(recall: Recall, count: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (count, context), and where an answer stands (1) or not (0)."""
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
    """Different slots out of 0 to `slots`, as likely in each doubling of the distance."""
    weights = 1.0 / (1.0 + np.arange(slots))
    # The earliest of exponential times with these rates: a draw without replacement by weight.
    times = draw.exponential(size=slots) / weights
    return np.sort(np.argpartition(times, queries - 1)[:queries])


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
