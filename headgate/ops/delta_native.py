"""Calls the C++ kernel of the gated delta rule, delta.cpp, as ops known to PyTorch.

Shapes: q, k, v (B,H,T,D); log_decay and beta (B,H,T); the memory (B,H,D,D), keys by values.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from headgate.ops.native import library
from headgate.ops.registration import refuse_gradient, register, register_gradient
from headgate.ops.span import native

CHUNK = 48
"""SIZE in delta.cpp."""


class DeltaCall(ctypes.Structure):
    """DeltaCall in delta.cpp."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("batch", "heads", "tokens", "width", "threads")),
        *((n, native.View) for n in ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v")),
        *((n, ctypes.c_void_p) for n in ("log_decay", "beta", "d_log_decay", "d_beta")),
        *((n, ctypes.c_void_p) for n in ("memory", "after", "states", "d_memory", "d_after")),
    ]


def _results(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    b, h, t, d = q.shape
    chunks = -(-t // CHUNK) if keep else 0
    out = q.new_empty((b, t, h, d)).transpose(1, 2)
    return out, q.new_empty((b, h, d, d)), q.new_empty((b, h, chunks, d, d))


def _new_call(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> DeltaCall:
    call = DeltaCall(*q.shape, library.threads())
    call.q, call.k, call.v = native.view(q), native.view(k), native.view(v)
    call.log_decay, call.beta = log_decay.data_ptr(), beta.data_ptr()
    return call


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    memory: Tensor,
    keep: bool,
    out: Tensor,
    after: Tensor,
    states: Tensor,
) -> None:
    q, k, v = map(native.rows, (q, k, v))
    log_decay, beta, memory = (t.contiguous() for t in (log_decay, beta, memory))
    call = _new_call(q, k, v, log_decay, beta)
    call.out, call.memory, call.after = native.view(out), memory.data_ptr(), after.data_ptr()
    call.states = states.data_ptr() if keep else None
    library.library().headgate_delta_forward(ctypes.byref(call))


def _gradient_results(
    d_out: Tensor, d_after: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    b, h, t, d = q.shape
    heads = (torch.empty_like(u) if u.stride(-1) == 1 else u.new_empty(u.shape) for u in (q, k, v))
    return *heads, q.new_empty((b, h, t)), q.new_empty((b, h, t)), q.new_empty((b, h, d, d))


def _backward(
    d_out: Tensor,
    d_after: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    d_log_decay: Tensor,
    d_beta: Tensor,
    d_memory: Tensor,
) -> None:
    d_out, q, k, v = map(native.rows, (d_out, q, k, v))
    log_decay, beta, states = (t.contiguous() for t in (log_decay, beta, states))
    d_after = None if d_after is None else d_after.contiguous()
    call = _new_call(q, k, v, log_decay, beta)
    call.d_out, call.d_q, call.d_k, call.d_v = map(native.view, (d_out, d_q, d_k, d_v))
    call.d_log_decay, call.d_beta, call.d_memory = (t.data_ptr() for t in (d_log_decay, d_beta, d_memory))
    call.states, call.d_after = states.data_ptr(), None if d_after is None else d_after.data_ptr()
    library.library().headgate_delta_backward(ctypes.byref(call))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], output[2])
    ctx.mark_non_differentiable(output[2])


def _gradients(ctx: Any, d_out: Tensor | None, d_after: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if d_out is None:
        d_out = torch.zeros_like(ctx.saved_tensors[0])
    return *_delta_backward(d_out, d_after, *ctx.saved_tensors), None


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta"
_delta = register(
    "delta_native",
    f"({_INPUTS}, Tensor memory, bool keep) -> (Tensor, Tensor, Tensor)",
    _results,
    _forward,
)
_delta_backward = register(
    "delta_native_backward",
    f"(Tensor d_out, Tensor? d_after, {_INPUTS}, Tensor states)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradient_results,
    _backward,
)
register_gradient("delta_native", _setup, _gradients)
refuse_gradient("delta_native_backward")


def delta_in_chunks(*given: Tensor) -> tuple[Tensor, Tensor]:
    """q, k, v, log_decay, beta, memory -> what the memory answers, and the memory after the last token."""
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    out, after, _ = _delta(*given, keep)
    return out, after
