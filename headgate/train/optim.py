"""The optimiser: AdamW, optionally with Muon for the layers' matrices; and the learning rate at each step.

Every parameter has a role, given by its place in the decoder and not by its mechanism, and each role may have
its own learning rate. Weight decay applies to matrices alone and does not follow those rates: so from a
scaled start, the output projection's rate acts as a factor on attention's output.
"""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headgate.config import TrainConfig
from headgate.mechanisms.contract import Mechanism
from headgate.model.decoder import Decoder

ROLES = {
    "embedding": "embedding",
    "head": "head",
    "q_proj": "query_key",
    "k_proj": "query_key",
    "v_proj": "value",
    "o_proj": "attention_output",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
"""Name of a decoder module -> the role of its parameters; norms have none."""


class Part(NamedTuple):
    """A parameter and what the optimiser needs to know about it."""

    name: str
    parameter: Tensor
    role: str
    """One of ROLES, `mechanism`, or `norm`."""
    decays: bool

    @property
    def orthogonal(self) -> bool:
        """Whether Muon takes it: the matrices inside the layers."""
        inside = self.role in ("query_key", "value", "attention_output", "mlp")
        return inside and self.parameter.ndim == 2


def parts(decoder: Decoder) -> Iterator[Part]:
    """Every parameter, once.

    Matrices decay: the weights of linear maps and embeddings. Of a mechanism's other parameters, whose first
    dimension is the heads, those with two further dimensions decay.
    """
    mechanisms = tuple(
        f"{name}." for name, module in decoder.named_modules() if isinstance(module, Mechanism)
    )
    seen: set[Tensor] = set()
    for prefix, module in decoder.named_modules():
        least = 2 if isinstance(module, (nn.Linear, nn.Embedding)) else 3
        for local, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            name = f"{prefix}.{local}"
            role = ROLES.get(prefix.rpartition(".")[2], "norm")
            if name.startswith(mechanisms):
                role = "mechanism"
            yield Part(name, parameter, role, parameter.ndim >= least)


class Optimizer:
    """One or two PyTorch optimisers as one."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(one.param_groups for one in self.inner))

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        return {parameter: kept for one in self.inner for parameter, kept in one.state.items()}

    def step(self) -> None:
        for one in self.inner:
            one.step()

    def zero_grad(self) -> None:
        for one in self.inner:
            one.zero_grad(set_to_none=True)


def make_optimizer(decoder: Decoder, train: TrainConfig) -> Optimizer:
    groups: dict[tuple[bool, float, float], list[Tensor]] = {}
    for part in parts(decoder):
        rate = 1.0 if part.role == "norm" else float(getattr(train, f"{part.role}_rate"))
        # PyTorch multiplies the decay by the learning rate, and so by the role's rate too.
        decay = train.weight_decay / rate if part.decays and rate else 0.0
        for_muon = train.optimizer == "muon" and part.orthogonal
        groups.setdefault((for_muon, decay, rate), []).append(part.parameter)

    def chosen(*, for_muon: bool) -> list[dict[str, Any]]:
        return [
            {"params": parameters, "weight_decay": decay, "scale": rate}
            for (muon, decay, rate), parameters in groups.items()
            if muon == for_muon
        ]

    adamw = torch.optim.AdamW(
        chosen(for_muon=False), lr=train.learning_rate, betas=train.betas, eps=train.eps, fused=True
    )
    # The state is made now rather than at the first step, so that all checkpoints have the same form.
    for parameter in chain.from_iterable(group["params"] for group in adamw.param_groups):
        adamw.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    if train.optimizer == "adamw":
        return Optimizer(adamw)
    muon = torch.optim.Muon(
        chosen(for_muon=True), lr=train.learning_rate, momentum=train.momentum, adjust_lr_fn="match_rms_adamw"
    )
    for parameter in chain.from_iterable(group["params"] for group in muon.param_groups):
        muon.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}
    return Optimizer(adamw, muon)


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate at step 1, 2, ..., `train.steps`: linear up to the peak, then down by the schedule."""
    if step <= train.warmup:
        return train.learning_rate * step / train.warmup
    if train.schedule == "constant":
        return train.learning_rate
    share = min(1.0, (step - train.warmup) / max(1, train.steps - train.warmup))
    left = 1 - share if train.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return train.learning_rate * (train.final_learning_rate + (1 - train.final_learning_rate) * left)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def gradient_norm(parameters: list[Tensor]) -> float:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if hasattr(norm, "full_tensor"):  # the parameters are sharded
        norm = norm.full_tensor()
    return norm.item()


def clip_gradients(parameters: list[Tensor], norm: float, most: float) -> None:
    """Scale gradients of this norm so that it is at most `most`."""
    if norm > most:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(most / norm)
