"""sparse-geometric: every pair's logit is scaled and gated (ASGA, aardXiv 2510.00090).

    s_ij^h = sigmoid(w_2^h . GELU(W_1q^h LN(q_i^h) + W_1k^h LN(k_j^h) + b_1^h) + b_2^h)
    a_ij^h = softplus(gamma^h) * (q_i^h . k_j^h) / sqrt(D)
    out_i^h = softmax over j <= i of (a_ij * s_ij) v_j                with gate="multiply", the paper's
              softmax over j <= i of (a_ij + log s_ij) v_j            with gate="log", ours

The paper's W_1 [LN q; LN k] is split into its halves, so that only the GELU is computed per pair. The product
sends a closed gate's logit to 0, so a closed pair can still outweigh an open one whose logit is negative; in
log space a closed gate removes the pair. LN has no weights of its own (W_1 absorbs them), and GELU is its
tanh form.
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
from headgate.mechanisms.gates import OPEN
from headgate.ops import reference
from headgate.ops.tiles import query_tiles


@dataclass(frozen=True)
class SparseGeometricOptions(MechanismOptions):
    gate: Literal["multiply", "log"] = "multiply"
    """How the gate meets the logit: as a factor, or as its logarithm added."""
    hidden: int = 16
    """Hidden units M of the pair gate."""
    geometric: Literal["learned", "none"] = "learned"
    """Whether a learned factor per head scales the logits."""
    sparsity: Literal["learned", "fixed", "none"] = "learned"
    """The pair gate, or a fixed hard mask instead, or neither."""
    window: int = 256
    """Band of the fixed mask: keys at a distance up to this."""
    stride: int = 64
    """Columns of the fixed mask beyond the band: every key whose position is a multiple of this."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "hidden", "window", "stride")


@register("sparse-geometric")
class SparseGeometric(Mechanism):
    Options = SparseGeometricOptions
    options: SparseGeometricOptions
    shelf = "papers"
    ablations = {
        "no-geometric": {"geometric": "none"},
        "fixed-pattern": {"sparsity": "fixed"},
        "neither": {"geometric": "none", "sparsity": "none"},
    }

    def __init__(self, heads: Heads, options: SparseGeometricOptions) -> None:
        super().__init__(heads, options)
        h, m, d = heads.n_heads, options.hidden, heads.head_dim
        if options.geometric == "learned":
            self.gamma = nn.Parameter(torch.empty(h))
        if options.sparsity == "learned":
            self.w1_q = nn.Parameter(torch.empty(h, m, d))
            self.w1_k = nn.Parameter(torch.empty(h, m, d))
            self.b1 = nn.Parameter(torch.empty(h, m))
            self.w2 = nn.Parameter(torch.empty(h, m))
            self.b2 = nn.Parameter(torch.empty(h))

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """gamma makes softplus(gamma) = 1; b2 = 2 opens the gates to 0.88."""
        constants = {"gamma": math.log(math.e - 1), "b1": 0.0, "b2": 2.0}
        if name in constants:
            parameter.fill_(constants[name])
        else:
            parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)

    def prepare(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, ...]:
        """Besides the keys, the key half of the gate (B,H,Tq,M), which decoding would otherwise recompute for
        every past key."""
        q, k, v = super().prepare(x, q, k, v, past)
        if self.options.sparsity != "learned":
            return q, k, v
        w1_k = self.w1_k.unflatten(0, (self.heads.n_kv_heads, -1))
        half = torch.einsum("bgtd,grmd->bgrtm", F.layer_norm(k, k.shape[-1:]), w1_k)
        return q, k, v, half.flatten(1, 2)

    def _query_half(self, q: Tensor) -> Tensor:
        half = torch.einsum("bhtd,hmd->bhtm", F.layer_norm(q, q.shape[-1:]), self.w1_q)
        return half + self.b1[:, None]

    def _scaled(self, q: Tensor) -> Tensor:
        if self.options.geometric == "none":
            return q
        return q * F.softplus(self.gamma)[:, None, None].to(q.dtype)  # autocast leaves gamma in fp32

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past, *states: Tensor) -> Tensor:
        o = self.options
        if o.sparsity == "none":
            return ops.attention(self._scaled(q), k, v, past.span())
        if o.sparsity == "fixed":
            past.require_all_keys("sparse-geometric with a fixed pattern")
            return ops.strided_attention(self._scaled(q), k, v, window=o.window, stride=o.stride)
        query_half, (key_half,) = self._query_half(q), states
        if self.observed:
            self.observe("gate", self._mean_gate(query_half, key_half))
        return ops.pair_gated_attention(
            self._scaled(q), k, v, query_half, key_half, self.w2, self.b2, form=o.gate
        )

    def _mean_gate(self, query_half: Tensor, key_half: Tensor) -> Tensor:
        """Each query's mean gate over its keys (B,Tq,H), a tile of queries at a time."""
        offset = key_half.shape[2] - query_half.shape[2]
        rows = []
        row_elements = query_half.shape[0] * query_half.shape[1] * key_half.shape[2] * self.options.hidden
        for first, last in query_tiles(query_half.shape[2], row_elements, query_half.device):
            keys = key_half[:, :, : offset + last]
            gate = (
                reference.pair_gate(query_half[:, :, first:last], keys, self.w2, self.b2).detach().sigmoid()
            )
            rows.append(gate.tril(offset + first).sum(-1))
        seen = torch.arange(offset + 1, key_half.shape[2] + 1, device=key_half.device)
        return (torch.cat(rows, 2) / seen).transpose(1, 2)

    def dense(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past, *states: Tensor) -> Tensor:
        o = self.options
        scaled = q * F.softplus(self.gamma)[:, None, None] if o.geometric == "learned" else q
        if o.sparsity == "none":
            return reference.span_attention(scaled, k, v, past.span())[0]
        if o.sparsity == "fixed":
            return reference.strided_attention(scaled, k, v, window=o.window, stride=o.stride)
        q_norm, k_norm = F.layer_norm(q, q.shape[-1:]), F.layer_norm(reference.per_head(q, k), k.shape[-1:])
        query_half = q_norm @ self.w1_q.mT + self.b1[:, None]
        key_half = k_norm @ self.w1_k.mT
        return reference.pair_gated_attention(
            scaled, k, v, query_half, key_half, self.w2, self.b2, form=o.gate
        )

    def plain_span(self) -> ops.Span | None:
        plain = self.options.sparsity == self.options.geometric == "none"
        return ops.Span() if plain else None

    @torch.no_grad()
    def start_as_full(self) -> float:
        """The same gate for every pair. Added in log space, it does not matter to the softmax; as a factor,
        it is undone by the geometric one, softplus(gamma) = 1 / gate, or starts near 1 if there is none."""
        o = self.options
        if o.sparsity == "fixed":
            return o.window + 1
        if o.sparsity == "learned":
            self.w2.zero_()
            if o.gate == "multiply" and o.geometric == "learned":
                self.gamma.copy_((1 / self.b2.sigmoid()).expm1().log())
            elif o.gate == "multiply":
                self.b2.fill_(OPEN)
        return math.inf

    def pair_operations(self) -> int:
        """A GELU in its tanh form takes eight operations per hidden unit, and its weighted sum two."""
        return 10 * self.options.hidden if self.options.sparsity == "learned" else 0

    def pairs(self, length: int) -> int:
        o = self.options
        if o.sparsity != "fixed":
            return super().pairs(length)
        return sum(min(i, o.window) + 1 + -(-max(0, i - o.window) // o.stride) for i in range(length))
