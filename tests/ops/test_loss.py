"""The loss behind the head: in half precision its products alone are rounded."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.ops import loss


def given(rows: int = 300, vocabulary: int = 61) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Values that half precision holds exactly, so that what differs is how they are summed.
    x = torch.randn(rows, 16, generator=generator).bfloat16().float()
    weight = torch.randn(vocabulary, 16, generator=generator).bfloat16().float()
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[::7] = -100
    return x, weight, targets


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_the_loss_in_half_precision(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "rows_at_once", lambda *args: 64)
    x, weight, targets = given()
    results = []
    for kind in (torch.float64, torch.float32):
        inputs = [t.to(kind).requires_grad_() for t in (x, weight)]
        if kind == torch.float64:
            found = F.cross_entropy(F.linear(*inputs), targets, reduction=reduction)
        else:
            with torch.autocast("cpu", torch.bfloat16):
                found = loss.linear_cross_entropy(*inputs, targets, reduction=reduction)
            assert found.dtype == torch.float32
        weights = torch.linspace(0.5, 2, found.numel(), dtype=kind).view(found.shape)
        results.append([found, *torch.autograd.grad((found * weights).sum(), inputs)])
        assert all(gradient.dtype == kind for gradient in results[-1][1:])
    for truth, ours in zip(*results, strict=True):
        assert (ours - truth).abs().max() <= 0.02 * truth.abs().max()
    truth, ours = (found.sum().item() for found, *_ in results)
    assert abs(ours - truth) <= 5e-4 * abs(truth)  # rounded to bf16 it would be off by up to 4e-3


def test_products_alone_are_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own op multiplies in fp32 under autocast, at a fraction of a GPU's speed."""
    seen = []
    linear = F.linear

    def watched(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((x.dtype, weight.dtype))
        return linear(x, weight)

    monkeypatch.setattr(loss.F, "linear", watched)
    x, weight, targets = given()
    with torch.autocast("cpu", torch.bfloat16):
        loss.linear_cross_entropy(x, weight, targets)
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}


def test_a_gpu_takes_thousands_of_rows_at_once() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert loss.rows_at_once(152_000, cpu) == 220
    assert 2000 <= loss.rows_at_once(152_000, gpu) <= 8192
    assert loss.rows_at_once(4096, gpu) == 8192
