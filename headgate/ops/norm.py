"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last dimension; and questions about a Linear.

PyTorch computes it on the CPU as a chain of elementwise passes, and as many again backward. Here the backward
pass is written out, which about halves them. torch.func's transforms and second derivatives take the formula.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headgate.ops.dispatch import is_transformed

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (...,C), weight (C); in the dtype of x, with the sum of squares in at least fp32."""
    if x.is_cuda:  # one fused kernel there, which would return fp32 under autocast
        with torch.autocast("cuda", enabled=False):
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    if is_transformed() or not torch.is_grad_enabled():
        return _formula(x, weight, eps)
    result: Tensor = _RMSNorm.apply(x, weight, eps)
    return result


def normed_linear(x: Tensor, norm: nn.RMSNorm, linear: nn.Linear) -> Tensor:
    """linear(norm(x)), with the norm's scale applied after the product: there it is one number per token, and
    no normed copy of x is kept for the backward pass."""
    if not is_plain(linear):
        return linear(norm(x))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square = torch.linalg.vecdot(wide, wide)[..., None] / x.shape[-1]
    scale = (square + (norm.eps or 0.0)).rsqrt().to(x.dtype)
    return F.linear(x, linear.weight * norm.weight) * scale + linear.bias


def is_plain(linear: nn.Module) -> bool:
    """Whether its weight and bias are all there is: no adapter, quantised weight, parametrisation or hook."""
    return (
        type(linear) is nn.Linear
        and "forward" not in vars(linear)
        and not any(getattr(linear, hooks) for hooks in HOOKS)
    )


def weight_dtype(linear: nn.Module) -> torch.dtype:
    """The dtype a Linear takes; those that quantise on the fly take fp32."""
    return linear.weight.dtype if isinstance(linear.weight, Tensor) else torch.float32


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _scale(wide: Tensor, eps: float) -> Tensor:
    """What x is multiplied by, (...,1)."""
    return (torch.linalg.vecdot(wide, wide) / wide.shape[-1] + eps).rsqrt()[..., None]


def _formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    return (wide * _scale(wide, eps) * weight).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        scale = _scale(wide, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is itself to be differentiated
            out = _formula(x, weight, ctx.eps)
            d_x, d_weight = torch.autograd.grad(out, (x, weight), d_out, create_graph=True)
            return d_x, d_weight, None
        normed = _wide(x) * scale
        d_out = d_out.to(normed.dtype)
        d_weight = (d_out * normed).reshape(-1, normed.shape[-1]).sum(0)
        d_normed = d_out * weight
        mean = torch.linalg.vecdot(d_normed, normed).div_(normed.shape[-1])[..., None]
        d_x = d_normed.addcmul_(normed, mean, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None
