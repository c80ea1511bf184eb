"""dynamic-sparse: a window and a learned gate per head (Dynamic Sparse Attention, aardXiv 2510.00061).

    g_i = sigmoid(W_g x_i + b_g)                      one value per head
    A(i) = all j <= i          while i < dense_prefix
           i-W <= j <= i       from there on
    out_i^h = g_i^h * attention of q_i^h over A(i)

The paper windows "sequences longer than 512". Applied per sequence, an early token's output would depend on
how many tokens follow it, and no KV cache could work; applied per token, on its own prefix, it does not.
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from headgate.config import require_at_least
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register
from headgate.mechanisms.gates import attention_of, fix_gate, head_weights, openness
from headgate.ops import Span, reference


@dataclass(frozen=True)
class DynamicSparseOptions(MechanismOptions):
    window: int | None = 256
    """Keys at a distance up to this are visible; null for all."""
    dense_prefix: int = 512
    """Positions below this see all keys before them."""
    gate: Literal["learned", "open"] = "learned"
    """How the heads are weighted: by the learned gate, or all by 1."""
    gate_bias: bool = True
    """Whether the gate has a bias; without one no weights hold it open for every token."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "window")
        require_at_least(self, 0, "dense_prefix")


@register("dynamic-sparse")
class DynamicSparse(Mechanism):
    Options = DynamicSparseOptions
    options: DynamicSparseOptions
    shelf = "papers"
    handles_documents = True
    ablations = {
        "no-gate": {"gate": "open"},
        "fixed-window": {"dense_prefix": 0},
        "no-window": {"window": None},
    }

    def __init__(self, heads: Heads, options: DynamicSparseOptions) -> None:
        super().__init__(heads, options)
        learned = options.gate == "learned"
        self.gate = nn.Linear(heads.d_model, heads.n_heads, options.gate_bias) if learned else None

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        span = past.span(self.options.window, dense_prefix=self.options.dense_prefix)
        if self.gate is None:
            return attention_of(q, k, v, span, None)
        gate = self.followed(openness(self.gate(x)), down=True)
        active = gate[:, 0] > 0 if self.is_skipping(q) else None
        return head_weights(gate) * attention_of(q, k, v, span, active)

    def dense(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        span = past.span(self.options.window, dense_prefix=self.options.dense_prefix)
        attended, _ = reference.span_attention(q, k, v, span)
        return attended if self.gate is None else head_weights(openness(self.gate(x))) * attended

    @property
    def skips(self) -> bool:
        return self.gate is not None

    def first_key(self, position: int) -> int:
        o = self.options
        return 0 if o.window is None or position < o.dense_prefix else max(0, position - o.window)

    def plain_span(self) -> Span | None:
        o = self.options
        return None if o.gate == "learned" else Span(o.window, o.dense_prefix)

    def gated_span(self) -> tuple[Span, str] | None:
        o = self.options
        return (Span(o.window, o.dense_prefix), "gate") if o.gate == "learned" else None

    def start_as_full(self) -> float:
        """Its gates start open, through their bias."""
        o = self.options
        if self.gate is not None:
            if not o.gate_bias:
                return 0
            fix_gate(self.gate)
        return math.inf if o.window is None else max(o.dense_prefix, o.window + 1)
