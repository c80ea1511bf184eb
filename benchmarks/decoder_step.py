"""What a mechanism costs in a whole training step: forward, backward and AdamW of a decoder, against `full`.

    python benchmarks/decoder_step.py --lengths 4096 8192 16384 32768

Times are interleaved in one process; a figure is the median over rounds of the ratio to `full` in
the same round. Peak memory is that of two steps in a fresh process, above what it holds without a model.
"""

import argparse
import json
import subprocess
import sys
from statistics import median

import torch

import headgate
import headgate.config
import headgate.recipes
from headgate.ops.native.memory import keep_memory
from headgate.study.speed import interleaved, ratios

MECHANISMS = ["full", "dynamic-sparse", "local", "head-gated", "context-adaptive:select=block"]


def step_of(recipe: str, mechanism: str, length: int):
    """A function that does one training step; windows are the mechanisms' own, as in the papers."""
    config = headgate.config.override(headgate.recipes.get_recipe(recipe), ["model.shared_options={}"])
    decoder = headgate.build_model(config, mechanism)
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(
        decoder.config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0)
    )

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        decoder(tokens[:, :-1], tokens[:, 1:]).backward()
        optimiser.step()

    return step


def peak(recipe: str, mechanism: str, length: int) -> int:
    """Peak bytes of two steps in this process, above what it holds before the model is built."""
    torch.zeros(1).requires_grad_().sum().backward()
    before = resident("VmRSS")
    step = step_of(recipe, mechanism, length)
    step()
    step()
    return resident("VmHWM") - before


def resident(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--mechanisms", nargs="+", default=MECHANISMS)
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long a length is measured")
    parser.add_argument("--peak", nargs=2, metavar=("MECHANISM", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak(options.recipe, options.peak[0], int(options.peak[1]))))
        return
    keep_memory()
    names = ["full", *(name for name in options.mechanisms if name != "full")]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    print(
        f"{options.recipe}, one sequence a step, {torch.get_num_threads()} threads: "
        "seconds, time and peak memory relative to full"
    )
    print(f"{'':30}" + "".join(f"{f'T={length}':>34}" for length in options.lengths))
    cells: dict[str, list[str]] = {name: [] for name in names}
    for length in options.lengths:
        steps = {name: step_of(options.recipe, name, length) for name in names}
        times = interleaved(steps, seconds=options.seconds, most_rounds=9)
        del steps
        memory = {}
        for name in names:
            command = [sys.executable, __file__, "--recipe", options.recipe, "--peak", name, str(length)]
            memory[name] = json.loads(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )
        for name in names:
            middle, low, high = ratios(times, name, "full")
            seconds[name].append(median(times[name]))
            share = memory[name] / memory["full"]
            cells[name].append(f"{seconds[name][-1]:8.2f}s {middle:.2f} ({low:.2f}-{high:.2f})  {share:.2f}")
    for name in names:
        print(f"{name:30}" + "".join(f"{cell:>34}" for cell in cells[name]))
    print("\nstep time at a length over that at the length before:")
    for name in names:
        growth = [b / a for a, b in zip(seconds[name], seconds[name][1:], strict=False)]
        print(f"{name:30}" + "  ".join(f"{factor:.2f}" for factor in growth))


if __name__ == "__main__":
    main()
