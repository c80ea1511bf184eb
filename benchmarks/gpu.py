"""The contract tests on a GPU, then a table of times against other attentions; writes a file to send back.

    make test-gpu                                        tests and table, into gpu-report.json and .md
    python benchmarks/gpu.py --lengths 2048 --no-tests   the table alone

Without a GPU it says so and ends with code 2, so that nobody takes it for a pass. Times are medians of
forward and backward in bf16, in one interleaved run, and ratios to causal SDPA in the same rounds; memory is
what a step adds to the peak. The file names the versions, the device and the paths that ran.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headgate import ops
from headgate.files import write_text
from headgate.measure.speed import (
    BASELINE,
    Case,
    Shape,
    causal_pairs,
    interleaved,
    mechanism_cases,
    ratios,
    sdpa,
)
from headgate.version import __version__

ROOT = Path(__file__).parents[1]
TESTS = ("tests/ops/test_device.py",)


def environment(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "headgate": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "device": str(device),
    }
    for package in ("triton", "flash_attn"):
        try:
            found[package] = __import__(package).__version__
        except ImportError:
            found[package] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
    return found


def run_tests(device: str) -> dict[str, Any]:
    """The outcome and the last lines of what pytest said."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *TESTS]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"HEADGATE_DEVICE": device}, stdout=subprocess.PIPE, text=True
    )
    print(run.stdout)
    return {"passed": run.returncode == 0, "output": run.stdout.splitlines()[-200:]}


def peers(shape: Shape, device: torch.device) -> tuple[list[Case], dict[str, str]]:
    """Other attentions of the same shape, and why some are missing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    cases = [Case(BASELINE, "peer", sdpa, causal_pairs)]
    missing: dict[str, str] = {}
    grouped = shape.n_heads != shape.n_kv_heads
    compiled = torch.compile(flex_attention)
    masks: dict[tuple[int, int], Any] = {}

    def flex(reach: int) -> Callable[..., Tensor]:
        def attend(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            t = q.shape[2]
            if (t, reach) not in masks:
                masks[t, reach] = create_block_mask(
                    lambda b, h, i, j: (j <= i) & (i - j <= reach), None, None, t, t, device=device
                )
            out: Tensor = compiled(q, k, v, block_mask=masks[t, reach], enable_gqa=grouped)
            return out

        return attend

    if device.type == "cuda":
        cases.append(Case("FlexAttention causal", "peer", flex(1 << 30), causal_pairs))
        cases.append(Case("FlexAttention window", "peer", flex(shape.window), causal_pairs))
    else:
        missing["FlexAttention"] = "it has no backward on a CPU"
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        missing["flash-attention"] = "it is not installed"
    else:

        def flash(reach: int) -> Callable[..., Tensor]:
            def attend(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                tokens_first = (t.transpose(1, 2) for t in (q, k, v))
                out: Tensor = flash_attn_func(*tokens_first, causal=True, window_size=(reach, 0))
                return out.transpose(1, 2)

            return attend

        cases.append(Case("flash-attention causal", "peer", flash(-1), causal_pairs))
        cases.append(Case("flash-attention window", "peer", flash(shape.window), causal_pairs))
    return cases, missing


def measure(shape: Shape, lengths: list[int], device: torch.device, seconds: float) -> dict[str, Any]:
    cases, missing = peers(shape, device)
    for case in mechanism_cases(shape):
        assert isinstance(case.attend, torch.nn.Module)
        case.attend.to(device, torch.bfloat16)
        cases.append(case)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        inputs = tuple(t.detach().to(device, torch.bfloat16) for t in shape.inputs(length))
        for t in inputs[1:]:
            t.requires_grad_()

        def step(case: Case, inputs: Any = inputs) -> None:
            case.run(inputs, backward=True)
            if device.type == "cuda":
                torch.cuda.synchronize()

        runs: dict[str, Callable[[], None]] = {}
        extra: dict[str, int | None] = {}
        for case in cases:
            try:
                step(case)
                extra[case.name] = added_memory(lambda case=case: step(case), device)  # type: ignore[misc]
            except Exception as error:  # a case too long for this device is a row that says so
                missing[f"{case.name} at T={length}"] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0]}"
                )
                continue
            runs[case.name] = lambda case=case: step(case)  # type: ignore[misc]
        times = interleaved(runs, seconds=seconds)
        for name in runs:
            middle, low, high = ratios(times, name, BASELINE)
            rows.append(
                {
                    "name": name,
                    "length": length,
                    "milliseconds": median(times[name]) * 1e3,
                    "ratio": middle,
                    "quartiles": [low, high],
                    "extra_bytes": extra[name],
                }
            )
            print(
                f"T={length:6d}  {name:34s} {rows[-1]['milliseconds']:9.3f} ms  {middle:6.2f} of SDPA",
                flush=True,
            )
    return {"shape": shape.__dict__, "rows": rows, "not_run": missing, "paths": ops.paths_taken()}


def added_memory(run: Callable[[], None], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def as_markdown(report: dict[str, Any]) -> str:
    lines = ["# headgate on a GPU", ""]
    lines += [f"- {name}: {value}" for name, value in report["environment"].items()]
    tests = report["tests"]
    lines += ["", f"Tests: {'not run' if tests is None else 'passed' if tests['passed'] else 'FAILED'}", ""]
    if tests is not None:
        lines += ["```", *tests["output"][-40:], "```", ""]
    lines += ["| T | attention | ms | of causal SDPA (quartiles) | extra MB |", "|---|---|---|---|---|"]
    for row in report["table"]["rows"]:
        low, high = row["quartiles"]
        memory = "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e6:.0f}"
        lines.append(
            f"| {row['length']} | {row['name']} | {row['milliseconds']:.3f} "
            f"| {row['ratio']:.2f} ({low:.2f}-{high:.2f}) | {memory} |"
        )
    lines += ["", *(f"not run: {name}: {reason}" for name, reason in report["table"]["not_run"].items())]
    lines += ["", "Paths: " + ", ".join(sorted(report["table"]["paths"])), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0, help="of measurement at each length")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.json"))
    parser.add_argument("--device", default="cuda", help="cpu tries this script itself out")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} sees no GPU here, so nothing was tested.", file=sys.stderr)
        sys.exit(2)
    device = torch.device(options.device)
    shape = Shape(1, options.heads, options.kv_heads, options.width, options.window)
    report: dict[str, Any] = {"environment": environment(device), "tests": None}
    if not options.no_tests:
        report["tests"] = run_tests(options.device)
    report["table"] = measure(shape, options.lengths, device, options.seconds)
    write_text(options.out, json.dumps(report, indent=1) + "\n")
    write_text(options.out.with_suffix(".md"), as_markdown(report))
    print(f"wrote {options.out} and {options.out.with_suffix('.md')}: please send them back")
    sys.exit(0 if report["tests"] is None or report["tests"]["passed"] else 1)


if __name__ == "__main__":
    main()
