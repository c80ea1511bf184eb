"""AdamW with weight decay on matrices alone, and the learning rate as a function of the step."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from headgate.config import TrainConfig
from headgate.mechanisms.contract import Mechanism
from headgate.model.decoder import Decoder


def make_optimizer(decoder: Decoder, train: TrainConfig) -> torch.optim.AdamW:
    """Groups of parameters by whether they decay and whether they belong to a mechanism."""
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for _, parameter, decays, gate in roles(decoder):
        groups.setdefault((decays, gate), []).append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": parameters,
                "weight_decay": train.weight_decay if decays else 0.0,
                "scale": train.gate_learning_rate if gate else 1.0,
            }
            for (decays, gate), parameters in groups.items()
        ],
        lr=train.learning_rate,
        betas=train.betas,
        eps=train.eps,
        fused=True,
    )
    for group in optimizer.param_groups:  # now and not at the first step, so that every checkpoint is alike
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return optimizer


def roles(decoder: Decoder) -> Iterator[tuple[str, Tensor, bool, bool]]:
    """Each parameter with its name, whether it decays and whether it is a mechanism's own.

    Matrices decay: the weights of linear maps and embeddings, and of a mechanism's other parameters, which
    have the heads in front, those with two dimensions behind.
    """
    mechanisms = tuple(
        f"{name}." for name, module in decoder.named_modules() if isinstance(module, Mechanism)
    )
    seen: set[Tensor] = set()
    for prefix, module in decoder.named_modules():
        least = 2 if isinstance(module, (nn.Linear, nn.Embedding)) else 3
        for local, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                name = f"{prefix}.{local}"
                yield name, parameter, parameter.ndim >= least, name.startswith(mechanisms)


def learning_rate(step: int, train: TrainConfig) -> float:
    """Of step 1, 2, ..., `train.steps`: a line up to the peak, then a cosine down, or the peak for ever."""
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    if train.schedule == "constant":
        return train.learning_rate
    share = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, share))) / 2
    return train.learning_rate * (train.final_learning_rate + (1 - train.final_learning_rate) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def gradient_norm(parameters: list[Tensor]) -> float:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if hasattr(norm, "full_tensor"):  # the parameters are shared out over processes
        norm = norm.full_tensor()
    return norm.item()


def clip_gradients(parameters: list[Tensor], norm: float, most: float) -> None:
    """Scale gradients of this norm so that it is at most `most`."""
    if norm > most:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(most / norm)
