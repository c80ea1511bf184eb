"""Causal attention on a GPU by PyTorch's scaled_dot_product_attention, whose fused kernels are the fastest
there for a plain causal mask. It returns no log-sum-exp that has a gradient, and knows no windows.
"""

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headgate.ops.span.options import Span

DEVICES = ("cuda",)


def refuse(
    q: Tensor, k: Tensor, v: Tensor, span: Span, *, output_only: bool, **biases: Tensor | None
) -> str | None:
    if q.device.type not in DEVICES:
        return f"it runs on a GPU, not on {q.device.type}"
    if span.window is not None:
        return "it has no windows"
    if span.first_keys is not None:
        return "its causal mask knows no documents"
    if any(bias is not None for bias in biases.values()):
        return "it has no biases"
    if not output_only:
        return "its log-sum-exp has no gradient"
    if q.shape[2] not in (1, k.shape[2]):
        return "its causal mask is for as many queries as keys, or for one query"
    return None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, span: Span, **options: Any) -> tuple[Tensor, None]:
    out = scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1])
    return out, None
