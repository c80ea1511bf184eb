"""Attention over a band and every stride-th column before it, at a cost of T*(window + T/stride)."""

from functools import partial

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.dispatch import Op, check
from headgate.ops.documents import by_document
from headgate.ops.span.op import span_attention
from headgate.ops.span.options import Span
from headgate.ops.tiles import query_tiles, recomputed

STRIDED = Op("strided_attention")


def strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    stride: int,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax over the keys i-window <= j <= i and all j < i that are multiples of stride; the keys begin at
    0."""
    check(q, k, v)
    Span(window).check()
    if stride < 1:
        raise HeadgateError(f"stride={stride} is too small; it must be at least 1")
    if documents is not None:
        run = partial(strided_attention, window=window, stride=stride, backend=backend)
        return by_document(documents, run, q, k, v)
    result: Tensor = STRIDED(backend, q, k, v, window=window, stride=stride)
    return result


@STRIDED.path("torch")
def _torch(q: Tensor, k: Tensor, v: Tensor, *, window: int, stride: int) -> Tensor:
    """The band and the columns are disjoint softmaxes, merged by their log-sum-exps."""
    band, band_lse = span_attention(q, k, v, Span(window))
    rows = min(q.shape[2], max(0, k.shape[2] - window - 1))  # the queries that have a key beyond the band
    if rows == 0:
        return band
    offset = k.shape[2] - rows
    columns = slice(0, k.shape[2] - window - 1, stride)
    k_columns, v_columns = k[:, :, columns], v[:, :, columns]

    def tile(q: Tensor, k: Tensor, v: Tensor, band: Tensor, band_lse: Tensor, first: Tensor) -> Tensor:
        i = first + torch.arange(q.shape[2], device=q.device)[:, None]
        beyond = torch.arange(k.shape[2], device=q.device) * stride < i - window
        scores = reference.logits(q, k).masked_fill(~beyond, -torch.inf)
        joint = torch.logaddexp(scores.logsumexp(-1), band_lse)[..., None]
        of_band, of_columns = ((t - joint).exp().to(q.dtype) for t in (band_lse[..., None], scores))
        return of_band * band + of_columns @ reference.per_head(q, v)

    parts = [band[:, :, : q.shape[2] - rows]]
    for a, b in query_tiles(rows, q.shape[0] * q.shape[1] * k_columns.shape[2], q.device):
        last = -(-(offset + b - 1 - window) // stride)  # columns that the tile's last query reaches
        at = slice(q.shape[2] - rows + a, q.shape[2] - rows + b)
        parts.append(
            recomputed(
                tile,
                q[:, :, at],
                k_columns[:, :, :last],
                v_columns[:, :, :last],
                band[:, :, at],
                band_lse[:, :, at],
                torch.full((), offset + a, device=q.device),
            )
        )
    return torch.cat(parts, 2)


STRIDED.path("reference")(reference.strided_attention)
