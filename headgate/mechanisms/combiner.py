"""combiner: a query's own block exactly, each earlier block as a summary (Combiner, arXiv 2107.05768).

    one softmax over   q_i . k_j / sqrt(D)   for the keys j <= i of the query's own block
                       q_i . m_b / sqrt(D)   for every earlier block b
    m_b = elementwise maximum of the block's keys
    value of block b = sum_j p(j) v_j,   p = softmax over the block of (m_b . k_j / sqrt(D))

Combiner pools a block's queries for p; here its keys are pooled, so that cached keys suffice.
"""

from dataclasses import dataclass

from torch import Tensor

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms.contract import Mechanism, MechanismOptions, Past, register


@dataclass(frozen=True)
class CombinerOptions(MechanismOptions):
    block: int = 64
    """Keys in a block."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "block")


@register("combiner")
class Combiner(Mechanism):
    Options = CombinerOptions
    options: CombinerOptions
    shelf = "baselines"

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        past.require_all_keys("combiner")
        block = self.options.block
        key, value = past.per_block("summaries", block, lambda k, v: ops.block_summaries(k, v, block), k, v)
        return ops.combiner_attention(q, k, v, block=block, summarised=(key, value))

    def start_as_full(self) -> float:
        """Only the first block is seen exactly; a summary of several keys cannot stand for all of them."""
        return self.options.block

    def pairs(self, length: int) -> int:
        block = self.options.block
        return sum(i % block + 1 + i // block for i in range(length))
