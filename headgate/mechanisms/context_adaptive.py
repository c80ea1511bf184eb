"""context-adaptive: a gate mixes a window of learned width with top-k keys (CAA, aardXiv 2510.00076).

    g_i = sigmoid(MLP(RMSNorm(x_i)))     one value per head, C -> C/4 -> H; the paper: "careful normalization"
    out_i^h = g_i^h * local_i^h + (1 - g_i^h) * global_i^h

local: keys up to `window` away as they are; from there to `max_window` with log w_i added to their logit,
w_i = sigmoid(width(x_i)), so that the width has a gradient. global: the k_i = ceil(c * sqrt(i + 1)) keys of
highest logit among all j <= i; with `select="block"`, for speed, the best ceil(k_i / block) complete past
blocks by q_i . mean(keys), and the query's own block. A probe sees its recall of the exact top k ("recall").
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headgate import ops
from headgate.config import require_at_least
from headgate.errors import HeadgateError
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register, window_pairs
from headgate.mechanisms.gates import fix_gate, head_weights, openness
from headgate.ops import reference
from headgate.ops.dispatch import forced
from headgate.ops.merge import mixed
from headgate.ops.norm import normed_linear
from headgate.ops.tiles import recomputed

RECOMPUTED = 4
"""Beyond this many windows the local branch is recomputed in the backward pass: little work, many bytes."""


@dataclass(frozen=True)
class ContextAdaptiveOptions(MechanismOptions):
    window: int = 256
    """The local window at its narrowest."""
    max_window: int = 512
    """The local window at its widest."""
    top_k: float = 1.0
    """c in k = ceil(c * sqrt(position + 1)), the keys of the global branch."""
    select: Literal["token", "block"] = "token"
    """Whether the global branch takes the best keys or the best blocks of keys."""
    block: int = 64
    """Keys in a block, with select=block."""
    gate: Literal["learned", "half", "local", "global"] = "learned"
    """The mix: learned, or fixed at one half, at local only, or at global only."""
    gate_bias: bool = True
    """Whether the gate's last layer has a bias; without one no weights hold it at either end."""
    width: Literal["learned", "fixed"] = "learned"
    """Whether the local window widens with the input or stays at its narrowest."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "window", "max_window", "block")
        if self.max_window < self.window:
            raise HeadgateError(
                f"max_window={self.max_window} is below window={self.window}; make it at least as wide"
            )
        if not self.top_k > 0:
            raise HeadgateError(f"top_k={self.top_k} must be above 0")

    @property
    def reach(self) -> int:
        return self.window if self.width == "fixed" else self.max_window


@register("context-adaptive")
class ContextAdaptive(Mechanism):
    Options = ContextAdaptiveOptions
    options: ContextAdaptiveOptions
    shelf = "papers"
    ablations = {
        "no-gate": {"gate": "half"},
        "local-only": {"gate": "local"},
        "global-only": {"gate": "global"},
        "fixed-width": {"width": "fixed"},
    }

    def __init__(self, heads: Heads, options: ContextAdaptiveOptions) -> None:
        super().__init__(heads, options)
        c, hidden = heads.d_model, max(1, heads.d_model // 4)
        self.gate = self.width = None
        if options.gate == "learned":
            norm, out = nn.RMSNorm(c, eps=1e-6), nn.Linear(hidden, heads.n_heads, options.gate_bias)
            self.gate = nn.Sequential(norm, nn.Linear(c, hidden), nn.GELU(), out)
        if options.width == "learned" and options.gate != "global":
            self.width = nn.Linear(c, heads.n_heads)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        o = self.options
        if o.gate == "local":
            return self._local(x, q, k, v, past)
        past.require_all_keys("context-adaptive")
        if o.gate == "global":
            return self._global(q, k, v, past)
        if self.gate is None:
            return (self._local(x, q, k, v, past) + self._global(q, k, v, past)) / 2
        norm, first = cast(nn.RMSNorm, self.gate[0]), cast(nn.Linear, self.gate[1])
        gate = self.followed(openness(self.gate[2:](normed_linear(x, norm, first))), down=True, up=True)
        if self.is_skipping(q):
            local = self._local(x, q, k, v, past, gate[:, 0] > 0)
            return mixed(local, ops.among_active(self._global, q, k, v, gate[:, 0] < 1), head_weights(gate))

        def mix(x: Tensor, q: Tensor, k: Tensor, v: Tensor, everything: Tensor, weights: Tensor) -> Tensor:
            return mixed(self._local(x, q, k, v, past), everything, weights)

        parts = x, q, k, v, self._global(q, k, v, past), head_weights(gate)
        long = q.shape[2] > RECOMPUTED * o.max_window and not self.observed
        return recomputed(mix, *parts) if long else mix(*parts)

    def dense(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        span, weight = self._ring(x, past)
        local, _ = reference.span_attention(q, k, v, span, ring_log_weight=weight)
        with forced("reference"):
            everything = self._global(q, k, v)
        fixed = {"half": 0.5, "local": 1.0, "global": 0.0}
        g = fixed[self.options.gate] if self.gate is None else head_weights(self.gate(x).sigmoid())
        return g * local + (1 - g) * everything

    @property
    def skips(self) -> bool:
        return self.gate is not None

    def _local(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past, active: Tensor | None = None
    ) -> Tensor:
        span, weight = self._ring(x, past)
        if weight is not None and self.observed:
            self.observe("width", weight.exp().transpose(1, 2))
        if active is not None:
            return ops.active_attention(q, k, v, active, span, ring_log_weight=weight)[0]
        return ops.span_attention(q, k, v, span, ring_log_weight=weight)[0]

    def _ring(self, x: Tensor, past: Past) -> tuple[ops.Span, Tensor | None]:
        o = self.options
        if self.width is None:
            return past.span(o.window), None
        return past.span(o.window, ring=o.max_window), F.logsigmoid(self.width(x)).transpose(1, 2)

    def _global(self, q: Tensor, k: Tensor, v: Tensor, past: Past | None = None) -> Tensor:
        o = self.options
        if o.select == "token":
            return ops.top_k_attention(q, k, v, scale=o.top_k)
        if self.observed:
            self.observe("recall", ops.selection_recall(q, k, block=o.block, scale=o.top_k))
        means = None if past is None else past.block_means(o.block, k)
        chosen = ops.choose_blocks(q, k, block=o.block, scale=o.top_k, means=means)
        return ops.block_selected_attention(q, k, v, block=o.block, chosen=chosen)

    def first_key(self, position: int) -> int:
        return max(0, position - self.options.reach) if self.options.gate == "local" else 0

    def pairs(self, length: int) -> int:
        """Local and global pairs; block selection counts a block's mean as one key."""
        o = self.options
        local = 0 if o.gate == "global" else window_pairs(length, o.reach)
        if o.gate == "local" or o.select == "token":
            return local + (o.gate != "local") * (length * (length + 1) // 2)
        return local + sum(i // o.block + keys for i, keys in enumerate(self._global_keys(length)))

    def _global_keys(self, length: int) -> list[int]:
        """How many keys the global branch attends to at each position."""
        o = self.options
        keys: list[int] = reference.top_count(torch.arange(length), o.top_k).tolist()
        if o.select == "token":
            return keys
        return [min(i // o.block, -(-n // o.block)) * o.block + i % o.block + 1 for i, n in enumerate(keys)]

    def plain_span(self) -> ops.Span | None:
        return ops.Span(self.options.window) if self.options.gate == "local" and self.width is None else None

    def start_as_full(self) -> float:
        """As the local branch at its widest: the global one leaves keys out from the third token on."""
        o = self.options
        for linear in (None if self.gate is None else self.gate[-1], self.width):
            if linear is not None and linear.bias is not None:
                fix_gate(cast(nn.Linear, linear))
        if o.gate == "local" or (o.gate == "learned" and o.gate_bias):
            return o.reach + 1
        return next((i for i, n in enumerate(self._global_keys(o.reach + 1)) if n <= i), o.reach + 1)
