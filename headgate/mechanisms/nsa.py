"""nsa: coarse, chosen and near keys, each behind a gate (Native Sparse Attention, arXiv 2502.11089).

    out_i^h = sum over c in {compressed, selected, window} of sigmoid(W_c x_i)^h * o_i^{h,c}

compressed: one mean key and mean value for every complete block before the query's own.
selected: the keys of `top_k` blocks: always the query's own and the first, then those with the largest weight
in the compressed attention, summed over the query heads that share keys.
window: i-W <= j <= i.

One block size serves compression and selection, and blocks are compressed by their mean, where the paper
learns a network. All branches share keys and values. The gates have no bias, so no weights make this full
attention and a retrofit starts changed.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register, window_pairs
from headgate.mechanisms.gates import head_weights, openness
from headgate.ops.merge import weighted_sum

BRANCHES = ("compressed", "selected", "window")


@dataclass(frozen=True)
class NsaOptions(MechanismOptions):
    block: int = 64
    """Keys in a block."""
    top_k: int = 16
    """Blocks that a query attends to, including its own and the first."""
    window: int = 512
    """Reach of the window: keys at a distance up to this."""
    without: Literal["none", "compressed", "selected", "window"] = "none"
    """The branch to leave out; without the compressed one, its weights still choose the blocks."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "block", "window")
        require_at_least(self, 2, "top_k")


@register("nsa")
class Nsa(Mechanism):
    Options = NsaOptions
    options: NsaOptions
    shelf = "second shelf"
    ablations = {
        "no-compressed": {"without": "compressed"},
        "no-selected": {"without": "selected"},
        "no-window": {"without": "window"},
    }

    def __init__(self, heads: Heads, options: NsaOptions) -> None:
        super().__init__(heads, options)
        self.branches = [branch for branch in BRANCHES if branch != options.without]
        self.gates = nn.Linear(heads.d_model, len(self.branches) * heads.n_heads, bias=False)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        past.require_all_keys("nsa")
        means = past.block_means(self.options.block, k, v)
        gates = openness(self.gates(x)).chunk(len(self.branches), -1)
        parts = [self._branch(branch, q, k, v, past, means) for branch in self.branches]
        for branch, gate in zip(self.branches, gates, strict=True):
            self.observe(f"{branch}_gate", gate)
        return weighted_sum(parts, [head_weights(gate).to(q.dtype) for gate in gates])

    def _branch(
        self, branch: str, q: Tensor, k: Tensor, v: Tensor, past: Past, means: list[Tensor] | None
    ) -> Tensor:
        o = self.options
        if branch == "window":
            return ops.attention(q, k, v, past.span(o.window))
        if branch == "compressed":
            return ops.compressed_attention(q, k, v, block=o.block, means=means)
        chosen = ops.choose_blocks(q, k, block=o.block, top_k=o.top_k - 1, by="weight", means=means)
        return ops.block_selected_attention(q, k, v, block=o.block, chosen=chosen)

    def first_key(self, position: int) -> int:
        return 0

    def pairs(self, length: int) -> int:
        """Over all branches; a block's mean counts as one key, both attended to and in the choice."""
        o, total = self.options, 0
        if "window" in self.branches:
            total += window_pairs(length, o.window)
        means = sum(i // o.block for i in range(length))
        if "compressed" in self.branches:
            total += means
        if "selected" in self.branches:
            chosen = (i % o.block + 1 + min(o.top_k - 1, i // o.block) * o.block for i in range(length))
            total += means + sum(chosen)
        return total
