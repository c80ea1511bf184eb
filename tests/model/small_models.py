"""A decoder so small that hundreds of tokens take a moment, with every mechanism's edges within reach."""

from dataclasses import fields

import torch
from torch import Tensor

import headgate
from headgate.config import ModelConfig
from headgate.mechanisms import MECHANISMS
from headgate.model.decoder import Decoder

WINDOW, MAX_WINDOW, PREFIX, BLOCK = 5, 9, 12, 4
SMALL = ModelConfig(
    vocab_size=50,
    d_model=24,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_mlp=40,
    shared_options={
        "window": WINDOW, "max_window": MAX_WINDOW, "dense_prefix": PREFIX, "block": BLOCK, "stride": 4,
    },
)  # fmt: skip


def variants() -> list[str]:
    """Every mechanism and every ablation of it, and the options that change what is cached or selected."""
    found = []
    for name in MECHANISMS.names():
        if name.endswith("-example"):
            continue
        bases: list[dict[str, object]] = [{}]
        known = {f.name for f in fields(MECHANISMS.get(name).Options)}
        bases += [{"select": "block"}] if "select" in known else []
        bases += [{"global_tokens": 3}] if "global_tokens" in known else []
        bases += [{"gate": "log"}] if name == "sparse-geometric" else []
        ablations = [{}, *MECHANISMS.get(name).ablations.values()]
        for base in bases:
            for options in [base | dict(ablation) for ablation in ablations]:
                words = ",".join(f"{o}={'null' if v is None else v}" for o, v in options.items())
                found.append(f"{name}:{words}" if words else name)
    return list(dict.fromkeys(found))


def small_decoder(mechanism: str | list[str], *, config: ModelConfig = SMALL, seed: int = 0) -> Decoder:
    """In fp64, with weights so large that every layer matters and gates that differ between tokens."""
    decoder = headgate.build_model(config, mechanism, seed=seed).double().eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim > 1 and "mechanism" not in name:
                parameter.mul_(0.3 / parameter.std())
            elif parameter.ndim > 1 and "gate" in name:
                parameter.mul_(20)
    return decoder


def some_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))
