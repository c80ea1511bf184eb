"""What a tile of pair-gated attention costs on a GPU by its instructions, and which unit bounds it.

    python benchmarks/triton_bound.py                    the table of docs/gpu.md; no GPU is needed

The instructions of a tile are counted in the machine code that Triton makes for the device: those of the
loop over tiles once, those of the loops over the gate's hidden units M times. A unit with n lanes takes as
many cycles for a warp's instruction as the warp has times n threads, so every unit gives a time that the tile
cannot beat; the longest bounds it.
Matrix products and bytes are counted from the shapes, all bytes as if they came from the device's memory.
Real kernels also wait.
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton_resources import Case, machine_code

from headgate.ops.triton.pair_gate import KERNELS, KernelConfig, configs


@dataclass(frozen=True)
class Device:
    """Per multiprocessor (AMD: compute unit, of four schedulers too) and cycle, unless it says otherwise."""

    target: str
    multiprocessors: int
    gigahertz: float
    fp32_lanes: int
    special_lanes: int
    tensor_flops: int
    """In bf16, dense."""
    memory_bytes: float
    """Per second, of the whole device."""
    issue_cycles: int = 1
    """That a scheduler is busy with a warp's instruction."""

    @property
    def is_amd(self) -> bool:
        return self.target.startswith("gfx")


# NVIDIA A100 and H100 Tensor Core GPU architecture white papers: multiprocessors, boost clock, FP32 cores and
# bf16 tensor speed (312 and 989 TFLOP/s) of the SXM boards, memory of the 80 GB boards. Special-function
# results per cycle: CUDA C++ programming guide, table of arithmetic instructions, 16 for 8.0, 9.0 and 10.0.
# B200: 148 multiprocessors, clock and tensor speed from 75 and 2,250 TFLOP/s of NVIDIA's Blackwell datasheet.
# MI300X: AMD CDNA 3 white paper, 304 units, 2.1 GHz, 1,307 TFLOP/s; a unit has four SIMDs of 16 lanes, which
# take four cycles for an instruction of 64 threads, and 16 for exp and 1/x; packed ones compute two numbers.
DEVICES = {
    "A100": Device("sm_80", 108, 1.41, 64, 16, 2048, 2.039e12),
    "H100": Device("sm_90", 132, 1.83, 128, 16, 4096, 3.35e12),
    "B200": Device("sm_100", 148, 1.98, 128, 16, 7680, 7.7e12),
    "MI300X": Device("gfx942", 304, 2.1, 64, 16, 2048, 5.3e12, issue_cycles=4),
}
FP32 = ("FADD", "FMUL", "FFMA", "FSEL", "FMNMX", "FMNMX3", "FSETP", "FSET")
PACKED = ("FADD2", "FMUL2", "FFMA2")
"""Two numbers a thread, and so twice the time in a unit."""
AMD_SPECIAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
AMD_FP32 = re.compile(r"v_(pk_)?(add|sub|subrev|mul|fma|fmac|max|max3|min|div_\w+|cmp\w*|cndmask)_(f32|b32)")
PRODUCTS = {"forward": 2, "backward": 5, "backward_queries": 3, "backward_keys": 4}
"""Matrix products of a tile: rows x columns x width multiply-adds each."""


def tile_instructions(code: str, hidden: int) -> Counter[str]:
    """Instructions that a warp runs for one tile, by name: the outermost loop, and `hidden` times the loops
    inside it that have the gate's activation."""
    lines = code.splitlines()
    outer, inner = _amd_loops(lines) if "amdgcn" in code else _nvidia_loops(lines)
    inner = [loop for loop in inner if any(re.search(r"MUFU|v_exp_|v_rcp_", lines[n]) for n in loop)]
    repeated = set().union(*inner)
    counts: Counter[str] = Counter()
    for n in outer:
        name = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d\s+)?([A-Z0-9_]+)", lines[n])
        name = name or re.match(r"\t([a-z]+_\w+)", lines[n])
        if name:
            counts[name[1]] += hidden if n in repeated else 1
    return counts


Loop = set[int]
"""The numbers of its lines."""


def _nvidia_loops(lines: Sequence[str]) -> tuple[Loop, list[Loop]]:
    labels = {found[1]: n for n, line in enumerate(lines) if (found := re.match(r"(\.L\w+):", line))}
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"BRA\S*\s.*`\((\.L\w+)\)", line)
        if target and labels[target[1]] < end - 1:
            loops.append(set(range(labels[target[1]], end + 1)))
    outer = max(loops, key=len)
    return outer, [loop for loop in loops if loop < outer]


def _amd_loops(lines: Sequence[str]) -> tuple[Loop, list[Loop]]:
    """By the compiler's own notes on each block: its blocks need not stand in the order of its loops."""
    loops: dict[str, Loop] = {}
    parents: dict[str, str] = {}
    block, within = "", ""
    for n, line in enumerate(lines):
        label = re.match(r"(?:\.L|; %)(BB\d+_\d+|bb\.\d+)", line)
        if label:
            block, within = label[1], ""
        parent = re.search(r"Parent Loop (BB\w+)", line)
        if parent:  # the innermost is the last
            parents[block] = parent[1]
        if re.search(r"Loop Header: Depth", line):
            within = block
        note = re.search(r"in Loop: Header=(BB\w+)", line)
        if note:
            within = note[1]
        if within:
            loops.setdefault(within, set()).add(n)
    whole = {name: set(of_loop) for name, of_loop in loops.items()}
    for name, of_loop in loops.items():
        above = parents.get(name)
        while above is not None:
            whole[above] |= of_loop
            above = parents.get(above)
    outer = max((name for name in loops if name not in parents), key=lambda name: len(whole[name]))
    return whole[outer], [loop for name, loop in whole.items() if name != outer and loop < whole[outer]]


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
    if device.is_amd:  # scalar, memory and matrix instructions have schedulers of their own
        special = sum(n for name, n in counts.items() if AMD_SPECIAL.match(name))
        plain = sum(n for name, n in counts.items() if AMD_FP32.match(name))
        issued = sum(n for name, n in counts.items() if name.startswith("v_") and "mfma" not in name)
        threads = 256
    else:
        special = counts["MUFU"]
        plain = sum(counts[name] for name in FP32) + 2 * sum(counts[name] for name in PACKED)
        issued, threads = sum(counts.values()), 128
    return Bound(
        {
            "tensor cores": PRODUCTS[kernel] * 2 * pairs * width / device.tensor_flops,
            "special functions": special * quarter * threads / device.special_lanes,
            "fp32": plain * quarter * threads / device.fp32_lanes,
            "issue": issued * quarter * device.issue_cycles,
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
            backend = "hip" if device.is_amd else "cuda"
            config = configs(kernel, options.width, torch.bfloat16, backend)[0]
            case = Case(kernel, "bf16", options.width, options.hidden, "multiply", config, device.target)
            counts = tile_instructions(machine_code(case), options.hidden)
            found = bound(kernel, device, config, counts, options.width, options.hidden)
            cells = " | ".join(f"{found.cycles[unit]:.0f}" for unit in units)
            tile = f"{config.rows} x {config.columns}, {config.warps}"
            time = found.milliseconds(device, pairs)
            print(f"| {name} | {kernel} | {tile} | {cells} | {found.limit} | {time:.2f} |")


if __name__ == "__main__":
    main()
