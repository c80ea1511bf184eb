"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last dimension.

PyTorch computes it on the CPU as a chain of elementwise passes, and as many again backward. Here the backward
pass is written out, which about halves them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (...,C), weight (C); in the dtype of x, the sum of squares in fp32 at least."""
    if x.is_cuda:  # one fused kernel there, which autocast would have return fp32
        with torch.autocast("cuda", enabled=False):
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    if not torch.is_grad_enabled():
        return (_normed(x, eps)[0] * weight).to(x.dtype)
    result: Tensor = _RMSNorm.apply(x, weight, eps)
    return result


def normed_linear(x: Tensor, norm: nn.RMSNorm, linear: nn.Linear) -> Tensor:
    """linear(norm(x)), with the norm's scale behind the product: there it is a number a token, and no normed
    copy of x is kept for the backward pass."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square = torch.linalg.vecdot(wide, wide)[..., None] / x.shape[-1]
    scale = (square + (norm.eps or 0.0)).rsqrt().to(x.dtype)
    return F.linear(x, linear.weight * norm.weight) * scale + linear.bias


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps), and what it was multiplied by (...,1)."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]
    return wide * scale, scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _normed(x, eps)
        ctx.save_for_backward(normed, scale, weight)
        return (normed * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        d_weight = (d_out * normed).reshape(-1, normed.shape[-1]).sum(0)
        d_normed = d_out * weight
        mean = torch.linalg.vecdot(d_normed, normed).div_(normed.shape[-1])[..., None]
        d_x = d_normed.addcmul_(normed, mean, value=-1).mul_(scale)
        return d_x.to(d_out.dtype), d_weight.to(weight.dtype), None
