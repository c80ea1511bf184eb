"""short-path: full attention beside a short path for what is near.

    out_i^h = attention of q_i^h over all j <= i  +  sum over c = 0..n-1 of w_c^h * v_{i-c}

w has one number per tap, head and channel. It starts at 0, so the mechanism starts as full attention.
Attention has to learn from scratch to look at the tokens just before; the path sees them from the start,
channel by channel, and leaves attention to what is far.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register


@dataclass(frozen=True)
class ShortPathOptions(MechanismOptions):
    taps: int = 4
    """Tokens that the path sees: the token itself and those just before it."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "taps")


@register("short-path")
class ShortPath(Mechanism):
    Options = ShortPathOptions
    options: ShortPathOptions
    handles_documents = True
    ablations = {"own-only": {"taps": 1}}

    def __init__(self, heads: Heads, options: ShortPathOptions) -> None:
        super().__init__(heads, options)
        self.taps = nn.Parameter(torch.empty(options.taps, heads.n_heads, heads.head_dim))

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.zero_()

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        near = ops.short_convolution(v, self.taps, q.shape[2], documents=past.documents)
        return ops.attention(q, k, v, past.span()) + near

    def start_as_full(self) -> float:
        self.taps.data.zero_()
        return math.inf
