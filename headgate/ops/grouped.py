"""Block selection on a GPU, grouped by block: queries that chose a block stand together and see it alone.

Under a mask, FlexAttention goes over every block that one of 128 neighbouring queries chose, and in training
these are most of them. Here each choice is a row of its own. Rows are sorted by block, and every block begins
a tile of 128 rows, so that a tile has one block of keys, and work follows the choices. A query's own block is
an attention of its own, and the results are merged by their log-sum-exps.

All sizes follow from the shapes, so nothing waits for the device, and all moves are selections, forwards and
backwards, so that nothing is added by atomics.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D); chosen (B,H,Tq,S). A group's choices are numbered (head, query, slot).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headgate.ops import flex

ROWS = flex.BLOCK


def pays(q: Tensor, k: Tensor, chosen: Tensor, block: int) -> bool:
    """Whether its pairs are fewer than half of those that a mask may have to go over, all of them."""
    slots, keys = chosen.shape[3], k.shape[2]
    repeat = q.shape[1] // k.shape[1]
    rows = ROWS * _tiles(repeat * q.shape[2] * slots, keys // block)
    seen = -(-block // ROWS) * ROWS
    return slots > 0 and 2 * rows * seen < repeat * q.shape[2] * keys / 2


class Grouping(NamedTuple):
    """Where each choice stands, and which stands in each place."""

    source: Tensor
    """(B,G,places): the number of the choice there; 0 where there is none."""
    filled: Tensor
    """(B,G,places): whether there is one."""
    place: Tensor
    """(B,G,choices): where it stands; 0 where no block was chosen."""
    chose: Tensor
    """(B,G,choices): whether one was."""
    blocks: Tensor
    """(B,G,tiles): the block that a tile sees; the number of blocks where it sees none."""

    @classmethod
    def of(cls, chosen: Tensor, groups: int, count: int) -> "Grouping":
        """Of choices among `count` blocks."""
        given = chosen.unflatten(1, (groups, -1)).flatten(2).long()
        chose = given >= 0
        wanted = torch.where(chose, given, count)
        ordered, order = wanted.sort(dim=-1, stable=True)
        edges = torch.arange(count + 1, device=chosen.device).expand(*given.shape[:2], -1).contiguous()
        first = torch.searchsorted(ordered, edges)
        sizes = first[..., 1:] - first[..., :-1]
        tiles = (sizes + ROWS - 1) // ROWS
        ends = tiles.cumsum(-1)
        begins = ends - tiles
        number = torch.arange(_tiles(given.shape[2], count), device=chosen.device)
        blocks = torch.searchsorted(ends, number.expand(*given.shape[:2], -1).contiguous(), right=True)
        known = blocks.clamp(max=count - 1)
        rank = (number - begins.gather(-1, known))[..., None] * ROWS
        rank = rank + torch.arange(ROWS, device=chosen.device)
        filled = (blocks < count)[..., None] & (rank < sizes.gather(-1, known)[..., None])
        among = (first.gather(-1, known)[..., None] + rank).clamp(0, given.shape[2] - 1)
        filled = filled.flatten(2)
        source = torch.where(filled, order.gather(-1, among.flatten(2)), 0)
        own = wanted.clamp(max=count - 1)
        place = begins.gather(-1, own) * ROWS + order.argsort(-1) - first.gather(-1, own)
        return cls(source, filled, torch.where(chose, place, 0), chose, blocks)


def _tiles(choices: int, blocks: int) -> int:
    """No more can be needed: every block may leave one of its tiles nearly empty."""
    return (choices + blocks * (ROWS - 1)) // ROWS


def block_selected_attention(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):  # under which a sum would be in fp32
        return _attended(q, k, v, chosen, block)


def _attended(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int) -> Tensor:
    own, own_lse = flex.attend_with_lse(q, k, v, flex.selected_mask(q, k, chosen[:1, :1, :, :0], block))
    groups, slots = k.shape[1], chosen.shape[3]
    g = Grouping.of(chosen, groups, k.shape[2] // block)
    rows = q.unflatten(1, (groups, -1)).flatten(2, 3)  # (B,G,heads of the group * Tq,D)
    placed: Tensor = _Placed.apply(rows, g.source, g.place, g.chose, slots)
    out, lse = flex.attend_with_lse(placed, k, v, _mask(g.blocks, block, k.shape[2]))
    each = _Taken.apply(out, g.source, g.filled, g.place)
    each_lse = _Taken.apply(lse[..., None], g.source, g.filled, g.place)
    each_lse = each_lse.masked_fill(~g.chose[..., None], -torch.inf)
    shape = (*q.shape[:3], slots)
    lses = torch.cat([each_lse.reshape(shape), own_lse[..., None]], -1)
    weights = (lses - lses.logsumexp(-1, keepdim=True)).exp()[..., None].to(q.dtype)
    return (weights[..., :-1, :] * each.reshape(*shape, -1)).sum(3) + weights[..., -1, :] * own


def _mask(blocks: Tensor, block: int, keys: int) -> Any:
    """Each tile of rows sees the keys of its block."""
    of_tile = blocks.to(torch.int32)
    low, high = of_tile[..., None] * block, (of_tile[..., None] + 1) * block
    columns = torch.arange(0, keys, flex.BLOCK, device=blocks.device)
    # Behind the last complete block there may be keys of a block that nobody can choose.
    none = of_tile[..., None] >= keys // block
    some = (columns < high) & (columns + flex.BLOCK > low) & ~none
    every = (columns >= low) & (columns + flex.BLOCK <= high) & ~none

    def seen(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return of_tile[b, h, row // ROWS] == key // block

    return flex.block_mask(some & ~every, every, seen, of_tile.shape[-1] * ROWS, keys)


def _rows(t: Tensor, index: Tensor) -> Tensor:
    return t.gather(2, index[..., None].expand(-1, -1, -1, t.shape[3]))


class _Placed(torch.autograd.Function):
    """The rows of queries (B,G,n,D) in the places of their choices; a row's gradient is the sum over them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, place: Tensor, chose: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(place, chose)
        ctx.slots = slots
        return _rows(rows, source // slots)

    @staticmethod
    def backward(ctx: Any, d_placed: Tensor) -> tuple[Tensor | None, ...]:
        place, chose = ctx.saved_tensors
        d_each = _rows(d_placed, place).masked_fill(~chose[..., None], 0.0)
        return d_each.unflatten(2, (-1, ctx.slots)).sum(3), None, None, None, None


class _Taken(torch.autograd.Function):
    """The results (B,G,places,D) of each choice; a place's gradient is that of the choice in it."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, source: Tensor, filled: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(source, filled)
        return _rows(t, place)

    @staticmethod
    def backward(ctx: Any, d_each: Tensor) -> tuple[Tensor | None, ...]:
        source, filled = ctx.saved_tensors
        return _rows(d_each, source).masked_fill(~filled[..., None], 0.0), None, None, None
