"""Documents that share a sequence: every op gives what it gives for each document alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headgate import ops
from headgate.errors import HeadgateError
from headgate.ops import Span
from headgate.ops.documents import document_starts

LENGTHS = [[1, 70, 130, 3, 57], [200, 61], [261]]
"""Of the documents in each row: within blocks and chunks of the kernels, and across several."""


def ids(rows: list[list[int]] = LENGTHS) -> Tensor:
    numbered = [[n for n, length in enumerate(row) for _ in range(length)] for row in rows]
    return torch.tensor(numbered)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


B, H, G, T, D, M = 3, 4, 2, 261, 16, 4
PER_TOKEN = {"q": (H, D), "k": (G, D), "v": (G, D)}
OPS: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "causal": (lambda q, k, v, **o: ops.causal_attention(q, k, v, **o), {}),
    "window": (lambda q, k, v, **o: ops.window_attention(q, k, v, 40, **o), {}),
    "prefix": (lambda q, k, v, **o: ops.window_attention(q, k, v, 20, dense_prefix=64, **o), {}),
    "pinned": (lambda q, k, v, **o: ops.window_attention(q, k, v, 9, pinned=3, **o), {}),
    "ring": (
        lambda q, k, v, weight, **o: ops.span_attention(
            q, k, v, Span(10, ring=50), ring_log_weight=weight[..., 0], **o
        ),
        {"weight": (H, 1)},
    ),
    "key bias": (
        lambda q, k, v, bias, **o: ops.biased_attention(q, k, v, bias[..., 0], Span(100), **o),
        {"bias": (H, 1)},
    ),
    "distance": (
        lambda q, k, v, **o: ops.distance_biased_attention(q, k, v, drawn(H, T, seed=9), **o),
        {},
    ),
    "far": (lambda q, k, v, **o: _padded(*ops.far_attention(q, k, v, 12, **o), q), {}),
    "pair gate": (
        lambda q, k, v, x, y, **o: ops.pair_gated_attention(
            q, k, v, x, y, drawn(H, M, seed=7), drawn(H, seed=8), form="multiply", **o
        ),
        {"x": (H, M), "y": (H, M)},
    ),
    "top-k": (lambda q, k, v, **o: ops.top_k_attention(q, k, v, **o), {}),
    "blocks": (lambda q, k, v, **o: ops.block_selected_attention(q, k, v, block=8, scale=2.0, **o), {}),
    "blocks and window": (
        lambda q, k, v, gates, **o: ops.blocks_and_window_attention(
            q, k, v, _first_block(q, **o), *gates.unbind(-1), block=8, window=20, **o
        ),
        {"gates": (H, 2)},
    ),
    "combiner": (lambda q, k, v, **o: ops.combiner_attention(q, k, v, block=8, **o), {}),
    "compressed": (lambda q, k, v, **o: ops.compressed_attention(q, k, v, block=8, **o), {}),
    "strided": (lambda q, k, v, **o: ops.strided_attention(q, k, v, window=9, stride=4, **o), {}),
    "windows": (lambda q, k, v, **o: ops.windows_attention(q, k, v, [5, 90], **o), {}),
    "short": (
        lambda q, k, v, **o: q + ops.short_convolution(k * v, drawn(3, H, v.shape[3], seed=6), **o),
        {},
    ),
    "delta": (
        lambda q, k, v, decay, **o: ops.gated_delta(
            torch.nn.functional.normalize(q, dim=-1),
            torch.nn.functional.normalize(k.repeat_interleave(2, 1), dim=-1),
            v.repeat_interleave(2, 1),
            -decay[..., 0].abs(),
            decay[..., 0].sigmoid(),
            **o,
        )[0],
        {"decay": (H, 1)},
    ),
}


def _first_block(q: Tensor, documents: Tensor | None = None, **_: Any) -> Tensor:
    """Every query chooses its document's first block, once that lies before its own."""
    starts = torch.zeros(1, 1) if documents is None else ops.document_starts(documents)
    chosen = torch.where(torch.arange(q.shape[2]) - starts >= 8, 0, -1)
    return chosen[:, None, :, None].expand(*q.shape[:3], 1)


def _padded(out: Tensor, lse: Tensor, q: Tensor) -> Tensor:
    """What lies beyond the window, with 0 for the queries that have nothing there; -inf becomes 0 too."""
    lse = torch.where(lse > -torch.inf, lse, 0.0)
    joint = torch.cat([out, lse[..., None]], -1)
    return torch.nn.functional.pad(joint, (0, 0, q.shape[2] - joint.shape[2], 0))


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("name", OPS)
def test_documents_are_as_if_alone(name: str, backend: str) -> None:
    run, more = OPS[name]
    shapes = {**PER_TOKEN, **more}
    inputs = [
        drawn(B, heads, T, width, seed=n).requires_grad_() for n, (heads, width) in enumerate(shapes.values())
    ]
    packed = run(*inputs, documents=ids(), backend=backend)
    packed = torch.cat([t.flatten(3) if t.ndim > 3 else t[..., None] for t in _listed(packed)], -1)
    rows = []
    for row, lengths in enumerate(LENGTHS):
        parts = zip(*(t[row : row + 1].split(lengths, 2) for t in inputs), strict=True)
        alone = [_listed(run(*part, backend=backend)) for part in parts]
        joined = [torch.cat([t.flatten(3) if t.ndim > 3 else t[..., None] for t in a], -1) for a in alone]
        rows.append(torch.cat(joined, 2))
    separate = torch.cat(rows)
    upstream = drawn(*packed.shape, seed=99)
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(t, inputs, upstream) for t in (packed, separate))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5 * max(1, expected.abs().max()), rtol=1e-5)


def _listed(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_starts_of_documents() -> None:
    assert document_starts(torch.tensor([[7, 7, 9, 9, 2], [1, 2, 3, 4, 5]])).tolist() == [
        [0, 0, 2, 2, 4],
        [0, 1, 2, 3, 4],
    ]
    assert document_starts(torch.tensor([[3, 3], [4, 4]])) is None
    again = document_starts(ids())
    assert again is not None
    assert torch.equal(document_starts(again), again)


def test_documents_that_return_are_refused() -> None:
    q, kv = drawn(2, 2, 5, 16, seed=0), drawn(2, 2, 5, 16, seed=1)
    returning = torch.tensor([[0, 0, 1, 1, 1], [4, 3, 3, 4, 9]])
    with pytest.raises(HeadgateError, match="documents return to 4 in row 1"):
        ops.causal_attention(q, kv, kv, documents=returning)
    with pytest.raises(HeadgateError, match=r"documents of shape \(2, 4\) were given for 5 queries"):
        ops.causal_attention(q, kv, kv, documents=returning[:, :4])
    with pytest.raises(HeadgateError, match=r"documents are torch\.float32 of shape"):
        ops.causal_attention(q, kv, kv, documents=returning.float())
