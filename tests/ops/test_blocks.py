"""Block-selected attention: the plan that groups queries by block, and its exactness on every path."""

import pytest
import torch
from torch import Tensor

from headgate import ops
from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.blocks import _attend, choose_blocks, plan_tiles
from headgate.ops.dispatch import forced
from headgate.ops.native import library


def tensors(
    seed: int, batch: int, heads: int, groups: int, queries: int, keys: int, width: int
) -> list[Tensor]:
    """q, k, v in fp64; q and k on a grid of 1/8, so that equal means tie exactly."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, queries, width), (batch, groups, keys, width), (batch, groups, keys, width)]
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [(q * 8).round() / 8, (k * 8).round() / 8, v]


CASES = [
    # batch, heads, groups, queries, keys, width, block, scale
    (1, 2, 2, 1, 1, 8, 4, 1.0),
    (2, 4, 2, 70, 70, 8, 8, 1.0),
    (1, 4, 1, 129, 129, 16, 8, 3.0),
    (3, 2, 2, 1, 65, 16, 16, 2.0),
    (2, 2, 1, 37, 101, 8, 16, 9.0),
    (1, 2, 2, 200, 200, 32, 64, 1.0),
    (1, 2, 2, 33, 33, 8, 1, 1.0),
    (1, 2, 2, 50, 50, 8, 100, 1.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_output_and_gradients_are_those_of_the_reference(case: tuple[int, ...], dtype: torch.dtype) -> None:
    *sizes, block, scale = case
    results = []
    for backend in ("torch", "reference"):
        q, k, v = (t.to(dtype).requires_grad_() for t in (u.clone() for u in tensors(0, *sizes)))
        out = ops.block_selected_attention(q, k, v, block=block, scale=scale, backend=backend)
        direction = torch.randn(
            out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        ).to(dtype)
        results.append([out, *torch.autograd.grad(out, (q, k, v), direction)])
    for ours, truth in zip(*results, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 1e-11
        assert (ours - truth).abs().max() <= tolerance * max(1.0, truth.abs().max().item())


def test_half_precision_is_summed_in_fp32() -> None:
    results = []
    for backend in ("torch", "reference"):
        inputs = [t.bfloat16().requires_grad_() for t in tensors(0, 1, 4, 2, 129, 129, 16)]
        run = inputs if backend == "torch" else [t.double() for t in inputs]
        out = ops.block_selected_attention(*run, block=8, scale=3.0, backend=backend)
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for ours, truth in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16 or ours is results[1][0]
        assert (ours.double() - truth.double()).abs().max() <= 0.02 * max(1.0, truth.abs().max().item())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_choice_is_the_references(case: tuple[int, ...]) -> None:
    *sizes, block, scale = case
    q, k, _ = tensors(3, *sizes)
    chosen = choose_blocks(q, k, block=block, scale=scale)
    blocks = torch.arange(k.shape[2] // block)
    assert torch.equal(
        (chosen[..., None] == blocks).any(-2), reference.selected_blocks(q, k, block=block, scale=scale)
    )


def test_ties_go_to_the_later_block() -> None:
    ones = torch.ones(1, 1, 40, 4)
    chosen = choose_blocks(ones, ones, block=8, scale=1.0)
    assert chosen[0, 0, :, 0].tolist() == [i // 8 - 1 for i in range(40)]


def test_the_plan_holds_every_choice_once_beside_its_block() -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(-1, 5, (2, 4, 90, 2), generator=generator)
    plan = plan_tiles(chosen, kv_heads=2, blocks=5)
    found = []
    for tile in range(len(plan.blocks)):
        for query in plan.queries[tile][~plan.empty[tile]].tolist():
            batch, row, head = query // 360, query // 4 % 90, query % 4
            assert plan.blocks[tile] // 5 == batch * 2 + head // 2  # keys of its own sequence and key head
            found.append((batch, head, row, int(plan.blocks[tile] % 5)))
    expected = [
        (b, h, t, int(n))
        for b in range(2)
        for h in range(4)
        for t in range(90)
        for n in chosen[b, h, t]
        if n >= 0
    ]
    assert sorted(found) == sorted(expected)


def test_all_queries_may_choose_one_block() -> None:
    """The most uneven plan there is: one block serves every query."""
    q, k, v = (t.float() for t in tensors(5, 1, 2, 2, 300, 300, 8))
    q = q.abs() + 1 / 8
    k[:, :, :8] = 9.0
    ours, truth = (ops.block_selected_attention(q, k, v, block=8, backend=b) for b in ("torch", "reference"))
    assert (choose_blocks(q, k, block=8, scale=1.0)[:, :, 8:, 0] == 0).all()
    assert (ours - truth).abs().max() < 1e-5


@pytest.mark.parametrize("queries", [20, 7])
def test_gradcheck(queries: int) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(7, 1, 4, 2, queries, 20, 4))
    chosen = choose_blocks(q, k, block=4, scale=2.0)
    assert torch.autograd.gradcheck(lambda q, k, v: _attend(q, k, v, chosen, 4, "torch")[0], (q, k, v))


def test_pytorch_accepts_the_op_and_second_derivatives_are_refused() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(9, 1, 2, 1, 20, 20, 4))
    chosen = choose_blocks(q, k, block=4, scale=1.0)
    torch.library.opcheck(torch.ops.headgate.block_selected.default, (q, k, v, chosen, 4, "torch"))
    out = ops.block_selected_attention(q, k, v, block=4, backend="torch")
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(HeadgateError, match="the second derivative of an attention op is not implemented"):
        first.sum().backward()


def test_recall_is_the_share_of_exact_top_keys_attended_to() -> None:
    q, k, _ = tensors(11, 2, 4, 2, 60, 60, 8)
    i, j = reference.positions(q, k)
    scores = reference.logits(q, k)
    exact = reference.best(scores, (j <= i).expand_as(scores), reference.top_count(i, 1.0))
    blocks = reference.selected_blocks(q, k, block=8, scale=1.0).repeat_interleave(8, -1)
    attended = torch.nn.functional.pad(blocks, (0, 60 - blocks.shape[-1])) | (j // 8 == i // 8)
    expected = (exact & attended).sum(-1) / exact.sum(-1)
    assert torch.equal(ops.selection_recall(q, k, block=8), expected)


@pytest.mark.parametrize("path", ["native", "torch"])
def test_the_backward_of_the_own_block_takes_the_path_of_the_forward(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it runs after the path is no longer asked for."""
    if path == "native" and library.unavailable() is not None:
        pytest.skip(f"the native path was not tested: {library.unavailable()}")
    taken = []
    for name in ("native", "torch"):
        op = getattr(torch.ops.headgate, f"span_{name}_backward")
        monkeypatch.setattr(
            torch.ops.headgate,
            f"span_{name}_backward",
            lambda *a, op=op, name=name: taken.append(name) or op(*a),
        )
    q, k, v = (t.float().requires_grad_() for t in tensors(0, 1, 2, 1, 40, 40, 16))
    with forced(path if path == "torch" else "auto"):
        out = ops.block_selected_attention(q, k, v, block=8, backend="torch")
    out.sum().backward()
    assert taken == [path]
