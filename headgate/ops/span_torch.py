"""Span attention in plain PyTorch: tiles of queries against the keys they reach, linear in time and memory.

What PyTorch's own fused CPU attention can do, it does: full causal spans, and the forward of a window, whose
tiles are overlapping views of the keys under one shared mask.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D). Inside, heads stand as (G,R), R = H/G, and a tile's queries as
(B,G,R*n,D), so that grouped keys are never repeated.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headgate.ops import reference
from headgate.ops.tiles import query_tiles


@dataclass(frozen=True)
class Span:
    """Which keys a query attends to; everything in absolute positions."""

    window: int | None
    dense_prefix: int
    global_tokens: int
    ring: int
    start: int

    def tiles(self, q: Tensor, k: Tensor) -> Iterator["Tile"]:
        """Query tiles with the key indices they need; what a tile holds depends on the span, not on T."""
        offset = k.shape[2] - q.shape[2]
        reach = max(self.window, self.ring) if self.window is not None else None
        keys_of_a_row = k.shape[2] if reach is None else min(k.shape[2], reach + 128 + self.global_tokens)
        row = q.shape[0] * q.shape[1] * keys_of_a_row
        for first, last in query_tiles(
            q.shape[2], row, most=256 if reach is None else max(64, min(256, reach))
        ):
            low = offset + first + self.start  # position of the tile's first query
            if reach is None or low < self.dense_prefix:
                low = 0
            else:
                low = max(0, low - reach - self.start)
            high = offset + last
            keys = torch.arange(low, high, device=k.device)
            extra = min(low, max(0, self.global_tokens - self.start))
            if extra:
                keys = torch.cat([torch.arange(extra, device=k.device), keys])
            i = torch.arange(offset + first, offset + last, device=k.device)[:, None] + self.start
            j = keys[None, :] + self.start
            allowed = reference.in_span(i, j, self.window, self.dense_prefix, self.global_tokens)
            in_ring = None
            if self.ring:
                assert self.window is not None
                in_ring = (i - j > self.window) & (i - j <= self.ring)
                allowed = allowed | in_ring
            yield Tile(slice(first, last), slice(low, high), extra, ~allowed, in_ring)


@dataclass(frozen=True)
class Tile:
    queries: slice
    keys: slice
    extra: int
    """Global tokens that stand before the contiguous keys."""
    hidden: Tensor
    in_ring: Tensor | None

    def of_keys(self, kv: Tensor) -> Tensor:
        near = kv[:, :, self.keys]
        return torch.cat([kv[:, :, : self.extra], near], 2) if self.extra else near

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        total[:, :, : self.extra] += part[:, :, : self.extra]
        total[:, :, self.keys] += part[:, :, self.extra :]

    def of_queries(self, grouped: Tensor) -> Tensor:
        """(B,G,R,Tq,...) -> (B,G,R*n,...)"""
        return grouped[:, :, :, self.queries].flatten(2, 3)

    def scores(self, q: Tensor, k: Tensor, ring_log_weight: Tensor | None) -> Tensor:
        """Scaled and masked logits (B,G,R,n,m) of q (B,G,R*n,D), which carries the scale, and k (B,G,m,D)."""
        n = self.hidden.shape[0]
        s = (q @ k.mT).unflatten(2, (-1, n))
        if ring_log_weight is not None:
            assert self.in_ring is not None
            s += torch.where(self.in_ring, ring_log_weight[:, :, :, self.queries, None], 0.0)
        return s.masked_fill_(self.hidden, -math.inf)


def accumulator(t: Tensor) -> torch.dtype:
    """Half precision is summed in single."""
    return torch.float32 if t.dtype in (torch.bfloat16, torch.float16) else t.dtype


def _grouped(t: Tensor, groups: int) -> Tensor:
    return t.unflatten(1, (groups, -1))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring_log_weight: Tensor | None,
    window: int | None,
    dense_prefix: int,
    global_tokens: int,
    ring: int,
    start: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    g, dtype = k.shape[1], lse.dtype
    scaled = _grouped(q.to(dtype) / math.sqrt(q.shape[-1]), g)
    k, v = k.to(dtype), v.to(dtype)
    weight = None if ring_log_weight is None else _grouped(ring_log_weight.to(dtype), g)
    out, lse = _grouped(out, g), _grouped(lse, g)
    for tile in Span(window, dense_prefix, global_tokens, ring, start).tiles(q, k):
        s = tile.scores(tile.of_queries(scaled), tile.of_keys(k), weight)
        top = s.amax(-1, keepdim=True)
        p = s.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        lse[:, :, :, tile.queries] = (total.log() + top).squeeze(-1)
        attended = (p.flatten(2, 3) @ tile.of_keys(v)).unflatten(2, p.shape[2:4])
        out[:, :, :, tile.queries] = attended.div_(total)


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring_log_weight: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: int | None,
    dense_prefix: int,
    global_tokens: int,
    ring: int,
    start: int,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    d_weight: Tensor,
) -> None:
    g, dtype = k.shape[1], lse.dtype
    scale = 1 / math.sqrt(q.shape[-1])
    scaled, d_grouped = _grouped(q.to(dtype) * scale, g), _grouped(d_out.to(dtype), g)
    delta = (d_grouped * _grouped(out.to(dtype), g)).sum(-1)
    if d_lse is not None:
        delta -= _grouped(d_lse, g)
    lse = _grouped(lse, g)
    wide_k, wide_v = k.to(dtype), v.to(dtype)
    weight = None if ring_log_weight is None else _grouped(ring_log_weight.to(dtype), g)
    grouped_d_q = _grouped(d_q, g)
    sum_k, sum_v = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for tile in Span(window, dense_prefix, global_tokens, ring, start).tiles(q, k):
        q_tile, k_tile, d_tile = tile.of_queries(scaled), tile.of_keys(wide_k), tile.of_queries(d_grouped)
        p = tile.scores(q_tile, k_tile, weight).sub_(lse[:, :, :, tile.queries, None]).exp_()
        tile.add_to_keys(sum_v, p.flatten(2, 3).mT @ d_tile)
        d_s = (d_tile @ tile.of_keys(wide_v).mT).unflatten(2, p.shape[2:4])
        d_s = d_s.sub_(delta[:, :, :, tile.queries, None]).mul_(p)
        if weight is not None:
            assert tile.in_ring is not None
            _grouped(d_weight, g)[:, :, :, tile.queries] = (d_s * tile.in_ring).sum(-1)
        flat = d_s.flatten(2, 3)
        grouped_d_q[:, :, :, tile.queries] = (flat @ k_tile).mul_(scale).unflatten(2, p.shape[2:4])
        tile.add_to_keys(sum_k, flat.mT @ q_tile)
    d_k.copy_(sum_k)
    d_v.copy_(sum_v)
