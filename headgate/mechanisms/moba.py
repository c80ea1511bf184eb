"""moba: a query's own block and the earlier ones that suit it (Mixture of Block Attention, arXiv 2502.13189).

    out_i^h = softmax over the chosen blocks' keys j <= i of (q_i . k_j / sqrt(D)) v_j
    chosen: the query's own block, and the top_k earlier ones with the highest q_i . mean(block keys), per
    head

Blocks are aligned; ties go to the later one. The choice has no gradient, but the chosen keys do.
"""

from dataclasses import dataclass

from torch import Tensor

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms.contract import Mechanism, MechanismOptions, Past, register


@dataclass(frozen=True)
class MobaOptions(MechanismOptions):
    block: int = 64
    """Keys in a block."""
    top_k: int = 3
    """Earlier blocks that a query attends to."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "block")
        require_at_least(self, 0, "top_k")


@register("moba")
class Moba(Mechanism):
    Options = MobaOptions
    options: MobaOptions
    shelf = "second shelf"
    ablations = {"own-block": {"top_k": 0}}

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        past.require_all_keys("moba")
        o, means = self.options, past.block_means(self.options.block, k)
        chosen = ops.choose_blocks(q, k, block=o.block, top_k=o.top_k, means=means)
        return ops.block_selected_attention(q, k, v, block=o.block, chosen=chosen)

    def pairs(self, length: int) -> int:
        """A block's mean counts as one key."""
        return selected_pairs(length, self.options.block, self.options.top_k)

    def start_as_full(self) -> float:
        """As long as there are no more blocks than are chosen."""
        return (self.options.top_k + 1) * self.options.block


def selected_pairs(length: int, block: int, top_k: int) -> int:
    """Pairs of queries that see their own block, a mean of every earlier one, and top_k of those."""
    return sum(i // block + i % block + 1 + min(top_k, i // block) * block for i in range(length))
