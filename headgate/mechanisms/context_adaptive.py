"""context-adaptive: a gate mixes a window of learned width with top-k (Context-Adaptive Attention, CAA).

    g_i = sigmoid(MLP(RMSNorm(x_i)))                  one value per head; the MLP goes C -> C/4 -> H
    out_i^h = g_i^h * local_i^h + (1 - g_i^h) * global_i^h

local: keys at a distance up to `window` as they are; keys from there to `max_window` with log w_i added to
their logit, w_i = sigmoid(width(x_i)). So w = 0 is the narrow window, w = 1 the wide one, and the width has a
gradient.

global: the k_i = ceil(c * sqrt(i + 1)) keys of highest logit among all j <= i. `select="token"` is exactly
this. `select="block"` takes whole blocks instead, for speed: the complete past blocks are ranked by q_i .
mean(keys), and the best ceil(k_i / block) of them are attended to with the query's own block. A probe sees
its recall of the exact top k ("recall").
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headgate import ops
from headgate.config import require_at_least
from headgate.errors import HeadgateError
from headgate.mechanisms.contract import (
    Heads,
    Mechanism,
    MechanismOptions,
    head_weights,
    open_gate,
    opened,
    register,
    require_all_keys,
    window_pairs,
)
from headgate.ops import reference
from headgate.ops.merge import mixed

RECOMPUTED = 4
"""Training sequences longer than so many windows compute the local branch again in the backward pass instead
of keeping it: it is then a small part of the work, and of as many bytes as the global branch."""


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
    """Keys of a block, with select=block."""
    gate: Literal["learned", "half", "local", "global"] = "learned"
    """The mix: learned, or fixed at one half, at local alone, at global alone."""
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


@register("context-adaptive")
class ContextAdaptive(Mechanism):
    Options = ContextAdaptiveOptions
    options: ContextAdaptiveOptions
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
            # The norm is the paper's "gate gradients require careful normalization".
            mlp = (nn.RMSNorm(c, eps=1e-6), nn.Linear(c, hidden), nn.GELU(), nn.Linear(hidden, heads.n_heads))
            self.gate = nn.Sequential(*mlp)
        if options.width == "learned" and options.gate != "global":
            self.width = nn.Linear(c, heads.n_heads)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        o = self.options
        if o.gate == "local":
            return self._local(x, q, k, v, start)
        require_all_keys("context-adaptive", start)
        if o.gate == "global":
            return self._global(q, k, v)
        if self.gate is None:
            return (self._local(x, q, k, v, start) + self._global(q, k, v)) / 2
        gate = self.followed(self._gate(x), down=True, up=True)
        long = q.shape[2] > RECOMPUTED * o.max_window
        if long and torch.is_grad_enabled() and not self.observed:
            everything = self._global(q, k, v)
            result: Tensor = checkpoint(
                self._mixed,
                x,
                q,
                k,
                v,
                start,
                everything,
                gate,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            return result
        if self.is_skipping(q):
            local = self._local(x, q, k, v, start, gate[:, 0] > 0)
            everything = ops.among_active(self._global, q, k, v, gate[:, 0] < 1)
            return mixed(local, everything, head_weights(gate))
        return self._mixed(x, q, k, v, start, self._global(q, k, v), gate)

    @property
    def skips(self) -> bool:
        return self.gate is not None

    def _mixed(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, start: int, everything: Tensor, gate: Tensor
    ) -> Tensor:
        return mixed(self._local(x, q, k, v, start), everything, head_weights(gate))

    def _gate(self, x: Tensor) -> Tensor:
        """The gate (B,Tq,H), with the norm's scale taken behind the first product: there it is a number a
        token, and no normed copy of x is kept for the backward pass."""
        assert self.gate is not None
        norm, first = cast(nn.RMSNorm, self.gate[0]), cast(nn.Linear, self.gate[1])
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (
            (torch.linalg.vecdot(wide, wide)[..., None] / x.shape[-1] + (norm.eps or 0.0)).rsqrt().to(x.dtype)
        )
        hidden = F.linear(x, first.weight * norm.weight) * scale + first.bias
        return opened(self.gate[2:](hidden))

    def _local(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, start: int, active: Tensor | None = None
    ) -> Tensor:
        """Of all heads, or when a token is decoded of those that are active."""
        o = self.options
        attend = ops.span_attention if active is None else partial(ops.active_attention, active=active)
        if self.width is None:
            return attend(q, k, v, window=o.window, start=start)[0]
        log_width = F.logsigmoid(self.width(x)).transpose(1, 2)
        if self.observed:
            self.observe("width", log_width.exp().transpose(1, 2))
        return attend(q, k, v, window=o.window, ring=o.max_window, ring_log_weight=log_width, start=start)[0]

    def _global(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = self.options
        if o.select == "token":
            return ops.top_k_attention(q, k, v, scale=o.top_k)
        if self.observed:
            self.observe("recall", ops.selection_recall(q, k, block=o.block, scale=o.top_k))
        return ops.block_selected_attention(q, k, v, block=o.block, scale=o.top_k)

    def reference(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        o = self.options
        w = None if self.width is None else F.logsigmoid(self.width(x)).transpose(1, 2)
        ring = 0 if w is None else o.max_window
        local, _ = reference.span_attention(
            q, k, v, window=o.window, ring=ring, ring_log_weight=w, start=start
        )
        if o.gate == "local":
            return local
        if o.select == "token":
            everything = reference.top_k_attention(q, k, v, scale=o.top_k)
        else:
            everything = reference.block_selected_attention(q, k, v, block=o.block, scale=o.top_k)
        fixed = {"half": 0.5, "global": 0.0}
        g = fixed[o.gate] if self.gate is None else head_weights(self.gate(x).sigmoid())
        return g * local + (1 - g) * everything

    def open(self) -> float:
        """Towards the local branch at its widest: the global one leaves keys out from the third token on."""
        o = self.options
        if self.gate is not None:
            last = self.gate[-1]
            assert isinstance(last, nn.Linear)
            open_gate(last)
        if self.width is not None:
            open_gate(self.width)
        local = (o.window if self.width is None else o.max_window) + 1
        everything = self._global_reach(local)
        return {"learned": local, "local": local, "half": everything, "global": everything}[o.gate]

    def _global_reach(self, most: int) -> int:
        """How many first positions, at most `most`, have all of their keys in the global branch."""
        o = self.options
        for i, count in enumerate(top_counts(most, o.top_k)):
            past = i // o.block
            blocks = min(past, -(-count // o.block)) * o.block + i % o.block + 1
            if (count if o.select == "token" else blocks) < i + 1:
                return i
        return most

    def first_key(self, position: int) -> int:
        o = self.options
        reach = o.window if o.width == "fixed" else o.max_window
        return max(0, position - reach) if o.gate == "local" else 0

    def pairs(self, length: int) -> int:
        """Local and global pairs; block selection counts a block's mean as one key."""
        o = self.options
        reach = o.window if o.width == "fixed" else o.max_window
        local = 0 if o.gate == "global" else window_pairs(length, reach)
        if o.gate == "local":
            return local
        if o.select == "token":
            return local + length * (length + 1) // 2
        everything = 0
        for i, count in enumerate(top_counts(length, o.top_k)):
            past = i // o.block
            everything += past + min(past, -(-count // o.block)) * o.block + i % o.block + 1
        return local + everything


def top_counts(length: int, scale: float) -> list[int]:
    counts: list[int] = reference.top_count(torch.arange(length), scale).tolist()
    return counts
