"""Block selection grouped by block: each choice has its place, results and gradients are the reference's."""

import pytest
import torch
from test_blocks import tensors
from test_flex import on_cpu  # noqa: F401 - a fixture
from torch import Tensor

from headgate import ops
from headgate.ops import flex, grouped
from headgate.ops.blocks import choose_blocks

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
CASES = [(1, 2, 1, 300, 300, 16, 16, 3.0), (2, 4, 2, 260, 260, 16, 32, 2.0), (1, 3, 3, 200, 330, 16, 48, 1.0)]


def choices(case: tuple[int, int, int, int, int, int, int, float]) -> tuple[list[Tensor], Tensor]:
    *sizes, block, scale = case
    q, k, v = (t.float() for t in tensors(0, *sizes))
    return [q, k, v], choose_blocks(q, k, block=block, scale=scale)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_choice_has_a_place_in_a_tile_of_its_block(case: tuple[int, ...]) -> None:
    (_, k, _), chosen = choices(case)  # type: ignore[arg-type]
    groups, block, slots = k.shape[1], case[6], chosen.shape[3]
    g = grouped.Grouping.of(chosen, groups, k.shape[2] // block)
    given = chosen.unflatten(1, (groups, -1)).flatten(2)
    assert torch.equal(g.chose, given >= 0)
    assert g.filled.sum() == (given >= 0).sum() > slots
    number = torch.arange(given.shape[2]).expand_as(given)
    assert torch.equal(g.source.gather(-1, g.place)[g.chose], number[g.chose])
    of_place = g.blocks.repeat_interleave(grouped.ROWS, -1)
    assert torch.equal(of_place.gather(-1, g.place)[g.chose], given[g.chose])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_are_the_references(
    case: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, chosen = choices(case)  # type: ignore[arg-type]
    options = {"block": case[6], "scale": case[7], "chosen": chosen}
    results = []
    for backend, pays in (("reference", False), ("flex", True)):
        monkeypatch.setattr(grouped, "pays", lambda *given, pays=pays: pays)
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = ops.block_selected_attention(*leaves, backend=backend, **options)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
        results.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_work_follows_the_choices() -> None:
    """Two blocks of 64 of 32,768 keys: a mask that a single one of 128 queries widens may see all of them."""
    q = torch.empty(1, 2, 32_768, 16, device="meta")
    chosen = torch.empty(1, 2, 32_768, 2, dtype=torch.int64, device="meta")
    assert grouped.pays(q, q, chosen, 64)
    rows = grouped.ROWS * grouped._tiles(32_768 * 2, 512)
    assert rows * 128 < 0.04 * 32_768**2 / 2
    short = q[:, :, :512]
    assert not grouped.pays(short, short, chosen[:, :, :512], 64)
    assert not grouped.pays(q[:, :, :1], q, chosen[:, :, :1], 64)


@pytest.mark.usefixtures("on_cpu")
def test_nearby_queries_that_choose_apart_make_a_mask_nearly_dense() -> None:
    """What the grouping is for: how many pairs FlexAttention goes over, both ways."""
    pick, block, length = torch.Generator().manual_seed(0), 64, 4096
    own = torch.arange(length) // block
    chosen = (torch.rand(1, 1, length, 1, generator=pick) * own[:, None]).long()
    chosen = torch.where(own[:, None] > 0, chosen, -1)
    q = torch.zeros(1, 1, length, 16)
    masked = flex.selected_mask(q, q, chosen, block).kv_num_blocks.sum()
    g = grouped.Grouping.of(chosen, 1, length // block)
    mask = grouped._mask(g.blocks, block, length)
    apart = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
    causal = (length // flex.BLOCK) * (length // flex.BLOCK + 1) / 2
    assert masked > 0.8 * causal
    assert apart < 0.25 * causal
