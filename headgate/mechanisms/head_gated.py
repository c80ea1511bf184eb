"""head-gated: a gate per head mixes a window with global attention (Learned Head Gating, aardXiv 2510.00093).

    g_i = sigmoid(W_g x_i + b_g)                      one value per head
    out_i^h = g_i^h * local_i^h + (1 - g_i^h) * global_i^h
    local: i-W <= j <= i     global: all j <= i

The global branch is not computed beside the local one: the keys beyond the window are attended to separately,
and global = merge(local, far) by their log-sum-exps. The cost is that of full attention.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register
from headgate.mechanisms.gates import OPEN, fix_gate, head_weights, openness
from headgate.ops import reference
from headgate.ops.merge import merged


@dataclass(frozen=True)
class HeadGatedOptions(MechanismOptions):
    window: int = 256
    """Reach of the local branch: keys at a distance up to this."""
    gate: Literal["learned", "half", "local", "global"] = "learned"
    """The mix: learned, or fixed at one half, at local only, or at global only."""
    gate_bias: bool = True
    """Whether the gate has a bias; without one no weights hold it at either end for every token."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "window")


@register("head-gated")
class HeadGated(Mechanism):
    Options = HeadGatedOptions
    options: HeadGatedOptions
    shelf = "papers"
    handles_documents = True
    ablations = {
        "no-gate": {"gate": "half"},
        "local-only": {"gate": "local"},
        "global-only": {"gate": "global"},
    }

    def __init__(self, heads: Heads, options: HeadGatedOptions) -> None:
        super().__init__(heads, options)
        learned = options.gate == "learned"
        self.gate = nn.Linear(heads.d_model, heads.n_heads, options.gate_bias) if learned else None

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        o = self.options
        if o.gate in ("local", "global"):
            return ops.attention(q, k, v, past.span(o.window if o.gate == "local" else None))
        far_weight: Tensor | float = 0.5
        active = None
        if self.gate is not None:
            # Only upwards: the window's keys belong to the global branch too, so a closed local branch would
            # save nothing.
            gate = self.followed(openness(self.gate(x)), up=True)
            far_weight = 1 - head_weights(gate)
            active = gate[:, 0] < 1 if self.is_skipping(q) else None
        local, local_lse = ops.span_attention(q, k, v, past.span(o.window))
        beyond = k.shape[2] - o.window - 1
        if active is None or beyond < 1:
            far, far_lse = ops.far_attention(q, k, v, o.window, past.span())
        else:
            far, far_lse = ops.active_attention(q, k[:, :, :beyond], v[:, :, :beyond], active, past.span())
        near = q.shape[2] - far.shape[2]  # queries whose every key is in the window
        if isinstance(far_weight, Tensor):
            far_weight = far_weight[:, :, near:]
        mixed = merged(local[:, :, near:], local_lse[:, :, near:], far, far_lse, far_weight)
        return torch.cat([local[:, :, :near], mixed], 2)

    def dense(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        local, _ = reference.span_attention(q, k, v, past.span(self.options.window))
        everything, _ = reference.span_attention(q, k, v, past.span())
        fixed = {"half": 0.5, "local": 1.0, "global": 0.0}
        g = fixed[self.options.gate] if self.gate is None else head_weights(openness(self.gate(x)))
        return g * local + (1 - g) * everything

    @property
    def skips(self) -> bool:
        return self.gate is not None

    def first_key(self, position: int) -> int:
        return max(0, position - self.options.window) if self.options.gate == "local" else 0

    def plain_span(self) -> ops.Span | None:
        o = self.options
        return ops.Span(o.window if o.gate == "local" else None) if o.gate in ("local", "global") else None

    def start_as_full(self) -> float:
        """Starts at the global branch, which is full attention: the gate starts at 0."""
        o = self.options
        if self.gate is not None and o.gate_bias:
            fix_gate(self.gate, -OPEN)
        mixed = self.gate is not None and not o.gate_bias
        return o.window + 1 if mixed or o.gate in ("half", "local") else math.inf
