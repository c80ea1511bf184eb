"""What following the gate is worth: how much is skipped, how much time that saves, what it costs in loss.

Decoding that skips what the gates weigh little (`headgate.skipping`) is timed against decoding everything,
interleaved in one run, on the same tokens. The loss is that of the split with the gates rounded the same way.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from headgate.config import ModelConfig
from headgate.errors import HeadgateError
from headgate.measure.speed import interleaved, ratios
from headgate.mechanisms.contract import Mechanism, probe, skipping
from headgate.model.decoder import Decoder, load
from headgate.train.distributed import join
from headgate.train.evaluate import autocast, evaluate, open_run

ROUNDS = 9


@dataclass(frozen=True)
class Skipping:
    """A threshold and its effect."""

    skip_below: float
    skipped: float
    """Share of what the gates weigh (heads, or branches of heads) that is skipped."""
    skipped_by_layer: tuple[float, ...]
    """The same for each layer that has a gate."""
    time: float
    """Time per decoded token relative to computing everything; the median over rounds."""
    time_low: float
    time_high: float
    """Its quartiles."""
    loss: float
    loss_cost: float
    """The loss above that of computing everything."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def can_skip(model: ModelConfig) -> bool:
    """Whether a mechanism of this model has a learned gate to follow."""
    with torch.device("meta"):
        decoder = Decoder(model)
    return any(isinstance(module, Mechanism) and module.skips for module in decoder.modules())


def gate_skipping(
    run: str | os.PathLike[str],
    thresholds: Sequence[float],
    *,
    split: str = "val",
    tokens: int | None = None,
    which: str = "last",
    data: str | os.PathLike[str] | None = None,
    context: int | None = None,
    device: str | None = None,
    seconds: float = 20.0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Skipping]:
    """The figures for each threshold, for a checkpoint of a run on a split of its data.

    The time is for decoding one sequence's tokens in the second half of the training context, measured for
    about `seconds`.
    """
    if not thresholds:
        raise HeadgateError("there are no thresholds to measure; give at least one, such as 0.05")
    opened = open_run(run, split=split, which=which, data=data, context=context)
    train = opened.settings.train
    with join(device) as world:
        decoder = load(opened.checkpoint).to(world.device).eval()
        for below in thresholds:
            with skipping(decoder, below):
                pass  # raises now rather than after minutes
        first = opened.windows.read(np.arange(min(len(opened.windows), train.batch_size)))[0].to(world.device)
        times = decoding_times(decoder, first[:1], [0.0, *thresholds], seconds=seconds, progress=progress)

        def loss(below: float) -> float:
            progress(f"loss at {below:g}")
            with skipping(decoder, below):
                found = evaluate(
                    decoder,
                    opened.windows,
                    tokens=tokens,
                    batch_size=train.batch_size,
                    precision=train.precision,
                    world=world,
                )
            return found.loss

        plain, results = loss(0.0), []
        for below in thresholds:
            with autocast(world.device, train.precision):
                by_layer = shares(decoder, first, below)
            found = loss(below)
            results.append(
                Skipping(
                    skip_below=below,
                    skipped=sum(by_layer) / len(by_layer),
                    skipped_by_layer=by_layer,
                    **dict(
                        zip(("time", "time_low", "time_high"), ratios(times, str(below), "0.0"), strict=True)
                    ),
                    loss=found,
                    loss_cost=found - plain,
                )
            )
    return results


@torch.no_grad()
def shares(decoder: Decoder, tokens: Tensor, below: float) -> tuple[float, ...]:
    """The share skipped in each layer that has a gate."""
    with skipping(decoder, below), probe(decoder) as seen:
        decoder(tokens)
    skipped = [values[0] for name, values in seen.items() if name.endswith(".skipped")]
    gates = sum(name.endswith(".gate") for name in seen)
    return tuple(layer.double().mean().item() for layer in skipped) or (0.0,) * gates


@torch.inference_mode()
def decoding_times(
    decoder: Decoder,
    tokens: Tensor,
    thresholds: Sequence[float],
    *,
    seconds: float,
    progress: Callable[[str], None],
) -> dict[str, list[float]]:
    """Seconds per round, by threshold; each round decodes the next few of the tokens (1,T)."""
    half = tokens.shape[1] // 2
    size = max(1, half // (ROUNDS + 1))
    runs = {}
    for below in dict.fromkeys(thresholds):
        with skipping(decoder, below):
            cache = decoder.new_cache()
            for part in tokens[:, :half].split(512, dim=1):
                decoder.hidden(part, cache=cache)

        def decode(below: float = below, cache: Any = cache) -> None:
            with skipping(decoder, below):
                for place in range(cache.length, cache.length + size):
                    at = place % tokens.shape[1]
                    decoder.hidden(tokens[:, at : at + 1], cache=cache)

        runs[str(below)] = decode
    return interleaved(runs, seconds=seconds, most_rounds=ROUNDS, progress=progress)


def print_skipping(results: Sequence[Skipping]) -> None:
    """Print a table for a person."""
    columns = ("gates below", "skipped", "time per decoded token", "loss", "added loss")
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for result in results:
        table.add_row(
            f"{result.skip_below:g}",
            f"{result.skipped:.1%}",
            f"{result.time:.2f} ({result.time_low:.2f}-{result.time_high:.2f})",
            f"{result.loss:.4f}",
            f"{result.loss_cost:+.4f}",
        )
    Console().print(table)
