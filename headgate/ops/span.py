"""Span attention: each query attends to the contiguous keys that end at itself.

One op serves full causal attention, windows, a window after a dense prefix, first tokens visible to all, and
a ring of keys further out that enters with a per-query log-weight. It returns the log-sum-exp as well,
differentiably, so that branches over disjoint keys can be merged exactly.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D); ring_log_weight and lse (B,H,Tq). Inside, heads stand as (G,R), R =
H/G, and a tile's queries as (B,G,R*n,D), so that grouped keys are never repeated.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.dispatch import Op, check
from headgate.ops.tiles import query_tiles

SPAN = Op("span_attention")


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, start: int = 0, backend: str = "auto") -> Tensor:
    """Attention of every query over all keys up to itself."""
    return span_attention(q, k, v, start=start, backend=backend)[0]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    dense_prefix: int = 0,
    global_tokens: int = 0,
    start: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Attention over the keys i-window <= j <= i: window + 1 of them, the query's own among them.

    A query at a position below `dense_prefix` sees all keys up to itself; the first `global_tokens` positions
    are visible to every later query.
    """
    return span_attention(
        q,
        k,
        v,
        window=window,
        dense_prefix=dense_prefix,
        global_tokens=global_tokens,
        start=start,
        backend=backend,
    )[0]


def far_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, start: int = 0, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attention over the keys beyond a window, j < i-window, of the queries that have any.

    Those are the last n of the Tq; returns the output (B,H,n,D) and the log-sum-exp (B,H,n), n = 0 if none.
    It is an ordinary causal attention: the keys without the last window + 1, against as many queries.
    """
    check(q, k, v, window=window, start=start)
    far = max(0, k.shape[2] - window - 1)
    n = min(q.shape[2], far)
    if n == 0:
        return q[:, :, :0], q[:, :, :0, 0]
    tail = q[:, :, q.shape[2] - n :]
    return span_attention(tail, k[:, :, :far], v[:, :, :far], start=start, backend=backend)


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    dense_prefix: int = 0,
    global_tokens: int = 0,
    ring: int = 0,
    ring_log_weight: Tensor | None = None,
    start: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The op in full: the output (B,H,Tq,D) and the log-sum-exp of the attended logits (B,H,Tq).

    Keys at a distance above `window` and up to `ring` enter with `ring_log_weight` added to their logit.
    """
    check(q, k, v, window=window, dense_prefix=dense_prefix, global_tokens=global_tokens, start=start)
    if ring_log_weight is not None:
        if window is None or ring < window or global_tokens or dense_prefix:
            raise HeadgateError(
                f"ring={ring} lies outside a plain window: window={window}, dense_prefix={dense_prefix} and "
                f"global_tokens={global_tokens} were given, expected window <= ring and 0 for the others"
            )
        if ring_log_weight.shape != q.shape[:3]:
            given = tuple(ring_log_weight.shape)
            raise HeadgateError(
                f"ring_log_weight has shape {given}; expected (B,H,Tq) = {tuple(q.shape[:3])}"
            )
    elif ring:
        raise HeadgateError(
            f"ring={ring} without ring_log_weight; give the log-weight of each query, (B,H,Tq)"
        )
    result: tuple[Tensor, Tensor] = SPAN(
        backend,
        q,
        k,
        v,
        window=window,
        dense_prefix=dense_prefix,
        global_tokens=global_tokens,
        ring=ring,
        ring_log_weight=ring_log_weight,
        start=start,
    )
    return result


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


def _grouped(t: Tensor, groups: int) -> Tensor:
    return t.unflatten(1, (groups, -1))


def _accumulator(t: Tensor) -> torch.dtype:
    return torch.float32 if t.dtype in (torch.bfloat16, torch.float16) else t.dtype


@custom_op("headgate::span_torch", mutates_args=())
def _span(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring_log_weight: Tensor | None,
    window: int | None,
    dense_prefix: int,
    global_tokens: int,
    ring: int,
    start: int,
) -> tuple[Tensor, Tensor]:
    g, dtype = k.shape[1], _accumulator(q)
    scaled = _grouped(q.to(dtype) / math.sqrt(q.shape[-1]), g)
    k, v = k.to(dtype), v.to(dtype)
    weight = None if ring_log_weight is None else _grouped(ring_log_weight.to(dtype), g)
    out = torch.empty(scaled.shape, dtype=dtype, device=q.device)
    lse = torch.empty(scaled.shape[:4], dtype=dtype, device=q.device)
    for tile in Span(window, dense_prefix, global_tokens, ring, start).tiles(q, k):
        s = tile.scores(tile.of_queries(scaled), tile.of_keys(k), weight)
        top = s.amax(-1, keepdim=True)
        p = s.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        lse[:, :, :, tile.queries] = (total.log() + top).squeeze(-1)
        attended = (p.flatten(2, 3) @ tile.of_keys(v)).unflatten(2, p.shape[2:4])
        out[:, :, :, tile.queries] = attended.div_(total)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


@_span.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=_accumulator(q))


@custom_op("headgate::span_torch_backward", mutates_args=())
def _span_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g, dtype = k.shape[1], lse.dtype
    scale = 1 / math.sqrt(q.shape[-1])
    scaled, d_grouped = _grouped(q.to(dtype) * scale, g), _grouped(d_out.to(dtype), g)
    delta = (d_grouped * _grouped(out.to(dtype), g)).sum(-1)
    if d_lse is not None:
        delta -= _grouped(d_lse, g)
    lse = _grouped(lse, g)
    wide_k, wide_v = k.to(dtype), v.to(dtype)
    weight = None if ring_log_weight is None else _grouped(ring_log_weight.to(dtype), g)
    d_q = torch.empty_like(scaled)
    d_k, d_v = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    d_weight = torch.empty_like(delta if ring_log_weight is not None else delta[:0])
    for tile in Span(window, dense_prefix, global_tokens, ring, start).tiles(q, k):
        q_tile, k_tile, d_tile = tile.of_queries(scaled), tile.of_keys(wide_k), tile.of_queries(d_grouped)
        p = tile.scores(q_tile, k_tile, weight).sub_(lse[:, :, :, tile.queries, None]).exp_()
        tile.add_to_keys(d_v, p.flatten(2, 3).mT @ d_tile)
        d_s = (d_tile @ tile.of_keys(wide_v).mT).unflatten(2, p.shape[2:4])
        d_s = d_s.sub_(delta[:, :, :, tile.queries, None]).mul_(p)
        if weight is not None:
            assert tile.in_ring is not None
            d_weight[:, :, :, tile.queries] = (d_s * tile.in_ring).sum(-1)
        flat = d_s.flatten(2, 3)
        d_q[:, :, :, tile.queries] = (flat @ k_tile).unflatten(2, p.shape[2:4])
        tile.add_to_keys(d_k, flat.mT @ q_tile)
    return (d_q * scale).flatten(1, 2).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_weight.flatten(1, 2)


@_span_backward.register_fake
def _(
    d_out: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = q.shape[0] if weight is not None else 0
    d_weight = q.new_empty((batch, *q.shape[1:3]), dtype=_accumulator(q))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_weight


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.options = inputs[4:]


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, weight, out, lse = ctx.saved_tensors
    none = (None,) * len(ctx.options)
    if d_out is None:
        d_out = torch.zeros_like(out)
    d_q, d_k, d_v, d_weight = _span_backward(d_out, d_lse, q, k, v, weight, out, lse, *ctx.options)
    return d_q, d_k, d_v, (None if weight is None else d_weight.to(weight.dtype)), *none


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise HeadgateError(
        "the second derivative of an attention op is not implemented; use backend='reference' for it"
    )


_span.register_autograd(_gradients, setup_context=_setup)
_span_backward.register_autograd(_no_second_derivative, setup_context=lambda ctx, inputs, output: None)


@SPAN.path("torch")
def _torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    dense_prefix: int,
    global_tokens: int,
    ring: int,
    ring_log_weight: Tensor | None,
    start: int,
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _span(
        q, k, v, ring_log_weight, window, dense_prefix, global_tokens, ring, start
    )
    return result


SPAN.path("reference")(reference.span_attention)
