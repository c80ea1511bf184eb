"""What the Triton kernels need of a GPU, read from kernels compiled for it; no GPU is needed.

    python benchmarks/triton_resources.py                           the table of docs/gpu.md
    python benchmarks/triton_resources.py --width 128 --hidden 32   at the largest sizes
    python benchmarks/triton_resources.py --width 32 64 128 --hidden 4 8 16 32 --form multiply log

Each kernel is compiled in all its configurations for A100 (sm_80), H100 (sm_90), B200 (sm_100) and MI300
(gfx942), and its registers, spills and shared memory are read from the machine code: a few seconds each.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from headgate.ops.triton.pair_gate import DTYPES, HIDDEN, KERNELS, WIDTHS, KernelConfig, configs, constants

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
SPILL_LIMIT = 16
"""Bytes a thread may spill: four registers, in a tile that computes for thousands of cycles."""
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one block may take: CUDA C++ programming guide, table of technical
specifications; CDNA 3 instruction set architecture, local data share."""
REGISTER_LIMIT = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Case:
    kernel: str
    dtype: str
    width: int
    hidden: int
    form: str
    config: KernelConfig
    target: str


@dataclass(frozen=True)
class Resources:
    registers: int
    spilled: int
    """Bytes a thread spills to memory."""
    shared: int


def signature(case: Case) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Types, constants and divisibility of the arguments, as a call with whole rows and many queries has
    them."""
    from headgate.ops.triton import pair_gate_kernels

    kernel = getattr(pair_gate_kernels, case.kernel)
    of_inputs, whole, attributes = f"*{case.dtype}", {}, {}
    dtype = next(t for t, name in TYPES.items() if name == case.dtype)
    values = constants(case.width, case.hidden, case.form, dtype, TARGETS[case.target][0])
    values |= {"ROWS": case.config.rows, "COLUMNS": case.config.columns}
    types: dict[str, Any] = {}
    for place, name in enumerate(kernel.arg_names):
        if name in values:
            types[name], whole[place,] = "constexpr", values[name]
        elif name.endswith("half_strides"):  # tokens last: the halves are transposed
            types[name], whole[place, 2] = ("i32", "i32", "constexpr", "i32"), 1
        elif name.endswith("strides"):
            count = 4 if name == "out_strides" else 3
            types[name] = ("i32",) * count
            attributes |= {(place, n): [["tt.divisibility", 16]] for n in range(count)}
        elif name in ("heads", "repeat", "queries", "keys", "window"):
            types[name] = "i32"
        elif name == "scale":
            types[name] = "fp32"
        else:
            sums = ("softmax", "delta")
            if case.kernel in ("backward", "backward_queries"):
                sums += ("d_w2", "d_b2")
            if case.kernel == "backward":  # what is added to by all
                sums += ("d_q", "d_query_half")
            types[name] = "*fp32" if name in (*sums, "query_half", "key_half") else of_inputs
            attributes[place,] = [["tt.divisibility", 16]]
    return types, whole, attributes


def compiled(case: Case) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from headgate.ops.triton import pair_gate_kernels

    types, whole, attributes = signature(case)
    source = ASTSource(getattr(pair_gate_kernels, case.kernel), types, whole, attributes)
    options = {"num_warps": case.config.warps, "num_stages": case.config.stages}
    return triton.compile(source, target=GPUTarget(*TARGETS[case.target]), options=options)


def resources(case: Case) -> Resources:
    kernel = compiled(case)
    shared = int(kernel.metadata.shared)
    if TARGETS[case.target][0] == "hip":
        text = kernel.asm["amdgcn"]

        def field(name: str) -> int:
            return int(re.findall(rf"\.{name}:\s+(\d+)", text)[-1])

        registers = field("vgpr_count")  # the accumulation registers are counted among them
        return Resources(registers, 4 * field("vgpr_spill_count"), shared)
    usage = _cubin_tool(kernel, "cuobjdump", "-res-usage")
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    return Resources(registers, stack, shared)


def machine_code(case: Case) -> str:
    """What the device runs, as text."""
    kernel = compiled(case)
    if TARGETS[case.target][0] == "hip":
        text: str = kernel.asm["amdgcn"]
        return text
    return _cubin_tool(kernel, "nvdisasm", "-c")


def _cubin_tool(kernel: Any, tool: str, option: str) -> str:
    """What one of the tools that come with Triton says about a compiled kernel."""
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__file__).parent / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([path, option, file.name], check=True, capture_output=True, text=True).stdout


def cases(widths: list[int], hidden: list[int], forms: list[str], *, first: bool) -> Iterator[Case]:
    """Every configuration at these sizes; or the first, in fp32 only of the kernel that needs the most."""
    for target, kernel, dtype, width, m, form in product(TARGETS, KERNELS, DTYPES, widths, hidden, forms):
        choices = configs(kernel, width, dtype, TARGETS[target][0])
        if first:
            choices = choices[: dtype == torch.bfloat16 or kernel == "backward_keys"]
        for config in choices:
            yield Case(kernel, TYPES[dtype], width, m, form, config, target)


def faults(case: Case, found: Resources) -> list[str]:
    """What would keep the kernel from running well on its target."""
    result = []
    if found.registers > REGISTER_LIMIT[case.target]:
        result.append(f"{found.registers} registers")
    if found.shared > SHARED_LIMIT[case.target]:
        result.append(f"{found.shared} bytes of shared memory")
    if found.spilled > SPILL_LIMIT:
        result.append(f"{found.spilled} bytes spilled")
    return result


def print_table(found: dict[Case, Resources]) -> None:
    """A row a configuration: registers / bytes spilled / KB of shared memory on each target."""
    print(f"| kernel | dtype | D | M | form | tile, warps | {' | '.join(TARGETS)} |")
    print("|---|---|---|---|---|---|" + "---|" * len(TARGETS))
    rows: dict[Case, dict[str, str]] = {}
    for case, got in found.items():
        cell = f"{got.registers} / {got.spilled} / {got.shared / 1024:.0f}"
        rows.setdefault(replace(case, target=""), {})[case.target] = cell
    for case, cells in rows.items():
        tile = f"{case.config.rows} x {case.config.columns}, {case.config.warps}"
        name = f"{case.kernel} | {case.dtype} | {case.width} | {case.hidden} | {case.form} | {tile}"
        print(f"| {name} | {' | '.join(cells.get(target, '') for target in TARGETS)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, nargs="+", choices=WIDTHS, default=[64])
    parser.add_argument("--hidden", type=int, nargs="+", choices=HIDDEN, default=[16])
    parser.add_argument("--form", nargs="+", choices=["multiply", "log"], default=["multiply"])
    parser.add_argument("--first", action="store_true", help="only first configurations, as the tests do")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    wanted = list(cases(options.width, options.hidden, options.form, first=options.first))
    with ProcessPoolExecutor(options.jobs) as pool:
        found = list(pool.map(resources, wanted))
    bad = [f"{c}: {fault}" for c, got in zip(wanted, found, strict=True) for fault in faults(c, got)]
    print_table(dict(zip(wanted, found, strict=True)))
    if options.json:
        rows = [asdict(c) | asdict(r) for c, r in zip(wanted, found, strict=True)]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"\n{len(wanted)} kernels, {len(bad)} over a limit", *bad, sep="\n", file=sys.stderr)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
