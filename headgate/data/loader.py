"""Batches from token shards, in an order that is a pure function of the seed and the epoch.

The tokens of a split are one stream, cut into windows of `length` tokens; a window's targets are its tokens
moved on by one. A pass over all windows in shuffled order is an epoch. A sample is a place in the endless row
of epochs: sample s is window number `permute(s % windows)` of epoch `s // windows`. So the whole state of a
loader is how many samples have been served, and any number of ranks can share them out or take over.
"""

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from headgate.data.shards import Split
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""The target of a token that does not count: what PyTorch's losses leave out."""
ORDER_BLOCK = 4096
OPEN_SHARDS = 128


class Windows:
    """The windows of a split; every token but the first is a target that counts in exactly one of them.

    The last window is moved back to end with the stream; the targets that it shares with the one before are
    ignored in it, and so are those that a shard's loss mask leaves out.
    """

    def __init__(self, split: Split, length: int) -> None:
        if length < 1:
            raise HeadgateError(f"length={length} is too small; a window has at least 1 token")
        if split.tokens <= length:
            raise HeadgateError(
                f"split {split.name!r} has {split.tokens} tokens, too few for a window of {length} and the "
                "target of its last one; choose a shorter length or prepare more text"
            )
        self.split = split
        self.length = length
        self.has_loss = any(shard.has_loss for shard in split.shards)
        self.answer_groups = split.task.groups if split.task is not None else ()
        self.has_documents = all(shard.has_index for shard in split.shards)
        self._starts = list(itertools.accumulate((shard.tokens for shard in split.shards), initial=0))
        # Memory maps hold a file open each, and a folder from a cluster may have thousands of shards.
        self._tokens = lru_cache(OPEN_SHARDS)(lambda shard: split.shards[shard].load_tokens())
        self._ends = lru_cache(OPEN_SHARDS)(lambda shard: split.shards[shard].load_ends())
        self._loss = lru_cache(OPEN_SHARDS)(lambda shard: split.shards[shard].load_loss())

    def __len__(self) -> int:
        return -(-(self.split.tokens - 1) // self.length)

    def read(self, windows: Sequence[int] | np.ndarray) -> tuple["Tensor", "Tensor"]:
        """Tokens and targets of these windows, int64 of shape (B, T)."""
        import torch

        stream = np.empty((len(windows), self.length + 1), dtype=np.int64)
        targets = np.empty((len(windows), self.length), dtype=np.int64)
        for row, window in enumerate(windows):
            start = self._start(int(window))
            for shard, first, last, place in self._pieces(start, self.length + 1):
                stream[row, place : place + last - first] = self._tokens(shard)[first:last]
            targets[row] = stream[row, 1:]
            if self.has_loss:
                self._ignore(targets[row], start + 1)
            targets[row, : int(window) * self.length - start] = IGNORED
        return torch.from_numpy(np.ascontiguousarray(stream[:, :-1])), torch.from_numpy(targets)

    def document_ids(self, windows: Sequence[int] | np.ndarray) -> "Tensor":
        """For each token of these windows, the number in the split of the document it stands in: (B,T)."""
        import torch

        ids = np.empty((len(windows), self.length), dtype=np.int64)
        for row, window in enumerate(windows):
            for shard, first, last, place in self._pieces(self._start(int(window)), self.length):
                ids[row, place : place + last - first] = self._numbers(shard, first, last)
        return torch.from_numpy(ids)

    def marks(self, windows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The bytes of the loss mask at the targets of these windows (B, T); 1 where a shard has no mask."""
        marks = np.ones((len(windows), self.length), dtype=np.int64)
        for row, window in enumerate(windows):
            for shard, first, last, place in self._pieces(self._start(int(window)) + 1, self.length):
                if self.split.shards[shard].has_loss:
                    marks[row, place : place + last - first] = self._loss(shard)[first:last]
        return marks

    def target_documents(self, windows: Sequence[int] | np.ndarray) -> "Tensor":
        """For each target of these windows, the number in the split of the document it stands in: (B,T)."""
        import torch

        numbers = np.empty((len(windows), self.length), dtype=np.int64)
        for row, window in enumerate(windows):
            for shard, first, last, place in self._pieces(self._start(int(window)) + 1, self.length):
                numbers[row, place : place + last - first] = self._numbers(shard, first, last)
        return torch.from_numpy(numbers)

    @cached_property
    def documents(self) -> int:
        """How many documents the split has."""
        return self._documents_before[-1]

    @cached_property
    def _documents_before(self) -> list[int]:
        """For each shard, how many documents stand in those before it; then how many there are."""
        return list(itertools.accumulate((len(shard.load_ends()) for shard in self.split.shards), initial=0))

    def _numbers(self, shard: int, first: int, last: int) -> np.ndarray:
        """The document of each token from `first` to `last` of a shard, by its number in the split."""
        ends = self._ends(shard)
        low, high = np.searchsorted(ends, np.array([first, last - 1], dtype=ends.dtype), side="right")
        edges = np.concatenate([[first], ends[low:high].astype(np.int64), [last]])
        return np.repeat(self._documents_before[shard] + np.arange(low, high + 1), np.diff(edges))

    def _ignore(self, targets: np.ndarray, start: int) -> None:
        """Take out the targets, which stand in the stream from `start` on, that a loss mask leaves out."""
        for shard, first, last, place in self._pieces(start, self.length):
            if self.split.shards[shard].has_loss:
                targets[place : place + last - first][self._loss(shard)[first:last] == 0] = IGNORED

    def _start(self, window: int) -> int:
        return min(window * self.length, self.split.tokens - 1 - self.length)

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Where `count` tokens of the stream from `start` on lie: shard, first, last, place in the row."""
        place = 0
        shard = bisect_right(self._starts, start) - 1
        while place < count:
            first = start + place - self._starts[shard]
            last = min(first + count - place, self.split.shards[shard].tokens)
            yield shard, first, last, place
            place += last - first
            shard += 1


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
        state: Mapping[str, int] | None = None,
    ) -> None:
        """`batch_size` counts this rank's sequences; `state` is what `state()` gave on any rank."""
        if batch_size < 1 or not 0 <= rank < ranks:
            raise HeadgateError(
                f"batch_size={batch_size}, rank={rank}, ranks={ranks} do not fit; "
                "expected a batch of at least 1, and a rank from 0 to ranks - 1"
            )
        bare = next((shard for shard in split.shards if document_ids and not shard.has_index), None)
        if bare is not None:
            raise HeadgateError(f"{bare.path} has no index, so documents cannot be told apart in it")
        self.windows = Windows(split, length)
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
        """All that a later loader needs to go on; the same for every rank."""
        return {
            "samples": self._samples,
            "seed": self.seed,
            "length": self.windows.length,
            "tokens": self.windows.split.tokens,
        }

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
        """A stretch of an epoch's order; many at once cost far less than one by one."""
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
    """Where a shuffle of `range(count)` sends each of `places`, without holding the shuffle.

    A Feistel network permutes the numbers of an even count of bits, at least six, as fewer mix badly; a
    result at or beyond `count` is permuted again until it falls below, which keeps it a permutation.
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
