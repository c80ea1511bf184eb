"""Attention over the query's own block and one summary of every earlier block, in one softmax."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.dispatch import Op, check
from headgate.ops.tiles import query_tiles, recomputed

COMBINER = Op("combiner_attention")


def combiner_attention(q: Tensor, k: Tensor, v: Tensor, *, block: int, backend: str = "auto") -> Tensor:
    """One softmax over the own block's keys j <= i and the summaries of the blocks before; the keys begin at
    0.

    A block's summary key is the elementwise maximum m of its keys; its summary value averages the block's
    values with the weights softmax(m . k_j / sqrt(D)).
    """
    check(q, k, v)
    if block < 1:
        raise HeadgateError(f"block={block} is too small; it must be at least 1")
    result: Tensor = COMBINER(backend, q, k, v, block=block)
    return result


def summaries(k: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Summary key and value of every complete block: (B,G,blocks,D) each."""
    n = k.shape[2] // block
    k, v = (t[:, :, : n * block].unflatten(2, (n, block)) for t in (k, v))
    key = k.amax(3)
    weight = ((k @ key[..., None]) / math.sqrt(k.shape[-1])).softmax(3)  # (B,G,n,block,1)
    return key, (weight * v).sum(3)


@COMBINER.path("torch")
def _torch(q: Tensor, k: Tensor, v: Tensor, *, block: int) -> Tensor:
    position = k.shape[2] - q.shape[2]  # of the first query
    first = position // block  # its block
    summary_k, summary_v = summaries(k, v, block)

    # Queries and keys from the first query's block on, padded to whole blocks. Padded keys lie behind every
    # real query of their block, so causality hides them; padded queries are cut off in the end.
    front, back = position - first * block, -k.shape[2] % block
    q_blocks = F.pad(q, (0, 0, front, back)).unflatten(2, (-1, block))  # (B,H,n,block,D)
    k_blocks, v_blocks = (
        F.pad(t[:, :, first * block :], (0, 0, 0, back)).unflatten(2, (-1, block)) for t in (k, v)
    )
    causal = torch.ones(block, block, dtype=torch.bool, device=q.device).tril()

    def tile(q: Tensor, k: Tensor, v: Tensor, far_k: Tensor, far_v: Tensor, before: Tensor) -> Tensor:
        n = q.shape[2]
        own = (q @ reference.per_head(q, k).mT / math.sqrt(q.shape[-1])).masked_fill(~causal, -torch.inf)
        far = q.flatten(2, 3) @ reference.per_head(q, far_k).mT / math.sqrt(q.shape[-1])
        earlier = (
            torch.arange(far_k.shape[2], device=q.device) < before + torch.arange(n, device=q.device)[:, None]
        )
        far = far.unflatten(2, (n, block)).masked_fill(~earlier[:, None], -torch.inf)
        weights = torch.cat([own, far], -1).softmax(-1)
        near = weights[..., :block] @ reference.per_head(q, v)
        return near + (weights[..., block:].flatten(2, 3) @ reference.per_head(q, far_v)).unflatten(
            2, (n, block)
        )

    parts = []
    row = q.shape[0] * q.shape[1] * block * (block + summary_k.shape[2])
    for a, b in query_tiles(q_blocks.shape[2], row, most=max(1, 256 // block)):
        far = slice(0, first + b - 1)
        parts.append(
            recomputed(
                tile,
                q_blocks[:, :, a:b],
                k_blocks[:, :, a:b],
                v_blocks[:, :, a:b],
                summary_k[:, :, far],
                summary_v[:, :, far],
                torch.tensor(first + a, device=q.device),
            )
        )
    out = torch.cat(parts, 2).flatten(2, 3)
    return out[:, :, front : front + q.shape[2]]


COMBINER.path("reference")(reference.combiner_attention)
