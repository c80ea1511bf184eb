"""gated: attention's output, gated by the querying token (Gated Attention, arXiv 2505.06708).

    out_i^h = o_i^h * sigmoid(W_g x_i)^h              o: full attention

`per="channel"` has a gate for each of a head's channels, as in Qwen3-Next; `per="head"` has one per head. The
gate has no bias as published; with `gate_bias=true` it has one, through which a retrofit opens it.
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register
from headgate.mechanisms.gates import attention_of, fix_gate, head_weights, openness
from headgate.ops import Span


@dataclass(frozen=True)
class GatedOptions(MechanismOptions):
    per: Literal["channel", "head"] = "channel"
    """Whether a head has a gate for each of its channels or a single one."""
    gate: Literal["learned", "open"] = "learned"
    """Whether the gate is learned, or 1 for all."""
    gate_bias: bool = False
    """Whether the gate has a bias."""


@register("gated")
class Gated(Mechanism):
    Options = GatedOptions
    options: GatedOptions
    shelf = "second shelf"
    handles_documents = True
    ablations = {"head": {"per": "head"}, "no-gate": {"gate": "open"}}
    renamed_options = {"bias": "gate_bias"}

    def __init__(self, heads: Heads, options: GatedOptions) -> None:
        super().__init__(heads, options)
        gates = heads.n_heads * (heads.head_dim if options.per == "channel" else 1)
        self.gate = nn.Linear(heads.d_model, gates, options.gate_bias) if options.gate == "learned" else None

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        if self.gate is None:
            return attention_of(q, k, v, past.span(), None)
        gate = openness(self.gate(x))
        if self.options.per == "channel":
            channels = gate.unflatten(-1, (self.heads.n_heads, -1))  # (B,Tq,H,D)
            if self.observed:
                self.observe("gate", channels.mean(-1))
            return attention_of(q, k, v, past.span(), None) * channels.transpose(1, 2)
        gate = self.followed(gate, down=True)
        active = gate[:, 0] > 0 if self.is_skipping(q) else None
        return head_weights(gate) * attention_of(q, k, v, past.span(), active)

    @property
    def skips(self) -> bool:
        return self.gate is not None and self.options.per == "head"

    def plain_span(self) -> Span | None:
        return Span() if self.gate is None else None

    def gated_span(self) -> tuple[Span, str] | None:
        return None if self.gate is None else (Span(), "gate")

    def start_as_full(self) -> float:
        """Through the bias; without one, no weights hold the gate open for every token."""
        if self.gate is None:
            return math.inf
        if not self.options.gate_bias:
            return 0
        fix_gate(self.gate)
        return math.inf
