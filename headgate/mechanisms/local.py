"""local: sliding-window attention (Longformer, arXiv 2004.05150).

    out_i = softmax over i-W <= j <= i, and j < global_tokens, of (q_i . k_j / sqrt(D)) v_j

A window of W is W + 1 keys.
"""

from dataclasses import dataclass

from torch import Tensor

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms.contract import Mechanism, MechanismOptions, register, window_pairs
from headgate.ops import reference


@dataclass(frozen=True)
class LocalOptions(MechanismOptions):
    window: int = 256
    """Keys at a distance up to this are visible; with 0 a token sees itself alone."""
    global_tokens: int = 0
    """The first tokens of the sequence that stay visible to every query."""

    def __post_init__(self) -> None:
        require_at_least(self, 0, "window", "global_tokens")


@register("local")
class Local(Mechanism):
    Options = LocalOptions
    options: LocalOptions

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        o = self.options
        return ops.window_attention(q, k, v, o.window, global_tokens=o.global_tokens, start=start)

    def reference(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        o = self.options
        return reference.span_attention(q, k, v, window=o.window, global_tokens=o.global_tokens, start=start)[
            0
        ]

    def open(self) -> float:
        return self.options.window + 1 + self.options.global_tokens

    def first_key(self, position: int) -> int:
        return max(0, position - self.options.window)

    @property
    def first_keys(self) -> int:
        return self.options.global_tokens

    def pairs(self, length: int) -> int:
        o = self.options
        beyond = max(0, length - o.window - 1)  # queries with keys before their window
        reached = window_pairs(beyond, o.global_tokens - 1) if o.global_tokens else 0
        return window_pairs(length, o.window) + reached
