"""A short causal convolution: each channel mixed with the same channel at the few tokens before."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import reference, short_native
from headgate.ops.dispatch import Op
from headgate.ops.span import native

SHORT = Op("short_convolution")


def short_convolution(
    t: Tensor,
    taps: Tensor,
    queries: int | None = None,
    *,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """out_i^h = sum over c = 0..n-1 of taps_c^h * t_{i-c}, for the last `queries` tokens (all by default).

    t (B,G,T,D), taps (n,H,D) with H a multiple of G -> (B,H,queries,D). Tokens before the first, and with
    `documents` (B,T) those of another document, count as 0.
    """
    if t.ndim != 4 or taps.ndim != 3 or t.shape[3] != taps.shape[2] or taps.shape[1] % max(1, t.shape[1]):
        raise HeadgateError(
            f"t and taps have shapes {tuple(t.shape)} and {tuple(taps.shape)}; expected (B,G,T,D) and "
            "(n,H,D), with H a multiple of G"
        )
    queries = t.shape[2] if queries is None else queries
    if not 1 <= queries <= t.shape[2] or not taps.shape[0]:
        raise HeadgateError(
            f"queries={queries} with {taps.shape[0]} taps over {t.shape[2]} tokens; expected at least one "
            "tap, and from 1 to as many queries as tokens"
        )
    if documents is not None and (documents.shape != (t.shape[0], t.shape[2]) or queries < t.shape[2]):
        raise HeadgateError(
            f"documents of shape {tuple(documents.shape)} with {queries} queries were given for a tensor of "
            f"shape {tuple(t.shape)}; expected (B,T) and whole sequences: as many queries as tokens"
        )
    wide = torch.promote_types(t.dtype, torch.float32)
    with torch.autocast(t.device.type, enabled=False):
        out: Tensor = SHORT(backend, t.to(wide), taps.to(wide), documents, queries)
    return out.to(t.dtype)


@SHORT.path("native", refuse=lambda t, *args: native.refuse(t))
def _native(t: Tensor, taps: Tensor, documents: Tensor | None, queries: int) -> Tensor:
    out: Tensor = short_native.convolve(t, taps, documents, queries)
    return out


@SHORT.path("torch")
def _torch(t: Tensor, taps: Tensor, documents: Tensor | None, queries: int) -> Tensor:
    count, offset, groups = taps.shape[0], t.shape[2] - queries, t.shape[1]
    whole = F.pad(t, (0, 0, count - 1, 0))
    weights = taps.unflatten(1, (groups, -1))[:, :, :, None]  # (n,G,H/G,1,D)
    out: Any = 0
    for c in range(count):
        first = offset + count - 1 - c
        before = whole[:, :, first : first + queries]
        if documents is not None and c:
            same = F.pad(documents[:, c:] == documents[:, :-c], (min(c, queries), 0))  # pads with False
            before = before * same[:, None, :queries, None]
        out = out + weights[c] * before[:, :, None]  # (B,G,H/G,Tq,D)
    result: Tensor = out.flatten(1, 2)
    return result


@SHORT.path("reference")
def _reference(t: Tensor, taps: Tensor, documents: Tensor | None, queries: int) -> Tensor:
    return reference.short_convolution(t, taps, documents, queries)
