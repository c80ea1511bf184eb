"""near-far: heads of near and far reach, each behind a gate that starts nearly closed.

    near heads: i-W <= j <= i     far heads: i-F <= j <= i,  F = stretch * W
    g_i = sigmoid(W_g x_i + b_g)                      one value per head; sigmoid(b_g) = opening
    out_i^h = g_i^h * attention of q_i^h over its reach

The first half of the key-value heads are near, the others far, each with its query heads; a single one is
far. A gate that starts nearly closed keeps attention's output quiet and slow to learn.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.config import require_at_least
from headgate.errors import HeadgateError
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register, window_pairs
from headgate.mechanisms.gates import OPEN, fix_gate, head_weights, openness


@dataclass(frozen=True)
class NearFarOptions(MechanismOptions):
    window: int = 256
    """Reach of the near heads: keys at a distance up to this."""
    stretch: int = 8
    """How many times as far the far heads reach."""
    gate: Literal["learned", "constant", "open"] = "learned"
    """How the heads are weighted: by the learned gate, by a learned constant for each, or all by 1."""
    opening: float = 0.05
    """How far the gate is open when training starts."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "window", "stretch")
        if not 0 < self.opening < 1:
            raise HeadgateError(f"opening={self.opening} is out of range; expected a share between 0 and 1")


@register("near-far")
class NearFar(Mechanism):
    Options = NearFarOptions
    options: NearFarOptions
    handles_documents = True
    ablations = {
        "no-gate": {"gate": "open"},
        "constant-gate": {"gate": "constant"},
        "half-open": {"opening": 0.5},
        "near-only": {"stretch": 1},
    }
    renamed_options = {"start": "opening"}
    tunable = {"opening": (0.02, 0.8)}

    def __init__(self, heads: Heads, options: NearFarOptions) -> None:
        super().__init__(heads, options)
        near, far = heads.n_kv_heads // 2, (heads.n_kv_heads + 1) // 2
        self.windows = [options.window] * near + [options.stretch * options.window] * far
        self.gate = nn.Linear(heads.d_model, heads.n_heads) if options.gate == "learned" else None
        self.constant = nn.Parameter(torch.empty(heads.n_heads)) if options.gate == "constant" else None

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name in ("gate.bias", "constant"):
            parameter.fill_(math.log(self.options.opening / (1 - self.options.opening)))
        else:
            super().initialise(name, parameter, generator)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        logits = self.constant if self.gate is None else self.gate(x)
        gate = None if logits is None else self.followed(openness(logits).expand(*x.shape[:2], -1), down=True)
        active = gate[:, 0] > 0 if gate is not None and self.is_skipping(q) else None
        attended = ops.windows_attention(q, k, v, self.windows, past.span(), active=active)
        return attended if gate is None else head_weights(gate) * attended

    @property
    def skips(self) -> bool:
        return self.options.gate != "open"

    def plain_span(self) -> ops.Span | None:
        return None if self.skips or len(set(self.windows)) > 1 else ops.Span(self.windows[0])

    def start_as_full(self) -> float:
        """Its gates start open, through their bias."""
        if self.gate is not None:
            fix_gate(self.gate)
        if self.constant is not None:
            self.constant.data.fill_(OPEN)
        return min(self.windows) + 1

    def first_key(self, position: int) -> int:
        return max(0, position - self.options.stretch * self.options.window)

    def pairs(self, length: int) -> int:
        return sum(window_pairs(length, window) for window in self.windows) // len(self.windows)
