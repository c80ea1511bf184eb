"""Pair-gated attention against causal SDPA, forward and backward: time in one interleaved run, extra memory.

    python benchmarks/pair_gate_peers.py                       time and memory at the lengths of the targets
    python benchmarks/pair_gate_peers.py --lengths 512 2048 --form log --rounds 30 --no-memory

Every round runs each path once, so that what else the machine does meets all of them; a ratio is the median
over rounds of path over SDPA, with the middle half of the rounds in brackets. On a machine that others use,
`--threads 1 --clock cpu` counts the time that a path itself computes. Memory is the growth of a fresh
process's peak over one step, gradients included. `eager` is the dense reference, as long as it fits.
"""

import argparse
import gc
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from headgate.machine import Peak, keep_memory
from headgate.ops import pair_gated_attention
from headgate.ops.native import library

HEADS, WIDTH, HIDDEN = 4, 64, 16
EAGER_AT_MOST = 1024
"""Beyond this length the reference's tensors over all pairs and hidden units take gigabytes."""


def steps(length: int, form: str) -> dict[str, Callable[[], object]]:
    """One training step of each path by name, SDPA first."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    heads = [normal(1, HEADS, length, WIDTH) for _ in range(3)]
    halves = [normal(1, HEADS, length, HIDDEN) for _ in range(2)]
    inputs = [*heads, *halves, normal(HEADS, HIDDEN) / math.sqrt(HIDDEN), torch.full((HEADS,), 2.0)]
    inputs = [t.requires_grad_() for t in inputs]
    d_out = normal(1, HEADS, length, WIDTH)

    def sdpa() -> object:
        out = F.scaled_dot_product_attention(*inputs[:3], is_causal=True)
        return torch.autograd.grad(out, inputs[:3], d_out)

    def step(backend: str) -> object:
        out = pair_gated_attention(*inputs, form=form, backend=backend)  # type: ignore[arg-type]
        return torch.autograd.grad(out, inputs, d_out)

    paths = {"sdpa": sdpa, "torch": lambda: step("torch")}
    if library.unavailable() is None:
        paths["native"] = lambda: step("native")
    if length <= EAGER_AT_MOST:
        paths["eager"] = lambda: step("reference")
    return paths


def table(length: int, form: str, rounds: int, clock: Callable[[], float]) -> None:
    paths = steps(length, form)
    times: dict[str, list[float]] = {name: [] for name in paths}
    for n in range(rounds + 1):
        for name, step in paths.items():
            began = clock()
            step()
            if n:  # the first round warms up
                times[name].append(clock() - began)
    for name, taken in times.items():
        ratios = sorted(a / b for a, b in zip(taken, times["sdpa"], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        best = min(taken) / min(times["sdpa"])
        print(
            f"{length:6d}  {name:7s} {statistics.median(taken) * 1e3:9.1f} {min(taken) * 1e3:9.1f}"
            f"   {middle:6.2f}x [{low:.2f}, {high:.2f}]   {best:6.2f}x",
            flush=True,
        )


def extra_memory(name: str, length: int, form: str) -> float:
    """Megabytes by which one step raises the peak of this process."""
    steps(64, form)[name]()  # libraries and threads, which every later step shares
    step = steps(length, form)[name]
    gc.collect()
    peak = Peak()
    step()
    return peak.bytes() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--form", choices=["multiply", "log"], default="multiply")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--memory-lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(extra_memory(options.memory_of, options.lengths[0], options.form))
        return
    machine = f"native: {library.instruction_set() or library.unavailable()}, load {os.getloadavg()[0]:.1f}"
    print(f"H={HEADS} D={WIDTH} M={HIDDEN} {options.form}, fp32, forward+backward; {machine}")
    print(f"{options.threads} threads, {options.clock} time")
    keep_memory()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    print(f"{'T':>6s}  {'path':7s} {'median ms':>9s} {'min ms':>9s}   over SDPA [middle half]   minima")
    for length in options.lengths:
        table(length, options.form, options.rounds, clock)
    if options.no_memory:
        return
    print("\nextra peak memory, MB (fresh process each)")
    for length in options.memory_lengths:
        row = []
        for name in steps(64, options.form):
            if name == "eager" and length > EAGER_AT_MOST:
                continue
            call = [sys.executable, __file__, "--memory-of", name, "--lengths", str(length)]
            call += ["--form", options.form, "--threads", str(options.threads)]
            done = subprocess.run(call, capture_output=True, text=True, check=True)
            row.append(f"{name} {float(done.stdout):.0f}")
        print(f"{length:6d}  {'   '.join(row)}", flush=True)


if __name__ == "__main__":
    main()
