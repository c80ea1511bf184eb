"""Attention of a decoding step for the active heads: theirs is span attention, others are not computed."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headgate import ops
from headgate.errors import HeadgateError
from headgate.ops import Span

OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 9},
    {"window": 9, "dense_prefix": 100, "start": 3},
    {"window": 5, "ring": 20},
    {"window": 400},
]


def inputs(
    *, keys: int = 70, batch: int = 3, heads: int = 6, groups: int = 3, width: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (
        torch.randn(batch, n, t, width, generator=generator)
        for n, t in ((heads, 1), (groups, keys), (groups, keys))
    )
    return q, k, v


def some_active(batch: int = 3, heads: int = 6) -> Tensor:
    active = torch.rand(batch, heads, generator=torch.Generator().manual_seed(1)) < 0.4
    active[0] = False  # a row without any
    active[1] = True
    return active


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("backend", "dtype"), [("auto", torch.float32), ("torch", torch.float64), ("reference", torch.float64)]
)
@pytest.mark.parametrize("groups", [6, 2, 1])
def test_active_heads_get_span_attention_and_the_others_nothing(
    options: dict[str, Any], backend: str, dtype: torch.dtype, groups: int
) -> None:
    q, k, v = (t.to(dtype) for t in inputs(groups=groups))
    weight = torch.randn(3, 6, 1).to(dtype) if "ring" in options else None
    active = some_active()
    out, lse = ops.active_attention(q, k, v, active, Span(**options), ring_log_weight=weight, backend=backend)
    expected, expected_lse = ops.span_attention(q, k, v, Span(**options), ring_log_weight=weight)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert torch.allclose(out[active], expected[active], rtol=0, atol=tolerance)
    assert torch.allclose(lse[active], expected_lse[active], rtol=0, atol=tolerance)
    assert (out[~active] == 0).all()
    assert (lse[~active] == -math.inf).all()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_what_no_active_head_reads_is_never_touched(backend: str) -> None:
    q, k, v = inputs(heads=6, groups=3)
    active = torch.zeros(3, 6, dtype=torch.bool)
    active[0, 2] = active[2, 5] = True  # key heads 1 and 2
    expected = ops.span_attention(q, k, v)[0]
    used = active.view(3, 3, 2).any(-1)
    k[~used] = v[~used] = math.nan
    for out in (
        ops.active_attention(q, k, v, active, backend=backend)[0],
        ops.among_active(lambda q, k, v: ops.top_k_attention(q, k, v, scale=100.0), q, k, v, active),
    ):
        assert torch.allclose(out[active], expected[active], rtol=0, atol=1e-5)
        assert (out[~active] == 0).all()


def test_no_active_head_at_all() -> None:
    q, k, v = inputs()
    none = torch.zeros(3, 6, dtype=torch.bool)
    for backend in ("auto", "torch", "reference"):
        out, lse = ops.active_attention(q, k, v, none, backend=backend)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    assert (ops.among_active(lambda q, k, v: 1 / 0, q, k, v, none) == 0).all()  # type: ignore[arg-type]


def test_bad_arguments_get_one_clear_sentence() -> None:
    q, k, v = inputs()
    with pytest.raises(HeadgateError, match="expected one query"):
        ops.active_attention(q.expand(-1, -1, 2, -1), k, v, some_active())
    with pytest.raises(HeadgateError, match=r"active is torch.float32 \(3, 6\)"):
        ops.active_attention(q, k, v, some_active().float())
    with pytest.raises(HeadgateError, match="has no gradient"):
        ops.active_attention(q.requires_grad_(), k, v, some_active())


@pytest.mark.parametrize("queries", [1, 3, 20])
def test_a_window_for_each_key_head(fast_backend: str, queries: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 90, 16, generator=generator) for heads in (6, 3, 3))
    q, windows = q[:, :, -queries:], [4, 30, 30]
    backend = fast_backend if queries <= 4 else "torch"
    found = ops.windows_attention(q, k, v, windows, Span(start=7), backend=backend)
    expected = [
        ops.attention(q[:, 2 * g : 2 * g + 2], k[:, [g]], v[:, [g]], Span(w, start=7), backend="reference")
        for g, w in enumerate(windows)
    ]
    torch.testing.assert_close(found, torch.cat(expected, 1))


def test_windows_are_one_for_each_key_head() -> None:
    q = torch.zeros(1, 4, 1, 16)
    with pytest.raises(HeadgateError, match="2 windows were given for 4 key heads"):
        ops.windows_attention(q, q, q, [3, 4])
