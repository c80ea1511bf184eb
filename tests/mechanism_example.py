"""output-gated-example: somebody else's mechanism. One file, registered by importing it; nothing else
knows of it.

out_i^h = o_i^h * softmax over i-W <= j <= i of (q_i . k_j / sqrt(D)) v_j,   o_i^h = sigmoid(W_o x_i + b_o)
"""

from dataclasses import dataclass

from torch import Tensor, nn

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms import Mechanism, MechanismOptions, Past, register


@dataclass(frozen=True)
class OutputGatedOptions(MechanismOptions):
    window: int = 256
    """Keys at a distance up to this are visible."""
    output_gate: bool = True
    """Whether the heads' outputs are gated."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "window")


@register("output-gated-example")
class OutputGated(Mechanism):
    Options = OutputGatedOptions
    ablations = {"no-output-gate": {"output_gate": False}}

    def __init__(self, heads, options):
        super().__init__(heads, options)
        self.output = nn.Linear(heads.d_model, heads.n_heads) if options.output_gate else None

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        attended = ops.attention(q, k, v, past.span(self.options.window))
        return attended if self.output is None else self.output(x).sigmoid().mT[..., None] * attended

    def first_key(self, position: int) -> int:
        return max(0, position - self.options.window)
