"""Which parameters decay, what role each has, which optimiser takes it, and how the learning rate goes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import headgate
from headgate.config import Config, TrainConfig, from_dict, to_dict
from headgate.errors import HeadgateError
from headgate.model.decoder import Decoder
from headgate.train.optim import (
    clip_gradients,
    gradient_norm,
    learning_rate,
    make_optimizer,
    output_rates,
    parts,
    set_learning_rate,
)


def groups(decoder: Decoder, config: Config) -> dict[str, tuple[float, float]]:
    """Name of each parameter -> (weight decay, learning-rate scale), as the optimiser has them."""
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    optimizer = make_optimizer(decoder, config.train)
    return {
        names[p]: (group["weight_decay"], group["scale"])
        for group in optimizer.param_groups
        for p in group["params"]
    }


def test_matrices_decay_and_nothing_else_does(micro: Config) -> None:
    config = replace(micro, model=replace(micro.model, qkv_bias=True, tied_embeddings=False))
    found = groups(headgate.build_model(config), config)
    assert set(found) == {name for name, _ in headgate.build_model(config).named_parameters()}
    for name, (decay, _) in found.items():
        is_matrix = name.endswith(("proj.weight", "embedding.weight", "head.weight", "gate.weight"))
        assert decay == (0.1 if is_matrix else 0.0), name


def test_parameters_per_head_decay_only_where_they_are_matrices(micro: Config) -> None:
    decoder = headgate.build_model(micro, ["sparse-geometric", "positional"])
    own = [part for part in parts(decoder) if part.role == "mechanism"]
    decays = {part.name.rpartition("mechanism.")[2]: part.decays for part in own}
    matrices = {"w1_q", "w1_k"}
    assert {name for name, decay in decays.items() if decay} == matrices
    assert decays.keys() - matrices == {"b1", "w2", "b2", "gamma", "mean", "log_std", "weight"}


OF_ROLE = {
    "embedding": ("embedding.weight",),
    "head": ("head.weight",),
    "query_key": ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"),
    "value": ("v_proj.weight", "v_proj.bias"),
    "attention_output": ("o_proj.weight",),
    "mlp": ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    "mechanism": ("mechanism.gate.weight", "mechanism.gate.bias"),
}


@pytest.mark.parametrize("role", OF_ROLE)
def test_each_role_has_a_learning_rate_of_its_own(role: str, micro: Config) -> None:
    """It multiplies the rate, and leaves the weight decay, which PyTorch multiplies with it, what it was."""
    config = replace(
        micro,
        model=replace(micro.model, qkv_bias=True, tied_embeddings=False),
        train=replace(micro.train, **{f"{role}_rate": 0.25}),
    )
    for name, (decay, scale) in groups(headgate.build_model(config), config).items():
        assert scale == (0.25 if name.endswith(OF_ROLE[role]) else 1.0), name
        assert decay * scale == pytest.approx(0.1 if decay else 0.0), name


@pytest.mark.parametrize("clip", [1e9, 0.5])
def test_a_rate_of_the_output_is_a_multiplier_of_attention(clip: float, micro: Config) -> None:
    """From a scaled start: rate r, or rate 1 and a factor r behind the output projection, learn alike, also
    where gradients are clipped."""
    base = replace(micro.model, start="scaled", tied_embeddings=False)
    losses = []
    clipped = 0
    for rate, factor in ((20.0, 1.0), (1.0, 20.0)):
        train = replace(micro.train, attention_output_rate=rate, learning_rate=1e-2, clip=clip)
        decoder = headgate.build_model(base, mechanism="full")
        for layer in decoder.layers:
            layer.attention.o_proj.register_forward_hook(lambda _, __, out, by=factor: out * by)
        optimizer = make_optimizer(decoder, train)
        set_learning_rate(optimizer, train.learning_rate)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, base.vocab_size, (4, 24), generator=generator)
        for _ in range(8):
            loss = decoder(tokens, tokens.roll(-1, 1))
            losses.append(loss.item())
            loss.backward()
            norm = gradient_norm(list(decoder.parameters()), output_rates(decoder, train))
            clipped += norm > clip
            clip_gradients(list(decoder.parameters()), norm, clip)
            optimizer.step()
            optimizer.zero_grad()
    assert clipped == (16 if clip < 1 else 0)
    assert losses[:8] == pytest.approx(losses[8:], rel=1e-4)
    assert losses[7] < losses[0] - 0.1


def test_muon_takes_the_matrices_of_the_layers_alone(micro: Config) -> None:
    config = replace(micro, model=replace(micro.model, tied_embeddings=False, qkv_bias=True))
    decoder = headgate.build_model(config)
    optimizer = make_optimizer(decoder, replace(config.train, optimizer="muon"))
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    kept = {names[parameter]: set(state) for parameter, state in optimizer.state.items()}
    assert set(kept) == set(names.values())
    for name, state in kept.items():
        of_muon = name.startswith("layers.") and name.endswith("proj.weight")
        assert state == ({"momentum_buffer"} if of_muon else {"step", "exp_avg", "exp_avg_sq"}), name


def test_older_names_of_settings_are_understood(micro: Config) -> None:
    values = to_dict(micro.train)
    values["gate_learning_rate"] = values.pop("mechanism_rate") * 3
    assert from_dict(TrainConfig, values) == replace(micro.train, mechanism_rate=3.0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) is out of range; expected at least 0 and below 1"),
        ({"momentum": -0.1}, "momentum=-0.1 is out of range"),
        ({"warmup_share": 1.0}, "warmup_share=1.0 is out of range"),
        ({"warmup_steps": 3, "warmup_share": 0.1}, "both set the length of the warm-up"),
        ({"value_rate": -1.0}, "value_rate=-1.0 is too small"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], sentence: str, micro: Config) -> None:
    with pytest.raises(HeadgateError, match=sentence):
        replace(micro.train, **{"warmup_steps": 0} | settings)


def test_the_schedule_warms_up_then_falls_like_a_cosine(micro: Config) -> None:
    train = replace(micro.train, steps=110, warmup_steps=10, learning_rate=2.0, final_learning_rate=0.1)
    assert learning_rate(1, train) == pytest.approx(0.2)
    assert learning_rate(10, train) == 2.0
    assert learning_rate(60, train) == pytest.approx(2.0 * 0.55)  # half way: the mean of 1 and 0.1
    assert learning_rate(110, train) == pytest.approx(0.2)
    rates = [learning_rate(step, train) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    line = replace(train, schedule="linear", warmup_steps=0, warmup_share=1 / 11)
    assert learning_rate(10, line) == 2.0
    assert learning_rate(35, line) == pytest.approx(2.0 * 0.775)
    assert learning_rate(110, line) == pytest.approx(0.2)
    constant = replace(train, schedule="constant")
    assert {learning_rate(step, constant) for step in range(10, 111)} == {2.0}
    assert learning_rate(1, replace(train, warmup_steps=0)) <= 2.0


def test_clipping_scales_to_the_norm_and_leaves_small_gradients_alone() -> None:
    parameters = [torch.zeros(3, requires_grad=True), torch.zeros(2, 2, requires_grad=True)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    norm = gradient_norm(parameters, {})
    assert norm == pytest.approx(2 * 7**0.5)
    assert gradient_norm(parameters, {parameters[0]: 3.0}) == pytest.approx(2 * (9 * 3 + 4) ** 0.5)
    clip_gradients(parameters, norm, 100.0)
    assert gradient_norm(parameters, {}) == norm
    clip_gradients(parameters, norm, 1.0)
    assert gradient_norm(parameters, {}) == pytest.approx(1.0)
