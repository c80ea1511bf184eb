"""full: causal softmax attention, the baseline (arXiv 1706.03762).

out_i = softmax over j <= i of (q_i . k_j / sqrt(D)) v_j
"""

import math

from torch import Tensor

from headgate import ops
from headgate.mechanisms.contract import Mechanism, Past, register


@register("full")
class Full(Mechanism):
    shelf = "baselines"
    handles_documents = True

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        return ops.attention(q, k, v, past.span())

    def plain_span(self) -> ops.Span:
        return ops.Span()

    def start_as_full(self) -> float:
        return math.inf
