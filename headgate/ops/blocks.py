"""Attention over whole blocks of keys chosen by their mean, and the query's own block up to itself.

The own block is ordinary causal attention with blocks as a batch. For the chosen ones, the (query, block)
choices are sorted by block and cut into tiles of queries that share a block, so that all work is batched
matrix products over tiles, and its amount follows the choices: T * (block + k_i). Both parts are merged by
their log-sum-exps.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D); chosen blocks (B,H,Tq,S), -1 where a query has fewer than S.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.dispatch import Op, check
from headgate.ops.merge import merged
from headgate.ops.registration import refuse_gradient, register, register_gradient
from headgate.ops.span import span_attention
from headgate.ops.tiles import query_tiles
from headgate.ops.top_k import highest

BLOCKS = Op("block_selected_attention")
TILE_QUERIES = 64
TILES_AT_ONCE = 512
"""Tiles of one batched product: 512 tiles of 64 x 64 scores are 8 MB, which caches hold."""


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


def selection_recall(q: Tensor, k: Tensor, *, block: int, scale: float = 1.0) -> Tensor:
    """The share of each query's exact top k_i keys that block selection attends to: (B,H,Tq)."""
    chosen = choose_blocks(q, k, block=block, scale=scale)
    shares = []
    for a, b in query_tiles(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2]):
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
def choose_blocks(q: Tensor, k: Tensor, *, block: int, scale: float) -> Tensor:
    """The blocks each query attends to beside its own, best first: (B,H,Tq,S), -1 for none."""
    offset, n = k.shape[2] - q.shape[2], k.shape[2] // block
    means = (
        k[:, :, : n * block].unflatten(2, (n, block)).mean(3).flip(2)
    )  # later first: argmax takes the first
    positions = torch.arange(offset, k.shape[2], device=q.device)
    counts = -(-reference.top_count(positions, scale) // block)
    counts = torch.minimum(counts, positions // block)
    chosen = torch.full((*q.shape[:3], int(counts.max())), -1, dtype=torch.int64, device=q.device)
    for a, b in query_tiles(q.shape[2], q.shape[0] * q.shape[1] * n, most=1024):
        past = (offset + b - 1) // block  # complete blocks before the tile's last query
        most = int(counts[a:b].max())
        if most == 0:
            continue
        grouped = q[:, :, a:b].unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        scores = (
            (grouped @ means[:, :, n - past :].mT).unflatten(2, (-1, b - a)).flatten(1, 2)
        )  # (B,H,b-a,past)
        number = torch.arange(past - 1, -1, -1, device=q.device)
        scores.masked_fill_(number >= (positions[a:b, None] // block), -math.inf)
        for slot in range(most):
            best = scores.argmax(-1, keepdim=True)
            picked = torch.where(slot < counts[a:b], past - 1 - best[..., 0], -1)
            chosen[:, :, a:b, slot] = picked
            if slot + 1 < most:
                scores.scatter_(-1, best, -math.inf)
    return chosen


@BLOCKS.path("torch")
def _torch(q: Tensor, k: Tensor, v: Tensor, *, block: int, scale: float) -> Tensor:
    own, own_lse = own_block_attention(q, k, v, block)
    chosen = choose_blocks(q, k, block=block, scale=scale)
    if chosen.shape[-1] == 0:
        return own
    far, far_lse = _selected(q, k, v, chosen, block)
    return merged(own, own_lse, far, far_lse)


def own_block_attention(q: Tensor, k: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Causal attention inside each aligned block, and its log-sum-exp: blocks become a batch."""
    first = (k.shape[2] - q.shape[2]) // block * block
    front, back = k.shape[2] - q.shape[2] - first, -k.shape[2] % block

    def batched(t: Tensor) -> Tensor:
        return t.unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1)  # (B*blocks,heads,block,D)

    # Padded keys lie behind every real query of their block; the padded queries' results are cut off.
    padded = F.pad(q, (0, 0, front, back)), *(F.pad(t[:, :, first:], (0, 0, 0, back)) for t in (k, v))
    out, lse = span_attention(*map(batched, padded))
    real = slice(front, front + q.shape[2])
    out = out.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)[:, :, real]
    return out, lse.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)[:, :, real]


@dataclass(frozen=True)
class Plan:
    """Choices sorted by key block and cut into tiles of TILE_QUERIES choices that share one."""

    queries: Tensor
    """(tiles,n): which row of q (B*H*Tq,D) stands in each place of a tile; 0 where it is empty."""
    empty: Tensor
    """(tiles,n): the places without a choice."""
    blocks: Tensor
    """(tiles,): which row of the blocks (B*G*blocks,block,D) a tile attends to."""

    def chunks(self) -> list["Plan"]:
        pieces = (t.split(TILES_AT_ONCE) for t in (self.queries, self.empty, self.blocks))
        return [Plan(*piece) for piece in zip(*pieces, strict=True)]


def plan_tiles(chosen: Tensor, kv_heads: int, blocks: int) -> Plan:
    b, h, t, _ = chosen.shape
    batch = torch.arange(b, device=chosen.device)[:, None, None, None]
    group = (torch.arange(h, device=chosen.device) // (h // kv_heads))[:, None, None]
    of_block = ((batch * kv_heads + group) * blocks + chosen)[chosen >= 0]
    of_query = torch.arange(b * h * t, device=chosen.device).view(b, h, t, 1).expand_as(chosen)[chosen >= 0]
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
    return Plan(
        queries.view(shape),
        empty.view(shape),
        torch.arange(len(counts), device=chosen.device).repeat_interleave(tiles),
    )


def _rows(k: Tensor, block: int) -> Tensor:
    """The complete blocks as rows: (B*G*blocks,block,D)."""
    n = k.shape[2] // block
    return k[:, :, : n * block].reshape(-1, block, k.shape[3])


def _results(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3])


def _forward(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int, out: Tensor, lse: Tensor) -> None:
    """Attention over the chosen blocks alone, and its log-sum-exp: 0 and -inf for a query that has none."""
    scaled = q.reshape(-1, q.shape[3]) / math.sqrt(q.shape[3])
    k_rows, v_rows = _rows(k, block), _rows(v, block)
    plan = plan_tiles(chosen, k.shape[1], k.shape[2] // block)

    # A query's blocks lie in different tiles. A first pass finds the log-sum-exp over all of them; with it
    # the second has the final weights at once. Keeping the first pass's scores would take memory for every
    # pair.
    per_tile = [(scaled[part.queries] @ k_rows[part.blocks].mT).logsumexp(-1) for part in plan.chunks()]
    partial = torch.cat(per_tile).masked_fill_(plan.empty, -math.inf).flatten()
    queries = plan.queries.flatten()
    top = q.new_full((len(scaled),), -math.inf).scatter_reduce_(0, queries, partial, "amax")
    share = (
        (partial - top[queries]).exp_().nan_to_num_(0.0)
    )  # an empty place of a query that has nothing else
    flat_lse = top.add_(q.new_zeros(len(scaled)).index_add_(0, queries, share).log_())
    lse.copy_(flat_lse.view(lse.shape))

    flat_out = out.view(-1, q.shape[3]).zero_()
    for part in plan.chunks():
        p = (scaled[part.queries] @ k_rows[part.blocks].mT).sub_(flat_lse[part.queries][..., None]).exp_()
        p.masked_fill_(part.empty[..., None], 0.0)
        flat_out.index_add_(0, part.queries.flatten(), (p @ v_rows[part.blocks]).flatten(0, 1))


def _gradient_results(
    d_out: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    out: Tensor,
    lse: Tensor,
    block: int,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
) -> None:
    scale = 1 / math.sqrt(q.shape[3])
    flat_q, flat_d = q.reshape(-1, q.shape[3]), d_out.reshape(-1, q.shape[3])
    k_rows, v_rows, flat_lse = _rows(k, block), _rows(v, block), lse.flatten()
    delta = (flat_d * out.reshape(flat_d.shape)).sum(-1) - d_lse.flatten()
    flat_d_q, d_k_rows, d_v_rows = (
        d_q.view(flat_q.shape).zero_(),
        torch.zeros_like(k_rows),
        torch.zeros_like(v_rows),
    )
    for part in plan_tiles(chosen, k.shape[1], k.shape[2] // block).chunks():
        q_tiles, d_tiles, k_tiles = flat_q[part.queries], flat_d[part.queries], k_rows[part.blocks]
        p = (q_tiles @ k_tiles.mT * scale).sub_(flat_lse[part.queries][..., None]).exp_()
        p.masked_fill_(part.empty[..., None], 0.0)
        d_s = (d_tiles @ v_rows[part.blocks].mT).sub_(delta[part.queries][..., None]).mul_(p).mul_(scale)
        flat_d_q.index_add_(0, part.queries.flatten(), (d_s @ k_tiles).flatten(0, 1))
        d_k_rows.index_add_(0, part.blocks, d_s.mT @ q_tiles)
        d_v_rows.index_add_(0, part.blocks, p.mT @ d_tiles)
    complete = k.shape[2] // block * block
    for gradient, rows in ((d_k, d_k_rows), (d_v, d_v_rows)):
        gradient[:, :, :complete] = rows.view(*k.shape[:2], complete, -1)
        gradient[:, :, complete:] = 0.0


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, chosen, ctx.block = inputs
    ctx.save_for_backward(q, k, v, chosen, *output)


def _gradients(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    return *_selected_backward(d_out, d_lse, *ctx.saved_tensors, ctx.block), None, None


_selected = register(
    "selected_blocks",
    "(Tensor q, Tensor k, Tensor v, Tensor chosen, int block) -> (Tensor, Tensor)",
    _results,
    _forward,
)
_selected_backward = register(
    "selected_blocks_backward",
    "(Tensor d_out, Tensor d_lse, Tensor q, Tensor k, Tensor v, Tensor chosen, Tensor out, Tensor lse, "
    "int block) -> (Tensor, Tensor, Tensor)",
    _gradient_results,
    _backward,
)
register_gradient("selected_blocks", _setup, _gradients)
refuse_gradient("selected_blocks_backward")
BLOCKS.path("reference")(reference.block_selected_attention)
