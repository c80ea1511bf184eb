"""gated-delta: a memory that forgets and corrects itself instead of keys (Gated DeltaNet, arXiv 2412.06464).

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t
    alpha = exp(-exp(A) softplus(w_a . x + d)),    beta = sigmoid(w_b . x)         one value per head
    out = RMSNorm(o) * SiLU(W_o x)

Before that a short causal convolution mixes each channel of q, k and v with the tokens before, and a SiLU
follows; q and k are then scaled to length 1. Nothing is rotated: the order of the tokens is in the recurrence
itself. The memory, always D x D per head, is all that is kept of the past, so no weights make this full
attention and a retrofit starts changed. Heads that share a key have a memory each.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headgate import ops
from headgate.config import require_at_least
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register
from headgate.ops.norm import rms_norm, weight_dtype
from headgate.ops.reference import per_head

LEAST_STEP, MOST_STEP, FASTEST = 1e-3, 0.1, 16.0
"""The decay's start, as published: exp(A) uniform over (0, 16), softplus(d) uniform in its log."""


@dataclass(frozen=True)
class GatedDeltaOptions(MechanismOptions):
    positions: Literal["rope", "none"] = "none"
    """Whether queries and keys are rotated by their positions."""
    convolution: int = 4
    """Tokens that the short convolution spans; 1 for none."""
    decay: Literal["learned", "none"] = "learned"
    """Whether the memory forgets by alpha, or keeps everything until it is overwritten (DeltaNet)."""
    gate: Literal["learned", "open"] = "learned"
    """Whether the memory's answer is gated by the querying token."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "convolution")


@register("gated-delta")
class GatedDelta(Mechanism):
    Options = GatedDeltaOptions
    options: GatedDeltaOptions
    shelf = "second shelf"
    ablations = {
        "no-convolution": {"convolution": 1},
        "no-decay": {"decay": "none"},
        "no-gate": {"gate": "open"},
    }

    def __init__(self, heads: Heads, options: GatedDeltaOptions) -> None:
        super().__init__(heads, options)
        h, g, d, c = heads.n_heads, heads.n_kv_heads, heads.head_dim, heads.d_model
        if options.convolution > 1:
            self.convolutions = nn.ParameterDict(
                {name: torch.empty(n * d, options.convolution) for name, n in (("q", h), ("k", g), ("v", g))}
            )
        self.beta = nn.Linear(c, h, bias=False)
        if options.decay == "learned":
            self.step = nn.Linear(c, h)
            self.log_rate = nn.Parameter(torch.empty(h))
        self.out_gate = nn.Linear(c, h * d, bias=False) if options.gate == "learned" else None
        self.norm = nn.RMSNorm(d, eps=1e-6)

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name.startswith("convolutions."):
            bound = 1 / math.sqrt(self.options.convolution)
            parameter.uniform_(-bound, bound, generator=generator)
        elif name == "log_rate":
            parameter.uniform_(1e-4, FASTEST, generator=generator).log_()
        elif name == "step.bias":
            step = parameter.uniform_(math.log(LEAST_STEP), math.log(MOST_STEP), generator=generator).exp_()
            parameter.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        else:
            super().initialise(name, parameter, generator)

    def prepare(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, ...]:
        q, k, v = (self._convolved(name, t, past) for name, t in (("q", q), ("k", k), ("v", v)))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return super().prepare(x, q, k, v, past)

    def _convolved(self, name: str, t: Tensor, past: Past) -> Tensor:
        """SiLU of each channel's convolution; (B,heads,Tq,D), in at least fp32."""
        t, span = t.to(torch.promote_types(t.dtype, torch.float32)), self.options.convolution
        if span == 1:
            return F.silu(t)
        whole = past.with_previous(name, t, span - 1)
        taps = self.convolutions[name].unflatten(0, (t.shape[1], 1, -1)).unbind(-1)  # (heads,1,D) each
        mixed = taps[0] * whole[:, :, : t.shape[2]]
        for n, tap in enumerate(taps[1:], 1):
            mixed = torch.addcmul(mixed, tap, whole[:, :, n : n + t.shape[2]])
        return F.silu(mixed)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # what is multiplied up over the tokens
            wide = x.to(weight_dtype(self.beta))
            beta = self.beta(wide).sigmoid().transpose(1, 2)
            log_decay = torch.zeros_like(beta)
            if self.options.decay == "learned":
                # in the layout of its gradient, for which the compiler plans softplus's otherwise
                step = self.step(wide).transpose(1, 2).contiguous()
                log_decay = -self.log_rate.exp()[:, None] * F.softplus(step)
        self.observe("beta", beta.transpose(1, 2))
        self.observe("decay", log_decay.transpose(1, 2).exp())
        k, v = per_head(q, k), per_head(q, v)
        answered, memory = ops.gated_delta(q, k, v, log_decay, beta, past.carried("memory"))
        past.carry("memory", memory)
        out = rms_norm(answered, self.norm.weight, 1e-6)
        if self.out_gate is not None:
            gate = F.silu(self.out_gate(x)).unflatten(-1, (self.heads.n_heads, -1)).transpose(1, 2)
            out = out * gate.to(out.dtype)
        return out.to(x.dtype)

    def first_key(self, position: int) -> int:
        return position

    def pairs(self, length: int) -> int:
        """A memory of D x D is read and written as D keys would be."""
        return length * self.heads.head_dim
