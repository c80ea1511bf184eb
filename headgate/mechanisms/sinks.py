"""sinks: a learned logit per head that attends to nothing, for staying silent (gpt-oss, arXiv 2508.10925).

    out_i^h = o_i^h * sigmoid(lse_i^h - s^h)          o: full attention, lse: log-sum-exp of its logits

That is a softmax over the keys and one more entry with logit s and value 0. A sink that stays at 0 is the
"softmax off by one".
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register
from headgate.mechanisms.gates import OPEN


@dataclass(frozen=True)
class SinksOptions(MechanismOptions):
    sink: Literal["learned", "constant", "none"] = "learned"
    """The sink's logit: learned for each head, always 0, or no sink."""


@register("sinks")
class Sinks(Mechanism):
    Options = SinksOptions
    options: SinksOptions
    shelf = "second shelf"
    handles_documents = True
    ablations = {"constant": {"sink": "constant"}, "no-sink": {"sink": "none"}}

    def __init__(self, heads: Heads, options: SinksOptions) -> None:
        super().__init__(heads, options)
        self.sink = nn.Parameter(torch.empty(heads.n_heads)) if options.sink == "learned" else None

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.zero_()

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        if self.options.sink == "none":
            return ops.attention(q, k, v, past.span())
        attended, lse = ops.span_attention(q, k, v, past.span())
        share = (lse if self.sink is None else lse - self.sink[:, None]).sigmoid()  # of the keys, (B,H,Tq)
        self.observe("gate", share.transpose(1, 2))
        return attended * share[..., None].to(attended.dtype)

    def plain_span(self) -> ops.Span | None:
        return ops.Span() if self.options.sink == "none" else None

    @torch.no_grad()
    def start_as_full(self) -> float:
        """A logit so low that nothing goes to the sink, even beside a single key of low logit."""
        if self.sink is not None:
            self.sink.fill_(-2 * OPEN)
        return 0 if self.options.sink == "constant" else math.inf
