"""Attention over chosen blocks of keys and attention over a window, each behind a gate, as one op.

The two have keys in common. In C++ a block that both see whole is computed once, forward and backward.
"""

from functools import partial

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import flex
from headgate.ops.blocks import block_selected_attention
from headgate.ops.blocks_native import FEW, blocks_and_window
from headgate.ops.dispatch import Op, check
from headgate.ops.documents import by_document
from headgate.ops.merge import weighted_sum
from headgate.ops.span import native
from headgate.ops.span.op import attention
from headgate.ops.span.options import Span

BLOCKS_AND_WINDOW = Op("blocks_and_window_attention")


def blocks_and_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    blocks_gate: Tensor,
    window_gate: Tensor,
    *,
    block: int,
    window: int,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """blocks_gate * block_selected_attention + window_gate * window_attention, with gates (B,H,Tq).

    `chosen` (B,H,Tq,S) is what `choose_blocks` gives. The keys begin at 0, and with `documents` at each
    document's start.
    """
    check(q, k, v)
    if block < 1 or window < 0:
        raise HeadgateError(f"block={block}, window={window}: expected at least 1 and 0")
    for name, t in (("chosen", chosen), ("blocks_gate", blocks_gate), ("window_gate", window_gate)):
        if t.shape[:3] != q.shape[:3] or t.ndim != (4 if t is chosen else 3):
            expected = f"(B,H,Tq{',S' if t is chosen else ''}) with (B,H,Tq) = {tuple(q.shape[:3])}"
            raise HeadgateError(f"{name} has shape {tuple(t.shape)}; expected {expected}")
    given = (q, k, v, chosen, blocks_gate, window_gate)
    if documents is not None:
        run = partial(blocks_and_window_attention, block=block, window=window, backend=backend)
        return by_document(documents, run, *given)
    result: Tensor = BLOCKS_AND_WINDOW(backend, *given, block=block, window=window)
    return result


def _apart(*given: Tensor, block: int, window: int, backend: str, of_window: str = "") -> Tensor:
    q, k, v, chosen, *gates = given
    parts = [
        block_selected_attention(q, k, v, block=block, chosen=chosen, backend=backend),
        attention(q, k, v, Span(window), backend=of_window or backend),
    ]
    return weighted_sum(parts, [gate[..., None].to(q.dtype) for gate in gates])


@BLOCKS_AND_WINDOW.path("native", refuse=lambda q, *args, **options: native.refuse(q))
def _native(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, *gates: Tensor, block: int, window: int
) -> Tensor:
    if q.shape[2] <= FEW:
        return _apart(q, k, v, chosen, *gates, block=block, window=window, backend="native")
    both = torch.stack([gate.to(q.dtype) for gate in gates])
    out: Tensor = blocks_and_window(q, k, v, chosen, both, block, window, k.shape[2] - q.shape[2])[0]
    return out


@BLOCKS_AND_WINDOW.path("flex", refuse=flex.refuse)
def _flex(*given: Tensor, block: int, window: int) -> Tensor:
    return _apart(*given, block=block, window=window, backend="flex", of_window="auto")


@BLOCKS_AND_WINDOW.path("torch")
def _torch(*given: Tensor, block: int, window: int) -> Tensor:
    return _apart(*given, block=block, window=window, backend="torch")


@BLOCKS_AND_WINDOW.path("reference")
def _reference(*given: Tensor, block: int, window: int) -> Tensor:
    return _apart(*given, block=block, window=window, backend="reference")
