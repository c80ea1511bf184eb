"""surprise: a mechanism of your own in one file. Values of keys unlike those before them weigh more.

s_j = |k_j - mean of the `span` keys before|^2 / D                  a state per key, from a look back
out_i^h = sum over j <= i of p_ij v_j sigmoid(w^h s_j + b^h)        p: full attention

headgate compare examples/own_mechanism.py:surprise --recipe tiny
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.mechanisms import Heads, Mechanism, MechanismOptions, Past, register


@dataclass(frozen=True)
class SurpriseOptions(MechanismOptions):
    span: int = 4
    """Tokens before a key that it is compared with."""


@register("surprise")
class Surprise(Mechanism):
    Options = SurpriseOptions
    ablations = {"last-key": {"span": 1}}

    def __init__(self, heads: Heads, options: SurpriseOptions) -> None:
        super().__init__(heads, options)
        self.weight, self.bias = (nn.Parameter(torch.empty(heads.n_kv_heads, 1)) for _ in "wb")

    def prepare(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, ...]:
        before = past.with_previous("k", k, self.options.span)[:, :, :-1]
        surprise = (k - before.unfold(2, self.options.span, 1).mean(-1)).square().mean(-1)  # (B,G,Tq)
        return *super().prepare(x, q, k, v, past), surprise

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past, surprise: Tensor) -> Tensor:
        return ops.attention(q, k, v * (self.weight * surprise + self.bias).sigmoid()[..., None], past.span())
