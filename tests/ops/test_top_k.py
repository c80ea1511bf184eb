"""Exact top-k attention: output and gradients, ties, odd shapes, and what PyTorch asks of an op."""

import pytest
import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import explain, reference, top_k_attention
from headgate.ops.native import library
from headgate.ops.tiles import query_tiles


def inputs(queries: int, keys: int, heads: int = 4, groups: int = 2, *, steps: float = 0.0) -> list[Tensor]:
    """q, k, v in fp64; with `steps` on a coarse grid, so that many logits are equal."""
    generator = torch.Generator().manual_seed(keys)
    shapes = [(2, heads, queries, 8), (2, groups, keys, 8), (2, groups, keys, 8)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if steps:
        drawn[:2] = [(t / steps).round() * steps for t in drawn[:2]]
    return [t.requires_grad_() for t in drawn]


@pytest.mark.parametrize(("length", "most"), [(8192, 30), (32_768, 400)])
def test_a_gpu_takes_few_large_tiles(length: int, most: int) -> None:
    """Every tile is some launches: of 4 sequences and 12 heads, 820 or 16,384 would be most of a layer."""
    tiles = {
        device: sum(1 for _ in query_tiles(length, 4 * 12 * length, torch.device(device)))
        for device in ("cpu", "cuda")
    }
    assert tiles["cuda"] <= most < tiles["cpu"] / 20


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 100.0])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 40), (17, 17), (63, 63), (130, 130), (9, 140)])
@pytest.mark.parametrize("steps", [0.0, 1.0])
def test_output_and_gradients_are_those_of_the_reference(
    queries: int, keys: int, scale: float, steps: float
) -> None:
    q, k, v = inputs(queries, keys, steps=steps)
    found = top_k_attention(q, k, v, scale=scale, backend="torch")
    expected = reference.top_k_attention(q, k, v, scale=scale)
    d_out = torch.randn(found.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = zip(
        (found, *torch.autograd.grad(found, (q, k, v), d_out)),
        (expected, *torch.autograd.grad(expected, (q, k, v), d_out)),
        strict=True,
    )
    for ours, theirs in pairs:
        assert (ours - theirs).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("queries", "keys", "groups", "steps", "scale"),
    [
        (5, 5, 2, 0.0, 1.0),
        (63, 63, 1, 1.0, 1.0),
        (130, 400, 4, 1.0, 3.0),
        (333, 333, 2, 0.0, 0.3),
        (9, 140, 2, 0.0, 100.0),
    ],
)
def test_the_native_path(
    queries: int, keys: int, groups: int, steps: float, scale: float, threads: int
) -> None:
    if library.unavailable() is not None:
        pytest.skip(f"the native path was not tested: {library.unavailable()}")
    exact = [t.detach().repeat(1, 1, 1, 2) for t in inputs(queries, keys, 4, groups, steps=steps)]
    assert_native_is_exact(exact, scale)


def test_a_list_that_fills_up_keeps_its_best() -> None:
    """The last keys score low; before them come the best, and before these many that beat only the last
    ones: the list of the best fills up before the end and is cut back."""
    if library.unavailable() is not None:
        pytest.skip(f"the native path was not tested: {library.unavailable()}")
    v = inputs(1000, 1000, 1, 1)[2].detach().repeat(1, 1, 1, 2)
    scores = torch.linspace(0, 1, 1000, dtype=torch.float64)
    scores[728:768] += 20
    scores[400:728] += 10
    q, k = torch.zeros_like(v), torch.zeros_like(v)
    q[..., 0], k[..., 0] = 1, scores
    assert_native_is_exact([q, k, v], 1.0)


def assert_native_is_exact(exact: list[Tensor], scale: float) -> None:
    d_out = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for dtype, backend in ((torch.float32, "native"), (torch.float64, "reference")):
        tensors = [t.to(dtype).requires_grad_() for t in exact]
        out = top_k_attention(*tensors, scale=scale, backend=backend)
        results.append([out, *torch.autograd.grad(out, tensors, d_out.to(dtype))])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 2e-5 * max(1.0, theirs.abs().max().item())


def test_a_few_queries_take_the_torch_path() -> None:
    q, k, v = (t.detach().float().repeat(1, 1, 1, 2) for t in inputs(4, 40))
    assert explain(top_k_attention, q, k, v).path == "torch"


def test_ties_are_common_on_the_grid_above() -> None:
    q, k, _ = inputs(63, 63, steps=1.0)
    scores = reference.logits(q, k)[:, :, -1]
    assert all(len(row.unique()) < 50 for row in scores.flatten(0, 1))


def test_half_precision_is_summed_in_fp32() -> None:
    exact = [t.detach().float() for t in inputs(50, 50)]
    half = [t.bfloat16() for t in exact]
    found = top_k_attention(*half, backend="torch")
    assert found.dtype == torch.bfloat16
    expected = top_k_attention(*(t.float() for t in half), backend="torch")
    assert (found.float() - expected).abs().max() < 2**-7 * expected.abs().max()


def test_second_derivatives_are_refused() -> None:
    q, k, v = inputs(20, 20)
    (d_q,) = torch.autograd.grad(top_k_attention(q, k, v, backend="torch").sum(), q, create_graph=True)
    with pytest.raises(HeadgateError, match="second derivative"):
        d_q.sum().backward()


@pytest.mark.compiles
def test_pytorch_accepts_the_native_op() -> None:
    if library.unavailable() is not None:
        pytest.skip(f"the native path was not tested: {library.unavailable()}")
    q, k, v = (t.detach().float().repeat(1, 1, 1, 2) for t in inputs(20, 24))
    ops = torch.ops.headgate
    kept = ops.top_k_native(q, k, v, 1.0)
    d_out = torch.ones_like(q)
    checked = torch.library.opcheck(ops.top_k_native_backward.default, (d_out, q, k, v, *kept, 1.0))
    arguments = (*(t.requires_grad_() for t in (q, k, v)), 1.0)
    checked |= torch.library.opcheck(ops.top_k_native.default, arguments)
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.compiles
def test_pytorch_accepts_the_op() -> None:
    q, k, v = (t.detach().float() for t in inputs(20, 24))
    forward, backward = torch.ops.headgate.top_k.default, torch.ops.headgate.top_k_backward.default
    out, weights, chosen = forward(q, k, v, 1.0)
    checked = torch.library.opcheck(backward, (torch.ones_like(out), q, k, v, weights, chosen))
    checked |= torch.library.opcheck(forward, (*(t.requires_grad_() for t in (q, k, v)), 1.0))
    assert set(checked.values()) == {"SUCCESS"}
    compiled = torch.compile(top_k_attention, fullgraph=True)
    assert torch.equal(compiled(q, k, v), top_k_attention(q, k, v))
