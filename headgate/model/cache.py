"""The keys and values of past tokens, per layer, from the first key that any later query may need.

A layer's cache lives in buffers that are written at their end. Dropping keys costs nothing: the live part is
a view, and when the end is reached it moves to the front (or to larger buffers), which a windowed mechanism
does about once per window of tokens. So its memory stays bounded and its time per token constant, at any
length.

The rows of a batch may be at different positions. Mechanisms have rules about absolute positions, so padding
cannot stand in for missing tokens: rows of the same length form a group with its own buffers, the mechanism
runs once per group, and everything else in the decoder runs once for all rows. A batch of equal lengths is
one group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops.gpu import send


class LayerCache:
    def __init__(self, most: int | None = None) -> None:
        self.most = most
        """The most tokens there will ever be, if known: buffers do not grow beyond that."""
        self.start = 0
        """Position of the first key held."""
        self._gap = 0  # keys dropped after the first ones, if a mechanism wants those kept
        self._begin = self._end = 0
        self._buffers: list[Tensor] = []  # keys, values, and the mechanism's states per key
        self.carried: dict[str, Tensor] = {}
        """Tensors (B,...) of fixed size that a mechanism passes from call to call."""
        self.blocks: dict[str, LayerCache] = {}
        """Summaries of complete blocks of keys, with one row per block instead of per key."""

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def end(self) -> int:
        """Position of the next key."""
        return self.start + self._gap + len(self)

    @property
    def bytes(self) -> int:
        own = sum(map(_bytes, [*self._buffers, *self.carried.values()]))
        return own + sum(blocks.bytes for blocks in self.blocks.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of what is held, without room for more."""
        held = [buffer[:, :, : len(self)] for buffer in self._buffers]
        own = sum(map(_bytes, [*held, *self.carried.values()]))
        return own + sum(blocks.held_bytes for blocks in self.blocks.values())

    def append(self, *new: Tensor) -> list[Tensor]:
        """Add the newest tokens' tensors (B,heads,T,...); returns views of all that is held."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new):
            raise HeadgateError(
                "a cache carries no gradients; run the decoder with a cache under torch.no_grad()"
            )
        held, added = len(self), new[0].shape[2]
        capacity = self._buffers[0].shape[2] if self._buffers else 0
        if self._end + added > capacity:
            wanted = 2 * (held + added)
            if self.most is not None:
                wanted = max(held + added, min(wanted, self.most - self.start - self._gap))
            # Moving in place would overlap unless the live part starts beyond its own length.
            fits = held <= self._begin and held + added <= capacity <= 2 * wanted
            target = self._buffers if fits else [t.new_empty(*t.shape[:2], wanted, *t.shape[3:]) for t in new]
            for old, fresh in zip(self._buffers, target, strict=False):
                fresh[:, :, :held] = old[:, :, self._begin : self._end]
            self._buffers, self._begin, self._end = target, 0, held
        for buffer, tensor in zip(self._buffers, new, strict=True):
            buffer[:, :, self._end : self._end + added] = tensor
        self._end += added
        return self.held()

    def held(self) -> list[Tensor]:
        """Views of all that is held."""
        return [buffer[:, :, self._begin : self._end] for buffer in self._buffers]

    def blocks_of(self, name: str) -> "LayerCache":
        """Where summaries of complete blocks are kept under this name."""
        return self.blocks.setdefault(name, LayerCache())

    def drop_before(self, position: int, *, keep: int = 0) -> None:
        """Forget the keys before `position`, except the first `keep` of the sequence, which then come right
        before it."""
        dropped = max(0, min(position - self.start - self._gap, len(self)) - keep)
        if dropped == 0:
            return
        for buffer in self._buffers if keep else ():
            first = buffer[:, :, self._begin : self._begin + keep].clone()  # it may overlap its new place
            buffer[:, :, self._begin + dropped : self._begin + dropped + keep] = first
        self._begin += dropped
        if keep:
            self._gap += dropped
        else:
            self.start += dropped

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order; a row may appear more than once."""

        def selected(t: Tensor) -> Tensor:
            return t.index_select(0, torch.tensor(rows, device=t.device))

        self._buffers = list(map(selected, self._buffers))
        self.carried = {name: selected(t) for name, t in self.carried.items()}
        for blocks in self.blocks.values():
            blocks.select(rows)


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


class Group:
    """The rows of a batch that are at the same position."""

    def __init__(self, n_layers: int, most: int | None = None) -> None:
        self.rows: list[int] | None = None
        """Which rows of the batch they are; None before the first tokens, when their number is unknown."""
        self.length = 0
        """Tokens seen so far; the next one has this position."""
        self.layers = [LayerCache(most) for _ in range(n_layers)]


class Cache:
    """What a decoder keeps between calls: pass the same one to each call, with the next tokens of every row.

    For rows of different lengths, run each length by itself with its own cache, then `join` the caches.
    """

    def __init__(self, n_layers: int, most: int | None = None) -> None:
        self.groups = [Group(n_layers, most)]
        # On the device once for all tokens, until rows change: a copy for each would make it wait.
        self._lengths: Tensor | None = None
        self._parts: list[tuple[slice | Tensor, Group]] | None = None

    @classmethod
    def join(cls, caches: Sequence["Cache"]) -> "Cache":
        """One cache of all their rows, in that order. The given caches must not be used again."""
        joined = cls(0)
        joined.groups, batch = [], 0
        for cache in caches:
            for group in cache.groups:
                if group.rows is None:
                    raise HeadgateError("a cache that has seen no token has no rows to join; run it first")
                group.rows = [batch + row for row in group.rows]
                joined.groups.append(group)
            batch += cache.batch or 0
        return joined

    @property
    def batch(self) -> int | None:
        """How many rows there are; None before the first tokens."""
        if any(group.rows is None for group in self.groups):
            return None
        return sum(len(group.rows or ()) for group in self.groups)

    @property
    def length(self) -> int:
        """Tokens seen so far by the longest row."""
        return max((group.length for group in self.groups), default=0)

    @property
    def lengths(self) -> list[int]:
        """Tokens seen so far by each row; each row's next token has this position."""
        by_row = {row: group.length for group in self.groups for row in group.rows or ()}
        return [by_row[row] for row in sorted(by_row)]

    @property
    def bytes(self) -> int:
        """Memory of the buffers."""
        return sum(layer.bytes for group in self.groups for layer in group.layers)

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys held, without room for more."""
        return sum(layer.held_bytes for group in self.groups for layer in group.layers)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order: without those that have ended, or as a beam search wants them."""
        kept = []
        for group in self.groups:
            assert group.rows is not None
            place = {row: index for index, row in enumerate(group.rows)}
            wanted = [place[row] for row in rows if row in place]
            if not wanted:
                continue
            if wanted != list(range(len(place))):
                for layer in group.layers:
                    layer.select(wanted)
            group.rows = [new for new, row in enumerate(rows) if row in place]
            kept.append(group)
        self.groups, self._lengths, self._parts = kept, None, None

    def claim(self, batch: int) -> None:
        """Expect the next tokens for this many rows; a number other than before is refused."""
        if self.batch is None:
            self.groups[0].rows = list(range(batch))
        elif self.batch != batch:
            raise HeadgateError(
                f"a batch of {batch} was given to a cache of batch {self.batch}; "
                "use a new cache for another batch"
            )

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Positions of the next `count` tokens: (T) if all rows are at the same one, (B,T) otherwise."""
        following = torch.arange(count, device=device)
        if len(self.groups) == 1:
            return self.groups[0].length + following
        if self._lengths is None:
            self._lengths = send(torch.tensor(self.lengths), device)
        return self._lengths[:, None] + following

    def parts(self, device: torch.device) -> list[tuple[slice | Tensor, Group]]:
        """The groups, each with what selects its rows from the batch: a slice if they are adjacent."""
        if self._parts is None:
            self._parts = []
            for group in self.groups:
                assert group.rows is not None
                first, end = group.rows[0], group.rows[-1] + 1
                together = end - first == len(group.rows)
                rows = slice(first, end) if together else send(torch.tensor(group.rows), device)
                self._parts.append((rows, group))
        return self._parts

    def advance(self, count: int) -> None:
        """`count` tokens were added to every row."""
        for group in self.groups:
            group.length += count
        if self._lengths is not None:
            self._lengths = self._lengths + count
