"""Attention over the k_i keys with the highest logits, exactly; ties go to the later key."""

import torch
from torch import Tensor

from headgate.ops import reference
from headgate.ops.dispatch import Op, check
from headgate.ops.tiles import query_tiles, recomputed

TOP_K = Op("top_k_attention")


def top_k_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float = 1.0, backend: str = "auto") -> Tensor:
    """Softmax over the ceil(scale * sqrt(i + 1)) keys of highest logit among all j <= i; the keys begin at
    0."""
    check(q, k, v)
    result: Tensor = TOP_K(backend, q, k, v, scale=scale)
    return result


def highest(scores: Tensor, allowed: Tensor, count: Tensor) -> Tensor:
    """What `reference.best` computes, by threshold: all above the count-th value, then the latest equal to
    it."""
    scores = scores.masked_fill(~allowed, -torch.inf)
    most = min(int(count.max()), scores.shape[-1])
    values = scores.topk(most, dim=-1).values
    threshold = values.gather(-1, (count.clamp(max=most) - 1).expand(*values.shape[:-1], 1))
    above = scores > threshold
    equal = (scores == threshold) & allowed
    room = count - above.sum(-1, keepdim=True)
    later = equal.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)  # how many equals stand at or after each
    return above | (equal & (later <= room))


@TOP_K.path("torch")
def _torch(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    offset = k.shape[2] - q.shape[2]

    def tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = reference.positions(q, k)
        scores = reference.logits(q, k)
        chosen = highest(scores.detach(), (j <= i).expand_as(scores), reference.top_count(i, scale))
        return reference.attend(scores, chosen, q, v)[0]

    tiles = query_tiles(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2])
    return torch.cat(
        [recomputed(tile, q[:, :, a:b], k[:, :, : offset + b], v[:, :, : offset + b]) for a, b in tiles], 2
    )


TOP_K.path("reference")(reference.top_k_attention)
