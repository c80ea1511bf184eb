"""What a tile of pair-gated attention costs on a GPU by its instructions, and which unit bounds it.

    python benchmarks/triton_bound.py                    the table of docs/gpu.md; no GPU is needed

The instructions of a tile are counted in the machine code that Triton makes for the device: those of the
loop over tiles once, those of the loops over the gate's hidden units M times. A unit with n lanes takes 32/n
cycles for a warp's instruction, so every unit gives a time that the tile cannot beat; the longest bounds it.
Matrix products and bytes are counted from the shapes, all bytes as if they came from the device's memory.
Real kernels also wait.
"""

import argparse
import re
from collections import Counter
from dataclasses import dataclass

import torch
from triton_resources import Case, machine_code

from headgate.ops.triton.pair_gate import KERNELS, KernelConfig, configs


@dataclass(frozen=True)
class Device:
    """Per multiprocessor and cycle, unless it says otherwise."""

    target: str
    multiprocessors: int
    gigahertz: float
    fp32_lanes: int
    special_lanes: int
    tensor_flops: int
    """In bf16, dense."""
    memory_bytes: float
    """Per second, of the whole device."""


# NVIDIA A100 and H100 Tensor Core GPU architecture white papers: multiprocessors, boost clock, FP32 cores and
# bf16 tensor speed (312 and 989 TFLOP/s) of the SXM boards, memory of the 80 GB boards. Special-function
# results per cycle: CUDA C++ programming guide, table of arithmetic instructions, 16 for 8.0 and 9.0.
DEVICES = {
    "A100": Device("sm_80", 108, 1.41, 64, 16, 2048, 2.039e12),
    "H100": Device("sm_90", 132, 1.83, 128, 16, 4096, 3.35e12),
}
FP32 = ("FADD", "FMUL", "FFMA", "FSEL", "FMNMX", "FSETP", "FSET")
PRODUCTS = {"forward": 2, "backward": 5, "backward_queries": 3, "backward_keys": 4}
"""Matrix products of a tile: rows x columns x width multiply-adds each."""


def tile_instructions(code: str, hidden: int) -> Counter[str]:
    """Instructions that a warp runs for one tile, by name: the outermost loop, its inner loops `hidden`
    times."""
    lines = code.splitlines()
    labels = {line.rstrip(":"): n for n, line in enumerate(lines) if re.match(r"\.L\w+:$", line)}
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"BRA `\((\.L\w+)\)", line)
        if target and labels[target[1]] < end - 1:
            loops.append((labels[target[1]], end))
    outer = max(loops, key=lambda loop: loop[1] - loop[0])
    inner = [loop for loop in loops if loop != outer and outer[0] <= loop[0] and loop[1] <= outer[1]]
    counts: Counter[str] = Counter()
    for n in range(outer[0], outer[1] + 1):
        name = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d\s+)?([A-Z0-9_]+)", lines[n])
        if name:
            counts[name[1]] += hidden if any(low <= n <= high for low, high in inner) else 1
    return counts


@dataclass(frozen=True)
class Bound:
    """Cycles of a multiprocessor that each unit needs for one tile."""

    cycles: dict[str, float]
    pairs: int

    @property
    def limit(self) -> str:
        return max(self.cycles, key=self.cycles.__getitem__)

    def milliseconds(self, device: Device, pairs: int) -> float:
        tiles = pairs / self.pairs / device.multiprocessors
        return tiles * self.cycles[self.limit] / device.gigahertz / 1e6


def bound(
    kernel: str, device: Device, config: KernelConfig, counts: Counter[str], width: int, hidden: int
) -> Bound:
    quarter = config.warps / 4  # warps that one scheduler serves
    pairs = config.rows * config.columns
    streamed = config.columns * (2 * width * 2 + hidden * 4)  # two tensors in bf16 and a half in fp32
    per_cycle = device.memory_bytes / device.multiprocessors / device.gigahertz / 1e9
    return Bound(
        {
            "tensor cores": PRODUCTS[kernel] * 2 * pairs * width / device.tensor_flops,
            "special functions": counts["MUFU"] * quarter * 128 / device.special_lanes,
            "fp32": sum(counts[name] for name in FP32) * quarter * 128 / device.fp32_lanes,
            "issue": sum(counts.values()) * quarter,
            "memory": streamed / per_cycle,
        },
        pairs,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=12)
    options = parser.parse_args()
    pairs = options.heads * options.length * (options.length + 1) // 2
    print(
        f"bf16, D={options.width} M={options.hidden}; ms: {options.heads} heads, T={options.length}, causal\n"
    )
    units = ("tensor cores", "special functions", "fp32", "issue", "memory")
    print(f"| device | kernel | tile, warps | {' | '.join(units)} | bound by | ms |")
    print("|---|---|---|" + "---|" * (len(units) + 2))
    for name, device in DEVICES.items():
        for kernel in KERNELS:
            config = configs(kernel, options.width, torch.bfloat16, "cuda")[0]
            case = Case(kernel, "bf16", options.width, options.hidden, "multiply", config, device.target)
            counts = tile_instructions(machine_code(case), options.hidden)
            found = bound(kernel, device, config, counts, options.width, options.hidden)
            cells = " | ".join(f"{found.cycles[unit]:.0f}" for unit in units)
            tile = f"{config.rows} x {config.columns}, {config.warps}"
            time = found.milliseconds(device, pairs)
            print(f"| {name} | {kernel} | {tile} | {cells} | {found.limit} | {time:.2f} |")


if __name__ == "__main__":
    main()
