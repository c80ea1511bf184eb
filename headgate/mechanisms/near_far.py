"""near-far: heads of near and far reach, each behind a gate that starts nearly closed.

    near heads: i-W <= j <= i     far heads: i-F <= j <= i,  F = stretch * W
    g_i = sigmoid(W_g x_i + b_g)                      one value per head; sigmoid(b_g) = start
    out_i^h = g_i^h * attention of q_i^h over its reach

The mechanism that docs/findings.md arrives at: a gate that starts nearly closed makes what attention puts out
quiet and slow to learn, which early in training is worth more than any pattern of keys. The first half of the
key-value heads are near, the others far, each with its query heads; if there is one, it is far. Cost and
cache are bounded by F.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.config import require_at_least
from headgate.errors import HeadgateError
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


@dataclass(frozen=True)
class NearFarOptions(MechanismOptions):
    window: int = 256
    """Reach of the near heads: keys at a distance up to this."""
    stretch: int = 8
    """How many times as far the far heads reach."""
    gate: Literal["learned", "constant", "open"] = "learned"
    """How the heads are weighted: by the learned gate, by a learned constant of each, or all by 1."""
    start: float = 0.05
    """How far the gate is open at the start of training."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "window", "stretch")
        if not 0 < self.start < 1:
            raise HeadgateError(f"start={self.start} is out of range; expected a share between 0 and 1")


@register("near-far")
class NearFar(Mechanism):
    Options = NearFarOptions
    options: NearFarOptions
    ablations = {
        "no-gate": {"gate": "open"},
        "constant-gate": {"gate": "constant"},
        "half-open": {"start": 0.5},
        "near-only": {"stretch": 1},
    }

    def __init__(self, heads: Heads, options: NearFarOptions) -> None:
        super().__init__(heads, options)
        self.near = heads.n_kv_heads // 2
        self.gate = nn.Linear(heads.d_model, heads.n_heads) if options.gate == "learned" else None
        self.constant = nn.Parameter(torch.empty(heads.n_heads)) if options.gate == "constant" else None

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name in ("gate.bias", "constant"):
            parameter.fill_(math.log(self.options.start / (1 - self.options.start)))
        else:
            super().initialise(name, parameter, generator)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        gate = self._gate(x)
        active = gate[:, 0] > 0 if gate is not None and self.is_skipping(q) else None
        parts = []
        for heads, groups, reach in self._spans():
            part = q[:, heads], k[:, groups], v[:, groups]
            if active is None:
                parts.append(ops.window_attention(*part, reach, start=start))
            else:
                parts.append(ops.active_attention(*part, active[:, heads], window=reach, start=start)[0])
        attended = torch.cat(parts, 1)
        return attended if gate is None else head_weights(gate) * attended

    def reference(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        parts = [
            reference.span_attention(q[:, heads], k[:, groups], v[:, groups], window=reach, start=start)[0]
            for heads, groups, reach in self._spans()
        ]
        attended = torch.cat(parts, 1)
        if self.constant is not None:
            return self.constant.sigmoid()[:, None, None] * attended
        return attended if self.gate is None else head_weights(self.gate(x).sigmoid()) * attended

    def _spans(self) -> list[tuple[slice, slice, int]]:
        """Heads, their key-value heads, and how far they reach."""
        o, groups = self.options, self.heads.n_kv_heads
        share = self.heads.n_heads // groups
        found = []
        for first, end, reach in ((0, self.near, o.window), (self.near, groups, o.stretch * o.window)):
            if first < end:
                found.append((slice(first * share, end * share), slice(first, end), reach))
        return found

    def _gate(self, x: Tensor) -> Tensor | None:
        if self.constant is not None:
            return self.followed(opened(self.constant).expand(*x.shape[:2], -1), down=True)
        return None if self.gate is None else self.followed(opened(self.gate(x)), down=True)

    @property
    def skips(self) -> bool:
        return self.options.gate != "open"

    @torch.no_grad()
    def open(self) -> float:
        if self.gate is not None:
            open_gate(self.gate)
        if self.constant is not None:
            self.constant.fill_(OPEN)
        return min(reach for _, _, reach in self._spans()) + 1

    def first_key(self, position: int) -> int:
        return max(0, position - self.options.stretch * self.options.window)

    def pairs(self, length: int) -> int:
        """The mean over the heads."""
        spans = self._spans()
        total = sum((heads.stop - heads.start) * window_pairs(length, reach) for heads, _, reach in spans)
        return total // self.heads.n_heads
