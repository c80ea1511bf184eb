"""full: causal softmax attention, the baseline.

out_i = softmax over j <= i of (q_i . k_j / sqrt(D)) v_j
"""

import math

from torch import Tensor

from headgate import ops
from headgate.mechanisms.contract import Mechanism, register
from headgate.ops import reference


@register("full")
class Full(Mechanism):
    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        return ops.causal_attention(q, k, v, start=start)

    def reference(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        return reference.span_attention(q, k, v, start=start)[0]

    def open(self) -> float:
        return math.inf

    def first_key(self, position: int) -> int:
        return 0

    def pairs(self, length: int) -> int:
        return length * (length + 1) // 2
