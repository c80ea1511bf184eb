"""The gated delta rule: chunks in C++ and in PyTorch against the recurrence as it is written."""

import pytest
import torch
from torch import Tensor

from headgate import ops

SHAPES = [(1, 2, 2, 32), (2, 2, 3, 16), (1, 2, 48, 32), (2, 3, 111, 16), (1, 1, 130, 64), (1, 1, 50, 128)]


def given(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v as projections leave them, log_decay, beta, and a memory."""
    b, h, t, d = shape
    generator = torch.Generator().manual_seed(sum(shape))
    q, k, v = (torch.randn(b, t, h, d, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k = (torch.nn.functional.normalize(u, dim=-1) for u in (q, k))
    log_decay = -torch.rand(b, h, t, generator=generator, dtype=torch.float64) / 2
    beta = torch.rand(b, h, t, generator=generator, dtype=torch.float64)
    memory = torch.randn(b, h, d, d, generator=generator, dtype=torch.float64)
    drawn = [*(u.transpose(1, 2) for u in (q, k, v)), log_decay, beta, memory]
    return [u.to(dtype).requires_grad_() for u in drawn]


def results(inputs: list[Tensor], backend: str) -> list[Tensor]:
    """The output, the memory and all gradients, with a gradient into both results."""
    out, memory = ops.gated_delta(*inputs, backend=backend)
    generator = torch.Generator().manual_seed(0)
    into = [torch.randn(u.shape, generator=generator, dtype=torch.float64).to(u) for u in (out, memory)]
    return [out, memory, *torch.autograd.grad((out, memory), inputs, into)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_are_the_recurrence(shape: tuple[int, ...], fast_backend: str) -> None:
    ours = results(given(shape, torch.float32), fast_backend)
    truth = results(given(shape), "reference")
    for a, b in zip(ours, truth, strict=True):
        assert (a - b).abs().max() <= 3e-6 * b.abs().max()


@pytest.mark.parametrize("length", [1, 4])
def test_few_tokens_without_a_gradient(length: int, fast_backend: str) -> None:
    inputs = given((2, 2, length, 32))
    with torch.no_grad():
        ours = ops.gated_delta(*(u.float() for u in inputs), backend=fast_backend)
        truth = ops.gated_delta(*inputs, backend="reference")
    for a, b in zip(ours, truth, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


def test_strong_decay_overflows_nowhere(fast_backend: str) -> None:
    inputs = given((1, 2, 100, 16), torch.float32)
    with torch.no_grad():
        inputs[3].fill_(-16.0)
    assert all(u.isfinite().all() for u in results(inputs, fast_backend))


def test_the_number_of_threads_changes_no_bit(fast_backend: str) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(results(given((1, 3, 100, 16), torch.float32), fast_backend))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_pytorch_accepts_the_op() -> None:
    if ops.explain("gated_delta", *given((1, 1, 5, 16), torch.float32)).path != "native":
        pytest.skip("the native path was not tested")
    torch.library.opcheck(
        torch.ops.headgate.delta_native.default, (*given((1, 2, 50, 16), torch.float32), True)
    )
