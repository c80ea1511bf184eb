"""local: sliding-window attention (Longformer, arXiv 2004.05150).

    out_i = softmax over i-W <= j <= i, and j < global_tokens, of (q_i . k_j / sqrt(D)) v_j

A window of W is W + 1 keys.
"""

from dataclasses import dataclass

from torch import Tensor

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms.contract import Mechanism, MechanismOptions, Past, register


@dataclass(frozen=True)
class LocalOptions(MechanismOptions):
    window: int = 256
    """Keys at a distance up to this are visible; with 0 a token sees only itself."""
    global_tokens: int = 0
    """The first tokens of the sequence, which stay visible to every query."""

    def __post_init__(self) -> None:
        require_at_least(self, 0, "window", "global_tokens")


@register("local")
class Local(Mechanism):
    Options = LocalOptions
    options: LocalOptions
    shelf = "baselines"
    handles_documents = True

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        o = self.options
        return ops.attention(q, k, v, past.span(o.window, pinned=o.global_tokens))

    def first_key(self, position: int) -> int:
        return max(0, position - self.options.window)

    @property
    def pinned_keys(self) -> int:
        return self.options.global_tokens

    def plain_span(self) -> ops.Span:
        return ops.Span(self.options.window, pinned=self.options.global_tokens)

    def start_as_full(self) -> float:
        return self.options.window + 1 + self.options.global_tokens
