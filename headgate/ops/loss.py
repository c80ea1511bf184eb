"""The cross-entropy after a linear head, in chunks of rows: the logits of a whole batch are never held.

In fp32 it is PyTorch's own chunked op. Autocast does not touch that op, which in half precision rounds the
loss and the sum of the weight's gradient. So under autocast the products here are in half precision, and
everything that is summed over rows or the vocabulary is in fp32.

Shapes: x (N,C), weight (V,C), targets (N).
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headgate.ops.gpu import device_kind
from headgate.ops.tiles import recomputed

IGNORED = -100
CPU_ELEMENTS, GPU_ELEMENTS = 1 << 25, 1 << 28
"""Logits held at once: 128 MB in fp32, and 1 GB where a product must be large to be fast."""


def rows_at_once(vocabulary: int, device: torch.device) -> int:
    """Tokens whose logits are held at once."""
    if device_kind(device) == "cpu":
        return max(64, min(1024, CPU_ELEMENTS // vocabulary))
    return max(2048, min(8192, GPU_ELEMENTS // vocabulary))


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, reduction: Literal["mean", "sum", "none"] = "mean"
) -> Tensor:
    """The cross-entropy of the targets that are not -100: their mean or sum, or (N) with 0 for the others."""
    rows = min(rows_at_once(weight.shape[0], x.device), x.shape[0])
    dtype = product_dtype(x)
    if dtype not in (torch.bfloat16, torch.float16):
        compiling = torch.compiler.is_compiling()  # otherwise PyTorch would warn, and so break the graph
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, allow_retain_graph=compiling)
        return F.linear_cross_entropy(
            x, weight, targets, ignore_index=IGNORED, reduction=reduction, options=options
        )
    if reduction == "none":
        half = weight.to(dtype)
        return torch.cat(
            [
                recomputed(_each, part.to(dtype), half, wanted)
                for part, wanted in zip(x.split(rows), targets.split(rows), strict=True)
            ]
        )
    total: Tensor = _SummedLoss.apply(x, weight, targets, dtype, rows)
    return total if reduction == "sum" else total / (targets != IGNORED).sum()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer would multiply x."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _each(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=IGNORED, reduction="none")


class _SummedLoss(torch.autograd.Function):
    """The gradients come with the loss, so the logits are needed only once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, rows: int
    ) -> Tensor:
        half, wide = weight.to(dtype), torch.float32
        total = torch.zeros((), dtype=wide, device=x.device)
        d_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for first in range(0, x.shape[0], rows):
            here = slice(first, first + rows)
            part, wanted = x[here].to(dtype), targets[here, None]
            logits, counts = F.linear(part, half).to(wide), wanted != IGNORED
            place = wanted.clamp(min=0)
            lse = logits.logsumexp(-1, keepdim=True)
            total += ((lse - logits.gather(1, place)) * counts).sum()
            if d_x is None and d_weight is None:
                continue
            logits.sub_(lse).exp_().scatter_add_(1, place, -torch.ones_like(lse)).mul_(counts)
            d_logits = logits.to(dtype)
            if d_x is not None:
                d_x[here] = d_logits @ half
            if d_weight is not None:
                d_weight += d_logits.mT @ part
            del logits, d_logits  # before the next chunk's are made
        ctx.save_for_backward(d_x, d_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_weight = ctx.saved_tensors
        if d_x is not None:
            d_x = (d_x * d_loss).to(d_x.dtype)
        if d_weight is not None:
            d_weight = (d_weight * d_loss).to(ctx.weight_dtype)
        return d_x, d_weight, None, None, None
