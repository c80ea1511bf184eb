"""value-residual: every layer's values mixed with the first layer's (ResFormer, arXiv 2410.17897).

    v^l <- a^l v^l + b^l v^1                          v^1: the first layer's values; a, b start at 1/2

The first layer is full attention as it is.
"""

import math

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register


@register("value-residual")
class ValueResidual(Mechanism):
    uses_first_values = True
    shelf = "second shelf"
    handles_documents = True

    def __init__(self, heads: Heads, options: MechanismOptions) -> None:
        super().__init__(heads, options)
        self.own = nn.Parameter(torch.empty(1))
        self.first = nn.Parameter(torch.empty(1))

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.fill_(0.5)

    def prepare(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, ...]:
        own, first = self.own.to(v.dtype), self.first.to(v.dtype)
        if past.first_values is None:
            mixed = v + 0 * (own + first)  # distributed training wants a gradient for every parameter
        else:
            mixed = own * v + first * past.first_values
        return super().prepare(x, q, k, mixed, past)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        return ops.attention(q, k, v, past.span())

    @torch.no_grad()
    def start_as_full(self) -> float:
        self.own.fill_(1.0)
        self.first.zero_()
        return math.inf
