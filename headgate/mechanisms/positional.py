"""positional: a learned prior over distances in the logits ("Probabilistic Positional Attention").

    out_i^h = softmax over j <= i of (q_i . k_j / sqrt(D) + log(P_h(i - j) + 1e-6)) v_j
    P_h = a mixture of 4 Gaussians over log2(1 + distance)

The dynamic-sparse paper lists this baseline only by name, and no public description was found: this is our
reading.
"""

import math

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.mechanisms.contract import Heads, Mechanism, MechanismOptions, Past, register
from headgate.ops import reference

COMPONENTS = 4
FARTHEST = 12.0
"""Where the last component starts, in log2(1 + distance): 4,095 tokens away."""
WIDE = 512.0
"""Deviation of a nearly even prior: over 4,095 tokens it changes a logit by less than 3e-4."""


@register("positional")
class Positional(Mechanism):
    shelf = "baselines"
    handles_documents = True

    def __init__(self, heads: Heads, options: MechanismOptions) -> None:
        super().__init__(heads, options)
        self.mean = nn.Parameter(torch.empty(heads.n_heads, COMPONENTS))
        self.log_std = nn.Parameter(torch.empty(heads.n_heads, COMPONENTS))
        self.weight = nn.Parameter(torch.empty(heads.n_heads, COMPONENTS))
        self._kept: tuple[list[tuple[int, int]], Tensor] | None = None  # the table that decoding last used

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name == "mean":
            parameter.copy_(torch.linspace(0.0, FARTHEST, COMPONENTS).expand_as(parameter))
        else:
            parameter.zero_()

    def log_prior(self, distances: int) -> Tensor:
        """log(P_h(d) + 1e-6) for the distances d = 0, 1, ...: (H,distances), in at least fp32: bf16 has no
        whole numbers beyond 256, and a distance's gradient is a sum over all queries."""
        d = torch.arange(distances, device=self.mean.device)
        u = torch.log2(1 + d.to(torch.promote_types(self.mean.dtype, torch.float32)))
        z = (u[:, None, None] - self.mean) / self.log_std.exp()  # (distances,H,4)
        density = torch.exp(-z.square() / 2) / (self.log_std.exp() * math.sqrt(2 * math.pi))
        return ((density * self.weight.softmax(-1)).sum(-1) + 1e-6).log().T

    def table(self, distances: int) -> Tensor:
        """`log_prior` for at least this many distances. Without a gradient it is kept for the next token,
        with room to grow, until a parameter changes."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.log_prior(distances)
        made_from = [(p.data_ptr(), p._version) for p in self.parameters()]
        if self._kept is None or self._kept[0] != made_from or self._kept[1].shape[1] < distances:
            self._kept = made_from, self.log_prior(2 * distances).contiguous()
        return self._kept[1]

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        return ops.distance_biased_attention(q, k, v, self.table(k.shape[2]), past.span())

    def dense(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        i, j = reference.positions(q, k)
        u = torch.log2(1 + (i - j).clamp(min=0).to(q.dtype))[..., None, None]  # (Tq,Tk,1,1)
        gaussians = torch.distributions.Normal(self.mean, self.log_std.exp()).log_prob(u).exp()
        prior = (gaussians * self.weight.softmax(-1)).sum(-1).movedim(-1, 0)  # (H,Tq,Tk)
        return reference.attend(reference.logits(q, k) + (prior + 1e-6).log(), j <= i, q, v)[0]

    @torch.no_grad()
    def start_as_full(self) -> float:
        """A prior so wide that it is the same at all distances, which the softmax does not see."""
        self.log_std.fill_(math.log(WIDE))
        return math.inf
