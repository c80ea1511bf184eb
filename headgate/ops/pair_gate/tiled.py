"""Pair-gated attention in plain PyTorch: tiles of queries, the gate's hidden layer in pieces of cache size.

The forward keeps each query's greatest score and sum; the backward recomputes every tile. Shapes: q and
d_out (B,H,Tq,D); k, v (B,G,Tk,D); halves (B,H,T,M). Inside, the hidden layer is (B,H,M,n,c) for n
queries and c keys: keys last, so that every pass over it is contiguous, and the sum over M is a product.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.ops import reference
from headgate.ops.span.options import Span

HIDDEN_ELEMENTS = 1 << 20
"""Values of the hidden layer at a time, 4 MB in fp32: more would leave the cache, less would be all
overhead."""
QUERIES, KEYS = 64, 128
"""The most queries in a tile, and the fewest keys in a piece."""
LINEAR, CUBIC = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
"""gelu(z) = z sigmoid(LINEAR z + CUBIC z^3): PyTorch's sigmoid takes a third of its tanh's time."""


@dataclass(frozen=True)
class PairTile:
    queries: slice
    keys: slice
    unseen: Tensor


class PairGate:
    """The gate of all pairs, its halves as (B,H,M,T), with room for a piece of its hidden layer."""

    def __init__(
        self, query_half: Tensor, key_half: Tensor, w2: Tensor, b2: Tensor, dtype: torch.dtype
    ) -> None:
        self.query_half, self.key_half = (t.to(dtype).mT.contiguous() for t in (query_half, key_half))
        self.w2, self.b2 = w2.to(dtype), b2.to(dtype)
        *heads, queries = self.query_half.shape
        self.queries = max(1, min(queries, QUERIES, HIDDEN_ELEMENTS // (math.prod(heads) * KEYS)))
        self.keys = max(KEYS, HIDDEN_ELEMENTS // (math.prod(heads) * self.queries))
        room = math.prod(heads) * self.queries * min(self.keys, key_half.shape[2])
        self.room = self.w2.new_empty((3, room))

    def tiles(self, window: int | None) -> Iterator[PairTile]:
        queries, keys, device = self.query_half.shape[3], self.key_half.shape[3], self.w2.device
        for first in range(0, queries, self.queries):
            last = min(queries, first + self.queries)
            low = 0 if window is None else max(0, keys - queries + first - window)
            high = keys - queries + last
            i = torch.arange(high - last + first, high, device=device)[:, None]
            j = torch.arange(low, high, device=device)[None, :]
            yield PairTile(slice(first, last), slice(low, high), ~reference.in_span(i, j, Span(window)))

    def pieces(self, keys: slice) -> Iterator[tuple[slice, slice]]:
        """The keys of a tile in pieces: their place among all keys, and among the tile's."""
        for low in range(keys.start, keys.stop, self.keys):
            high = min(keys.stop, low + self.keys)
            yield slice(low, high), slice(low - keys.start, high - keys.start)

    def hidden(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden layer before its activation, z, the sigmoid in it, and gelu(z): each (B,H,M,n,c)."""
        shape = (*self.query_half.shape[:3], queries.stop - queries.start, keys.stop - keys.start)
        z, share, hidden = (part[: math.prod(shape)].view(shape) for part in self.room)
        torch.add(self.query_half[:, :, :, queries, None], self.key_half[:, :, :, None, keys], out=z)
        torch.mul(z, z, out=share).mul_(CUBIC).add_(LINEAR).mul_(z).sigmoid_()
        return z, share, torch.mul(z, share, out=hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B,H,n,c)"""
        sums = self.w2[:, None] @ hidden.flatten(3)  # (B,H,1,n*c)
        return sums.view(*hidden.shape[:2], *hidden.shape[3:]).add_(self.b2[:, None, None])

    @staticmethod
    def slope(z: Tensor, share: Tensor, room: Tensor) -> Tensor:
        """gelu'(z), written over `share`; `room` and z are lost."""
        torch.addcmul(share, share, share, value=-1, out=room).mul_(z)
        return share.addcmul_(room, z.mul_(z).mul_(3 * CUBIC).add_(LINEAR))


def gated(scores: Tensor, logits: Tensor, form: str) -> Tensor:
    return scores * logits.sigmoid() if form == "multiply" else scores + F.logsigmoid(logits)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_half: Tensor,
    key_half: Tensor,
    w2: Tensor,
    b2: Tensor,
    form: str,
    window: int | None,
    out: Tensor,
    softmax: Tensor,
) -> None:
    dtype = softmax.dtype
    q = q.to(dtype) / math.sqrt(q.shape[-1])
    k, v = (reference.per_head(q, t.to(dtype)) for t in (k, v))
    gate = PairGate(query_half, key_half, w2, b2, dtype)
    for tile in gate.tiles(window):
        scores = q[:, :, tile.queries] @ k[:, :, tile.keys].mT
        for keys, place in gate.pieces(tile.keys):
            logits = gate.logits(gate.hidden(tile.queries, keys)[2])
            scores[..., place] = gated(scores[..., place], logits, form)
        scores.masked_fill_(tile.unseen, -math.inf)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        softmax[:, :, tile.queries] = torch.cat([top, total], -1)
        out[:, :, tile.queries] = (weights @ v[:, :, tile.keys]).div_(total)


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_half: Tensor,
    key_half: Tensor,
    w2: Tensor,
    b2: Tensor,
    out: Tensor,
    softmax: Tensor,
    form: str,
    window: int | None,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    d_query_half: Tensor,
    d_key_half: Tensor,
    d_w2: Tensor,
    d_b2: Tensor,
) -> None:
    dtype, groups, scale = softmax.dtype, k.shape[1], 1 / math.sqrt(q.shape[-1])
    q, d_out = q.to(dtype) * scale, d_out.to(dtype)
    k, v = (reference.per_head(q, t.to(dtype)) for t in (k, v))
    gate = PairGate(query_half, key_half, w2, b2, dtype)
    delta = (d_out * out).sum(-1, keepdim=True, dtype=dtype)
    sum_k, sum_v = torch.zeros_like(k), torch.zeros_like(v)  # (B,H,Tk,D)
    sum_queries, sum_keys = torch.zeros_like(gate.query_half), torch.zeros_like(gate.key_half)  # (B,H,M,T)
    sum_w2, sum_b2 = torch.zeros_like(gate.w2), torch.zeros_like(gate.b2)
    for tile in gate.tiles(window):
        scores = q[:, :, tile.queries] @ k[:, :, tile.keys].mT
        d_scores = (d_out[:, :, tile.queries] @ v[:, :, tile.keys].mT).sub_(delta[:, :, tile.queries])
        top, total = softmax[:, :, tile.queries].split(1, -1)
        weights = torch.empty_like(scores)
        for keys, place in gate.pieces(tile.keys):
            z, share, hidden = gate.hidden(tile.queries, keys)
            logits, raw = gate.logits(hidden), scores[..., place]
            weight = gated(raw, logits, form).sub_(top).exp_().div_(total)
            weight.masked_fill_(tile.unseen[:, place], 0)
            weights[..., place] = weight
            d_gated = weight.mul_(d_scores[..., place])
            if form == "multiply":
                opened = logits.sigmoid_()
                d_scores[..., place] = d_gated * opened
                d_logits = d_gated.mul_(raw).mul_(opened).mul_(1 - opened)
            else:
                d_scores[..., place] = d_gated
                d_logits = d_gated.mul_(logits.neg_().sigmoid_())
            sum_b2 += d_logits.sum((0, 2, 3))
            sum_w2 += (d_logits.flatten(2)[:, :, None] @ hidden.flatten(3).mT).sum((0, 2))
            d_hidden = gate.slope(z, share, hidden).mul_(d_logits[:, :, None])
            sum_queries[:, :, :, tile.queries] += d_hidden.sum(4)
            sum_keys[:, :, :, keys] += d_hidden.sum(3)
        sum_v[:, :, tile.keys] += weights.mT @ d_out[:, :, tile.queries]
        sum_k[:, :, tile.keys] += d_scores.mT @ q[:, :, tile.queries]
        d_q[:, :, tile.queries] = (d_scores @ k[:, :, tile.keys]).mul_(scale)
    d_k.copy_(sum_k.unflatten(1, (groups, -1)).sum(2))
    d_v.copy_(sum_v.unflatten(1, (groups, -1)).sum(2))
    d_query_half.copy_((sum_queries * gate.w2[:, :, None]).mT)
    d_key_half.copy_((sum_keys * gate.w2[:, :, None]).mT)
    d_w2.copy_(sum_w2)
    d_b2.copy_(sum_b2)
