"""Which parameters decay, which are a mechanism's own, and how the learning rate goes."""

from dataclasses import replace

import pytest
import torch

import headgate
from headgate.config import Config
from headgate.model.decoder import Decoder
from headgate.train.optim import clip_gradients, gradient_norm, learning_rate, make_optimizer, roles


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
    decays = {name.rpartition("mechanism.")[2]: decay for name, _, decay, own in roles(decoder) if own}
    matrices = {"w1_q", "w1_k"}
    assert {name for name, decay in decays.items() if decay} == matrices
    assert decays.keys() - matrices == {"b1", "w2", "b2", "gamma", "mean", "log_std", "weight"}


def test_gates_have_a_learning_rate_of_their_own(micro: Config) -> None:
    config = replace(micro, train=replace(micro.train, gate_learning_rate=0.25))
    for name, (_, scale) in groups(headgate.build_model(config), config).items():
        assert scale == (0.25 if ".mechanism." in name else 1.0), name


def test_the_schedule_warms_up_then_falls_like_a_cosine(micro: Config) -> None:
    train = replace(micro.train, steps=110, warmup_steps=10, learning_rate=2.0, final_learning_rate=0.1)
    assert learning_rate(1, train) == pytest.approx(0.2)
    assert learning_rate(10, train) == 2.0
    assert learning_rate(60, train) == pytest.approx(2.0 * 0.55)  # half way: the mean of 1 and 0.1
    assert learning_rate(110, train) == pytest.approx(0.2)
    rates = [learning_rate(step, train) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    constant = replace(train, schedule="constant")
    assert {learning_rate(step, constant) for step in range(10, 111)} == {2.0}
    assert learning_rate(1, replace(train, warmup_steps=0)) <= 2.0


def test_clipping_scales_to_the_norm_and_leaves_small_gradients_alone() -> None:
    parameters = [torch.zeros(3, requires_grad=True), torch.zeros(2, 2, requires_grad=True)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    norm = gradient_norm(parameters)
    assert norm == pytest.approx(2 * 7**0.5)
    clip_gradients(parameters, norm, 100.0)
    assert gradient_norm(parameters) == norm
    clip_gradients(parameters, norm, 1.0)
    assert gradient_norm(parameters) == pytest.approx(1.0)
