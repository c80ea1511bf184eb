"""Plain-PyTorch attention in query tiles, recomputed in the backward pass, so memory is linear in T."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headgate.ops.gpu import device_kind

TILE_ELEMENTS, GPU_TILE_ELEMENTS, GPU_TILE_QUERIES = 1 << 22, 1 << 27, 1024
"""The most scores that one tile holds, about 16 MB in fp32: big enough for matrix products, small beside T x
T. On a GPU every tile takes several launches, and fewer tiles of 512 MB take the time of one."""


def query_tiles(
    queries: int, row_elements: int, device: torch.device, *, most: int = 256
) -> Iterator[tuple[int, int]]:
    """Ranges of queries whose tiles hold at most TILE_ELEMENTS when a query's row holds `row_elements`."""
    elements = TILE_ELEMENTS
    if device_kind(device) != "cpu":
        elements, most = GPU_TILE_ELEMENTS, max(most, GPU_TILE_QUERIES)
    size = max(1, min(most, elements // max(1, row_elements)))
    for first in range(0, queries, size):
        yield first, min(first + size, queries)


def recomputed(tile: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """tile(*tensors), forgetting everything between inputs and output until the backward pass needs it."""
    if not torch.is_grad_enabled():
        return tile(*tensors)
    result = checkpoint(tile, *tensors, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result
