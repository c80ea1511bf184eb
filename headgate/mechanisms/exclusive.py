"""exclusive: attention's output minus its part along the token's own value (XSA, arXiv 2603.09078).

    out_i = o_i - (o_i . u_i) u_i,   u_i = v_i / |v_i|      o: full attention, v_i: from the head's own group

The stream already holds the token itself; attention then adds only what others say. No weights make it full
attention, so a retrofit starts changed.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headgate import ops
from headgate.mechanisms.contract import Mechanism, MechanismOptions, Past, register


@dataclass(frozen=True)
class ExclusiveOptions(MechanismOptions):
    exclude: Literal["self", "none"] = "self"
    """Whether the part along the token's own value is removed, or nothing is."""


@register("exclusive")
class Exclusive(Mechanism):
    Options = ExclusiveOptions
    options: ExclusiveOptions
    shelf = "second shelf"
    handles_documents = True
    ablations = {"no-exclusion": {"exclude": "none"}}

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        attended = ops.attention(q, k, v, past.span())
        if self.options.exclude == "none":
            return attended
        grouped = attended.unflatten(1, (k.shape[1], -1))  # (B,G,H/G,Tq,D)
        own = v[:, :, None, v.shape[2] - q.shape[2] :].to(torch.promote_types(v.dtype, torch.float32))
        square = torch.linalg.vecdot(own, own).clamp_min(torch.finfo(own.dtype).tiny)
        along = torch.linalg.vecdot(grouped.to(own.dtype), own) / square
        if self.observed:
            self.observe("own", along.flatten(1, 2).transpose(1, 2))
        return (grouped - along[..., None] * own).to(attended.dtype).flatten(1, 2)

    def plain_span(self) -> ops.Span | None:
        return ops.Span() if self.options.exclude == "none" else None

    def start_as_full(self) -> float:
        return float("inf") if self.options.exclude == "none" else 0
