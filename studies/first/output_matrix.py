"""Is it the gate, or how the matrix behind it starts and learns? Full attention with that matrix held back.

    python studies/first/output_matrix.py --data runs/study/text-data --out runs/study/output-matrix
    python studies/first/output_matrix.py --both ... train.steps=1000 train.warmup_steps=100  # longer runs

A constant of 0.05 on what attention puts out is, to AdamW, an output matrix that starts at a twentieth and
learns at a twentieth of the rate. Trains recipe.json with each of the two, both and neither, one after
another on one thread, about a minute a seed; run again, it goes on.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from headgate.config import Config, TrainConfig, load, override
from headgate.machine import keep_memory
from headgate.mechanisms.contract import initialise_parameter
from headgate.model.decoder import Decoder
from headgate.train.loop import train
from headgate.train.optim import Optimizer, make_optimizer

RECIPE = Path(__file__).with_name("recipe.json")
CASES = [(1.0, 1.0), (0.05, 1.0), (1.0, 0.05), (0.05, 0.05)]


@contextmanager
def held_back(start: float, rate: float) -> Iterator[None]:
    """Inside, every model's output matrices start and learn with these shares of the usual."""

    def initialise(name: str, parameter: Tensor, generator: torch.Generator) -> None:
        initialise_parameter(name, parameter, generator)
        if "o_proj" in name:
            parameter.mul_(start)

    def make(decoder: Decoder, settings: TrainConfig) -> Optimizer:
        optimizer = make_optimizer(decoder, settings)
        held = {id(p) for name, p in decoder.named_parameters() if "o_proj" in name}
        for inner in optimizer.inner:
            for group in list(inner.param_groups):
                mine = [p for p in group["params"] if id(p) in held]
                if mine:
                    group["params"] = [p for p in group["params"] if id(p) not in held]
                    inner.param_groups.append({**group, "params": mine, "scale": rate * group["scale"]})
        scales = [g["scale"] for g in optimizer.param_groups for p in g["params"] if id(p) in held]
        assert scales == [rate] * len(held), scales
        return optimizer

    with (
        patch("headgate.model.decoder.initialise_parameter", initialise),
        patch("headgate.train.loop.make_optimizer", make),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6])
    parser.add_argument("--both", action="store_true", help="held back both ways alone")
    parser.add_argument("settings", nargs="*", help="settings of the recipe that differ")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    print(f"{'start':>8}{'rate':>8}  loss of each seed")
    for start, rate in CASES[-1:] if options.both else CASES:
        losses = []
        for seed in options.seeds:
            config = override(load(Config, RECIPE), [f"seed={seed}", *options.settings])
            folder = options.out / f"start-{start}-rate-{rate}-seed-{seed}"
            with held_back(start, rate):
                if train(config, options.data, folder).signal is not None:
                    return
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            losses.append(summary["final"]["loss"])
        print(f"{start:8}{rate:8}  " + " ".join(f"{loss:.4f}" for loss in losses), flush=True)


if __name__ == "__main__":
    main()
