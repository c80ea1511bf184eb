"""Attention over whole blocks of keys chosen by their mean, and the query's own block up to itself.

The (query, block) choices are sorted by block and cut into tiles of queries that share a block, so that all
work is matrix products over tiles, and its amount follows the choices: T * (block + k_i). In plain PyTorch
the own block is ordinary causal attention with blocks as a batch, and the two parts are merged by their
log-sum-exps.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D); chosen blocks (B,H,Tq,S), -1 where a query has fewer than S.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import flex, grouped, reference
from headgate.ops.blocks_native import blocks_attention, choose
from headgate.ops.dispatch import Op, check, forced_backend
from headgate.ops.documents import by_document
from headgate.ops.registration import refuse_gradient, register, register_gradient
from headgate.ops.span import native
from headgate.ops.span.op import branch_path, causal_gradients, span_attention
from headgate.ops.span.tiled import accumulator
from headgate.ops.tiles import query_tiles
from headgate.ops.top_k import highest

BLOCKS = Op("block_selected_attention")
TILE_QUERIES = 64
TILES_AT_ONCE = 512
"""Tiles in one batched product: 512 tiles of 64 x 64 scores are 8 MB, which fits in caches."""


def block_selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    scale: float = 1.0,
    chosen: Tensor | None = None,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax over the query's own aligned block up to itself and the best complete blocks before it.

    Those are the blocks `chosen` (B,H,Tq,S), as `choose_blocks` returns them; by default the ceil(k_i /
    block) with the highest q . mean(block keys), k_i = ceil(scale * sqrt(i + 1)). The choice has no gradient;
    the chosen keys have their exact one. The keys begin at 0, and with `documents` at each document's start,
    from which the chosen blocks are then counted too.
    """
    check(q, k, v)
    if block < 1:
        raise HeadgateError(f"block={block} is too small; it must be at least 1")
    if chosen is not None and chosen.shape[:3] != q.shape[:3]:
        given, expected = tuple(chosen.shape), tuple(q.shape[:3])
        raise HeadgateError(f"chosen has shape {given}; expected (B,H,Tq,S) with (B,H,Tq) = {expected}")
    if documents is not None:
        run = partial(block_selected_attention, block=block, scale=scale, backend=backend)
        if chosen is None:
            return by_document(documents, run, q, k, v)
        return by_document(documents, lambda q, k, v, c: run(q, k, v, chosen=c), q, k, v, chosen)
    result: Tensor = BLOCKS(backend, q, k, v, block=block, scale=scale, chosen=chosen)
    return result


def selection_recall(q: Tensor, k: Tensor, *, block: int, scale: float = 1.0) -> Tensor:
    """The share of each query's exact top k_i keys that block selection attends to: (B,H,Tq)."""
    chosen = choose_blocks(q, k, block=block, scale=scale)
    shares = []
    for a, b in query_tiles(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2], q.device):
        last = k.shape[2] - q.shape[2] + b
        i, j = reference.positions(q[:, :, a:b], k[:, :, :last])
        scores = reference.logits(q[:, :, a:b], k[:, :, :last])
        exact = highest(scores, (j <= i).expand_as(scores), reference.top_count(i, scale))
        attended = (j // block == i // block).expand_as(exact)
        for slot in chosen[:, :, a:b].unbind(-1):
            attended = attended | (j // block == slot[..., None])
        shares.append((exact & attended).sum(-1) / exact.sum(-1))
    return torch.cat(shares, 2)


@torch.no_grad()
def choose_blocks(
    q: Tensor,
    k: Tensor,
    *,
    block: int,
    scale: float = 1.0,
    top_k: int | None = None,
    by: Literal["product", "weight"] = "product",
    means: Sequence[Tensor] | None = None,
) -> Tensor:
    """The blocks each query attends to besides its own, best first: (B,H,Tq,S), -1 for none.

    Chosen by the rule of `scale`, or `top_k` of them if there are that many. Blocks are ranked by
    q . mean(keys) for each head; or, by weight, all heads of a group make one choice: by their attention over
    the blocks' mean keys, summed, with the sequence's first block always chosen. Ties go to the later block.
    `means`: those of the keys' blocks, and whatever follows, if already known.
    """
    with torch.autocast(q.device.type, enabled=False):
        wide = accumulator(q)
        of_keys = block_means(k.to(wide), block) if means is None else means[0].to(wide)
        return _choose(q.to(wide), k, of_keys, block, scale, top_k, by == "weight")


def _choose(
    q: Tensor, k: Tensor, means: Tensor, block: int, scale: float, top_k: int | None, by_weight: bool
) -> Tensor:
    offset, n = k.shape[2] - q.shape[2], k.shape[2] // block
    positions = torch.arange(offset, k.shape[2], device=q.device)
    counts = positions // block
    if top_k is None:
        counts = torch.minimum(counts, -(-reference.top_count(positions, scale) // block))
    slots = _slots(k.shape[2] - 1, block, scale, top_k)
    if forced_backend() in ("auto", "native") and native.refuse(q) is None:
        chosen = choose(q, means, counts, slots=slots, block=block, offset=offset, by_weight=by_weight)
        return reference.per_head(q, chosen)
    means = means.flip(2)  # later first, since argmax takes the first
    heads = k.shape[1] if by_weight else q.shape[1]
    chosen = torch.full((q.shape[0], heads, q.shape[2], slots), -1, dtype=torch.int64, device=q.device)
    for a, b in query_tiles(q.shape[2], q.shape[0] * q.shape[1] * n, q.device, most=1024):
        past = (offset + b - 1) // block  # complete blocks before the tile's last query
        most = _slots(offset + b - 1, block, scale, top_k)
        if most == 0:
            continue
        grouped = q[:, :, a:b].unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        scores = (
            (grouped @ means[:, :, n - past :].mT).unflatten(2, (-1, b - a)).flatten(1, 2)
        )  # (B,H,b-a,past)
        number = torch.arange(past - 1, -1, -1, device=q.device)
        later = number >= (positions[a:b, None] // block)
        scores.masked_fill_(later, -math.inf)
        if by_weight:
            weights = (scores / math.sqrt(q.shape[3])).softmax(-1)
            scores = weights.unflatten(1, (heads, -1)).sum(2)
            scores[..., -1] = math.inf
            scores.masked_fill_(later, -math.inf)
        for slot in range(most):
            best = scores.argmax(-1, keepdim=True)
            picked = torch.where(slot < counts[a:b], past - 1 - best[..., 0], -1)
            chosen[:, :, a:b, slot] = picked
            if slot + 1 < most:
                scores.scatter_(-1, best, -math.inf)
    return reference.per_head(q, chosen)


def block_means(t: Tensor, block: int) -> Tensor:
    """The mean of every complete block: (B,G,blocks,D)."""
    means: Tensor = _BlockMeans.apply(t, block)
    return means


class _BlockMeans(torch.autograd.Function):
    """With a gradient in the input's memory layout, because others are added to it."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, block: int) -> Tensor:
        ctx.save_for_backward(t)
        ctx.block = block
        n = t.shape[2] // block
        return t[:, :, : n * block].unflatten(2, (n, block)).mean(3)

    @staticmethod
    def backward(ctx: Any, d_means: Tensor) -> tuple[Tensor, None]:
        (t,) = ctx.saved_tensors
        n = d_means.shape[2]
        spread = (d_means / ctx.block)[:, :, :, None].expand(-1, -1, -1, ctx.block, -1)
        d_t = torch.empty_like(t)
        d_t[:, :, : n * ctx.block].unflatten(2, (n, ctx.block)).copy_(spread)
        d_t[:, :, n * ctx.block :].zero_()
        return d_t, None


def _slots(position: int, block: int, scale: float, top_k: int | None) -> int:
    """How many past blocks a query there attends to, which no earlier query exceeds: known without reading
    tensors, which would break a graph being traced."""
    wanted = -(-math.ceil(scale * math.sqrt(position + 1)) // block) if top_k is None else top_k
    return min(wanted, position // block)


@BLOCKS.path("native", refuse=lambda q, *args, **options: native.refuse(q))
def _native(q: Tensor, k: Tensor, v: Tensor, *, block: int, scale: float, chosen: Tensor | None) -> Tensor:
    chosen = choose_blocks(q, k, block=block, scale=scale) if chosen is None else chosen
    out: Tensor = blocks_attention(q, k, v, chosen, block, k.shape[2] - q.shape[2])[0]
    return out


@BLOCKS.path("flex", refuse=flex.refuse)
def _flex(q: Tensor, k: Tensor, v: Tensor, *, block: int, scale: float, chosen: Tensor | None) -> Tensor:
    chosen = choose_blocks(q, k, block=block, scale=scale) if chosen is None else chosen
    attend = grouped if grouped.pays(q, k, chosen, block) else flex
    return attend.block_selected_attention(q, k, v, chosen, block)


@BLOCKS.path("torch")
def _torch(q: Tensor, k: Tensor, v: Tensor, *, block: int, scale: float, chosen: Tensor | None) -> Tensor:
    chosen = choose_blocks(q, k, block=block, scale=scale) if chosen is None else chosen
    out: Tensor = _attend(q, k, v, chosen, block, branch_path(q))[0]
    return out


@dataclass(frozen=True)
class OwnBlocks:
    """Blocks as a batch, so that attention inside them is causal attention: (B*blocks,heads,block,D).

    Only blocks that hold queries count. Padded keys come after every real query of their block, and the
    padded queries' results are cut off.
    """

    block: int
    first: int
    """Position of the first block that holds a query."""
    front: int
    back: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, block: int) -> "OwnBlocks":
        position = k.shape[2] - q.shape[2]
        return cls(block, position - position % block, position % block, -k.shape[2] % block)

    def queries(self, t: Tensor) -> Tensor:
        return self._batched(t, self.front)

    def keys(self, t: Tensor) -> Tensor:
        return self._batched(t[:, :, self.first :], 0)

    def _batched(self, t: Tensor, front: int) -> Tensor:
        if front or self.back:
            t = F.pad(t, (*(0, 0) * (t.ndim - 3), front, self.back))
        return t.unflatten(2, (-1, self.block)).transpose(1, 2).flatten(0, 1)

    def unbatched(self, t: Tensor, batch: int, front: int) -> Tensor:
        """(B*blocks,heads,block,...) -> (B,heads,T,...)"""
        t = t.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
        return t[:, :, front : t.shape[2] - self.back]


@dataclass(frozen=True)
class ChoiceTiles:
    """Choices sorted by key block and cut into tiles of TILE_QUERIES choices that share one."""

    queries: Tensor
    """(tiles,n): which row of the queries (B*Tq*H,D) is in each place of a tile; 0 if it is empty."""
    empty: Tensor
    """(tiles,n): the places without a choice."""
    blocks: Tensor
    """(tiles,): which row of the blocks (B*G*blocks,block,D) a tile attends to."""

    def chunks(self) -> list["ChoiceTiles"]:
        pieces = (t.split(TILES_AT_ONCE) for t in (self.queries, self.empty, self.blocks))
        return [ChoiceTiles(*piece) for piece in zip(*pieces, strict=True)]


def plan_tiles(chosen: Tensor, kv_heads: int, blocks: int) -> ChoiceTiles:
    b, h, t, _ = chosen.shape
    batch = torch.arange(b, device=chosen.device)[:, None, None, None]
    group = (torch.arange(h, device=chosen.device) // (h // kv_heads))[:, None, None]
    of_block = ((batch * kv_heads + group) * blocks + chosen)[chosen >= 0]
    number = torch.arange(b * t * h, device=chosen.device).view(b, t, h, 1).transpose(1, 2)
    of_query = number.expand_as(chosen)[chosen >= 0]
    of_block, order = of_block.sort(stable=True)
    counts = torch.bincount(of_block, minlength=b * kv_heads * blocks)
    tiles = -(-counts // TILE_QUERIES)
    first_tile, first_choice = tiles.cumsum(0) - tiles, counts.cumsum(0) - counts
    rank = torch.arange(len(order), device=chosen.device) - first_choice[of_block]
    place = first_tile[of_block] * TILE_QUERIES + rank
    total = int(tiles.sum())
    queries = torch.zeros(total * TILE_QUERIES, dtype=torch.int64, device=chosen.device)
    queries[place] = of_query[order]
    empty = torch.ones(total * TILE_QUERIES, dtype=torch.bool, device=chosen.device)
    empty[place] = False
    shape = (total, TILE_QUERIES)
    return ChoiceTiles(
        queries.view(shape),
        empty.view(shape),
        torch.arange(len(counts), device=chosen.device).repeat_interleave(tiles),
    )


def _rows(t: Tensor) -> Tensor:
    """Anything per query as rows, (B,H,Tq,...) -> (B*Tq*H,...): the order in which projections produce it."""
    return t.transpose(1, 2).flatten(0, 2)


def _taken(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], which is faster as a selection of whole rows."""
    return rows.index_select(0, index.flatten()).unflatten(0, index.shape)


def _block_rows(k: Tensor, block: int) -> Tensor:
    """The complete blocks as rows: (B*G*blocks,block,D)."""
    n = k.shape[2] // block
    return k[:, :, : n * block].reshape(-1, block, k.shape[3])


def _results(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, h, t, d = q.shape
    lse = q.new_empty((b, t, h), dtype=accumulator(q)).transpose(1, 2)
    return q.new_empty((b, t, h, d)).transpose(1, 2), lse


def _forward(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int, path: str, out: Tensor, lse: Tensor
) -> None:
    if q.dtype != lse.dtype:  # half precision is summed in fp32
        wide = torch.empty_like(out, dtype=lse.dtype)
        q, k, v = (t.to(lse.dtype) for t in (q, k, v))
        _forward(q, k, v, chosen, block, branch_path(q), wide, lse)
        out.copy_(wide)
        return
    scaled = _rows(q) / math.sqrt(q.shape[3])
    k_rows, v_rows = _block_rows(k, block), _block_rows(v, block)
    own = OwnBlocks.of(q, k, block)
    own_out, own_lse = span_attention(own.queries(q), own.keys(k), own.keys(v), backend=path)
    own_lse = _rows(own.unbatched(own_lse, q.shape[0], own.front))
    plan = plan_tiles(chosen, k.shape[1], k.shape[2] // block)

    # A query's blocks are in different tiles. A first pass finds the log-sum-exp over all of them and the own
    # block; with it the second has the final weights at once, and no scores need to be kept in between.
    per_tile = [
        (_taken(scaled, part.queries) @ _taken(k_rows, part.blocks).mT).logsumexp(-1)
        for part in plan.chunks()
    ]
    partial = (
        torch.cat([own_lse.new_empty(0, TILE_QUERIES), *per_tile])
        .masked_fill_(plan.empty, -math.inf)
        .flatten()
    )
    queries = plan.queries.flatten()
    top = own_lse.clone().scatter_reduce_(0, queries, partial, "amax")
    total = (own_lse - top).exp_().index_add_(0, queries, (partial - top[queries]).exp_())
    flat_lse = top.add_(total.log_())
    _rows(lse).copy_(flat_lse)

    rows = _rows(out)
    own_share = (own_lse - flat_lse).exp_()[:, None]
    rows.copy_(_rows(own.unbatched(own_out, q.shape[0], own.front)) * own_share)
    for part in plan.chunks():
        p = _taken(scaled, part.queries) @ _taken(k_rows, part.blocks).mT
        p.sub_(_taken(flat_lse, part.queries)[..., None]).exp_()
        p.masked_fill_(part.empty[..., None], 0.0)
        rows.index_add_(0, part.queries.flatten(), (p @ _taken(v_rows, part.blocks)).flatten(0, 1))


def _gradient_results(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    b, h, t, d = q.shape
    return q.new_empty((b, t, h, d)).transpose(1, 2), k.new_empty(k.shape), v.new_empty(v.shape)


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    out: Tensor,
    lse: Tensor,
    block: int,
    path: str,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
) -> None:
    """Every branch is differentiated with the output and log-sum-exp of the whole: exp(s - lse) are then the
    final weights, and out . d_out is the same for all branches."""
    if q.dtype != lse.dtype:
        wide = [torch.empty_like(t, dtype=lse.dtype) for t in (d_q, d_k, d_v)]
        d_out, q, k, v, out = (t.to(lse.dtype) for t in (d_out, q, k, v, out))
        _backward(d_out, q, k, v, chosen, out, lse, block, branch_path(q), *wide)
        for to, gradient in zip((d_q, d_k, d_v), wide, strict=True):
            to.copy_(gradient)
        return
    own = OwnBlocks.of(q, k, block)
    queries, keys = map(own.queries, (q, out, lse, d_out)), map(own.keys, (k, v))
    (q_own, out_own, lse_own, d_own), (k_own, v_own) = queries, keys
    own_gradients = causal_gradients(d_own, q_own, k_own, v_own, out_own, lse_own, path=path)
    d_q.copy_(own.unbatched(own_gradients[0], q.shape[0], own.front))
    for total, part in ((d_k, own_gradients[1]), (d_v, own_gradients[2])):
        total[:, :, : own.first] = 0.0
        total[:, :, own.first :] = own.unbatched(part, q.shape[0], 0)

    scale = 1 / math.sqrt(q.shape[3])
    flat_q, flat_d, flat_lse, rows = _rows(q) * scale, _rows(d_out), _rows(lse), _rows(d_q)
    k_rows, v_rows = _block_rows(k, block), _block_rows(v, block)
    d_k_rows, d_v_rows = torch.zeros_like(k_rows), torch.zeros_like(v_rows)
    delta = (flat_d * _rows(out)).sum(-1)
    for tiles in plan_tiles(chosen, k.shape[1], k.shape[2] // block).chunks():
        q_tiles, d_tiles = _taken(flat_q, tiles.queries), _taken(flat_d, tiles.queries)
        k_tiles, v_tiles = _taken(k_rows, tiles.blocks), _taken(v_rows, tiles.blocks)
        p = (q_tiles @ k_tiles.mT).sub_(_taken(flat_lse, tiles.queries)[..., None]).exp_()
        p.masked_fill_(tiles.empty[..., None], 0.0)
        d_s = (d_tiles @ v_tiles.mT).sub_(_taken(delta, tiles.queries)[..., None]).mul_(p)
        rows.index_add_(0, tiles.queries.flatten(), (d_s @ k_tiles).flatten(0, 1), alpha=scale)
        d_k_rows.index_add_(0, tiles.blocks, d_s.mT @ q_tiles)
        d_v_rows.index_add_(0, tiles.blocks, p.mT @ d_tiles)
    complete = k.shape[2] // block * block
    d_k[:, :, :complete] += d_k_rows.view(*k.shape[:2], complete, k.shape[3])
    d_v[:, :, :complete] += d_v_rows.view(*v.shape[:2], complete, v.shape[3])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, chosen, ctx.block, ctx.path = inputs
    ctx.save_for_backward(q, k, v, chosen, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_backward(d_out, *ctx.saved_tensors, ctx.block, ctx.path), None, None, None


_attend = register(
    "block_selected",
    "(Tensor q, Tensor k, Tensor v, Tensor chosen, int block, str path) -> (Tensor, Tensor)",
    _results,
    _forward,
)
_attend_backward = register(
    "block_selected_backward",
    "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor chosen, Tensor out, Tensor lse, int block, str path)"
    " -> (Tensor, Tensor, Tensor)",
    _gradient_results,
    _backward,
)
register_gradient("block_selected", _setup, _gradients)
refuse_gradient("block_selected_backward")
BLOCKS.path("reference")(reference.block_selected_attention)
