"""Span attention in plain PyTorch: tiles of queries against the keys they reach, linear in time and memory.

What PyTorch's own fused CPU attention can do, it does: full causal spans, and the forward pass of a window,
whose tiles are overlapping views of the keys under one shared mask. The rest is matrix products per tile.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D). Inside, N = B*G and R = H/G: queries are (N,R,Tq,D), a tile of them
(N,R*n,D), and keys (N,Tk,D), so that grouped keys are never repeated. Scores are in units of log 2, since
PyTorch's exp2 takes half the time of its exp.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.ops import reference
from headgate.ops.documents import stretches
from headgate.ops.span.options import Span
from headgate.ops.tiles import query_tiles

LOG2E, LN2 = math.log2(math.e), math.log(2)
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class SpanTiles:
    """The tiles of one call. Positions count from `span.start`, indices from 0."""

    queries: int
    keys: int
    span: Span
    device: torch.device

    @property
    def offset(self) -> int:
        """The key of the first query."""
        return self.keys - self.queries

    @cached_property
    def whole_windows(self) -> range:
        """The first queries of the tiles whose queries see a whole window and nothing else; its step is their
        size."""
        span = self.span
        if span.window is None or span.ring or span.pinned > span.start:
            return range(0)
        size = max(32, min(64, span.window // 2))
        first = max(0, max(span.window, span.dense_prefix - span.start) - self.offset)
        return range(first, self.queries - size + 1, size)

    def tiles(self, rows: int, *, whole_windows: bool = True) -> Iterator["SpanTile"]:
        """All tiles, or those outside `whole_windows`, for `rows` heads of queries side by side."""
        before = after = self.queries
        if self.whole_windows:
            before, after = self.whole_windows[0], self.whole_windows[-1] + self.whole_windows.step
        yield from self._other_tiles(0, before, rows)
        if whole_windows and self.whole_windows:
            yield from self.window_tiles()
        yield from self._other_tiles(after, self.queries, rows)

    def _other_tiles(self, first: int, last: int, rows: int) -> Iterator["SpanTile"]:
        reach = self.span.reach
        most = 256 if reach is None else max(32, min(256, reach))
        keys = self.keys if reach is None else min(self.keys, reach + most + self.span.pinned)
        for a, b in query_tiles(last - first, rows * keys, self.device, most=most):
            yield self._tile(first + a, first + b)

    def window_tiles(self) -> Iterator["SpanTile"]:
        """The tiles of `whole_windows`, which share their masks."""
        assert self.span.window is not None
        size, window = self.whole_windows.step, self.span.window
        i, j = torch.arange(size, device=self.device)[:, None], torch.arange(size, device=self.device)
        # A tile sees window + size keys: the first `size` of them leave the window, the last ones enter it.
        edges = [(slice(0, size), j < i), (slice(window, window + size), j > i)]
        for first in self.whole_windows:
            own = self.offset + first
            yield SpanTile(
                slice(first, first + size), slice(own - window, own + size), 0, edges, None, self.offset
            )

    def _tile(self, first: int, last: int) -> "SpanTile":
        span, low = self.span, 0
        if span.reach is not None and span.start + self.offset + first >= span.dense_prefix:
            low = max(0, self.offset + first - span.reach)
        high = self.offset + last
        keys = torch.arange(low, high, device=self.device)
        extra = min(low, max(0, span.pinned - span.start))
        if extra:
            keys = torch.cat([torch.arange(extra, device=self.device), keys])
        i = torch.arange(self.offset + first, high, device=self.device)[:, None] + span.start
        j = keys[None, :] + span.start
        allowed, in_ring = reference.in_span(i, j, span), None
        if span.ring:
            in_ring = reference.in_ring(i, j, span)
            allowed = allowed | in_ring
        hidden = [(slice(None), ~allowed)]
        return SpanTile(slice(first, last), slice(low, high), extra, hidden, in_ring, self.offset)


@dataclass(frozen=True)
class SpanTile:
    queries: slice
    keys: slice
    extra: int
    """Pinned keys that come before the contiguous ones."""
    edges: list[tuple[slice, Tensor]]
    """Ranges of the tile's keys, and which pairs (n, keys) are hidden in them."""
    in_ring: Tensor | None
    offset: int
    """The key of the call's first query."""

    def of_keys(self, kv: Tensor) -> Tensor:
        near = kv[:, self.keys]
        return torch.cat([kv[:, : self.extra], near], 1) if self.extra else near

    def add_to_keys(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Adds weights (N,R*n,m) transposed times rows (N,R*n,D) to the tile's keys."""
        if self.extra:
            total[:, : self.extra].baddbmm_(weights[..., : self.extra].mT, rows)
            weights = weights[..., self.extra :]
        total[:, self.keys].baddbmm_(weights.mT, rows)

    def of_queries(self, grouped: Tensor) -> Tensor:
        """(N,R,Tq,...) -> (N,R*n,...)"""
        return grouped[:, :, self.queries].flatten(1, 2)

    @property
    def own_keys(self) -> slice:
        return slice(self.offset + self.queries.start, self.offset + self.queries.stop)

    def scores(self, q: Tensor, k: Tensor, biases: "Biases") -> Tensor:
        """Masked logits (N,R,n,m) of q (N,R*n,D), which includes the scale, and k (N,m,D)."""
        s = torch.bmm(q, k.mT).unflatten(1, (-1, self.queries.stop - self.queries.start))
        if biases.ring is not None:
            assert self.in_ring is not None
            s += torch.where(self.in_ring, biases.ring[:, :, self.queries, None], 0.0) * LOG2E
        if biases.key is not None:
            own, rows = biases.key[:, :, self.own_keys], biases.key.transpose(1, 2)
            s += (self.of_keys(rows).transpose(1, 2)[:, :, None] - own[..., None]).mul_(LOG2E)
        if biases.distance is not None:
            batches = s.unflatten(0, (-1, len(biases.distance)))
            batches.add_(self.by_distance(biases.distance), alpha=LOG2E)
        for columns, hidden in self.edges:
            s[..., columns].masked_fill_(hidden, -math.inf)
        return s

    def by_distance(self, table: Tensor) -> Tensor:
        """table[..., i - j] of (G,R,L) as (G,R,n,m), 0 above the diagonal; all keys from 0 on."""
        n, m = self.queries.stop - self.queries.start, self.keys.stop
        line = torch.cat([table.new_zeros(*table.shape[:-1], n - 1), table[..., :m]], -1)
        return line.flip(-1).unfold(-1, m, 1).flip(-2)

    def of_distances(self, d_s: Tensor) -> Tensor:
        """The sums of d_s (...,n,m) over the pairs of each distance 0 to m - 1: (...,m)."""
        n, m = d_s.shape[-2:]
        skewed = F.pad(d_s.flip(-2), (0, n)).flatten(-2)[..., : n * (m + n - 1)].unflatten(-1, (n, -1))
        return skewed.sum(-2)[..., :m].flip(-1)


@dataclass(frozen=True)
class Biases:
    """What is added to logits, in the shapes of the products."""

    ring: Tensor | None
    """(N,R,Tq)"""
    key: Tensor | None
    """(N,R,Tk)"""
    distance: Tensor | None
    """(G,R,L)"""


def accumulator(t: Tensor) -> torch.dtype:
    """Half precision is accumulated in single precision."""
    return torch.float32 if t.dtype in (torch.bfloat16, torch.float16) else t.dtype


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring_log_weight: Tensor | None,
    key_bias: Tensor | None,
    distance_bias: Tensor | None,
    first_keys: Tensor | None,
    span: Sequence[int],
    out: Tensor,
    lse: Tensor,
) -> None:
    if first_keys is not None:
        out.zero_()
        lse.fill_(-math.inf)
        for part in stretches(first_keys, k.shape[2]):
            ring = None if ring_log_weight is None else part.of(ring_log_weight)
            bias = None if key_bias is None else part.of_keys(key_bias)
            given = (part.of(q), part.of_keys(k), part.of_keys(v), ring, bias, distance_bias)
            forward(*given, None, span, part.of(out), part.of(lse))
        return
    biased = key_bias is not None or distance_bias is not None
    if not biased and _is_fused(q, k, span):
        fused_out, fused_lse = _fused(_rows(q), _rows(k), _rows(v), 0.0, True)
        out.copy_(fused_out)
        lse.copy_(fused_lse)
        return
    dtype, per_key_head = lse.dtype, KeyHeadRows(q, k)
    scaled = per_key_head.queries(q.to(dtype) * (LOG2E / math.sqrt(q.shape[-1])))
    keys, values = k.to(dtype).flatten(0, 1), v.to(dtype).flatten(0, 1)
    biases = per_key_head.biases(ring_log_weight, key_bias, distance_bias, dtype)
    tiles = SpanTiles(q.shape[2], k.shape[2], Span.of(span), q.device)
    fused = not biased and q.device.type == "cpu" and len(tiles.whole_windows) > 0
    if fused:
        _fused_windows(tiles, scaled, keys, values, per_key_head, out, lse)
    for tile in tiles.tiles(q.shape[0] * q.shape[1], whole_windows=not fused):
        s = tile.scores(tile.of_queries(scaled), tile.of_keys(keys), biases)
        top = s.amax(-1, keepdim=True)
        p = s.sub_(top).exp2_()
        total = p.sum(-1, keepdim=True)
        lse[:, :, tile.queries] = per_key_head.undo((total.log2() + top).squeeze(-1)) * LN2
        attended = torch.bmm(p.flatten(1, 2), tile.of_keys(values)).unflatten(1, p.shape[1:3])
        out[:, :, tile.queries] = per_key_head.undo(attended.div_(total))


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring_log_weight: Tensor | None,
    key_bias: Tensor | None,
    distance_bias: Tensor | None,
    first_keys: Tensor | None,
    out: Tensor,
    lse: Tensor,
    span: Sequence[int],
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    d_weight: Tensor,
    d_key_bias: Tensor,
    d_distance_bias: Tensor,
) -> None:
    if first_keys is not None:
        for gradient in (d_q, d_k, d_v, d_weight, d_key_bias, d_distance_bias):
            gradient.zero_()
        of_distances = torch.zeros_like(d_distance_bias)
        for part in stretches(first_keys, k.shape[2]):
            ring = None if ring_log_weight is None else part.of(ring_log_weight)
            bias = None if key_bias is None else part.of_keys(key_bias)
            given = (part.of(q), part.of_keys(k), part.of_keys(v), ring, bias, distance_bias, None)
            backward(
                part.of(d_out), None if d_lse is None else part.of(d_lse), *given, part.of(out),
                part.of(lse).contiguous(), span, part.of(d_q), part.of_keys(d_k), part.of_keys(d_v),
                d_weight if ring is None else part.of(d_weight),
                d_key_bias if bias is None else part.of_keys(d_key_bias), of_distances,
            )  # fmt: skip
            d_distance_bias += of_distances
        return
    biased = key_bias is not None or distance_bias is not None
    if not biased and d_lse is None and _is_fused(q, k, span):
        grads = _fused_backward(*map(_rows, (d_out, q, k, v, out)), lse, 0.0, True)
        for to, grad in zip((d_q, d_k, d_v), grads, strict=True):
            to.copy_(grad)
        return
    dtype, per_key_head = lse.dtype, KeyHeadRows(q, k)
    scale = 1 / math.sqrt(q.shape[-1])
    delta = (d_out.to(dtype) * out.to(dtype)).sum(-1)
    if d_lse is not None:
        delta -= d_lse
    delta, log2_sum = per_key_head.queries(delta), per_key_head.queries(lse * LOG2E)
    scaled, upstream = (
        per_key_head.queries(q.to(dtype) * (scale * LOG2E)),
        per_key_head.queries(d_out.to(dtype)),
    )
    keys, values = k.to(dtype).flatten(0, 1), v.to(dtype).flatten(0, 1)
    biases = per_key_head.biases(ring_log_weight, key_bias, distance_bias, dtype)
    sum_k, sum_v = keys.new_zeros(keys.shape), values.new_zeros(values.shape)
    tiles = SpanTiles(q.shape[2], k.shape[2], Span.of(span), q.device)
    for bias in (d_key_bias, d_distance_bias):
        bias.zero_()
    for tile in tiles.tiles(q.shape[0] * q.shape[1]):
        q_tile, k_tile, d_tile = tile.of_queries(scaled), tile.of_keys(keys), tile.of_queries(upstream)
        p = tile.scores(q_tile, k_tile, biases).sub_(log2_sum[:, :, tile.queries, None]).exp2_()
        heads = p.shape[1:3]
        tile.add_to_keys(sum_v, p.flatten(1, 2), d_tile)
        d_s = torch.bmm(d_tile, tile.of_keys(values).mT).sub_(tile.of_queries(delta)[..., None])
        d_s.mul_(p.flatten(1, 2))
        by_head = d_s.unflatten(1, heads)
        if ring_log_weight is not None:
            assert tile.in_ring is not None
            d_weight[:, :, tile.queries] = per_key_head.undo((by_head * tile.in_ring).sum(-1))
        if key_bias is not None:
            per_key = per_key_head.undo(by_head.sum(-2))
            d_key_bias[:, :, : tile.extra] += per_key[..., : tile.extra]
            d_key_bias[:, :, tile.keys] += per_key[..., tile.extra :]
        if distance_bias is not None:
            per_distance = per_key_head.undo(tile.of_distances(by_head)).sum(0)
            d_distance_bias[:, : per_distance.shape[1]] += per_distance
        d_q[:, :, tile.queries] = per_key_head.undo(torch.bmm(d_s, k_tile).mul_(scale).unflatten(1, heads))
        tile.add_to_keys(sum_k, d_s, q_tile)
    d_k.copy_(sum_k.mul_(LN2).view_as(k))
    d_v.copy_(sum_v.view_as(v))


class KeyHeadRows:
    """(B,H,Tq,...) <-> (N,R,Tq,...)"""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.batch, self.groups, self.repeat = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]

    def queries(self, t: Tensor) -> Tensor:
        return t.reshape(self.batch * self.groups, self.repeat, *t.shape[2:])

    def biases(
        self, ring: Tensor | None, key: Tensor | None, distance: Tensor | None, dtype: torch.dtype
    ) -> Biases:
        return Biases(
            None if ring is None else self.queries(ring.to(dtype)),
            None if key is None else self.queries(key.to(dtype)),
            None if distance is None else distance.to(dtype).unflatten(0, (self.groups, self.repeat)),
        )

    def undo(self, t: Tensor) -> Tensor:
        return t.reshape(self.batch, self.groups * self.repeat, *t.shape[2:])


def _rows(t: Tensor) -> Tensor:
    """The fused attention assumes without checking that rows are contiguous."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _is_fused(q: Tensor, k: Tensor, span: Sequence[int]) -> bool:
    return span[0] < 0 and q.device.type == "cpu" and q.shape[2] == k.shape[2]


def _fused_windows(
    tiles: SpanTiles, q: Tensor, k: Tensor, v: Tensor, heads: KeyHeadRows, out: Tensor, lse: Tensor
) -> None:
    """Fills the queries of `whole_windows`: tiles form a batch, and their keys are overlapping views."""
    assert tiles.span.window is not None
    window, whole = tiles.span.window, tiles.whole_windows
    count, size, first = len(whole), whole.step, whole[0]
    last = first + count * size
    n, r, _, d = q.shape

    def overlapping(kv: Tensor) -> Tensor:  # (N,Tk,D) -> (tiles,N,window+size,D)
        reached = _rows(kv)[:, tiles.offset + first - window :]
        return reached.unfold(1, window + size, size)[:, :count].permute(1, 0, 3, 2)

    def untiled(t: Tensor) -> Tensor:  # (tiles,N,R*size,...) -> (B,H,tiles*size,...)
        return heads.undo(t.unflatten(2, (r, size)).permute(1, 2, 0, 3, *range(4, t.ndim + 1)).flatten(2, 3))

    mask = torch.zeros(size, window + size, dtype=q.dtype)
    for columns, hidden in next(tiles.window_tiles()).edges:
        mask[:, columns].masked_fill_(hidden, -math.inf)
    tiled = (
        q[:, :, first:last].unflatten(2, (count, size)).permute(2, 0, 1, 3, 4).reshape(count, n, r * size, d)
    )
    fused_out, fused_lse = _fused(
        _rows(tiled), overlapping(k), overlapping(v), 0.0, False, attn_mask=mask.repeat(r, 1), scale=LN2
    )
    out[:, :, first:last] = untiled(fused_out)
    lse[:, :, first:last] = untiled(fused_lse)
