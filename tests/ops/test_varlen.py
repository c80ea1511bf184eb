"""The path through PyTorch's varlen attention, with what it is documented to compute in its place: it has no
kernels on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headgate import ops
from headgate.ops import Span, reference
from headgate.ops.span import varlen


def documented(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    most_q: int,
    most_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    return_aux: Any,
) -> tuple[Tensor, Tensor]:
    """torch.nn.attention.varlen.varlen_attn: sequences one after another, (T,H,D); queries stand at the end
    of their keys, and see `left` of them before their own and `right` behind."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    left, right = window_size
    outs, lses = [], []
    for n in range(len(ends_q) - 1):
        rows, columns = slice(int(ends_q[n]), int(ends_q[n + 1])), slice(int(ends_k[n]), int(ends_k[n + 1]))
        own_q, own_k, own_v = q[rows].transpose(0, 1), k[columns].transpose(0, 1), v[columns].transpose(0, 1)
        assert own_q.shape[1] <= most_q
        assert own_k.shape[1] <= most_k
        own_k, own_v = (t.repeat_interleave(q.shape[1] // k.shape[1], 0) for t in (own_k, own_v))
        j = torch.arange(own_k.shape[1])
        i = j[own_k.shape[1] - own_q.shape[1] :, None]
        seen = (j <= i + right) & ((left < 0) | (j >= i - left))
        scores = (own_q @ own_k.mT / own_q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        outs.append((scores.softmax(-1) @ own_v).transpose(0, 1))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize(
    ("queries", "keys", "span"),
    [
        (20, 20, Span(5)),
        (7, 20, Span(5)),
        (7, 20, Span()),
        (1, 20, Span(5)),
        (20, 20, Span(5, dense_prefix=9)),
        (12, 20, Span(5, dense_prefix=11)),
        (12, 20, Span(5, dense_prefix=11, start=2)),
        (12, 20, Span(5, dense_prefix=8)),
        (12, 20, Span(5, dense_prefix=40)),
        (7, 20, Span(5, pinned=3, start=3)),
    ],
    ids=str,
)
def test_it_computes_what_the_reference_does(
    queries: int, keys: int, span: Span, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "DEVICES", ("cpu",))
    monkeypatch.setattr(varlen, "HALF", (torch.float64,))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", documented)
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16))
    inputs = [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]
    truth, truth_lse = reference.span_attention(*inputs, span)
    found = ops.attention(*inputs, span, backend="varlen")
    d_out = torch.randn(truth.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(
        (found, *torch.autograd.grad(found, inputs, d_out)),
        (truth, *torch.autograd.grad(truth, inputs, d_out)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(ops.span_attention(*inputs, span, backend="varlen")[1], truth_lse)


def test_it_refuses_what_it_cannot_do() -> None:
    def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        with FakeTensorMode():
            return torch.empty(shape, dtype=dtype, device="cuda")

    q = on_gpu(1, 4, 30, 64)
    for tensor, span, reason in (
        (on_gpu(1, 4, 30, 64, dtype=torch.float32), Span(5), "it takes bfloat16 and float16, not float32"),
        (on_gpu(1, 4, 30, 36), Span(5), "head width 36 is not a multiple of 8 up to 256"),
        (q, Span(5, pinned=2), "it has no pinned keys"),
    ):
        explanation = ops.explain("attention", tensor, tensor, tensor, span)
        assert ("varlen", reason) in explanation.refusals
    needs = q.requires_grad_()
    refusals = ops.explain("span_attention", needs, needs, needs, Span(5)).refusals
    assert ("varlen", "its log-sum-exp has no gradient") in refusals
