"""head-gated: a learned gate per head mixes a local window with global attention (Learned Head Gating).

    g_i = sigmoid(W_g x_i + b_g)                      one value per head
    out_i^h = g_i^h * local_i^h + (1 - g_i^h) * global_i^h
    local: i-W <= j <= i     global: all j <= i

The global branch is not computed beside the local one: the keys beyond the window are attended to by
themselves, and global = merge(local, far) by their log-sum-exps. The cost is that of full attention.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms.contract import (
    OPEN,
    Heads,
    Mechanism,
    MechanismOptions,
    head_weights,
    open_gate,
    opened,
    register,
    window_pairs,
)
from headgate.ops import reference
from headgate.ops.merge import merged


@dataclass(frozen=True)
class HeadGatedOptions(MechanismOptions):
    window: int = 256
    """Reach of the local branch: keys at a distance up to this."""
    gate: Literal["learned", "half", "local", "global"] = "learned"
    """The mix: learned, or fixed at one half, at local alone, at global alone."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "window")


@register("head-gated")
class HeadGated(Mechanism):
    Options = HeadGatedOptions
    options: HeadGatedOptions
    ablations = {
        "no-gate": {"gate": "half"},
        "local-only": {"gate": "local"},
        "global-only": {"gate": "global"},
    }

    def __init__(self, heads: Heads, options: HeadGatedOptions) -> None:
        super().__init__(heads, options)
        self.gate = nn.Linear(heads.d_model, heads.n_heads) if options.gate == "learned" else None

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        o = self.options
        if o.gate == "global":
            return ops.causal_attention(q, k, v, start=start)
        if o.gate == "local":
            return ops.window_attention(q, k, v, o.window, start=start)
        openness: Tensor | float = 0.5
        active = None
        if self.gate is not None:
            # Only upwards: the keys of the window belong to the global branch too, so a closed local branch
            # would save nothing.
            gate = self.followed(opened(self.gate(x)), up=True)
            openness = 1 - head_weights(gate)
            active = gate[:, 0] < 1 if self.is_skipping(q) else None
        local, local_lse = ops.span_attention(q, k, v, window=o.window, start=start)
        beyond = k.shape[2] - o.window - 1
        if active is None or beyond < 1:
            far, far_lse = ops.far_attention(q, k, v, o.window, start=start)
        else:
            far, far_lse = ops.active_attention(q, k[:, :, :beyond], v[:, :, :beyond], active, start=start)
        near = q.shape[2] - far.shape[2]  # queries whose every key lies in the window
        if isinstance(openness, Tensor):
            openness = openness[:, :, near:]
        mixed = merged(local[:, :, near:], local_lse[:, :, near:], far, far_lse, openness)
        return torch.cat([local[:, :, :near], mixed], 2)

    @property
    def skips(self) -> bool:
        return self.gate is not None

    def reference(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        local, _ = reference.span_attention(q, k, v, window=self.options.window, start=start)
        everything, _ = reference.span_attention(q, k, v, start=start)
        fixed = {"half": 0.5, "local": 1.0, "global": 0.0}
        g = fixed[self.options.gate] if self.gate is None else head_weights(self.gate(x).sigmoid())
        return g * local + (1 - g) * everything

    def open(self) -> float:
        """Towards the global branch, which is full attention: the gate starts at 0."""
        if self.gate is not None:
            open_gate(self.gate, -OPEN)
        return self.options.window + 1 if self.options.gate in ("half", "local") else math.inf

    def first_key(self, position: int) -> int:
        return max(0, position - self.options.window) if self.options.gate == "local" else 0

    def pairs(self, length: int) -> int:
        if self.options.gate == "local":
            return window_pairs(length, self.options.window)
        return length * (length + 1) // 2
