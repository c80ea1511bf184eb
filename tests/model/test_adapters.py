"""What others hang on a Linear counts: adapters, hooks, parametrisations, quantised weights."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import headgate
from headgate.config import ModelConfig
from headgate.model.decoder import Decoder

MICRO = ModelConfig(
    vocab_size=257,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_mlp=40,
    tied_embeddings=False,
    shared_options={"window": 5, "max_window": 9, "dense_prefix": 12, "block": 4, "stride": 4, "hidden": 8},
)
NAMES = [name for name in headgate.mechanisms() if not name.endswith("-example")]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "head"]


def build(name: str) -> Decoder:
    decoder = headgate.build_model(MICRO, name)
    with torch.no_grad():
        for parameter_name, parameter in decoder.named_parameters():
            if parameter.ndim > 1 and ".mechanism." not in parameter_name:
                parameter.mul_(0.3 / parameter.std())
    return decoder.eval()


def some_tokens(length: int) -> Tensor:
    return torch.randint(257, (1, length), generator=torch.Generator().manual_seed(0))


def linears(decoder: Decoder) -> dict[str, nn.Linear]:
    return {name: m for name, m in decoder.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_on_any_linear_is_what_it_is_merged(name: str) -> None:
    """LoRA on every Linear there is, the mechanism's own too, above and below any limit of size."""
    peft = pytest.importorskip("peft", reason="needs the extra: pip install 'headgate[dev]'")
    decoder = build(name)
    names = list(linears(decoder))
    before = {length: decoder(some_tokens(length)) for length in (20, 200)}
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(decoder, config).eval()
    tokens = some_tokens(200)
    with torch.no_grad():
        found = {length: adapted(some_tokens(length)) for length in (20, 200)}
        short = adapted(tokens[:, :20])
        assert torch.allclose(adapted(tokens)[:, :20], short, atol=1e-3)  # long and short agree
    adapted(tokens, tokens).backward()
    missing = [n for n, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    loss = adapted(tokens, tokens).item()
    merged = adapted.merge_and_unload()
    for length, logits in found.items():
        assert (logits - before[length]).abs().max() > 0.1
        assert torch.allclose(merged(some_tokens(length)), logits, rtol=1e-3, atol=2e-3)
    assert merged(tokens, tokens).item() == pytest.approx(loss, rel=1e-4)


def doubled_by_hook(linear: nn.Linear) -> Callable[[], None]:
    handle = linear.register_forward_hook(lambda module, args, out: 2 * out)
    return handle.remove


class Twice(nn.Module):
    def forward(self, t: Tensor) -> Tensor:
        return 2 * t


def doubled_by_parametrisation(linear: nn.Linear) -> Callable[[], None]:
    for parameter in [name for name, _ in linear.named_parameters()]:
        parametrize.register_parametrization(linear, parameter, Twice())
    return lambda: None


def doubled_by_replacement(linear: nn.Linear) -> Callable[[], None]:
    """As accelerate's hooks do."""
    plain = linear.forward
    linear.forward = lambda *args: 2 * plain(*args)  # type: ignore[method-assign]
    return lambda: None


@pytest.mark.parametrize("length", [20, 200])
@pytest.mark.parametrize("double", [doubled_by_hook, doubled_by_parametrisation, doubled_by_replacement])
def test_a_changed_linear_counts(double: Callable[[nn.Linear], Any], length: int) -> None:
    """Each is doubled, and must do what doubled weights do."""
    tokens = some_tokens(length)
    for name in linears(build("context-adaptive")):
        changed, expected = build("context-adaptive"), build("context-adaptive")
        double(changed.get_submodule(name))  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in expected.get_submodule(name).parameters():
                parameter.mul_(2)
            assert torch.allclose(changed(tokens), expected(tokens), rtol=1e-4, atol=1e-4), name
            loss, wanted = changed(tokens, tokens), expected(tokens, tokens)
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-5), name


@pytest.mark.parametrize("name", NAMES)
def test_quantised_linears_are_used(name: str) -> None:
    decoder = build(name)
    expected = decoder(some_tokens(200))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch announces another way to quantise
        quantised = torch.ao.quantization.quantize_dynamic(decoder, {nn.Linear})
    assert not linears(quantised)
    with torch.no_grad():
        difference = (quantised(some_tokens(200)) - expected).abs()
        assert 1e-4 < difference.mean() < 0.35 * expected.std()
        quantised(some_tokens(200), some_tokens(200))
    (done,) = quantised.generate(some_tokens(9), 5, temperature=0)
    assert len(done.tokens) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_weights_learn_as_in_fp32(name: str, dtype: torch.dtype) -> None:
    half = headgate.build_model(MICRO, name).to(dtype)
    decoder = headgate.build_model(MICRO, name)
    decoder.load_state_dict(half.state_dict())
    gradients = []
    for model in (decoder, half):
        model(some_tokens(150), some_tokens(150)).backward()
        gradients.append([p.grad.flatten().float() for p in model.parameters()])
    assert {p.grad.dtype for p in half.parameters()} == {dtype}
    assert torch.cosine_similarity(*map(torch.cat, gradients), dim=0) > 0.995
    for wide, narrow in zip(*gradients, strict=True):
        assert torch.cosine_similarity(wide, narrow, dim=0) > 0.98 or wide.norm() == 0
