"""Helpers for gates: numbers between 0 and 1 that weight the output of a head, or of one of its branches."""

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.ops import Span

OPEN = 10.0
"""Bias of an open gate: 1 - sigmoid(10) = 5e-5, which changes a model's logits by about 5e-4. A larger one
would be closer to the identity, but learn later: the gate's gradient shrinks with it as exp(-bias)."""


@torch.no_grad()
def fix_gate(gate: nn.Linear, bias: float = OPEN) -> None:
    """Make a gate the same for every input: sigmoid(bias). Its weights, at 0, still have a gradient."""
    gate.weight.zero_()
    gate.bias.fill_(bias)


def openness(logits: Tensor) -> Tensor:
    """How far a gate with these logits is open: their sigmoid, computed in at least fp32. In bf16 a gate
    above 0.998 is 1, and would never learn to close: its gradient is computed as g * (1 - g).

    A gate is `openness(linear(x))` with a plain `nn.Linear`, so that adapters and quantisation, which replace
    Linears, change its logits.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide).sigmoid().to(logits.dtype)


def head_weights(gate: Tensor) -> Tensor:
    """A gate per token and head (B,Tq,H) in the shape that multiplies attended values (B,H,Tq,1)."""
    return gate.transpose(1, 2)[..., None]


def attention_of(q: Tensor, k: Tensor, v: Tensor, span: Span, active: Tensor | None) -> Tensor:
    """Attention of all heads, or only of the active ones (B,H) when a single token is decoded."""
    if active is None:
        return ops.attention(q, k, v, span)
    return ops.active_attention(q, k, v, active, span)[0]
