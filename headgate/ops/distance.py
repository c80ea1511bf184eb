"""Causal attention with a bias by the distance of query and key, one table per head."""

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.dispatch import Op, check
from headgate.ops.tiles import query_tiles, recomputed

DISTANCE = Op("distance_biased_attention")


def distance_biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, backend: str = "auto"
) -> Tensor:
    """softmax over j <= i of q.k / sqrt(D) + bias[h, i-j]; bias (H,L) with L at least the number of keys."""
    check(q, k, v)
    if bias.ndim != 2 or bias.shape[0] != q.shape[1] or bias.shape[1] < k.shape[2]:
        raise HeadgateError(
            f"bias has shape {tuple(bias.shape)}; expected (H,L) = ({q.shape[1]}, at least {k.shape[2]})"
        )
    result: Tensor = DISTANCE(backend, q, k, v, bias)
    return result


def toeplitz(bias: Tensor, first: int, rows: int, columns: int) -> Tensor:
    """bias[h, first + r - c] as (H,rows,columns), 0 above the diagonal: a sliding view, so its gradient is
    cheap."""
    low, high = first - columns + 1, first + rows - 1
    line = bias[:, max(0, low) : high + 1]
    line = torch.cat([line.new_zeros(line.shape[0], max(0, -low)), line], 1)
    return line.flip(1).unfold(1, columns, 1).flip(1)


@DISTANCE.path("torch")
def _torch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    offset = k.shape[2] - q.shape[2]

    def tile(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        rows, columns = q.shape[2], k.shape[2]
        i, j = reference.positions(q, k)
        scores = reference.logits(q, k) + toeplitz(bias, columns - rows, rows, columns)
        return reference.attend(scores, j <= i, q, v)[0]

    tiles = query_tiles(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2])
    return torch.cat(
        [
            recomputed(tile, q[:, :, a:b], k[:, :, : offset + b], v[:, :, : offset + b], bias)
            for a, b in tiles
        ],
        2,
    )


DISTANCE.path("reference")(reference.distance_biased_attention)
