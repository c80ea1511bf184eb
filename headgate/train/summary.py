"""The summary of a finished run: losses, speed, cost, and the conditions they were measured under."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import nn

from headgate.config import Config
from headgate.data.loader import DocumentLengths
from headgate.machine import describe
from headgate.mechanisms.contract import Mechanism
from headgate.model.decoder import Decoder
from headgate.train.checkpoint import State
from headgate.train.distributed import World
from headgate.version import __version__

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")


def summarise(
    config: Config,
    decoder: Decoder,
    state: State,
    last: Mapping[str, Any],
    best: Mapping[str, Any],
    world: World,
    documents: DocumentLengths | None = None,
) -> dict[str, Any]:
    """`last` and `best` are the metrics lines of the last and best evaluations; `documents` holds the lengths
    of the pieces that attention stays within, if documents are masked."""
    context = config.train.context
    return {
        "steps": state.step,
        "tokens": state.tokens,
        "skipped": state.skipped,
        "final": {"step": last["step"], "train_loss": last["loss"], **last["validation"]},
        "best": {"step": best["step"], **best["validation"]},
        "gates": last["gates"],
        "tokens_per_second": state.tokens / max(state.training_seconds, 1e-9),
        "seconds": {
            "training": state.training_seconds,
            "evaluating": state.evaluating_seconds,
            "saving": state.saving_seconds,
        },
        "memory_peak": state.memory_peak,
        "parameters": decoder.parameter_count(),
        "mechanism_parameters": sum(p.numel() for m in mechanisms_of(decoder) for p in m.parameters()),
        "flops_per_token": flops_per_token(decoder, context, documents),
        "document_tokens": None if documents is None else documents.mean,
        "kernel_paths": dict(sorted(state.paths.items())),
        "sparsity": sparsity(decoder, context, documents),
        "mechanisms": [config.model.layer_mechanism(n).name for n in range(config.model.n_layers)],
        "versions": {
            "headgate": __version__,
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
        "machine": {
            **describe(world.device),
            "processes": world.size,
            "threads": torch.get_num_threads(),
        },
    }


def mechanisms_of(decoder: Decoder) -> list[Mechanism]:
    """One for each layer."""
    return [module for module in decoder.modules() if isinstance(module, Mechanism)]


def pairs_per_token(mechanism: Mechanism, context: int, documents: DocumentLengths | None = None) -> float:
    """Query-key pairs that a head evaluates per token: the mean over a context, or over pieces of documents
    of the given lengths. Computed at about 64 lengths, which is exact enough, and interpolated between."""
    if documents is None:
        return mechanism.pairs(context) / context
    known = documents.lengths
    if len(known) > 64:
        known = np.unique(np.geomspace(known[0], known[-1], 96).round().astype(np.int64))
    found = np.interp(documents.lengths, known, [mechanism.pairs(int(length)) for length in known])
    return float((found * documents.counts).sum() / documents.tokens)


def pairs_by_layer(decoder: Decoder, context: int, documents: DocumentLengths | None = None) -> list[float]:
    """`pairs_per_token` of each layer; the pattern over the layers repeats, so each part is counted once."""
    layers, pattern = mechanisms_of(decoder), len(decoder.config.mechanism)
    found = [pairs_per_token(mechanism, context, documents) for mechanism in layers[:pattern]]
    return [found[n % pattern] for n in range(len(layers))]


def flops_per_token(
    decoder: Decoder, context: int, documents: DocumentLengths | None = None
) -> dict[str, float]:
    """Multiplications and additions of the forward pass, averaged over a context; training takes three times.

    Two for each weight of a linear map, including the output head, and four for each head dimension of each
    query-key pair. Norms, RoPE and anything else a mechanism does to a pair are left out.
    """
    weights = sum(
        p.numel() for m in decoder.modules() if isinstance(m, nn.Linear) for p in m.parameters() if p.ndim > 1
    )
    if decoder.config.tied_embeddings:
        weights += decoder.embedding.weight.numel()
    pairs = sum(pairs_by_layer(decoder, context, documents))
    attention = 4.0 * pairs * decoder.config.n_heads * decoder.config.head_dim
    return {"linear": 2.0 * weights, "attention": attention, "forward": 2.0 * weights + attention}


def sparsity(decoder: Decoder, context: int, documents: DocumentLengths | None = None) -> dict[str, Any]:
    """The share of the causal query-key pairs that each layer does not evaluate."""
    dense = (context + 1) / 2
    layers = [1 - pairs / dense for pairs in pairs_by_layer(decoder, context, documents)]
    return {"context": context, "mean": sum(layers) / len(layers), "by_layer": layers}
