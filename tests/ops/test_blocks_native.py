"""The C++ kernels over blocks of keys: chosen blocks, one summary a block, and the choice itself."""

import pytest
import torch
from torch import Tensor

from headgate import ops
from headgate.ops.blocks_native import blocks_attention
from headgate.ops.dispatch import forced
from headgate.ops.native import library

pytestmark = pytest.mark.skipif(
    library.unavailable() is not None, reason=f"the native path was not tested: {library.unavailable()}"
)

CASES = [
    # batch, heads, groups, queries, keys, width, block, top_k
    (1, 4, 2, 1, 300, 32, 16, 5),
    (2, 4, 2, 3, 111, 16, 16, 5),
    (2, 4, 2, 300, 300, 32, 16, 5),
    (1, 2, 2, 700, 700, 64, 64, 4),
    (1, 4, 1, 129, 400, 16, 8, 9),
    (1, 2, 1, 300, 1200, 96, 250, 2),  # a block longer than the kernel's chunk of keys
    (1, 2, 2, 33, 33, 128, 1, 5),
    (1, 2, 2, 50, 50, 16, 100, 3),  # no complete block
    (1, 1, 1, 1100, 1100, 16, 32, 3),  # one head in several parts
    (4, 4, 2, 1050, 1050, 16, 32, 3),  # a part in several strips
]


def heads(case: tuple[int, ...]) -> list[Tensor]:
    """q, k, v as projections leave them."""
    b, h, g, queries, keys, width, *_ = case
    generator = torch.Generator().manual_seed(sum(case))
    sizes = ((h, queries), (g, keys), (g, keys))
    drawn = (torch.randn(b, t, n, width, generator=generator) for n, t in sizes)
    return [t.transpose(1, 2).requires_grad_() for t in drawn]


def outputs_and_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out, *torch.autograd.grad(out, inputs, direction)]


def assert_close(ours: list[Tensor], truth: list[Tensor]) -> None:
    for a, b in zip(ours, truth, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("by", ["product", "weight"])
def test_chosen_blocks_agree_with_the_reference(case: tuple[int, ...], by: str) -> None:
    *_, block, top_k = case
    inputs = heads(case)
    q, k, _ = inputs
    chosen = ops.choose_blocks(q, k, block=block, top_k=top_k, by=by)
    with forced("torch"):
        assert torch.equal(chosen, ops.choose_blocks(q, k, block=block, top_k=top_k, by=by))
    ours, truth = (
        outputs_and_gradients(
            ops.block_selected_attention(*inputs, block=block, chosen=chosen, backend=backend), inputs
        )
        for backend in ("native", "reference")
    )
    assert_close(ours, truth)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_summaries_agree_with_the_reference(case: tuple[int, ...]) -> None:
    inputs = heads(case)
    ours, truth = (
        outputs_and_gradients(ops.compressed_attention(*inputs, block=case[6], backend=backend), inputs)
        for backend in ("native", "reference")
    )
    assert_close(ours, truth)


def with_gates(case: tuple[int, ...]) -> list[Tensor]:
    """q, k, v, and a gate of either sign for each of two branches."""
    q, k, v = heads(case)
    b, h, t, _ = q.shape
    drawn = torch.randn(2, b, t, h, generator=torch.Generator().manual_seed(2))
    return [q, k, v, *(gate.transpose(1, 2).requires_grad_() for gate in drawn)]


@pytest.mark.parametrize("window", [0, 5, 40, 300, 5000])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen_blocks_and_a_window_agree_with_the_reference(case: tuple[int, ...], window: int) -> None:
    """Windows inside the query's own block, at the edges of others, and longer than the sequence."""
    *_, block, top_k = case
    q, k, v, *gates = inputs = with_gates(case)
    chosen = ops.choose_blocks(q, k, block=block, top_k=top_k, by="weight")
    ours, truth = (
        outputs_and_gradients(
            ops.blocks_and_window_attention(
                q, k, v, chosen, *gates, block=block, window=window, backend=backend
            ),
            inputs,
        )
        for backend in ("native", "reference")
    )
    assert_close(ours, truth)


def test_a_branch_far_below_the_other_keeps_its_own_softmax() -> None:
    """The scores of the window lie so far below those of the chosen blocks that one maximum for both would
    leave it nothing."""
    q, _, v, *gates = with_gates((1, 1, 1, 300, 300, 16, 16, 3))
    far = torch.where(torch.arange(300) < 16, 1.0, -1.0)[:, None] * 200 * q.detach()[:, :, -1:].sign()
    chosen = torch.zeros(1, 1, 300, 1, dtype=torch.int64)
    ours, truth = (
        ops.blocks_and_window_attention(
            q[:, :, -9:], far, v, chosen[:, :, -9:], *(g[:, :, -9:] for g in gates), **options
        )
        for options in ({"block": 16, "window": 60, "backend": b} for b in ("native", "reference"))
    )
    assert (ours - truth).abs().max() < 1e-5


@pytest.mark.parametrize("case", [CASES[2], CASES[8]], ids=str)
@pytest.mark.parametrize("by", ["product", "weight"])
def test_the_number_of_threads_changes_no_bit(case: tuple[int, ...], by: str) -> None:
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            inputs = heads(case)
            chosen = ops.choose_blocks(*inputs[:2], block=case[6], top_k=case[7], by=by)
            out = ops.block_selected_attention(*inputs, block=case[6], chosen=chosen, backend="native")
            coarse = ops.compressed_attention(*inputs, block=case[6], backend="native")
            gates = with_gates(case)[3:]
            both = ops.blocks_and_window_attention(
                *inputs, chosen, *gates, block=case[6], window=70, backend="native"
            )
            results.append([*outputs_and_gradients(out, inputs), *outputs_and_gradients(coarse, inputs)])
            results[-1] += outputs_and_gradients(both, [*inputs, *gates])
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


@pytest.mark.parametrize("queries", [40, 2])
def test_ties_go_to_the_later_block_and_nan_is_the_best(queries: int) -> None:
    k = torch.ones(1, 1, 40, 16)
    chosen = ops.choose_blocks(k[:, :, 40 - queries :], k, block=8, top_k=2)
    assert chosen[0, 0, -1].tolist() == [3, 2]
    k[:, :, 8:16] = torch.nan
    chosen = ops.choose_blocks(torch.ones(1, 1, queries, 16), k, block=8, top_k=2)
    assert chosen[0, 0, -1].tolist() == [1, 3]


def test_choices_that_are_no_earlier_block_are_passed_over() -> None:
    """Nothing outside of the tensors is read, whatever is given."""
    q, k, v = (t.detach() for t in heads((1, 2, 2, 64, 64, 16, 8, 1)))
    odd = torch.tensor([-7, 3, 8, 10**12]).expand(1, 2, 64, 4)
    plain = torch.where(torch.arange(64)[:, None] // 8 > 3, 3, -1).expand(1, 2, 64, 1)
    for queries in (64, 3):
        ours, truth = (
            ops.block_selected_attention(
                q[:, :, -queries:], k, v, block=8, chosen=c[:, :, -queries:], backend="native"
            )
            for c in (odd, plain)
        )
        assert torch.equal(ours, truth)


def test_pytorch_accepts_the_ops() -> None:
    inputs = heads((1, 2, 1, 20, 20, 16, 4, 2))
    chosen = ops.choose_blocks(*inputs[:2], block=4, top_k=2)
    torch.library.opcheck(torch.ops.headgate.blocks_native.default, (*inputs, chosen, 4, 0))
    both = (*inputs, chosen, torch.rand(2, 1, 2, 20, requires_grad=True), 4, 6, 0)
    torch.library.opcheck(torch.ops.headgate.blocks_and_window_native.default, both)
    counts = torch.arange(20).int() // 4
    means = ops.block_means(inputs[1].detach(), 4)
    given = (inputs[0].detach(), means, counts, 2, 4, 0, True)
    torch.library.opcheck(torch.ops.headgate.choose_blocks_native.default, given)


def test_a_query_before_the_first_whole_block_sees_no_summary() -> None:
    q, k, v = heads((1, 2, 1, 20, 20, 16, 8, 1))
    out, lse = blocks_attention(q, ops.block_means(k, 8), ops.block_means(v, 8), None, 8, 0)
    assert (out[:, :, :8] == 0).all()
    assert (lse[:, :, :8] == -torch.inf).all()
    assert out[:, :, 8:].ne(0).all()
