"""Windows and chunks over a cache on a GPU through PyTorch's flash attention (torch.nn.attention.varlen):
nothing is compiled, and queries fewer than keys are at their end, as ours are. Its log-sum-exp has no
gradient.

A dense prefix is a separate causal attention before the window's.
"""

from typing import Any

import torch
from torch import Tensor

from headgate.ops.gpu import HALF, before_ampere, device_kind, is_hip
from headgate.ops.span.options import Span

DEVICES = ("cuda",)
WIDEST = 256


def refuse(
    q: Tensor, k: Tensor, v: Tensor, span: Span, *, output_only: bool, **biases: Tensor | None
) -> str | None:
    if device_kind(q.device) not in DEVICES:
        return f"it runs on a GPU, not on {q.device.type}"
    if is_hip():
        return "its windows are for NVIDIA's devices"
    if q.dtype not in HALF:
        return f"it takes bfloat16 and float16, not {q.dtype}".replace("torch.", "")
    if before_ampere(q):
        return "it needs an NVIDIA device of compute capability 8.0 or newer"
    if q.shape[3] % 8 or q.shape[3] > WIDEST:
        return f"head width {q.shape[3]} is not a multiple of 8 up to {WIDEST}"
    if any(bias is not None for bias in biases.values()):
        return "it has no biases"
    if span.first_keys is not None:
        return "it does not keep documents apart"
    if span.pinned > span.start:
        return "it has no pinned keys"
    if not output_only and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "its log-sum-exp has no gradient"
    return None


def span_attention(q: Tensor, k: Tensor, v: Tensor, span: Span, **options: Any) -> tuple[Tensor, Tensor]:
    """The output (B,H,Tq,D) and the log-sum-exp (B,H,Tq)."""
    first = k.shape[2] - q.shape[2]
    dense = span.dense_prefix - span.start - first  # queries that see all keys up to themselves
    if span.window is None or dense >= q.shape[2]:
        return _attend(q, k, v, -1)
    if dense <= 0:
        return _attend(q, k, v, span.window)
    end = first + dense
    parts = (
        _attend(q[:, :, :dense], k[:, :, :end], v[:, :, :end], -1),
        _attend(q[:, :, dense:], k, v, span.window),
    )
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # it imports the compiler

    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    q_ends, k_ends = (
        torch.arange(0, (batch + 1) * n, n, dtype=torch.int32, device=q.device) for n in (queries, keys)
    )
    out, lse = varlen_attn(
        q,
        k,
        v,
        q_ends,
        k_ends,
        queries,
        keys,
        window_size=(window, 0),
        enable_gqa=heads != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out.unflatten(0, (batch, queries)).transpose(1, 2), lse.unflatten(1, (batch, -1)).transpose(0, 1)
