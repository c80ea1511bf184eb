"""Mechanisms to test the instrument with: one that differs by a factor alone, one made worse on purpose."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms.contract import Mechanism, MechanismOptions, Past, register


@dataclass(frozen=True)
class LouderOptions(MechanismOptions):
    factor: float = 20.0
    """What the output of full attention is multiplied by."""


@register("louder")
class Louder(Mechanism):
    """louder: full attention times a constant."""

    Options = LouderOptions
    options: LouderOptions

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        return self.options.factor * ops.attention(q, k, v, past.span())


@dataclass(frozen=True)
class BlindedOptions(MechanismOptions):
    hidden: int = 4
    """How many of the latest tokens a token does not see; itself it does."""

    def __post_init__(self) -> None:
        require_at_least(self, 0, "hidden")


@register("blinded")
class Blinded(Mechanism):
    """blinded: full attention without the keys of the last few tokens."""

    Options = BlindedOptions
    options: BlindedOptions

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        keys = torch.arange(k.shape[2], device=q.device)
        distance = keys[k.shape[2] - q.shape[2] :, None] - keys
        seen = (distance == 0) | (distance > self.options.hidden)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
