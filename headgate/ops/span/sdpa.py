"""Attention on a GPU through PyTorch's scaled_dot_product_attention, whose fused kernels are the fastest
there for a plain causal mask, and for a single query over whatever keys it sees. Its log-sum-exp has no
gradient.

PyTorch would silently take its dense kernel ("math") if no fused one fits. Only the fused ones are allowed
here: grouped heads in fp32, which they lack, have their keys repeated, and the rest is refused.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headgate.ops.gpu import HALF, before_ampere, device_kind, is_planned
from headgate.ops.span.options import Span

DEVICES = ("cuda",)
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
WIDEST = 256


def refuse(
    q: Tensor, k: Tensor, v: Tensor, span: Span, *, output_only: bool, **biases: Tensor | None
) -> str | None:
    if device_kind(q.device) not in DEVICES:
        return f"it runs on a GPU, not on {q.device.type}"
    if span.window is not None and q.shape[2] > 1:
        return "it has no windows"
    if span.first_keys is not None:
        return "its causal mask knows no documents"
    if any(bias is not None for bias in biases.values()):
        return "it has no biases"
    if not output_only:
        return "its log-sum-exp has no gradient"
    if q.shape[2] not in (1, k.shape[2]):
        return "its causal mask is for as many queries as keys, or for one query"
    if q.dtype not in (*HALF, torch.float32) or (q.dtype == torch.bfloat16 and before_ampere(q)):
        return f"PyTorch has only its dense kernel for {q.dtype} here".replace("torch.", "")
    if q.shape[3] > WIDEST:
        return f"PyTorch has only its dense kernel for heads wider than {WIDEST}"
    return None


def kernel(q: Tensor, k: Tensor, v: Tensor, span: Span, **options: Any) -> str:
    """The kernel that PyTorch picks, as far as can be known before asking on the device."""
    if (
        is_planned()
        or not torch.cuda.is_available()
        or torch.compiler.is_compiling()
        or isinstance(q, FakeTensor)
    ):
        return "flash" if _has_flash(q) else "efficient"
    q, k, v, grouped = _arranged(q, k, v, span)
    with sdpa_kernel(FUSED):
        chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, q.shape[2] > 1, enable_gqa=grouped)
    return SDPBackend(chosen).name.partition("_")[0].lower()


def causal_attention(q: Tensor, k: Tensor, v: Tensor, span: Span, **options: Any) -> tuple[Tensor, None]:
    q, k, v, grouped = _arranged(q, k, v, span)
    with sdpa_kernel(FUSED):
        out = scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=grouped)
    return out, None


def _has_flash(q: Tensor) -> bool:
    return q.dtype in HALF and not before_ampere(q)


def _arranged(q: Tensor, k: Tensor, v: Tensor, span: Span) -> tuple[Tensor, Tensor, Tensor, bool]:
    """The keys that are seen, with a head for each query head if no fused kernel supports groups."""
    if q.shape[2] == 1:
        pinned, first = span.seen_by_last(k.shape[2])
        if pinned:
            k, v = (torch.cat([t[:, :, :pinned], t[:, :, first:]], 2) for t in (k, v))
        else:
            k, v = k[:, :, first:], v[:, :, first:]
    grouped = q.shape[1] != k.shape[1]
    if grouped and not _has_flash(q):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        grouped = False
    return q, k, v, grouped
