"""What a mechanism costs in a whole training step: forward, backward and AdamW of a decoder.

    python benchmarks/decoder_step.py --lengths 4096 8192                                  against `full`
    python benchmarks/decoder_step.py --lengths 8192 16384 32768 --mechanisms dynamic-sparse   its growth

Times are interleaved in one process; a figure is the median over rounds of the ratio to the first one in
the same round. Peak memory is that of two steps in a fresh process, above what it holds without a model.
Windows are the mechanisms' own, as in the papers.
"""

import argparse
from statistics import median

import torch

from headgate.compare.variants import Variant
from headgate.config import override
from headgate.machine import keep_memory
from headgate.measure.costs import build, peak_memory, training_step
from headgate.measure.speed import interleaved, ratios
from headgate.recipes import named_config

MECHANISMS = ["full", "dynamic-sparse", "local", "head-gated", "context-adaptive:select=block"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--mechanisms", nargs="+", default=MECHANISMS)
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long a length is measured")
    parser.add_argument("--rounds", type=int, default=9, help="at most so many at a length")
    parser.add_argument("--no-memory", action="store_true")
    options = parser.parse_args()
    keep_memory()
    base = override(named_config(options.recipe), ["model.shared_options={}", "train.batch_size=1"])
    names, first = options.mechanisms, options.mechanisms[0]
    configs = {name: Variant.parse(name).config(base) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    print(
        f"{options.recipe}, one sequence a step, {torch.get_num_threads()} threads: "
        f"seconds, time and peak memory relative to {first}"
    )
    print(f"{'':30}" + "".join(f"{f'T={length}':>34}" for length in options.lengths))
    cells: dict[str, list[str]] = {name: [] for name in names}
    for length in options.lengths:
        steps = {name: training_step(build(configs[name]), base.train, length) for name in names}
        times = interleaved(steps, seconds=options.seconds, most_rounds=options.rounds)
        del steps
        memory = {}
        if not options.no_memory:
            memory = {name: peak_memory(config, length) for name, config in configs.items()}
        for name in names:
            middle, low, high = ratios(times, name, first)
            seconds[name].append(median(times[name]))
            share = f"  {memory[name] / memory[first]:.2f}" if memory else ""
            cells[name].append(f"{seconds[name][-1]:8.2f}s {middle:.2f} ({low:.2f}-{high:.2f}){share}")
    for name in names:
        print(f"{name:30}" + "".join(f"{cell:>34}" for cell in cells[name]))
    print("\nstep time at a length over that at the length before:")
    for name in names:
        growth = [b / a for a, b in zip(seconds[name], seconds[name][1:], strict=False)]
        print(f"{name:30}" + "  ".join(f"{factor:.2f}" for factor in growth))


if __name__ == "__main__":
    main()
