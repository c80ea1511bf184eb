"""Calls the C++ kernels over blocks of keys, blocks.cpp and choose.cpp, as ops known to PyTorch.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D), or one summary per block; chosen blocks (B,H,Tq,S).
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from headgate.ops.native import library
from headgate.ops.registration import refuse_gradient, register, register_gradient
from headgate.ops.span import native
from headgate.ops.span.options import Span

FEW = 4
"""FEW in span.h: for so many queries the kernels of a decoding step are faster."""


class BlocksCall(ctypes.Structure):
    """BlocksCall in blocks.cpp."""

    _fields_ = [
        ("span", native.SpanCall),
        ("chosen", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("slots", "block", "offset", "summaries", "window")),
        ("branch_out", native.View * 2),
        *((n, ctypes.c_void_p) for n in ("gates", "d_gates")),
    ]


class ChooseCall(ctypes.Structure):
    """ChooseCall in choose.cpp."""

    _fields_ = [
        ("span", native.SpanCall),
        *((n, ctypes.c_void_p) for n in ("chosen", "counts")),
        *((n, ctypes.c_int64) for n in ("slots", "block", "offset", "by_weight")),
    ]


def _results(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, h, t, d = q.shape
    return q.new_empty((b, t, h, d)).transpose(1, 2), q.new_empty((b, h, t))


def _gradient_results(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """In the inputs' memory layout: other branches' gradients have it too, and are added to these."""
    return tuple(torch.empty_like(t) if t.stride(-1) == 1 else t.new_empty(t.shape) for t in (q, k, v))


def _new_call(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, block: int, offset: int, lse: Tensor
) -> BlocksCall:
    span = native.new_call(q, k, Span().numbers())
    span.q, span.k, span.v, span.lse = native.view(q), native.view(k), native.view(v), lse.data_ptr()
    if chosen is None:
        return BlocksCall(span, None, 0, block, offset, True, -1)
    return BlocksCall(span, chosen.data_ptr(), chosen.shape[3], block, offset, False, -1)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor | None,
    block: int,
    offset: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    q, k, v = native.rows(q), native.rows(k), native.rows(v)
    chosen = None if chosen is None else chosen.contiguous()
    call = _new_call(q, k, v, chosen, block, offset, lse)
    call.span.out = native.view(out)
    library.library().headgate_blocks_forward(ctypes.byref(call))


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor | None,
    out: Tensor,
    lse: Tensor,
    block: int,
    offset: int,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
) -> None:
    d_out, q, k, v, out = map(native.rows, (d_out, q, k, v, out))
    chosen = None if chosen is None else chosen.contiguous()
    call = _new_call(q, k, v, chosen, block, offset, lse)
    span = call.span
    span.out, span.d_out = native.view(out), native.view(d_out)
    span.d_q, span.d_k, span.d_v = native.view(d_q), native.view(d_k), native.view(d_v)
    library.library().headgate_blocks_backward(ctypes.byref(call))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block, ctx.offset = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _blocks_backward(d_out, *ctx.saved_tensors, ctx.block, ctx.offset)
    return *gradients, None, None, None


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? chosen"
blocks_attention = register(
    "blocks_native", f"({_INPUTS}, int block, SymInt offset) -> (Tensor, Tensor)", _results, _forward
)
"""blocks_attention(q, k, v, chosen, block, offset) -> the output and the log-sum-exp. The first query has
position `offset`. With chosen=None the keys are summaries, one per block, and a query sees those of the
blocks before its own."""
_blocks_backward = register(
    "blocks_native_backward",
    f"(Tensor d_out, {_INPUTS}, Tensor out, Tensor lse, int block, SymInt offset)"
    " -> (Tensor, Tensor, Tensor)",
    _gradient_results,
    _backward,
)
register_gradient("blocks_native", _setup, _gradients)
refuse_gradient("blocks_native_backward")


def _branch_results(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    b, h, t, d = q.shape
    out = q.new_empty((b, t, h, d)).transpose(1, 2)
    return out, q.new_empty((2, b, h, t, d)), q.new_empty((2, b, h, t))


def _set_branches(call: BlocksCall, window: int, branches: Tensor, gates: Tensor) -> None:
    call.window, call.gates = window, gates.data_ptr()
    call.branch_out = (native.View * 2)(*map(native.view, branches))


def _branch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    gates: Tensor,
    block: int,
    window: int,
    offset: int,
    out: Tensor,
    branches: Tensor,
    lse: Tensor,
) -> None:
    q, k, v = native.rows(q), native.rows(k), native.rows(v)
    chosen, gates = chosen.contiguous(), gates.contiguous()
    call = _new_call(q, k, v, chosen, block, offset, lse)
    call.span.out = native.view(out)
    _set_branches(call, window, branches, gates)
    library.library().headgate_blocks_forward(ctypes.byref(call))


def _branch_gradient_results(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, gates: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return *_gradient_results(d_out, q, k, v), gates.new_empty(gates.shape)


def _branch_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    gates: Tensor,
    branches: Tensor,
    lse: Tensor,
    block: int,
    window: int,
    offset: int,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    d_gates: Tensor,
) -> None:
    d_out, q, k, v = map(native.rows, (d_out, q, k, v))
    chosen, gates = chosen.contiguous(), gates.contiguous()
    call = _new_call(q, k, v, chosen, block, offset, lse)
    _set_branches(call, window, branches, gates)
    call.d_gates, span = d_gates.data_ptr(), call.span
    span.d_out = native.view(d_out)
    span.d_q, span.d_k, span.d_v = native.view(d_q), native.view(d_k), native.view(d_v)
    library.library().headgate_blocks_backward(ctypes.byref(call))


def _branch_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.block, ctx.window, ctx.offset = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # of the branches: zeros as large as two outputs


def _branch_gradients(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    d_q, d_k, d_v, d_gates = _blocks_and_window_backward(
        d_out, *ctx.saved_tensors, ctx.block, ctx.window, ctx.offset
    )
    return d_q, d_k, d_v, None, d_gates, None, None, None


_BOTH_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor chosen, Tensor gates"
blocks_and_window = register(
    "blocks_and_window_native",
    f"({_BOTH_INPUTS}, int block, int window, SymInt offset) -> (Tensor, Tensor, Tensor)",
    _branch_results,
    _branch_forward,
)
"""blocks_and_window(q, k, v, chosen, gates, block, window, offset) -> the output, which is the sum of both
branches times their gates (2,B,H,Tq), the branches (2,B,H,Tq,D) and their log-sum-exps, chosen first."""
_blocks_and_window_backward = register(
    "blocks_and_window_native_backward",
    f"(Tensor d_out, {_BOTH_INPUTS}, Tensor branches, Tensor lse, int block, int window, SymInt offset)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _branch_gradient_results,
    _branch_backward,
)
register_gradient("blocks_and_window_native", _branch_setup, _branch_gradients)
refuse_gradient("blocks_and_window_native_backward")


def _choose_results(
    q: Tensor, means: Tensor, counts: Tensor, slots: int, block: int, offset: int, by_weight: bool
) -> tuple[Tensor]:
    heads = means.shape[1] if by_weight else q.shape[1]
    return (q.new_empty((q.shape[0], heads, q.shape[2], slots), dtype=torch.int64),)


def _choose(
    q: Tensor,
    means: Tensor,
    counts: Tensor,
    slots: int,
    block: int,
    offset: int,
    by_weight: bool,
    chosen: Tensor,
) -> None:
    q, means = native.rows(q), native.rows(means)
    span = native.new_call(q, means, Span().numbers())
    span.q, span.k = native.view(q), native.view(means)
    call = ChooseCall(span, chosen.data_ptr(), counts.data_ptr(), slots, block, offset, by_weight)
    library.library().headgate_choose_blocks(ctypes.byref(call))


_choose_op = register(
    "choose_blocks_native",
    "(Tensor q, Tensor means, Tensor counts, SymInt slots, int block, SymInt offset, bool by_weight)"
    " -> Tensor[]",
    _choose_results,
    _choose,
)


def choose(
    q: Tensor, means: Tensor, counts: Tensor, *, slots: int, block: int, offset: int, by_weight: bool
) -> Tensor:
    """The blocks of each query, best first, `counts` (Tq) of them: (B,heads,Tq,slots), -1 for none."""
    chosen: Tensor = _choose_op(q, means, counts.int(), slots, block, offset, by_weight)[0]
    return chosen
