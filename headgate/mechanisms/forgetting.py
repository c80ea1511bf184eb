"""forgetting: a gate per token by which the past fades (Forgetting Transformer, arXiv 2503.02130).

    f_l^h = sigmoid(w_f^h . x_l + b_f^h)
    logit_ij^h = q_i . k_j / sqrt(D) + sum over l = j+1..i of log f_l^h

A query's own running sum is the same for all its keys, so this is a bias per key: -c_j, with c the running
sum of log f. Nothing is rotated, as published: a key's distance shows in how far it has faded. A retrofit
starts changed: even a gate as open as it can be while still learning fades over thousands of tokens.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headgate import ops
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register
from headgate.ops.norm import weight_dtype

SHORTEST, LONGEST = 16.0, 4096.0
"""Time constants 1 / (1 - f) of the first and last heads, with start=spread."""


@dataclass(frozen=True)
class ForgettingOptions(MechanismOptions):
    positions: Literal["rope", "none"] = "none"
    """Whether queries and keys are rotated by their positions."""
    start: Literal["paper", "spread"] = "paper"
    """Where the bias starts: at 0, so that f is 1/2; or so that the heads remember 16 to 4,096 tokens."""


@register("forgetting")
class Forgetting(Mechanism):
    Options = ForgettingOptions
    options: ForgettingOptions
    shelf = "second shelf"
    handles_documents = True
    ablations = {"rope": {"positions": "rope"}, "spread-start": {"start": "spread"}}
    tunable = {"start": ["paper", "spread"]}

    def __init__(self, heads: Heads, options: ForgettingOptions) -> None:
        super().__init__(heads, options)
        self.forget = nn.Linear(heads.d_model, heads.n_heads)

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name == "forget.bias" and self.options.start == "spread":
            exponents = torch.linspace(math.log(SHORTEST), math.log(LONGEST), len(parameter))
            parameter.copy_(torch.log(exponents.exp() - 1))  # sigmoid(b) = 1 - 1 / constant
        else:
            super().initialise(name, parameter, generator)

    def prepare(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, ...]:
        """Besides the keys, c (B,H,Tq) in at least fp32."""
        with torch.autocast(x.device.type, enabled=False):
            logits = self.forget(x.to(weight_dtype(self.forget)))
            log_f = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32))).transpose(1, 2)
        self.observe("gate", log_f.exp().transpose(1, 2))
        running = past.running_sum("sum", log_f).to(log_f.dtype)
        return *super().prepare(x, q, k, v, past), running

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past, running: Tensor) -> Tensor:
        dtype = q.dtype
        if torch.is_grad_enabled():  # half precision's losses would add up in the running sum's gradient
            q, k, v = (t.to(running.dtype) for t in (q, k, v))
        return ops.biased_attention(q, k, v, -running, past.span()).to(dtype)
