"""Calls the C++ pair-gated attention: pair_gate.cpp."""

import ctypes

from torch import Tensor

from headgate.ops.native import library
from headgate.ops.span import native as span
from headgate.ops.span.options import Span

HIDDEN = (4, 8, 16, 32)


class PairGateCall(ctypes.Structure):
    """PairGateCall in pair_gate.cpp."""

    _fields_ = [
        ("span", span.SpanCall),
        *((n, ctypes.c_int64) for n in ("hidden", "log_form")),
        *((n, span.View) for n in ("query_half", "key_half", "d_query_half", "d_key_half")),
        *((n, ctypes.c_void_p) for n in ("w2", "b2", "d_w2", "d_b2", "softmax")),
    ]


def refuse(q: Tensor, hidden: int) -> str | None:
    """Why the kernel cannot take these heads."""
    if hidden not in HIDDEN:
        return span.refuse(q) or f"hidden width {hidden} is not one of {', '.join(map(str, HIDDEN))}"
    return span.refuse(q)


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
    q, k, v, query_half, key_half = map(span.rows, (q, k, v, query_half, key_half))
    w2, b2 = w2.contiguous(), b2.contiguous()
    call = _call(q, k, v, query_half, key_half, w2, b2, form, window)
    call.span.out, call.softmax = span.view(out), softmax.data_ptr()
    library.library().headgate_pair_gate_forward(ctypes.byref(call))


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
    q, k, v, query_half, key_half = map(span.rows, (q, k, v, query_half, key_half))
    out, d_out, softmax, w2, b2 = (
        span.rows(out),
        span.rows(d_out),
        softmax.contiguous(),
        w2.contiguous(),
        b2.contiguous(),
    )
    call = _call(q, k, v, query_half, key_half, w2, b2, form, window)
    call.span.out, call.span.d_out, call.softmax = span.view(out), span.view(d_out), softmax.data_ptr()
    call.span.d_q, call.span.d_k, call.span.d_v = span.view(d_q), span.view(d_k), span.view(d_v)
    call.d_query_half, call.d_key_half = span.view(d_query_half), span.view(d_key_half)
    call.d_w2, call.d_b2 = d_w2.data_ptr(), d_b2.data_ptr()
    library.library().headgate_pair_gate_backward(ctypes.byref(call))


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_half: Tensor,
    key_half: Tensor,
    w2: Tensor,
    b2: Tensor,
    form: str,
    window: int | None,
) -> PairGateCall:
    call = PairGateCall(
        span.new_call(q, k, Span(window).numbers()), hidden=w2.shape[1], log_form=form == "log"
    )
    call.span.q, call.span.k, call.span.v = span.view(q), span.view(k), span.view(v)
    call.query_half, call.key_half = span.view(query_half), span.view(key_half)
    call.w2, call.b2 = w2.data_ptr(), b2.data_ptr()
    return call
