"""Calls the C++ kernel of the short convolution, short.cpp, as ops known to PyTorch.

Shapes: t (B,G,Tk,D); taps (n,H,D); documents (B,Tk) or None; out (B,H,Tq,D).
"""

import ctypes
from typing import Any

from torch import Tensor

from headgate.ops.native import library
from headgate.ops.registration import refuse_gradient, register, register_gradient
from headgate.ops.span import native


class ShortCall(ctypes.Structure):
    """ShortCall in short.cpp."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("batch", "groups", "repeat", "queries", "keys", "width", "taps")),
        ("threads", ctypes.c_int64),
        *((n, native.View) for n in ("t", "out", "d_out", "d_t")),
        *((n, ctypes.c_void_p) for n in ("weights", "d_weights", "documents")),
    ]


def _new_call(t: Tensor, taps: Tensor, documents: Tensor | None, queries: int) -> ShortCall:
    (batch, groups, keys, width), (count, heads, _) = t.shape, taps.shape
    call = ShortCall(batch, groups, heads // groups, queries, keys, width, count, library.threads())
    call.t, call.weights = native.view(t), taps.data_ptr()
    call.documents = None if documents is None else documents.data_ptr()
    return call


def _results(t: Tensor, taps: Tensor, documents: Tensor | None, queries: int) -> tuple[Tensor]:
    return (t.new_empty((t.shape[0], queries, taps.shape[1], t.shape[3])).transpose(1, 2),)


def _forward(t: Tensor, taps: Tensor, documents: Tensor | None, queries: int, out: Tensor) -> None:
    t, taps = native.rows(t), taps.contiguous()
    documents = None if documents is None else documents.long().contiguous()
    call = _new_call(t, taps, documents, queries)
    call.out = native.view(out)
    library.library().headgate_short_forward(ctypes.byref(call))


def _gradient_results(
    d_out: Tensor, t: Tensor, taps: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    b, g, keys, d = t.shape
    return t.new_empty((b, keys, g, d)).transpose(1, 2), t.new_empty((b, *taps.shape))


def _backward(
    d_out: Tensor, t: Tensor, taps: Tensor, documents: Tensor | None, d_t: Tensor, d_taps: Tensor
) -> None:
    d_out, t, taps = native.rows(d_out), native.rows(t), taps.contiguous()
    documents = None if documents is None else documents.long().contiguous()
    call = _new_call(t, taps, documents, d_out.shape[2])
    call.d_out, call.d_t, call.d_weights = native.view(d_out), native.view(d_t), d_taps.data_ptr()
    library.library().headgate_short_backward(ctypes.byref(call))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    d_t, d_taps = _short_backward(d_out, *ctx.saved_tensors)
    return d_t, d_taps.sum(0), None, None


convolve = register(
    "short_native", "(Tensor t, Tensor taps, Tensor? documents, SymInt queries) -> Tensor", _results, _forward
)
_short_backward = register(
    "short_native_backward",
    "(Tensor d_out, Tensor t, Tensor taps, Tensor? documents) -> (Tensor, Tensor)",
    _gradient_results,
    _backward,
)
register_gradient("short_native", _setup, _gradients)
refuse_gradient("short_native_backward")
