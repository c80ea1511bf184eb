"""RMSNorm against its formula, with every gradient."""

import pytest
import torch

from headgate.ops.norm import rms_norm


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 11, 8)])
def test_values_and_gradients_are_those_of_the_formula(shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1:], generator=draw, dtype=torch.float64, requires_grad=True)
    d_out = torch.randn(shape, generator=draw, dtype=torch.float64)
    expected = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * weight
    wanted = torch.autograd.grad(expected, (x, weight), d_out)
    out = rms_norm(x, weight, 1e-3)
    assert torch.allclose(out, expected, rtol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(out, (x, weight), d_out), wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_low_precision_stays_low_and_is_summed_in_fp32() -> None:
    x = torch.full((2, 4096), 3.0, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(4096, requires_grad=True)
    out = rms_norm(x, weight, 0.0)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.ones_like(out))
    out.sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
