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

import torch
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
        gates = dict(zip(self.branches, openness(self.gates(x)).chunk(len(self.branches), -1), strict=True))
        for branch, gate in gates.items():
            self.observe(f"{branch}_gate", gate)
        weights = {branch: head_weights(gate).to(q.dtype) for branch, gate in gates.items()}
        o, fine = self.options, [weights[branch] for branch in BRANCHES[1:] if branch in weights]
        if "selected" in weights:
            chosen = ops.choose_blocks(q, k, block=o.block, top_k=o.top_k - 1, by="weight", means=means)
        if len(fine) == 2:  # one op, as many keys are in both
            near = ops.blocks_and_window_attention(
                q, k, v, chosen, *(weight.squeeze(-1) for weight in fine), block=o.block, window=o.window
            )
        elif "selected" in weights:
            near = weighted_sum([ops.block_selected_attention(q, k, v, block=o.block, chosen=chosen)], fine)
        else:
            near = weighted_sum([ops.attention(q, k, v, past.span(o.window))], fine)
        if "compressed" not in weights:
            return near
        coarse = ops.compressed_attention(q, k, v, block=o.block, means=means)
        return torch.addcmul(near, coarse, weights["compressed"])

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
