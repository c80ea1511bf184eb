"""Attention over the query's own block and one summary of every earlier block, in one softmax."""

import math
from functools import partial

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.blocks import OwnBlocks
from headgate.ops.dispatch import Op, check
from headgate.ops.documents import by_document
from headgate.ops.merge import merged
from headgate.ops.span.op import attention, span_attention
from headgate.ops.span.options import Span
from headgate.ops.tiles import query_tiles, recomputed

COMBINER = Op("combiner_attention")


def combiner_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    summarised: tuple[Tensor, Tensor] | None = None,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One softmax over the own block's keys j <= i and the summaries of the blocks before; the keys begin at
    0. `summarised`: what `block_summaries(k, v, block)` returns, if already known.

    A block's summary key is the elementwise maximum m of its keys; its summary value averages the block's
    values with the weights softmax(m . k_j / sqrt(D)).
    """
    check(q, k, v)
    if block < 1:
        raise HeadgateError(f"block={block} is too small; it must be at least 1")
    if documents is not None:
        if summarised is not None:
            raise HeadgateError("summarised blocks belong to one document; leave them out with documents")
        return by_document(documents, partial(combiner_attention, block=block, backend=backend), q, k, v)
    result: Tensor = COMBINER(backend, q, k, v, block=block, summarised=summarised)
    return result


def block_summaries(k: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Summary key and value of every complete block: (B,G,blocks,D) each."""
    n = k.shape[2] // block
    k, v = (t[:, :, : n * block].unflatten(2, (n, block)) for t in (k, v))
    key = k.amax(3)
    weight = ((k @ key[..., None]) / math.sqrt(k.shape[-1])).softmax(3)  # (B,G,n,block,1)
    return key, (weight * v).sum(3)


@COMBINER.path("torch")
def _torch(
    q: Tensor, k: Tensor, v: Tensor, *, block: int, summarised: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The own block and the summaries are disjoint softmaxes, merged by their log-sum-exps."""
    summary_k, summary_v = block_summaries(k, v, block) if summarised is None else summarised
    own = OwnBlocks.of(q, k, block)
    earlier = (k.shape[2] - 1) // block  # complete blocks before the last query's
    if q.shape[2] == 1:
        keys, values = (
            torch.cat([summary[:, :, :earlier], t[:, :, own.first :]], 2)
            for summary, t in ((summary_k, k), (summary_v, v))
        )
        return attention(q, keys, values, Span())
    near, near_lse = (
        own.unbatched(t, q.shape[0], own.front)
        for t in span_attention(own.queries(q), own.keys(k), own.keys(v))
    )
    # The queries of the first block have no summary to attend to.
    alone = max(0, block - (k.shape[2] - q.shape[2]))
    if alone >= q.shape[2]:
        return near

    def tile(q: Tensor, k: Tensor, v: Tensor, near: Tensor, near_lse: Tensor, first: Tensor) -> Tensor:
        of_query = (first + torch.arange(q.shape[2], device=q.device)) // block
        hidden = torch.arange(k.shape[2], device=q.device) >= of_query[:, None]
        grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        scores = (grouped @ k.mT).unflatten(2, (-1, q.shape[2])) / math.sqrt(q.shape[-1])  # (B,G,R,n,blocks)
        scores = scores.masked_fill(hidden, -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        far = ((scores - lse).exp().flatten(2, 3) @ v).unflatten(2, (-1, q.shape[2])).flatten(1, 2)
        return merged(near, near_lse, far, lse.squeeze(-1).flatten(1, 2))

    parts = [near[:, :, :alone]]
    offset = k.shape[2] - q.shape[2]
    for a, b in query_tiles(q.shape[2] - alone, q.shape[0] * q.shape[1] * earlier, q.device, most=1 << 20):
        at, far = slice(alone + a, alone + b), slice(0, (offset + alone + b - 1) // block)
        first = torch.full((), offset + alone + a, device=q.device)
        tensors = q[:, :, at], summary_k[:, :, far], summary_v[:, :, far], near[:, :, at], near_lse[:, :, at]
        parts.append(
            recomputed(tile, *tensors, first) if b < q.shape[2] - alone or a else tile(*tensors, first)
        )
    return torch.cat(parts, 2)


@COMBINER.path("reference")
def _reference(
    q: Tensor, k: Tensor, v: Tensor, *, block: int, summarised: tuple[Tensor, Tensor] | None
) -> Tensor:
    return reference.combiner_attention(q, k, v, block=block)
