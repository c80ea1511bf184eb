"""Attention over the mean key and the mean value of every complete block before the query's own."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.blocks import block_means
from headgate.ops.blocks_native import blocks_attention
from headgate.ops.dispatch import Op, check
from headgate.ops.documents import by_document
from headgate.ops.span import native
from headgate.ops.span.op import attention
from headgate.ops.span.options import Span
from headgate.ops.span.tiled import accumulator
from headgate.ops.tiles import query_tiles, recomputed

COMPRESSED = Op("compressed_attention")


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    documents: Tensor | None = None,
    means: Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax over the means of the aligned blocks that end before the query's own begins; 0 for the first
    block's queries, which have none before them. The keys begin at 0.

    `means`: `block_means` of k and of v, if already known, as in decoding; no gradient reaches k and v
    through them.
    """
    check(q, k, v)
    if block < 1:
        raise HeadgateError(f"block={block} is too small; it must be at least 1")
    if documents is not None:
        if means is not None:
            raise HeadgateError("means of blocks belong to one document; leave them out with documents")
        return by_document(documents, partial(compressed_attention, block=block, backend=backend), q, k, v)
    result: Tensor = COMPRESSED(backend, q, k, v, block=block, means=means)
    return result


@COMPRESSED.path("native", refuse=lambda q, *args, **options: native.refuse(q))
def _native(q: Tensor, k: Tensor, v: Tensor, *, block: int, means: Sequence[Tensor] | None) -> Tensor:
    keys, values = means or (block_means(k, block), block_means(v, block))
    offset = k.shape[2] - q.shape[2]
    if q.shape[2] == 1 and offset >= block:
        seen = offset // block
        return attention(q, keys[:, :, :seen], values[:, :, :seen], Span(), backend="native")
    out: Tensor = blocks_attention(q, keys, values, None, block, offset)[0]
    return out


@COMPRESSED.path("torch")
def _torch(q: Tensor, k: Tensor, v: Tensor, *, block: int, means: Sequence[Tensor] | None) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        wide = accumulator(q)
        keys, values = means or (block_means(t.to(wide), block) for t in (k, v))
        offset = k.shape[2] - q.shape[2]
        return _attend(q.to(wide), keys.to(wide), values.to(wide), block, offset).to(q.dtype)


def _attend(q: Tensor, keys: Tensor, values: Tensor, block: int, offset: int) -> Tensor:
    groups = keys.shape[1]
    first = min(q.shape[2], max(0, block - offset))  # the first query with a block before its own

    def tile(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        grouped = q.unflatten(1, (groups, -1)).flatten(2, 3)
        scores = (grouped @ keys.mT / math.sqrt(q.shape[3])).unflatten(2, (-1, q.shape[2]))
        later = torch.arange(keys.shape[2], device=q.device) >= positions[:, None] // block
        weights = scores.masked_fill(later, -math.inf).softmax(-1).flatten(2, 3)
        return (weights @ values).unflatten(2, (-1, q.shape[2])).flatten(1, 2)

    parts = [torch.zeros_like(q[:, :, :first])]
    row = q.shape[0] * q.shape[1] * keys.shape[2]
    for a, b in query_tiles(q.shape[2] - first, row, q.device, most=1024):
        a, b = first + a, first + b
        seen = (offset + b - 1) // block
        positions = torch.arange(offset + a, offset + b, device=q.device)
        parts.append(recomputed(tile, q[:, :, a:b], keys[:, :, :seen], values[:, :, :seen], positions))
    return torch.cat(parts, 2)


@COMPRESSED.path("reference")
def _reference(q: Tensor, k: Tensor, v: Tensor, *, block: int, means: Any) -> Tensor:
    return reference.compressed_attention(q, k, v, block=block)
