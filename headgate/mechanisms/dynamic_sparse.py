"""dynamic-sparse: a window and a learned gate per head (Dynamic Sparse Attention).

    g_i = sigmoid(W_g x_i + b_g)                      one value per head
    A(i) = all j <= i          while i < dense_prefix
           i-W <= j <= i       from there on
    out_i^h = g_i^h * attention of q_i^h over A(i)

The paper windows "sequences longer than 512". Taken per sequence, an early token's output would depend on how
many tokens follow it, and no KV cache could work; taken per token, on its own prefix, it does not.
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms.contract import (
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
class DynamicSparseOptions(MechanismOptions):
    window: int | None = 256
    """Keys at a distance up to this are visible; null for all."""
    dense_prefix: int = 512
    """Positions below this see all keys before them."""
    gate: Literal["learned", "open"] = "learned"
    """How the heads are weighted: by the learned gate, or all by 1."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "window")
        require_at_least(self, 0, "dense_prefix")


@register("dynamic-sparse")
class DynamicSparse(Mechanism):
    Options = DynamicSparseOptions
    options: DynamicSparseOptions
    ablations = {
        "no-gate": {"gate": "open"},
        "fixed-window": {"dense_prefix": 0},
        "no-window": {"window": None},
    }

    def __init__(self, heads: Heads, options: DynamicSparseOptions) -> None:
        super().__init__(heads, options)
        self.gate = nn.Linear(heads.d_model, heads.n_heads) if options.gate == "learned" else None

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        o = self.options
        gate = None if self.gate is None else self.followed(opened(self.gate(x)), down=True)
        if gate is not None and self.is_skipping(q):
            attended, _ = ops.active_attention(
                q, k, v, gate[:, 0] > 0, window=o.window, dense_prefix=o.dense_prefix, start=start
            )
        elif o.window is None:
            attended = ops.causal_attention(q, k, v, start=start)
        else:
            attended = ops.window_attention(q, k, v, o.window, dense_prefix=o.dense_prefix, start=start)
        return attended if gate is None else head_weights(gate) * attended

    @property
    def skips(self) -> bool:
        return self.gate is not None

    def reference(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        o = self.options
        attended, _ = reference.span_attention(
            q, k, v, window=o.window, dense_prefix=o.dense_prefix, start=start
        )
        return attended if self.gate is None else head_weights(self.gate(x).sigmoid()) * attended

    def open(self) -> float:
        if self.gate is not None:
            open_gate(self.gate)
        o = self.options
        return math.inf if o.window is None else max(o.dense_prefix, o.window + 1)

    def first_key(self, position: int) -> int:
        o = self.options
        return 0 if o.window is None or position < o.dense_prefix else max(0, position - o.window)

    def pairs(self, length: int) -> int:
        o = self.options
        if o.window is None:
            return length * (length + 1) // 2
        dense = min(length, o.dense_prefix)
        windowed = window_pairs(length, o.window) - window_pairs(dense, o.window)
        return dense * (dense + 1) // 2 + windowed
