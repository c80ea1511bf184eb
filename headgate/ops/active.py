"""Attention of a decoding step for some of its heads, skipping what the gates have closed; and attention with
a separate window for each key head, in one kernel call when few tokens are decoded.

Shapes: q (B,H,1,D), the newest token of each row; k, v (B,G,Tk,D); active (B,H), the heads to compute. The
others get an output of 0 and a log-sum-exp of -inf, as attention over no keys would.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.dispatch import Op, check
from headgate.ops.span import native
from headgate.ops.span.op import attention, check_ring, span_attention, within
from headgate.ops.span.options import Span

ACTIVE = Op("active_attention")
BY_HEAD = Op("windows_attention")
FEW = 4
"""Up to this many queries the C++ kernel takes a window for each key head."""


def windows_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Sequence[int],
    span: Span = Span(),  # noqa: B008 - a tuple
    *,
    active: Tensor | None = None,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`attention` with a window for each key head instead of the span's: the output (B,H,Tq,D). For a single
    query without a gradient, it may be computed for the `active` heads (B,H) alone."""
    check(q, k, v)
    span = within(documents, q, k, span)
    for window in windows:
        span._replace(window=window).check()
    if len(windows) != k.shape[1]:
        raise HeadgateError(
            f"{len(windows)} windows were given for {k.shape[1]} key heads; give one for each"
        )
    if active is not None:
        check_active(q, k, v, active)
    result: Tensor = BY_HEAD(backend, q, k, v, windows, span, active)
    return result


def _refuse_native(
    q: Tensor, k: Tensor, v: Tensor, windows: Sequence[int], span: Span, active: Tensor | None
) -> str | None:
    if span.first_keys is not None:
        return "it takes only one document"
    if q.shape[2] > FEW or (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))):
        return f"it takes a window for each head only for up to {FEW} queries without a gradient"
    return "it cannot be traced" if torch.compiler.is_compiling() else native.refuse(q)


@BY_HEAD.path("native", refuse=_refuse_native)
def _windows_native(
    q: Tensor, k: Tensor, v: Tensor, windows: Sequence[int], span: Span, active: Tensor | None
) -> Tensor:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    numbers = span._replace(window=max(windows)).numbers()
    active = None if active is None else active.contiguous()
    native.forward(q, k, v, None, None, None, None, numbers, out, lse, active, windows)
    return out


@BY_HEAD.path("torch")
def _windows_torch(
    q: Tensor, k: Tensor, v: Tensor, windows: Sequence[int], span: Span, active: Tensor | None
) -> Tensor:
    """One attention for the neighbouring heads of each window, by whichever path it takes."""
    share, parts, first = q.shape[1] // k.shape[1], [], 0
    for window, run in groupby(windows):
        end = first + len(list(run))
        heads, groups = slice(first * share, end * share), slice(first, end)
        given = q[:, heads], k[:, groups], v[:, groups]
        if active is None:
            parts.append(attention(*given, span._replace(window=window)))
        else:
            parts.append(active_attention(*given, active[:, heads], span._replace(window=window))[0])
        first = end
    return torch.cat(parts, 1)


BY_HEAD.path("reference")(_windows_torch)


def active_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    active: Tensor,
    span: Span = Span(),  # noqa: B008 - a tuple
    *,
    ring_log_weight: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`span_attention` of the active heads: the output (B,H,1,D) and the log-sum-exp (B,H,1). It has no
    gradient."""
    check(q, k, v)
    span.check()
    check_ring(q, span, ring_log_weight)
    check_active(q, k, v, active)
    result: tuple[Tensor, Tensor] = ACTIVE(backend, q, k, v, active, span, ring_log_weight)
    return result


def check_active(q: Tensor, k: Tensor, v: Tensor, active: Tensor) -> None:
    if q.shape[2] != 1 or active.shape != q.shape[:2] or active.dtype != torch.bool:
        raise HeadgateError(
            f"q has shape {tuple(q.shape)} and active is {active.dtype} {tuple(active.shape)}; "
            "expected one query, q (B,H,1,D), and active as booleans (B,H)"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise HeadgateError("active_attention has no gradient; run it under torch.no_grad()")


class KeyHeads:
    """The key heads that active heads read, over all rows, as one batch with one key head each."""

    def __init__(self, active: Tensor, key_heads: int) -> None:
        self._active = active.reshape(active.shape[0] * key_heads, -1)
        self._needed = self._active.any(-1).nonzero()[:, 0]

    def __len__(self) -> int:
        return len(self._needed)

    def queries(self, t: Tensor) -> Tensor:
        """(B,H,...) -> (n,H/G,...)"""
        return t.reshape(*self._active.shape, *t.shape[2:])[self._needed]

    def keys(self, t: Tensor) -> Tensor:
        """(B,G,...) -> (n,1,...)"""
        return t.flatten(0, 1)[self._needed, None]

    def spread(self, t: Tensor, shape: torch.Size, otherwise: float) -> Tensor:
        """(n,H/G,...) -> (B,H,...), with `otherwise` for the inactive heads."""
        everywhere = t.new_full((*self._active.shape, *shape[2:]), otherwise)
        active = self._active[self._needed].view(*t.shape[:2], *(1,) * (t.ndim - 2))
        everywhere[self._needed] = t.masked_fill(~active, otherwise)
        return everywhere.view(shape)


def among_active(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, active: Tensor
) -> Tensor:
    """attend(q, k, v) -> (B,H,1,D) for any attention, computed only for the key heads that an active head
    reads (on a GPU, for all); 0 for the inactive heads."""
    if q.device.type != "cpu":
        return attend(q, k, v).masked_fill(~active[..., None, None], 0.0)
    heads = KeyHeads(active, k.shape[1])
    if len(heads) == 0:
        return torch.zeros_like(q)
    return heads.spread(attend(heads.queries(q), heads.keys(k), heads.keys(v)), q.shape, 0.0)


@ACTIVE.path("native", refuse=lambda q, *others: native.refuse(q))
def _native(
    q: Tensor, k: Tensor, v: Tensor, active: Tensor, span: Span, ring_log_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    native.forward(q, k, v, ring_log_weight, None, None, None, span.numbers(), out, lse, active.contiguous())
    return out, lse


@ACTIVE.path(
    "whole", refuse=lambda q, *others: "leaving heads out pays here" if q.device.type == "cpu" else None
)
def _whole(
    q: Tensor, k: Tensor, v: Tensor, active: Tensor, span: Span, ring_log_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Every head: asking a GPU which ones are active takes longer than their attention to one query."""
    out, lse = span_attention(q, k, v, span, ring_log_weight=ring_log_weight)
    return out.masked_fill(~active[..., None, None], 0.0), lse.masked_fill(~active[..., None], -math.inf)


@ACTIVE.path("torch")
def _torch(
    q: Tensor, k: Tensor, v: Tensor, active: Tensor, span: Span, ring_log_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    heads = KeyHeads(active, k.shape[1])
    if len(heads) == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf)
    weight = None if ring_log_weight is None else heads.queries(ring_log_weight)
    out, lse = span_attention(
        heads.queries(q), heads.keys(k), heads.keys(v), span, ring_log_weight=weight, backend="torch"
    )
    return heads.spread(out, q.shape, 0.0), heads.spread(lse, q.shape[:3], -math.inf)


@ACTIVE.path("reference")
def _reference(
    q: Tensor, k: Tensor, v: Tensor, active: Tensor, span: Span, ring_log_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse = reference.span_attention(q, k, v, span, ring_log_weight=ring_log_weight)
    return out.masked_fill(~active[..., None, None], 0.0), lse.masked_fill(~active[..., None], -math.inf)
