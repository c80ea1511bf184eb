"""shifted: keys, or keys and values, that know the token before (KV shifting, arXiv 2411.19574).

    mode="mix"      k_j <- a^g k_j + b^g k_{j-1},   v_j <- c^g v_j + d^g v_{j-1}      before rotation
    mode="offset"   the second half of a key's dimensions comes from the token before and is not rotated, nor
                    is that half of the queries; values as they are (modded-nanogpt, record 49)

k_{-1} = v_{-1} = 0. A single layer can then find the token after the last occurrence of this one, for which
plain attention needs two. A mix starts at 1, 0, 1, 0: as full attention. An offset never does.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.errors import HeadgateError
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register


@dataclass(frozen=True)
class ShiftedOptions(MechanismOptions):
    mode: Literal["mix", "offset"] = "mix"
    """A learned mix with the key and value before, or half of the key taken from there."""


@register("shifted")
class Shifted(Mechanism):
    Options = ShiftedOptions
    options: ShiftedOptions
    shelf = "second shelf"
    handles_documents = True
    ablations = {"offset": {"mode": "offset"}}

    def __init__(self, heads: Heads, options: ShiftedOptions) -> None:
        super().__init__(heads, options)
        if options.mode == "mix":
            self.keys = nn.Parameter(torch.empty(2, heads.n_kv_heads))  # a, b
            self.values = nn.Parameter(torch.empty(2, heads.n_kv_heads))  # c, d
        elif heads.head_dim % 4:
            raise HeadgateError(
                f"head_dim={heads.head_dim} is not a multiple of 4; mode=offset rotates half of it, in pairs"
            )

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.copy_(torch.tensor([[1.0], [0.0]]).expand_as(parameter))

    def prepare(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, ...]:
        if self.options.mode == "mix":
            k, v = self._mixed("k", k, self.keys, past), self._mixed("v", v, self.values, past)
            return super().prepare(x, q, k, v, past)
        (turned_q, still_q), (turned_k, still_k) = q.chunk(2, -1), k.chunk(2, -1)
        turned_q, turned_k, _ = super().prepare(x, turned_q, turned_k, v, past)
        before = past.previous("k", still_k)
        return torch.cat([turned_q, still_q], -1), torch.cat([turned_k, before], -1), v

    def _mixed(self, name: str, t: Tensor, weights: Tensor, past: Past) -> Tensor:
        own, before = weights.to(t.dtype)[..., None, None]
        return own * t + before * past.previous(name, t)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        return ops.attention(q, k, v, past.span())

    def start_as_full(self) -> float:
        return math.inf if self.options.mode == "mix" else 0
