"""The decoder under torch.func, second derivatives, torch.export and torch.compile: right, or refused."""

import pytest
import torch
from torch import Tensor

import headgate
from headgate.config import ModelConfig
from headgate.errors import HeadgateError
from headgate.model.decoder import Decoder
from headgate.ops.dispatch import forced

MICRO = ModelConfig(
    vocab_size=50,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_mlp=40,
    shared_options={"window": 5, "max_window": 9, "dense_prefix": 12, "block": 4, "stride": 4, "hidden": 8},
)
SOME = ["full", "dynamic-sparse", "head-gated", "context-adaptive", "sparse-geometric", "gated-delta"]


def some_tokens(length: int = 33) -> Tensor:
    return torch.randint(50, (2, length), generator=torch.Generator().manual_seed(0))


def setup(name: str) -> tuple[Decoder, dict[str, Tensor], list[Tensor]]:
    """A decoder, its parameters, and their gradients as backward gives them."""
    decoder = headgate.build_model(MICRO, name)
    parameters = dict(decoder.named_parameters())
    loss = decoder(some_tokens(), some_tokens())
    return decoder, parameters, list(torch.autograd.grad(loss, list(parameters.values())))


@pytest.mark.parametrize("name", SOME)
def test_torch_func_gives_the_gradients_of_backward(name: str) -> None:
    decoder, parameters, expected = setup(name)

    def loss(values: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return torch.func.functional_call(decoder, values, (tokens, tokens))

    found = torch.func.grad(loss)(parameters, some_tokens())
    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, some_tokens()[:, None])
    generator = torch.Generator().manual_seed(1)
    direction = {n: torch.randn(p.shape, generator=generator) for n, p in parameters.items()}
    _, along = torch.func.jvp(lambda values: loss(values, some_tokens()), (parameters,), (direction,))
    for ours, rows, theirs in zip(found.values(), each.values(), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)
        assert torch.allclose(rows.mean(0), theirs, rtol=1e-3, atol=1e-5)
    wanted = sum((a * b).sum() for a, b in zip(direction.values(), expected, strict=True))
    assert along.item() == pytest.approx(wanted.item(), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", ["full", "context-adaptive"])
def test_a_second_derivative_is_that_of_finite_differences(name: str) -> None:
    decoder = headgate.build_model(MICRO, name).double()
    weight = decoder.layers[0].get_parameter("attention.q_proj.weight")
    tokens = some_tokens(9)

    def slope(*, second: bool) -> Tensor:
        with forced("reference"):
            (gradient,) = torch.autograd.grad(decoder(tokens, tokens), weight, create_graph=second)
        return gradient.square().sum()

    (found,) = torch.autograd.grad(slope(second=True), weight)
    step = 1e-5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        weight.add_(step)
    above = slope(second=False).item()
    with torch.no_grad():
        weight.sub_(2 * step)
    expected = (above - slope(second=False).item()) / 2
    assert (found * step).sum().item() == pytest.approx(expected, rel=1e-4)


def test_without_the_reference_a_second_derivative_is_refused() -> None:
    decoder = headgate.build_model(MICRO, "full")
    parameters = list(decoder.parameters())
    first = torch.autograd.grad(decoder(some_tokens(), some_tokens()), parameters, create_graph=True)
    with pytest.raises(HeadgateError, match="second derivative of an attention op is not implemented"):
        sum(g.square().sum() for g in first).backward()


@pytest.mark.parametrize(
    "name", ["full", "local", "dynamic-sparse", "gated", "forgetting", "positional", "gated-delta"]
)
def test_an_exported_program_takes_any_length(name: str) -> None:
    decoder = headgate.build_model(MICRO, name).eval()
    length = torch.export.Dim("length", min=8, max=512)
    with torch.no_grad():
        program = torch.export.export(decoder, (some_tokens(),), dynamic_shapes=({1: length},), strict=False)
        for tokens in map(some_tokens, (8, 20, 70)):
            assert torch.allclose(program.module()(tokens), decoder(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["full", "head-gated", "gated-delta"])
def test_forward_loss_and_backward_are_one_graph(name: str) -> None:
    decoder, parameters, expected = setup(name)
    torch.compiler.reset()
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    compiled(some_tokens(), some_tokens()).backward()
    for (name, parameter), theirs in zip(parameters.items(), expected, strict=True):
        assert torch.allclose(parameter.grad, theirs, rtol=1e-3, atol=1e-5), name
