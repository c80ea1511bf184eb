"""Calls the C++ span attention: span_forward.cpp, span_backward.cpp and span_few.cpp."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from headgate.ops.gpu import device_kind
from headgate.ops.native import library

WIDTHS = (16, 32, 64, 96, 128)


class View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("batch", "head", "token")]


class SpanCall(ctypes.Structure):
    """SpanCall in span.h."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("batch", "groups", "repeat", "queries", "keys", "width", "threads")),
        *((n, ctypes.c_int64) for n in ("window", "dense_prefix", "pinned", "ring", "start")),
        *((n, View) for n in ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v")),
        *((n, ctypes.c_void_p) for n in ("lse", "ring_log_weight", "d_lse", "d_ring_log_weight", "active")),
        *((n, ctypes.c_void_p) for n in ("key_bias", "d_key_bias", "distance_bias", "d_distance_bias")),
        ("distances", ctypes.c_int64),
        ("windows", ctypes.c_void_p),
        ("first_keys", ctypes.c_void_p),
    ]


def refuse(q: Tensor) -> str | None:
    """Why the kernel cannot take these heads."""
    reason = library.unavailable()
    if reason is not None:
        return reason
    if device_kind(q.device) != "cpu" or q.dtype != torch.float32:
        return f"it computes float32 on the CPU, not {q.dtype} on {q.device.type}".replace("torch.", "")
    if q.shape[-1] not in WIDTHS:
        return f"head width {q.shape[-1]} is not one of {', '.join(map(str, WIDTHS))}"
    return None


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
    active: Tensor | None = None,
    windows: Sequence[int] | None = None,
) -> None:
    """With few queries, heads may be left out by `active` (B,H), and each key head may have its own window by
    `windows`."""
    q, k, v = rows(q), rows(k), rows(v)
    weight, key_bias, distance_bias = map(_numbers, (ring_log_weight, key_bias, distance_bias))
    first_keys = None if first_keys is None else first_keys.contiguous()
    call = new_call(q, k, span)
    call.first_keys = _pointer(first_keys)
    call.q, call.k, call.v, call.out = view(q), view(k), view(v), view(out)
    _set_biases(call, key_bias, distance_bias)
    call.lse, call.ring_log_weight, call.active = lse.data_ptr(), _pointer(weight), _pointer(active)
    if windows is not None:
        of_heads = (ctypes.c_int64 * len(windows))(*windows)
        call.windows = ctypes.addressof(of_heads)
    library.library().headgate_span_forward(ctypes.byref(call))


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
    q, k, v, out, d_out = rows(q), rows(k), rows(v), rows(out), rows(d_out)
    weight, d_lse, lse = _numbers(ring_log_weight), _numbers(d_lse), lse.contiguous()
    key_bias, distance_bias = map(_numbers, (key_bias, distance_bias))
    first_keys = None if first_keys is None else first_keys.contiguous()
    call = new_call(q, k, span)
    call.first_keys = _pointer(first_keys)
    _set_biases(call, key_bias, distance_bias)
    call.d_key_bias, call.d_distance_bias = d_key_bias.data_ptr(), d_distance_bias.data_ptr()
    call.q, call.k, call.v, call.out, call.d_out = view(q), view(k), view(v), view(out), view(d_out)
    call.d_q, call.d_k, call.d_v = view(d_q), view(d_k), view(d_v)
    call.lse, call.ring_log_weight = lse.data_ptr(), _pointer(weight)
    call.d_lse, call.d_ring_log_weight = _pointer(d_lse), d_weight.data_ptr()
    library.library().headgate_span_backward(ctypes.byref(call))


def new_call(q: Tensor, k: Tensor, span: Sequence[int]) -> SpanCall:
    (batch, heads, queries, width), (_, groups, keys, _) = q.shape, k.shape
    return SpanCall(batch, groups, heads // groups, queries, keys, width, library.threads(), *span)


def _set_biases(call: SpanCall, key_bias: Tensor | None, distance_bias: Tensor | None) -> None:
    call.key_bias, call.distance_bias = _pointer(key_bias), _pointer(distance_bias)
    call.distances = 0 if distance_bias is None else distance_bias.shape[1]


def rows(t: Tensor) -> Tensor:
    return t if t.stride(3) == 1 else t.contiguous()


def view(t: Tensor) -> View:
    return View(t.data_ptr(), *t.stride()[:3])


def _numbers(t: Tensor | None) -> Tensor | None:
    """Log-weights and biases as the kernels read them; under autocast they arrive in half precision."""
    return None if t is None else t.to(torch.float32).contiguous()


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
