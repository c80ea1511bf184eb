"""Pair-gated attention in plain PyTorch: tiles of queries, the gate's hidden layer in pieces that fit the cache.

The forward keeps each query's greatest score and sum; the backward computes every tile again. Shapes: q and
d_out (B,H,Tq,D); k, v (B,G,Tk,D); halves (B,H,T,M). Inside, the hidden layer stands as (B,H,M,n,c) for n
queries and c keys: keys last, so that every pass over it is contiguous, and the sum over M is a product.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.ops import reference

HIDDEN_ELEMENTS = 1 << 18
"""Values of the hidden layer at a time: 1 MB in fp32, which the cores' own caches hold."""
QUERIES = 64
"""Queries of a tile."""


@dataclass(frozen=True)
class Gate:
    """The gate of all pairs: its halves (B,H,M,T), w2 (H,M), b2 (H)."""

    query_half: Tensor
    key_half: Tensor
    w2: Tensor
    b2: Tensor

    def pieces(self, queries: slice, keys: slice) -> Iterator[tuple[slice, slice]]:
        """The keys of a tile in pieces: where they lie among all keys, and where among the tile's."""
        row = self.query_half[:, :, :, queries].numel()
        step = max(16, HIDDEN_ELEMENTS // row)
        for low in range(keys.start, keys.stop, step):
            high = min(keys.stop, low + step)
            yield slice(low, high), slice(low - keys.start, high - keys.start)

    def hidden(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """The hidden layer before and after its activation, (B,H,M,n,c)."""
        z = self.query_half[:, :, :, queries, None] + self.key_half[:, :, :, None, keys]
        return z, F.gelu(z, approximate="tanh")

    def logits(self, hidden: Tensor) -> Tensor:
        """(B,H,n,c)"""
        sums = self.w2[:, None] @ hidden.flatten(3)  # (B,H,1,n*c)
        return sums.view(*hidden.shape[:2], *hidden.shape[3:]).add_(self.b2[:, None, None])


@dataclass(frozen=True)
class Tile:
    queries: slice
    keys: slice
    unseen: Tensor


def tiles(queries: int, keys: int, window: int | None, device: torch.device) -> Iterator[Tile]:
    offset = keys - queries
    for first in range(0, queries, QUERIES):
        last = min(queries, first + QUERIES)
        low = 0 if window is None else max(0, offset + first - window)
        i = torch.arange(offset + first, offset + last, device=device)[:, None]
        j = torch.arange(low, offset + last, device=device)[None, :]
        yield Tile(slice(first, last), slice(low, offset + last), ~reference.in_span(i, j, window))


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
    gate = _gate(query_half, key_half, w2, b2, dtype)
    for tile in tiles(q.shape[2], k.shape[2], window, q.device):
        scores = q[:, :, tile.queries] @ k[:, :, tile.keys].mT
        for keys, place in gate.pieces(tile.queries, tile.keys):
            logits = gate.logits(gate.hidden(tile.queries, keys)[1])
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
    gate = _gate(query_half, key_half, w2, b2, dtype)
    delta = (d_out * out).sum(-1, keepdim=True, dtype=dtype)
    sum_k, sum_v = torch.zeros_like(k), torch.zeros_like(v)  # (B,H,Tk,D)
    sum_queries, sum_keys = torch.zeros_like(gate.query_half), torch.zeros_like(gate.key_half)  # (B,H,M,T)
    sum_w2, sum_b2 = torch.zeros_like(gate.w2), torch.zeros_like(gate.b2)
    for tile in tiles(q.shape[2], k.shape[2], window, q.device):
        scores = q[:, :, tile.queries] @ k[:, :, tile.keys].mT
        d_scores = (d_out[:, :, tile.queries] @ v[:, :, tile.keys].mT).sub_(delta[:, :, tile.queries])
        top, total = softmax[:, :, tile.queries].split(1, -1)
        weights = torch.empty_like(scores)
        for keys, place in gate.pieces(tile.queries, tile.keys):
            z, hidden = gate.hidden(tile.queries, keys)
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
            sum_w2 += (hidden.flatten(3) @ d_logits.flatten(2)[..., None]).sum((0, 3))
            d_hidden = torch.ops.aten.gelu_backward(d_logits[:, :, None].expand_as(z), z, approximate="tanh")
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


def _gate(query_half: Tensor, key_half: Tensor, w2: Tensor, b2: Tensor, dtype: torch.dtype) -> Gate:
    query_half, key_half = (t.to(dtype).mT.contiguous() for t in (query_half, key_half))
    return Gate(query_half, key_half, w2.to(dtype), b2.to(dtype))
