"""Span and block-selected attention through PyTorch's FlexAttention, for GPUs.

What a query sees is stated twice: pair by pair, and block by block from the same bounds, so that
FlexAttention skips blocks that nothing sees and checks no pairs in blocks seen whole. Masks of spans are
kept.

Only a bias per key needs a score function. A ring is a second attention over the ring's keys, merged by the
log-sum-exps: FlexAttention adds the gradient of a captured log-weight pair by pair with atomics, which is
slow and does not repeat. Its gradients were NaN where a score function met a length that is not a multiple of
128 (pytorch issue 153799), so with a bias to be differentiated lengths are padded.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D). Here all positions count from the first key given, so `start` is 0.
"""

import importlib.util
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.weak import WeakIdKeyDictionary

from headgate.ops.gpu import NO_TRITON, device_kind, is_planned
from headgate.ops.merge import merged
from headgate.ops.span.options import Span

BLOCK = 128
"""Queries and keys in a block of the mask: FlexAttention's default, which its tiles divide."""
LEAST_WIDTH = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cuda",)
_TRITON = importlib.util.find_spec("triton") is not None

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def refuse(q: Tensor, *tensors: Any, **options: Any) -> str | None:
    """Why FlexAttention cannot take these heads."""
    if device_kind(q.device) not in DEVICES:
        return f"it runs on a GPU, not on {q.device.type}"
    if not _TRITON and not is_planned():
        return NO_TRITON
    if q.dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16, not {q.dtype}".replace("torch.", "")
    if q.shape[-1] < LEAST_WIDTH:
        return f"head width {q.shape[-1]} is below {LEAST_WIDTH}"
    if _is_forced_eager():
        return "torch.compile is switched off, and without it FlexAttention computes all pairs"
    return None


def _is_forced_eager() -> bool:
    if torch.compiler.is_compiling():
        return False
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # nobody can have set it before it is imported
    return compiler is not None and compiler._stance.stance == "force_eager"


@dataclass(frozen=True)
class SeenPairs:
    """The pairs at a distance from `nearest` to `farthest`, and those in `dense_prefix` or
    `pinned`."""

    queries: int
    keys: int
    nearest: int
    farthest: int
    dense_prefix: int = 0
    pinned: int = 0

    def pairs(self, device: torch.device, first_keys: Tensor | None = None) -> Mask:
        """Bounds are in tensors: as numbers they would compile anew with every length. The dense prefix and
        the pinned keys count from `first_keys` (B,Tq), where the queries' documents begin."""
        offset, nearest, farthest, prefix, first = (
            torch.full((), value, dtype=torch.int32, device=device)
            for value in (
                self.keys - self.queries,
                self.nearest,
                self.farthest,
                self.dense_prefix,
                self.pinned,
            )
        )

        def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            i = query + offset
            distance = i - key
            inside = (distance <= farthest) | (i < prefix) | (key < first)
            return (distance >= nearest) & inside

        if first_keys is None:
            return seen
        begin = first_keys.to(torch.int32)

        def seen_in_document(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            i, document = query + offset, begin[b, query]
            distance = i - key
            inside = (distance <= farthest) | (i - document < prefix) | (key - document < first)
            return (distance >= nearest) & (key >= document) & inside

        return seen_in_document

    def blocks_of_documents(self, first_keys: Tensor) -> tuple[Tensor, Tensor]:
        """The same as `blocks`, for each row: (B,query blocks,key blocks), from the documents (B,Tq) of each
        block's first and last query, between which they rise."""
        some, every = replace(self, dense_prefix=0, pinned=0).blocks(first_keys.device)
        if self.dense_prefix or self.pinned:  # then any key of the document may be seen
            some = SeenPairs(self.queries, self.keys, self.nearest, self.keys).blocks(first_keys.device)[0]
        low_i, high_i = _bounds(self.queries, first_keys.device)
        low_j, high_j = _bounds(self.keys, first_keys.device)
        earliest, latest = first_keys[:, low_i, None], first_keys[:, high_i, None]
        return some & (high_j >= earliest), every & (low_j >= latest)

    def blocks(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """For every block of pairs (query blocks, key blocks): whether any is seen, and whether all are.

        A block that reaches beyond the last query or key is not seen whole.
        """
        low_i, high_i = _bounds(self.queries, device)
        low_j, high_j = (t[None, :] for t in _bounds(self.keys, device))
        whole = (high_i - low_i == BLOCK - 1)[:, None] & (high_j - low_j == BLOCK - 1)
        low_i, high_i = (t[:, None] + self.keys - self.queries for t in (low_i, high_i))
        prefix, first = self.dense_prefix, self.pinned
        reach = high_i - low_j >= self.nearest
        near = reach & (low_i - high_j <= self.farthest)
        in_prefix = (low_i < prefix) & (high_i.clamp(max=prefix - 1) - low_j >= self.nearest)
        some = near | in_prefix | (reach & (low_j < first))
        # The pair that is hidden if any is: the last query, and the first key that is not pinned.
        too_far = (high_i >= prefix) & (high_j >= first) & (high_i - low_j.clamp(min=first) > self.farthest)
        return some, whole & (low_i - high_j >= self.nearest) & ~too_far

    def mask(self, device: torch.device, first_keys: Tensor | None = None) -> BlockMask:
        if first_keys is None:
            some, every = (t[None] for t in self.blocks(device))
        else:
            some, every = self.blocks_of_documents(first_keys)
        pairs = self.pairs(device, first_keys)
        return block_mask((some & ~every)[:, None], every[:, None], pairs, self.queries, self.keys)


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span,
    *,
    output_only: bool = False,
    ring_log_weight: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if key_bias is not None and torch.is_grad_enabled() and k.shape[2] % BLOCK:
        # What is appended comes after every query that counts.
        more, queries = -k.shape[2] % BLOCK, q.shape[2]
        q, k, v = (F.pad(t, (0, 0, 0, more)) for t in (q, k, v))
        if span.first_keys is not None:
            span = span._replace(first_keys=F.pad(span.first_keys, (0, more), value=k.shape[2] - more))
        if ring_log_weight is not None:
            ring_log_weight = F.pad(ring_log_weight, (0, more))
        out, lse = span_attention(
            q,
            k,
            v,
            span,
            output_only=output_only,
            ring_log_weight=ring_log_weight,
            key_bias=F.pad(key_bias, (0, more)),
        )
        return out[:, :, :queries], None if lse is None else lse[:, :, :queries]
    queries, keys = q.shape[2], k.shape[2]
    bias = None if key_bias is None else KeyBias(key_bias, keys - queries)
    prefix, pinned = max(0, span.dense_prefix - span.start), max(0, span.pinned - span.start)
    farthest = keys if span.window is None else min(span.window, keys)
    seen = SeenPairs(queries, keys, 0, farthest, prefix, pinned)
    mask = _mask_of(q, seen, span.first_keys)
    if output_only and ring_log_weight is None:
        return _attend(q, k, v, mask, bias), None
    near, near_lse = attend_with_lse(q, k, v, mask, bias)
    if ring_log_weight is None:
        return near, near_lse
    seen = SeenPairs(queries, keys, farthest + 1, min(span.ring, keys))
    far, far_lse = attend_with_lse(q, k, v, _mask_of(q, seen, span.first_keys), bias)
    far_lse = far_lse + ring_log_weight.to(far_lse.dtype)
    return merged(near, near_lse, far, far_lse), torch.logaddexp(near_lse, far_lse)


def block_selected_attention(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int) -> Tensor:
    """Attention of each query to its own block of keys up to itself and to the chosen ones (B,H,Tq,S)."""
    return _attend(q, k, v, selected_mask(q, k, chosen, block))


def selected_mask(q: Tensor, k: Tensor, chosen: Tensor, block: int) -> BlockMask:
    """Built from the choices alone: each marks the blocks of the mask that its keys are in."""
    (batch, heads, queries, _), keys = chosen.shape, k.shape[2]
    chosen = chosen.to(torch.int32)
    slots = chosen.unbind(-1)
    offset = torch.full((), keys - queries, dtype=torch.int32, device=q.device)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        i, of_key = query + offset, key // block
        result = (of_key == i // block) & (key <= i)
        for slot in slots:
            result = result | (slot[b, h, query] == of_key)
        return result

    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    i = torch.arange(keys - queries, keys, device=q.device, dtype=torch.int32)[:, None]
    marked = torch.cat([chosen, (i // block).expand(batch, heads, -1, 1)], -1)  # (B,H,Tq,S+1)
    # One extra column takes what marks nothing.
    some = torch.zeros(batch, heads, rows, columns + 1, dtype=torch.bool, device=q.device)
    for piece in range(-(-block // BLOCK) + 1):
        column = marked * block // BLOCK + piece
        reached = (marked >= 0) & (column * BLOCK < (marked + 1) * block) & (column * BLOCK <= i)
        column = torch.where(reached, column, columns)
        column = F.pad(column, (0, 0, 0, rows * BLOCK - queries), value=columns)
        some = some.scatter(3, column.unflatten(2, (rows, BLOCK)).flatten(3).long(), True)
    return block_mask(some[..., :columns], None, seen, queries, keys)


class KeyBias:
    """A bias per key (B,H,Tk), of which only the difference to the query's own key enters a score, so that a
    running sum may be large."""

    def __init__(self, bias: Tensor, offset: int) -> None:
        self.bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
        self.own = self.bias[:, :, offset:]

    def scores(self) -> Callable[..., Tensor]:
        bias, own = self.bias, self.own

        def biased(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + (bias[b, h, key] - own[b, h, query])

        return biased


def attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, bias: KeyBias | None = None
) -> tuple[Tensor, Tensor]:
    out, extra = _attend(q, k, v, mask, bias, AuxRequest(lse=True))
    return out, extra.lse if bias is None else extra.lse + bias.own


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    bias: KeyBias | None = None,
    extra: AuxRequest | None = None,
) -> Any:
    # Inside a caller's torch.compile the call is traced with the rest; outside, FlexAttention by itself would
    # compute all pairs.
    attend = flex_attention if torch.compiler.is_compiling() else _compiled()
    return attend(
        q,
        k,
        v,
        score_mod=None if bias is None else bias.scores(),
        block_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=extra,
        kernel_options=_kernel_options(q, k),
    )


def _kernel_options(q: Tensor, k: Tensor) -> dict[str, Any] | None:
    """FlexAttention's kernel for few queries holds all of a key head's queries in one tile, and has none for
    more than a block of the mask; PyTorch 2.13 chooses it nevertheless, and then has nothing to compile."""
    rows = (1 << (q.shape[2] - 1).bit_length()) * (q.shape[1] // k.shape[1])
    return {"FORCE_USE_FLEX_ATTENTION": True} if q.shape[2] < BLOCK < rows else None


@lru_cache(maxsize=1)
def _compiled() -> Any:
    # Heads and widths are compiled one by one, lengths together from the second on.
    return torch.compile(flex_attention, fullgraph=True, recompile_limit=128)  # type: ignore[call-overload]


def _mask_of(q: Tensor, seen: SeenPairs, first_keys: Tensor | None = None) -> BlockMask:
    if torch.compiler.is_compiling() or isinstance(q, FakeTensor):
        return seen.mask(q.device, first_keys)
    if first_keys is None:
        return _kept_mask(seen, q.device)
    of_batch = _masks_of_batches.setdefault(first_keys, {})  # every layer of a step asks for the same
    if seen not in of_batch:
        with torch.inference_mode(False), torch.no_grad():
            of_batch[seen] = seen.mask(q.device, first_keys)
    return of_batch[seen]


_masks_of_batches: MutableMapping[Tensor, dict[SeenPairs, BlockMask]] = WeakIdKeyDictionary()
"""For the documents of batches that are still in use."""


@lru_cache(maxsize=64)
def _kept_mask(seen: SeenPairs, device: torch.device) -> BlockMask:
    with torch.inference_mode(False), torch.no_grad():  # training may use what evaluation made first
        return seen.mask(device)


def _bounds(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    low = torch.arange(0, length, BLOCK, device=device, dtype=torch.int32)
    return low, (low + BLOCK - 1).clamp(max=length - 1)


def block_mask(some: Tensor, every: Tensor | None, pairs: Mask, queries: int, keys: int) -> BlockMask:
    """A mask from the blocks (B,H,rows,columns) that are partly seen, and those seen whole."""
    kv, of_q = _listed(some), _listed(some.mT)
    none = (None, None)
    full_kv, full_q = (none, none) if every is None else (_listed(every), _listed(every.mT))
    return BlockMask(
        seq_lengths=(queries, keys),
        kv_num_blocks=kv[0],
        kv_indices=kv[1],
        full_kv_num_blocks=full_kv[0],
        full_kv_indices=full_kv[1],
        q_num_blocks=of_q[0],
        q_indices=of_q[1],
        full_q_num_blocks=full_q[0],
        full_q_indices=full_q[1],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=pairs,
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are marked, and their columns, in order, followed by the last column."""
    # In a compiled layer this runs with every call, and a sort would be a kernel or two of its own.
    rank, columns = blocks.cumsum(-1, dtype=torch.int32), blocks.shape[-1]
    wanted = torch.arange(1, columns + 1, dtype=torch.int32, device=blocks.device)
    order = torch.searchsorted(rank, wanted.expand_as(rank).contiguous(), out_int32=True)
    return rank[..., -1].contiguous(), order.clamp(max=columns - 1)
