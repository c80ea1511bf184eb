"""Attention over whole blocks of keys chosen by their mean, and the query's own block up to itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.dispatch import Op, check
from headgate.ops.tiles import query_tiles, recomputed
from headgate.ops.top_k import highest

BLOCKS = Op("block_selected_attention")


def block_selected_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block: int, scale: float = 1.0, backend: str = "auto"
) -> Tensor:
    """Softmax over the query's own aligned block up to itself and the best complete blocks before it.

    Of those, the ceil(k_i / block) with the highest q . mean(block keys), k_i = ceil(scale * sqrt(i + 1));
    ties go to the later block. The choice carries no gradient, the chosen keys their exact one. The keys
    begin at 0.
    """
    check(q, k, v)
    if block < 1:
        raise HeadgateError(f"block={block} is too small; it must be at least 1")
    result: Tensor = BLOCKS(backend, q, k, v, block=block, scale=scale)
    return result


def block_means(k: Tensor, block: int) -> Tensor:
    """Mean key of every complete block: (B,G,blocks,D)."""
    n = k.shape[2] // block
    return k[:, :, : n * block].unflatten(2, (n, block)).mean(3)


def selection_recall(q: Tensor, k: Tensor, *, block: int, scale: float = 1.0) -> Tensor:
    """The share of each query's exact top k_i keys that block selection attends to: (B,H,Tq)."""
    i, j = reference.positions(q, k)
    scores = reference.logits(q, k)
    exact = highest(scores, (j <= i).expand_as(scores), reference.top_count(i, scale))
    chosen = reference.selected_blocks(q, k, block=block, scale=scale).repeat_interleave(block, dim=-1)
    chosen = F.pad(chosen, (0, k.shape[2] - chosen.shape[-1])) | (j // block == i // block)
    return (exact & chosen).sum(-1) / exact.sum(-1)


@BLOCKS.path("torch")
def _torch(q: Tensor, k: Tensor, v: Tensor, *, block: int, scale: float) -> Tensor:
    offset = k.shape[2] - q.shape[2]
    means = block_means(k.detach(), block)

    def tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = reference.positions(q, k)
        candidates = reference.per_head(q, means[:, :, : k.shape[2] // block])
        by_mean = q.detach() @ candidates.mT
        allowed = (j <= i) & (j // block == i // block)
        if by_mean.shape[-1]:
            past = torch.arange(by_mean.shape[-1], device=q.device) < i // block
            count = -(-reference.top_count(i, scale) // block)
            chosen = highest(by_mean, past.expand_as(by_mean), count).repeat_interleave(block, dim=-1)
            allowed = allowed | F.pad(chosen, (0, k.shape[2] - chosen.shape[-1]))
        return reference.attend(reference.logits(q, k), allowed, q, v)[0]

    tiles = query_tiles(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2])
    return torch.cat(
        [recomputed(tile, q[:, :, a:b], k[:, :, : offset + b], v[:, :, : offset + b]) for a, b in tiles], 2
    )


BLOCKS.path("reference")(reference.block_selected_attention)
