"""The short convolution: C++ and PyTorch against one matrix per tap."""

import pytest
import torch
from torch import Tensor

from headgate import ops
from headgate.errors import HeadgateError

SHAPES = [
    (1, 1, 1, 1, 1, 16),
    (2, 2, 4, 5, 3, 32),
    (2, 1, 3, 111, 4, 16),
    (1, 2, 2, 63, 1, 64),
    (1, 1, 2, 2, 7, 128),
]
"""B, G, H, T, taps, D."""


def given(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    b, g, h, t, n, d = shape
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(b, t, g, d, generator=generator, dtype=torch.float64).transpose(1, 2)
    taps = torch.randn(n, h, d, generator=generator, dtype=torch.float64)
    return values.to(dtype).requires_grad_(), taps.to(dtype).requires_grad_()


def results(
    inputs: tuple[Tensor, Tensor], backend: str, queries: int, documents: Tensor | None
) -> list[Tensor]:
    out = ops.short_convolution(*inputs, queries, documents=documents, backend=backend)
    generator = torch.Generator().manual_seed(0)
    into = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    return [out, *torch.autograd.grad(out, inputs, into)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("part", ["whole", "last", "documents"])
def test_it_is_the_formula(shape: tuple[int, ...], part: str, fast_backend: str) -> None:
    length = shape[3]
    queries = max(1, length // 3) if part == "last" else length
    ids = (torch.arange(length) * 3 // max(2, length))[None].expand(shape[0], -1)
    documents = ids if part == "documents" else None
    ours = results(given(shape, torch.float32), fast_backend, queries, documents)
    truth = results(given(shape, torch.float64), "reference", queries, documents)
    for a, b in zip(ours, truth, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_a_sum_by_hand(backend: str) -> None:
    t = torch.tensor([1.0, 10.0, 100.0])[None, None, :, None].expand(1, 1, 3, 16)
    taps = torch.tensor([1.0, 2.0])[:, None, None].expand(2, 1, 16)
    assert ops.short_convolution(t, taps, backend=backend)[0, 0, :, 0].tolist() == [1.0, 12.0, 120.0]
    apart = torch.tensor([[0, 1, 1]])
    found = ops.short_convolution(t, taps, documents=apart, backend=backend)[0, 0, :, 0]
    assert found.tolist() == [1.0, 10.0, 120.0]


def test_the_number_of_threads_changes_no_bit(fast_backend: str) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(results(given((3, 2, 4, 100, 4, 32), torch.float32), fast_backend, 100, None))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_bad_shapes_are_refused() -> None:
    t, taps = given((1, 2, 4, 5, 3, 16), torch.float32)
    with pytest.raises(HeadgateError, match="with H a multiple of G"):
        ops.short_convolution(t, taps[:, :3])
    with pytest.raises(HeadgateError, match="queries=6 with 3 taps over 5 tokens"):
        ops.short_convolution(t, taps, 6)
    with pytest.raises(HeadgateError, match="as many queries as tokens"):
        ops.short_convolution(t, taps, 2, documents=torch.zeros(1, 5, dtype=torch.int64))


def test_pytorch_accepts_the_op() -> None:
    t, taps = given((2, 2, 4, 50, 4, 16), torch.float32)
    if ops.explain("short_convolution", t, taps).path != "native":
        pytest.skip("the native path was not tested")
    starts = torch.zeros(2, 50, dtype=torch.int64)
    torch.library.opcheck(torch.ops.headgate.short_native.default, (t, taps, starts, 50))
