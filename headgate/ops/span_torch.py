"""Span attention in plain PyTorch: tiles of queries against the keys they reach, linear in time and memory.

What PyTorch's own fused CPU attention can do, it does: full causal spans, and the forward of a window, whose
tiles are overlapping views of the keys under one shared mask. The rest are matrix products per tile.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D). Inside, heads stand as (G,R), R = H/G, and a tile's queries as
(B,G,R*n,D), so that grouped keys are never repeated.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headgate.ops import reference
from headgate.ops.tiles import query_tiles

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class Span:
    """Which keys the queries of one call attend to. Positions count from `start`, indices from 0."""

    queries: int
    keys: int
    window: int | None
    dense_prefix: int
    global_tokens: int
    ring: int | None
    start: int
    device: torch.device

    @property
    def offset(self) -> int:
        """The key of the first query."""
        return self.keys - self.queries

    @property
    def reach(self) -> int | None:
        return self.window if self.window is None or self.ring is None else max(self.window, self.ring)

    @cached_property
    def whole_windows(self) -> range:
        """The first queries of the tiles whose queries see a whole window and nothing else; its step is their
        size."""
        if self.window is None or self.ring is not None or self.global_tokens > self.start:
            return range(0)
        size = max(32, min(128, self.window // 2))
        first = max(0, max(self.window, self.dense_prefix - self.start) - self.offset)
        return range(first, self.queries - size + 1, size)

    def tiles(self, rows: int, *, whole_windows: bool = True) -> Iterator["Tile"]:
        """All tiles, or those outside `whole_windows`, for `rows` heads of queries side by side."""
        before = after = self.queries
        if self.whole_windows:
            before, after = self.whole_windows[0], self.whole_windows[-1] + self.whole_windows.step
        yield from self._other_tiles(0, before, rows)
        if whole_windows and self.whole_windows:
            yield from self.window_tiles()
        yield from self._other_tiles(after, self.queries, rows)

    def _other_tiles(self, first: int, last: int, rows: int) -> Iterator["Tile"]:
        reach = self.reach
        most = 256 if reach is None else max(32, min(256, reach))
        keys = self.keys if reach is None else min(self.keys, reach + most + self.global_tokens)
        for a, b in query_tiles(last - first, rows * keys, most=most):
            yield self._tile(first + a, first + b)

    def window_tiles(self) -> Iterator["Tile"]:
        """The tiles of `whole_windows`, which share their masks."""
        assert self.window is not None
        size, window = self.whole_windows.step, self.window
        i, j = torch.arange(size, device=self.device)[:, None], torch.arange(size, device=self.device)
        # A tile sees window + size keys: the first `size` of them leave the window, the last come into it.
        edges = [(slice(0, size), j < i), (slice(window, window + size), j > i)]
        for first in self.whole_windows:
            own = self.offset + first
            yield Tile(slice(first, first + size), slice(own - window, own + size), 0, edges, None)

    def _tile(self, first: int, last: int) -> "Tile":
        low = 0
        if self.reach is not None and self.start + self.offset + first >= self.dense_prefix:
            low = max(0, self.offset + first - self.reach)
        high = self.offset + last
        keys = torch.arange(low, high, device=self.device)
        extra = min(low, max(0, self.global_tokens - self.start))
        if extra:
            keys = torch.cat([torch.arange(extra, device=self.device), keys])
        i = torch.arange(self.offset + first, high, device=self.device)[:, None] + self.start
        j = keys[None, :] + self.start
        allowed = reference.in_span(i, j, self.window, self.dense_prefix, self.global_tokens)
        in_ring = None
        if self.ring is not None:
            assert self.window is not None
            in_ring = (i - j > self.window) & (i - j <= self.ring)
            allowed = allowed | in_ring
        return Tile(slice(first, last), slice(low, high), extra, [(slice(None), ~allowed)], in_ring)


@dataclass(frozen=True)
class Tile:
    queries: slice
    keys: slice
    extra: int
    """Global tokens that stand before the contiguous keys."""
    edges: list[tuple[slice, Tensor]]
    """Ranges of the tile's keys, and which pairs (n, keys) are hidden in them."""
    in_ring: Tensor | None

    def of_keys(self, kv: Tensor) -> Tensor:
        near = kv[:, :, self.keys]
        return torch.cat([kv[:, :, : self.extra], near], 2) if self.extra else near

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        if self.extra:
            total[:, :, : self.extra] += part[:, :, : self.extra]
        total[:, :, self.keys] += part[:, :, self.extra :]

    def of_queries(self, grouped: Tensor) -> Tensor:
        """(B,G,R,Tq,...) -> (B,G,R*n,...)"""
        return grouped[:, :, :, self.queries].flatten(2, 3)

    def scores(self, q: Tensor, k: Tensor, ring_log_weight: Tensor | None) -> Tensor:
        """Masked logits (B,G,R,n,m) of q (B,G,R*n,D), which carries the scale, and k (B,G,m,D)."""
        s = (q @ k.mT).unflatten(2, (-1, self.queries.stop - self.queries.start))
        if ring_log_weight is not None:
            assert self.in_ring is not None
            s += torch.where(self.in_ring, ring_log_weight[:, :, :, self.queries, None], 0.0)
        for columns, hidden in self.edges:
            s[..., columns].masked_fill_(hidden, -math.inf)
        return s


def accumulator(t: Tensor) -> torch.dtype:
    """Half precision is summed in single."""
    return torch.float32 if t.dtype in (torch.bfloat16, torch.float16) else t.dtype


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
    if _is_fused(q, k, window):
        fused_out, fused_lse = _fused(_rows(q), _rows(k), _rows(v), 0.0, True)
        out.copy_(fused_out)
        lse.copy_(fused_lse)
        return
    g, dtype = k.shape[1], lse.dtype
    scaled = _grouped(q.to(dtype) / math.sqrt(q.shape[-1]), g)
    k, v = k.to(dtype), v.to(dtype)
    weight = None if ring_log_weight is None else _grouped(ring_log_weight.to(dtype), g)
    out, lse = _grouped(out, g), _grouped(lse, g)
    rings = None if ring_log_weight is None else ring
    span = Span(q.shape[2], k.shape[2], window, dense_prefix, global_tokens, rings, start, q.device)
    fused = q.device.type == "cpu" and len(span.whole_windows) > 0
    if fused:
        _fused_windows(span, scaled, k, v, out, lse)
    for tile in span.tiles(q.shape[0] * q.shape[1], whole_windows=not fused):
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
    if d_lse is None and _is_fused(q, k, window):
        grads = _fused_backward(*map(_rows, (d_out, q, k, v, out)), lse, 0.0, True)
        for to, grad in zip((d_q, d_k, d_v), grads, strict=True):
            to.copy_(grad)
        return
    g, dtype = k.shape[1], lse.dtype
    scale = 1 / math.sqrt(q.shape[-1])
    delta = (d_out.to(dtype) * out.to(dtype)).sum(-1)
    if d_lse is not None:
        delta -= d_lse
    # One more column carries -lse into the scores and -delta into the probabilities' gradients.
    scaled = _grouped(torch.cat([q.to(dtype) * scale, -lse[..., None]], -1), g)
    d_grouped = _grouped(torch.cat([d_out.to(dtype), -delta[..., None]], -1), g)
    one = k.new_ones((*k.shape[:3], 1), dtype=dtype)
    wide_k, wide_v = torch.cat([k.to(dtype), one], -1), torch.cat([v.to(dtype), one], -1)
    weight = None if ring_log_weight is None else _grouped(ring_log_weight.to(dtype), g)
    grouped_d_q = _grouped(d_q, g)
    sum_k, sum_v = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    rings = None if ring_log_weight is None else ring
    span = Span(q.shape[2], k.shape[2], window, dense_prefix, global_tokens, rings, start, q.device)
    for tile in span.tiles(q.shape[0] * q.shape[1]):
        q_tile, k_tile, d_tile = tile.of_queries(scaled), tile.of_keys(wide_k), tile.of_queries(d_grouped)
        p = tile.scores(q_tile, k_tile, weight).exp_()
        tile.add_to_keys(sum_v, p.flatten(2, 3).mT @ d_tile[..., :-1])
        d_s = (d_tile @ tile.of_keys(wide_v).mT).unflatten(2, p.shape[2:4]).mul_(p)
        if weight is not None:
            assert tile.in_ring is not None
            _grouped(d_weight, g)[:, :, :, tile.queries] = (d_s * tile.in_ring).sum(-1)
        flat = d_s.flatten(2, 3)
        grouped_d_q[:, :, :, tile.queries] = (flat @ k_tile[..., :-1]).mul_(scale).unflatten(2, p.shape[2:4])
        tile.add_to_keys(sum_k, flat.mT @ q_tile[..., :-1])
    d_k.copy_(sum_k)
    d_v.copy_(sum_v)


def _grouped(t: Tensor, groups: int) -> Tensor:
    return t.unflatten(1, (groups, -1))


def _rows(t: Tensor) -> Tensor:
    """The fused attention takes rows to be contiguous without asking."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _is_fused(q: Tensor, k: Tensor, window: int | None) -> bool:
    return window is None and q.device.type == "cpu" and q.shape[2] == k.shape[2]


def _fused_windows(span: Span, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Fills the queries of `whole_windows`: tiles stand as a batch, and their keys are views that overlap."""
    assert span.window is not None
    window, tiles, size = span.window, len(span.whole_windows), span.whole_windows.step
    first = span.whole_windows[0]
    queries = slice(first, first + tiles * size)
    b, g, r, _, d = q.shape

    def tiled(t: Tensor) -> Tensor:  # (B,G,R,Tq,...) -> (tiles,B,G,R,size,...)
        return t[:, :, :, queries].unflatten(3, (tiles, size)).movedim(3, 0)

    def overlapping(kv: Tensor) -> Tensor:  # (B,G,Tk,D) -> (tiles,B*G,window+size,D)
        reached = _rows(kv).flatten(0, 1)[:, span.offset + first - window :]
        return reached.unfold(1, window + size, size)[:, :tiles].permute(1, 0, 3, 2)

    mask = torch.zeros(size, window + size, dtype=q.dtype)
    for columns, hidden in next(span.window_tiles()).edges:
        mask[:, columns].masked_fill_(hidden, -math.inf)
    q_tiles = _rows(tiled(q).reshape(tiles, b * g, r * size, d))
    keys, values = overlapping(k), overlapping(v)
    fused_out, fused_lse = _fused(q_tiles, keys, values, 0.0, False, attn_mask=mask.repeat(r, 1), scale=1.0)
    tiled(out).copy_(fused_out.view(tiles, b, g, r, size, d))
    tiled(lse).copy_(fused_lse.reshape(tiles, b, g, r, size))
