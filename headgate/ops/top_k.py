"""Attention over the k_i keys with the highest logits, exactly; ties go to the later key.

The choice looks at every logit, in tiles of queries. Plain PyTorch keeps k_i weights and their keys for each
query; with them the backward pass is matrix products, without choosing again. The C++ path keeps only each
query's last choice and recomputes the logits.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D); weights and keys of the choice (B,H,Tq,S), with S the largest k_i.
"""

import ctypes
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headgate.ops import reference
from headgate.ops.dispatch import Op, check
from headgate.ops.documents import by_document
from headgate.ops.native import library
from headgate.ops.registration import refuse_gradient, register, register_gradient
from headgate.ops.span import native
from headgate.ops.span.options import Span
from headgate.ops.span.tiled import accumulator
from headgate.ops.tiles import query_tiles

TOP_K = Op("top_k_attention")


def top_k_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = 1.0,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax over the ceil(scale * sqrt(i + 1)) keys of highest logit among all j <= i; the keys begin at
    0."""
    check(q, k, v)
    if documents is not None:
        return by_document(documents, partial(top_k_attention, scale=scale, backend=backend), q, k, v)
    result: Tensor = TOP_K(backend, q, k, v, scale=scale)
    return result


def highest(scores: Tensor, allowed: Tensor, count: Tensor) -> Tensor:
    """What `reference.best` computes, by threshold: all above the count-th value, then the latest equal to
    it."""
    scores = scores.masked_fill(~allowed, -torch.inf)
    most = min(int(count.max()), scores.shape[-1])
    values = scores.topk(most, dim=-1).values
    threshold = values.gather(-1, (count.clamp(max=most) - 1).expand(*values.shape[:-1], 1))
    above = scores > threshold
    equal = (scores == threshold) & allowed
    room = count - above.sum(-1, keepdim=True)
    later = equal.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)  # how many equals are at or after each
    return above | (equal & (later <= room))


FEW = 4
"""Up to this many queries, which fill no tile of the kernel, matrix products are faster."""


class TopKCall(ctypes.Structure):
    """TopKCall in top_k.cpp."""

    _fields_ = [("span", native.SpanCall), ("counts", ctypes.c_void_p), ("borders", ctypes.c_void_p)]


def _refuse_native(q: Tensor, *args: Any, **options: Any) -> str | None:
    return f"{q.shape[2]} queries fill no tile" if q.shape[2] <= FEW else native.refuse(q)


@TOP_K.path("native", refuse=_refuse_native)
def _native(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    out: Tensor = _attend_native(q, k, v, scale)[0]
    return out


def _native_results(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, ...]:
    b, h, t, d = q.shape
    out, lse = q.new_empty((b, t, h, d)).transpose(1, 2), q.new_empty((b, h, t))
    return out, lse, q.new_empty((b, h, t), dtype=torch.int64)


def _new_call(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, borders: Tensor, counts: Tensor) -> TopKCall:
    span = native.new_call(q, k, Span().numbers())
    span.q, span.k, span.v, span.lse = native.view(q), native.view(k), native.view(v), lse.data_ptr()
    return TopKCall(span, counts.data_ptr(), borders.data_ptr())


def _counts(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """How many keys each query chooses: (Tq)."""
    i = torch.arange(k.shape[2] - q.shape[2], k.shape[2])
    return torch.minimum(reference.top_count(i, scale), i + 1).int()


def _native_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor, borders: Tensor
) -> None:
    q, k, v, counts = native.rows(q), native.rows(k), native.rows(v), _counts(q, k, scale)
    call = _new_call(q, k, v, lse, borders, counts)
    call.span.out = native.view(out)
    library.library().headgate_top_k_forward(ctypes.byref(call))


def _native_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    borders: Tensor,
    scale: float,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
) -> None:
    d_out, q, k, v, out = map(native.rows, (d_out, q, k, v, out))
    counts = _counts(q, k, scale)
    call = _new_call(q, k, v, lse, borders, counts)
    span = call.span
    span.out, span.d_out = native.view(out), native.view(d_out)
    span.d_q, span.d_k, span.d_v = native.view(d_q), native.view(d_k), native.view(d_v)
    library.library().headgate_top_k_backward(ctypes.byref(call))


@TOP_K.path("torch")
def _torch(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    out: Tensor = _attend(q, k, v, scale)[0]
    return out


def _slots(keys: int, scale: float) -> int:
    return min(keys, math.ceil(scale * math.sqrt(keys)) + 1)


def _results(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, ...]:
    b, h, t, d = q.shape
    slots = (b, h, t, _slots(k.shape[2], scale))
    out = q.new_empty((b, t, h, d)).transpose(1, 2)
    return out, q.new_empty(slots, dtype=accumulator(q)), q.new_empty(slots, dtype=torch.int32)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, weights: Tensor, chosen: Tensor
) -> None:
    tiles = _Tiles(q, k, v)
    for a, b in tiles:
        scores = tiles.products(q[:, :, a:b], tiles.keys[:, :, : tiles.end(b)]).mul_(tiles.scale)
        own = scores[..., tiles.end(a) :]
        own.masked_fill_(tiles.later[: b - a, : b - a], -math.inf)
        i = torch.arange(tiles.end(a), tiles.end(b), device=q.device)[:, None]
        count = torch.minimum(reference.top_count(i, scale), i + 1)
        slots = min(weights.shape[-1], scores.shape[-1])
        values, index = scores.topk(slots, dim=-1)
        if _tied(values, count):
            best = highest(scores, scores > -math.inf, count)
            values, index = scores.masked_fill(~best, -math.inf).topk(slots, dim=-1)
        beyond = torch.arange(slots, device=q.device) >= count
        p = values.masked_fill_(beyond, -math.inf).softmax(-1)
        out[:, :, a:b] = tiles.weighted(
            scores.zero_().scatter_(-1, index, p), tiles.values[:, :, : tiles.end(b)]
        )
        weights[:, :, a:b, :slots], chosen[:, :, a:b, :slots] = p, index
        weights[:, :, a:b, slots:], chosen[:, :, a:b, slots:] = 0.0, 0


def _tied(values: Tensor, count: Tensor) -> bool:
    """Whether any query's last chosen value equals the first that was not chosen, values being sorted."""
    if values.shape[-1] < 2:
        return False
    border = count.clamp(max=values.shape[-1] - 1).expand(*values.shape[:-1], 1)
    last, after = values.gather(-1, border - 1), values.gather(-1, border)
    return bool(((last == after) & (after > -math.inf)).any())


def _gradient_results(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    b, h, t, d = q.shape
    return q.new_empty((b, t, h, d)).transpose(1, 2), k.new_empty(k.shape), v.new_empty(v.shape)


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    chosen: Tensor,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
) -> None:
    tiles = _Tiles(q, k, v)
    sum_k, sum_v = torch.zeros_like(tiles.keys), torch.zeros_like(tiles.values)
    for a, b in tiles:
        end = tiles.end(b)
        slots = min(weights.shape[-1], end)
        p, index = weights[:, :, a:b, :slots], chosen[:, :, a:b, :slots].long()
        d_p = tiles.products(d_out[:, :, a:b], tiles.values[:, :, :end])
        of_chosen = d_p.gather(-1, index)
        d_s = p * (of_chosen - (p * of_chosen).sum(-1, keepdim=True)) * tiles.scale
        dense = d_p.zero_().scatter_(-1, index, p)
        sum_v[:, :, :end] += tiles.weighted_back(dense, d_out[:, :, a:b])
        dense.zero_().scatter_(-1, index, d_s)
        d_q[:, :, a:b] = tiles.weighted(dense, tiles.keys[:, :, :end])
        sum_k[:, :, :end] += tiles.weighted_back(dense, q[:, :, a:b])
    d_k.copy_(sum_k)
    d_v.copy_(sum_v)


class _Tiles:
    """Tiles of queries against the keys up to their last, with products over grouped heads without repeating
    keys; in at least single precision."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        dtype = accumulator(q)
        self.keys, self.values = k.to(dtype), v.to(dtype)
        self.groups, self.offset = k.shape[1], k.shape[2] - q.shape[2]
        self.scale = 1 / math.sqrt(q.shape[3])
        self._ranges = list(query_tiles(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2], q.device, most=128))
        size = self._ranges[0][1]
        self.later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)

    def __iter__(self) -> Any:
        return iter(self._ranges)

    def end(self, query: int) -> int:
        """How many keys come before this query's own."""
        return self.offset + query

    def _grouped(self, t: Tensor) -> Tensor:
        """(B,H,n,X) -> (B,G,R*n,X)"""
        return t.to(self.keys.dtype).unflatten(1, (self.groups, -1)).flatten(2, 3)

    def products(self, rows: Tensor, keys: Tensor) -> Tensor:
        """rows (B,H,n,D) with each key (B,G,m,D): (B,H,n,m)"""
        return (self._grouped(rows) @ keys.mT).unflatten(2, (-1, rows.shape[2])).flatten(1, 2)

    def weighted(self, dense: Tensor, values: Tensor) -> Tensor:
        """dense (B,H,n,m) times values (B,G,m,D): (B,H,n,D)"""
        return (self._grouped(dense) @ values).unflatten(2, (-1, dense.shape[2])).flatten(1, 2)

    def weighted_back(self, dense: Tensor, rows: Tensor) -> Tensor:
        """dense (B,H,n,m) transposed times rows (B,H,n,D), summed over the heads of a group: (B,G,m,D)"""
        return self._grouped(dense).mT @ self._grouped(rows)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weights, chosen = output
    ctx.save_for_backward(*inputs[:3], weights, chosen)
    ctx.mark_non_differentiable(weights, chosen)


def _gradients(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_backward(d_out, *ctx.saved_tensors), None


_attend = register(
    "top_k", "(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor, Tensor)", _results, _forward
)
_attend_backward = register(
    "top_k_backward",
    "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor weights, Tensor chosen) -> (Tensor, Tensor, Tensor)",
    _gradient_results,
    _backward,
)
register_gradient("top_k", _setup, _gradients)
refuse_gradient("top_k_backward")


def _native_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _native_gradients(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_native_backward(d_out, *ctx.saved_tensors, ctx.scale), None


_attend_native = register(
    "top_k_native",
    "(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor, Tensor)",
    _native_results,
    _native_forward,
)
_attend_native_backward = register(
    "top_k_native_backward",
    "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor borders, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _gradient_results,
    _native_backward,
)
register_gradient("top_k_native", _native_setup, _native_gradients)
refuse_gradient("top_k_native_backward")
TOP_K.path("reference")(reference.top_k_attention)
