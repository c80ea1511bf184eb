"""Batches from token shards, in an order that is a pure function of the seed and the epoch.

The tokens of a split are one stream, cut into windows of `length` tokens; a window's targets are its tokens
shifted by one. A pass over all windows in shuffled order is an epoch. A sample is a place in the endless
sequence of epochs: sample s is window number `permute(s % windows)` of epoch `s // windows`. So the whole
state of a loader is how many samples it has served, and any number of ranks can share them or take over.

With packing, a window is a sequence of whole documents instead; everything else stays the same.
"""

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from headgate.config import TrainConfig
from headgate.data.packing import pack
from headgate.data.shards import Split
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""The target of a token that does not count: the index that PyTorch's losses ignore."""
ORDER_BLOCK = 4096
OPEN_SHARDS = 128


@dataclass(frozen=True)
class DocumentLengths:
    """The lengths of the documents in a split's windows, as the windows cut them."""

    lengths: np.ndarray
    """Distinct lengths, ascending."""
    counts: np.ndarray
    """How many documents have each length."""

    @property
    def tokens(self) -> int:
        return int((self.lengths * self.counts).sum())

    @property
    def mean(self) -> float:
        return self.tokens / int(self.counts.sum())


class Windows:
    """The windows of a split; every token but the first is a target that counts in exactly one window.

    The last window is moved back to end with the stream; targets that it shares with the window before are
    ignored in it, and so are those that a shard's loss mask leaves out. With `documents`, a window's
    documents are to be kept apart: `document_ids` says which token belongs to which, and a target that begins
    another document than its token's is ignored, unless `count_boundaries`.
    """

    def __init__(
        self, split: Split, length: int, *, documents: bool = False, count_boundaries: bool = False
    ) -> None:
        if length < 1:
            raise HeadgateError(f"length={length} is too small; a window needs at least 1 token")
        if split.tokens <= length:
            raise HeadgateError(
                f"split {split.name!r} has {split.tokens} tokens, too few for a window of {length} and a "
                "target for its last token; choose a shorter length or prepare more text"
            )
        bare = next((shard for shard in split.shards if documents and not shard.has_index), None)
        if bare is not None:
            raise HeadgateError(
                f"{bare.path} has no index, so documents cannot be told apart in it; train with "
                "train.documents=stream"
            )
        self.split = split
        self.length = length
        self.separate, self.count_boundaries = documents, count_boundaries
        self.has_loss = any(shard.has_loss for shard in split.shards)
        self.answer_groups = split.task.groups if split.task is not None else ()
        self.has_documents = all(shard.has_index for shard in split.shards)
        self._starts = list(itertools.accumulate((shard.tokens for shard in split.shards), initial=0))
        # Each memory map holds a file open, and a folder from a cluster may have thousands of shards.
        self._tokens = lru_cache(OPEN_SHARDS)(lambda shard: split.shards[shard].load_tokens())
        self._ends = lru_cache(OPEN_SHARDS)(lambda shard: split.shards[shard].load_ends())
        self._loss = lru_cache(OPEN_SHARDS)(lambda shard: split.shards[shard].load_loss())

    def __len__(self) -> int:
        return -(-(self.split.tokens - 1) // self.length)

    def read(self, windows: Sequence[int] | np.ndarray) -> tuple["Tensor", "Tensor"]:
        """Tokens and targets of these windows, int64 of shape (B, T)."""
        import torch

        tokens = np.zeros((len(windows), self.length), dtype=np.int64)
        targets = np.full((len(windows), self.length), IGNORED, dtype=np.int64)
        for row, window in enumerate(windows):
            for start, place, count in self._stretches(int(window)):
                for shard, first, last, at in self._pieces(start, count):
                    tokens[row, place + at : place + at + last - first] = self._tokens(shard)[first:last]
                followed = min(count, self.split.tokens - 1 - start)  # the stream's last token has no target
                of_row = targets[row, place : place + followed]
                of_row[:-1] = tokens[row, place + 1 : place + followed]
                if followed:
                    shard, first, _, _ = next(self._pieces(start + followed, 1))
                    of_row[-1] = self._tokens(shard)[first]
                if self.has_loss:
                    self._ignore(of_row, start + 1)
                if self.separate and not self.count_boundaries:
                    of_row[self._beginnings(start + 1, followed)] = IGNORED
            targets[row, : self._seen_before(int(window))] = IGNORED
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def document_ids(self, windows: Sequence[int] | np.ndarray) -> "Tensor":
        """For each token of these windows, the number in the split of its document: (B,T); for padding, a
        number above all others."""
        return self._numbered(windows, 0)

    def target_documents(self, windows: Sequence[int] | np.ndarray) -> "Tensor":
        """For each target of these windows, the number in the split of its document: (B,T)."""
        return self._numbered(windows, 1)

    def _numbered(self, windows: Sequence[int] | np.ndarray, ahead: int) -> "Tensor":
        import torch

        numbers = np.full((len(windows), self.length), self.documents, dtype=np.int64)
        for row, window in enumerate(windows):
            for start, place, count in self._stretches(int(window)):
                inside = min(count, self.split.tokens - ahead - start)
                for shard, first, last, at in self._pieces(start + ahead, inside):
                    numbers[row, place + at : place + at + last - first] = self._numbers(shard, first, last)
        return torch.from_numpy(numbers)

    def marks(self, windows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The bytes of the loss mask at the targets of these windows (B, T); 1 where a shard has no mask."""
        marks = np.ones((len(windows), self.length), dtype=np.int64)
        for row, window in enumerate(windows):
            for start, place, count in self._stretches(int(window)):
                for shard, first, last, at in self._pieces(
                    start + 1, min(count, self.split.tokens - 1 - start)
                ):
                    if self.split.shards[shard].has_loss:
                        marks[row, place + at : place + at + last - first] = self._loss(shard)[first:last]
        return marks

    @cached_property
    def documents(self) -> int:
        """How many documents the split has."""
        return self._documents_before[-1]

    def document_lengths(self) -> DocumentLengths:
        """The lengths of the documents as the windows cut them."""
        places = [np.arange(0, self.split.tokens, self.length)]
        for before, shard in zip(self._starts, self.split.shards, strict=False):
            places.append(before + shard.load_ends().astype(np.int64))
        pieces: np.ndarray = np.diff(np.unique(np.concatenate(places)))
        return DocumentLengths(*np.unique(pieces, return_counts=True))

    def beginning(self, document: int, count: int) -> list[int]:
        """The first tokens, at most `count`, of the document with this number in the split."""
        shard = bisect_right(self._documents_before, document) - 1
        number, ends = document - self._documents_before[shard], self._ends(shard)
        first = int(ends[number - 1]) if number else 0
        tokens: list[int] = self._tokens(shard)[first : min(int(ends[number]), first + count)].tolist()
        return tokens

    @cached_property
    def _documents_before(self) -> list[int]:
        """For each shard, how many documents come before it; then the total."""
        return list(itertools.accumulate((len(shard.load_ends()) for shard in self.split.shards), initial=0))

    def _numbers(self, shard: int, first: int, last: int) -> np.ndarray:
        """The document of each token from `first` to `last` of a shard, by its number in the split."""
        ends = self._ends(shard)
        low, high = np.searchsorted(ends, np.array([first, last - 1], dtype=ends.dtype), side="right")
        edges = np.concatenate([[first], ends[low:high].astype(np.int64), [last]])
        return np.repeat(self._documents_before[shard] + np.arange(low, high + 1), np.diff(edges))

    def _beginnings(self, start: int, count: int) -> np.ndarray:
        """Which of the stream's `count` tokens from `start` on are the first of a document."""
        found = []
        for shard, first, last, at in self._pieces(start, count):
            ends = self._ends(shard)
            low, high = np.searchsorted(ends, np.array([first, last], dtype=ends.dtype), side="left")
            found.append(ends[low:high].astype(np.int64) - first + at)
            if first == 0:
                found.append(np.array([at]))
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def _ignore(self, targets: np.ndarray, start: int) -> None:
        """Mark as ignored the targets, at `start` and after in the stream, that a loss mask leaves out."""
        for shard, first, last, place in self._pieces(start, len(targets)):
            if self.split.shards[shard].has_loss:
                targets[place : place + last - first][self._loss(shard)[first:last] == 0] = IGNORED

    def _stretches(self, window: int) -> Sequence[tuple[int, int, int]]:
        """The stretches that make up a window: start in the stream, place in the row, number of tokens."""
        return [(min(window * self.length, self.split.tokens - 1 - self.length), 0, self.length)]

    def _seen_before(self, window: int) -> int:
        """How many of a window's first targets already count in the window before."""
        return max(0, window * self.length - (self.split.tokens - 1 - self.length))

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Where the stream's `count` tokens from `start` on are: shard, first, last, place in the row."""
        place = 0
        shard = bisect_right(self._starts, start) - 1
        while place < count:
            first = start + place - self._starts[shard]
            last = min(first + count - place, self.split.shards[shard].tokens)
            yield shard, first, last, place
            place += last - first
            shard += 1


class PackedDocuments(Windows):
    """Windows of whole documents, as few as best fit makes them, each padded at its end.

    A document longer than a window is cut into windows of its own and a remainder. Every token but the first
    of its document is a target that counts in exactly one window.
    """

    def __init__(self, split: Split, length: int) -> None:
        super().__init__(split, length, documents=True)
        starts, counts = self._cut()
        if not len(starts):
            raise HeadgateError(f"split {split.name!r} has no document of two tokens or more; prepare others")
        sequences = pack(counts, length)
        order = np.argsort(sequences, kind="stable")
        self._from, self._counts = starts[order], counts[order]
        self._begins = np.searchsorted(sequences[order], np.arange(sequences.max() + 2))
        self.padding = 1 - float(counts.sum()) / (length * len(self))
        """The share of the tokens that are padding."""

    def __len__(self) -> int:
        return len(self._begins) - 1

    def document_lengths(self) -> DocumentLengths:
        return DocumentLengths(*np.unique(self._counts, return_counts=True))

    def _cut(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the pieces of all documents begin in the stream, and their lengths. A piece of one token,
        which can only be the end of a document, is left out: it has no target."""
        starts, counts = [], []
        for before, shard in zip(self._starts, range(len(self.split.shards)), strict=False):
            ends = before + np.asarray(self._ends(shard)).astype(np.int64)
            begins = np.concatenate([[before], ends[:-1]])
            pieces = -(-(ends - begins) // self.length)
            first = np.repeat(np.cumsum(pieces) - pieces, pieces)
            start = np.repeat(begins, pieces) + (np.arange(pieces.sum()) - first) * self.length
            count = np.minimum(np.repeat(ends, pieces) - start, self.length)
            starts.append(start[count > 1])
            counts.append(count[count > 1])
        return np.concatenate(starts), np.concatenate(counts)

    def _stretches(self, window: int) -> Sequence[tuple[int, int, int]]:
        mine = slice(self._begins[window], self._begins[window + 1])
        counts = self._counts[mine].tolist()
        places = itertools.accumulate(counts, initial=0)
        return list(zip(self._from[mine].tolist(), places, counts, strict=False))

    def _seen_before(self, window: int) -> int:
        return 0


def document_lengths(split: Split, train: TrainConfig) -> DocumentLengths | None:
    """The lengths of the documents that a run with these settings keeps apart; None if it keeps none
    apart."""
    if train.documents == "stream":
        return None
    if train.packing == "whole":
        return PackedDocuments(split, train.context).document_lengths()
    return Windows(split, train.context, documents=True).document_lengths()


def validation_windows(split: Split, length: int, train: TrainConfig) -> Windows:
    """What a run with these settings is evaluated on: whole documents if documents are masked."""
    if train.documents == "stream":
        return Windows(split, length)
    if train.boundaries == "count":
        return Windows(split, length, documents=True, count_boundaries=True)
    return PackedDocuments(split, length)


class Loader:
    """An endless iterator over batches of (tokens, targets), or (tokens, targets, document_ids).

    Each batch takes `batch_size` samples for each of `ranks` processes, of which this is number `rank`.
    """

    def __init__(
        self,
        split: Split,
        *,
        length: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        document_ids: bool = False,
        count_boundaries: bool = False,
        packing: Literal["stream", "whole"] = "stream",
        state: Mapping[str, int] | None = None,
    ) -> None:
        """`batch_size` counts this rank's sequences; `state` is what `state()` returned on any rank.

        With `document_ids`, documents are to be kept apart: targets across their boundaries are ignored,
        unless `count_boundaries`. `packing="whole"` fills sequences with whole documents.
        """
        if batch_size < 1 or not 0 <= rank < ranks:
            raise HeadgateError(
                f"batch_size={batch_size}, rank={rank}, ranks={ranks} do not go together; "
                "expected a batch of at least 1, and a rank from 0 to ranks - 1"
            )
        if packing == "whole" and (not document_ids or count_boundaries):
            raise HeadgateError(
                "packing='whole' puts documents together in an order of its own, in which none continues "
                "another; use it with document_ids, and without count_boundaries"
            )
        self.windows = (
            PackedDocuments(split, length)
            if packing == "whole"
            else Windows(split, length, documents=document_ids, count_boundaries=count_boundaries)
        )
        self.batch_size, self.seed, self.rank, self.ranks = batch_size, seed, rank, ranks
        self._document_ids = document_ids
        self._samples = 0
        self._order = lru_cache(2)(self._order_block)
        if state is not None:
            self._resume(state)

    @property
    def epoch(self) -> int:
        return self._samples // len(self.windows)

    def state(self) -> dict[str, int]:
        """All that a later loader needs to continue; the same on every rank."""
        state = {
            "samples": self._samples,
            "seed": self.seed,
            "length": self.windows.length,
            "tokens": self.windows.split.tokens,
        }
        if isinstance(self.windows, PackedDocuments):
            state["sequences"] = len(self.windows)
        return state

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> tuple["Tensor", ...]:
        first = self._samples + self.rank * self.batch_size
        chosen = self.order(first, first + self.batch_size)
        self._samples += self.batch_size * self.ranks
        tokens, targets = self.windows.read(chosen)
        return (
            (tokens, targets, self.windows.document_ids(chosen)) if self._document_ids else (tokens, targets)
        )

    def order(self, first: int, last: int) -> np.ndarray:
        """The windows of samples `first` to `last`."""
        pieces = []
        while first < last:
            epoch, place = divmod(first, len(self.windows))
            block, skip = divmod(place, ORDER_BLOCK)
            pieces.append(self._order(epoch, block)[skip : skip + last - first])
            first += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _order_block(self, epoch: int, block: int) -> np.ndarray:
        """A stretch of an epoch's order; computing many at once is far cheaper than one by one."""
        count = len(self.windows)
        places = np.arange(block * ORDER_BLOCK, min((block + 1) * ORDER_BLOCK, count))
        return permute(places, count, self.seed, epoch)

    def _resume(self, state: Mapping[str, int]) -> None:
        mine = self.state()
        for name in mine:
            if name not in state:
                raise HeadgateError(f"the loader's state has no {name!r}; expected {', '.join(mine)}")
            if name != "samples" and state[name] != mine[name]:
                raise HeadgateError(
                    f"the loader's state was made with {name}={state[name]}, not {mine[name]}; "
                    "resume with the data and settings it was made with"
                )
        samples = state["samples"]
        if not isinstance(samples, int) or samples < 0:
            raise HeadgateError(
                f"the loader's state has samples={samples!r}; expected a whole number of at least 0"
            )
        self._samples = samples


def permute(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where a shuffle of `range(count)` sends each of `places`, without storing the shuffle.

    A Feistel network permutes the numbers with an even number of bits, at least six, since fewer mix badly; a
    result of `count` or more is permuted again until it falls below, which keeps it a permutation.
    """
    half = np.uint64(max(((count - 1).bit_length() + 1) // 2, 3))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.frombuffer(hashlib.sha512(f"{seed}/{epoch}".encode()).digest(), dtype="<u8").astype(np.uint64)
    result = places.astype(np.uint64)
    todo = np.arange(len(result))
    while len(todo):
        left, right = result[todo] >> half, result[todo] & mask
        for key in keys:
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        result[todo] = (left << half) | right
        todo = todo[result[todo] >= count]
    return result.astype(np.int64)
