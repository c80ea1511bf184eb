"""differential: two attentions over the same keys, one minus the other (DIFF V2, after arXiv 2410.05258).

    out_i^h = o_i^{h,1} - sigmoid(w_l^h . x_i) * o_i^{h,2}

2H query heads share the keys and values: both o are full attention, and what both see cancels. The second
half of the queries has its own projection, and always an RMSNorm, like the first half in Qwen3. With
`gate_bias=true` w_l has a bias, through which a retrofit closes the second half.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register
from headgate.mechanisms.gates import OPEN, fix_gate, head_weights, openness
from headgate.ops.norm import rms_norm


@dataclass(frozen=True)
class DifferentialOptions(MechanismOptions):
    gate: Literal["learned", "closed"] = "learned"
    """How much of the second half is subtracted: as learned, or nothing, which is full attention."""
    gate_bias: bool = False
    """Whether the gate has a bias."""


@register("differential")
class Differential(Mechanism):
    Options = DifferentialOptions
    options: DifferentialOptions
    shelf = "second shelf"
    handles_documents = True
    ablations = {"no-difference": {"gate": "closed"}}
    renamed_options = {"bias": "gate_bias"}

    def __init__(self, heads: Heads, options: DifferentialOptions) -> None:
        super().__init__(heads, options)
        self.gate = None
        if options.gate == "learned":
            self.gate = nn.Linear(heads.d_model, heads.n_heads, options.gate_bias)
            self.q_proj = nn.Linear(heads.d_model, heads.n_heads * heads.head_dim, bias=False)
            self.q_norm = nn.RMSNorm(heads.head_dim, eps=1e-6)

    def prepare(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, ...]:
        if self.gate is not None:
            second = self.q_proj(x).unflatten(-1, (-1, self.heads.head_dim)).transpose(1, 2)
            second = rms_norm(second, self.q_norm.weight, 1e-6).to(q.dtype)
            q = torch.stack([q, second], 2).flatten(1, 2)  # (B,2H,Tq,D): a pair shares its keys
        return super().prepare(x, q, k, v, past)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        attended = ops.attention(q, k, v, past.span())
        if self.gate is None:
            return attended
        first, second = attended.unflatten(1, (-1, 2)).unbind(2)
        return first - head_weights(self.followed(openness(self.gate(x)))).to(first.dtype) * second

    def pairs(self, length: int) -> int:
        return super().pairs(length) * (1 if self.gate is None else 2)

    def plain_span(self) -> ops.Span | None:
        return ops.Span() if self.gate is None else None

    def start_as_full(self) -> float:
        """Through the bias; without one, no weights close the second half for every token."""
        if self.gate is None:
            return math.inf
        if not self.options.gate_bias:
            return 0
        fix_gate(self.gate, -OPEN)
        return math.inf
