"""Merges branches of attention: over disjoint keys by their log-sum-exps, or weighted by gates."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headgate.ops.dispatch import is_transformed


def merged(
    near: Tensor, near_lse: Tensor, far: Tensor, far_lse: Tensor, far_weight: Tensor | float = 1.0
) -> Tensor:
    """near + far_weight * (joint - near), where joint is the attention over the keys of both (B,H,T,D).

    joint = (1 - s) * near + s * far, with s = sigmoid(far_lse - near_lse) the far keys' share of the softmax.
    So a weight of 1 gives the joint attention, and one between 0 and 1 mixes it with the near one.
    """
    share = (far_lse - near_lse).sigmoid()[..., None].to(near.dtype)
    return near + far_weight * share * (far - near)


def mixed(first: Tensor, second: Tensor, gate: Tensor) -> Tensor:
    """gate * first + (1 - gate) * second, both (B,H,T,D), with a gate (B,H,T,1).

    Only the three are kept for the backward pass, of which attention keeps two anyway.
    """
    gate = gate.to(first.dtype)  # under autocast it may be in half precision
    if is_transformed() or not torch.is_grad_enabled():
        return torch.lerp(second, first, gate)
    result: Tensor = _Mixed.apply(first, second, gate)
    return result


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(first, second, gate)
        return torch.lerp(second, first, gate)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second, gate = ctx.saved_tensors
        d_first = d_out * gate
        d_gate = torch.linalg.vecdot(d_out, first - second)[..., None]
        return d_first, d_out - d_first, d_gate


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of parts (B,H,T,D), each times its weights (B,H,T,1)."""
    if is_transformed():
        return torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
    result: Tensor = _WeightedSum.apply(*parts, *weights)
    return result


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        parts, weights = given[: len(given) // 2], given[len(given) // 2 :]
        out = parts[0] * weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            out.addcmul_(part, weight)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        given = ctx.saved_tensors
        parts, weights = given[: len(given) // 2], given[len(given) // 2 :]
        of_weights = (torch.linalg.vecdot(d_out, part)[..., None] for part in parts)
        return *(d_out * weight for weight in weights), *of_weights
