"""Everything headgate does on a GPU, tried and timed in ten minutes, with a one-page report to send back.

    make test-gpu                                   writes gpu-report.md (one page) and gpu-report.json
    python benchmarks/gpu.py --minutes 60 --thorough        more cases of each, more tests
    python benchmarks/gpu.py --only time:local decode:      these alone

Without a GPU it says so and ends with code 2, so that nobody takes it for a pass. Each case runs in another
process, which goes on with the next: when one dies, hangs or leaves the device in error, it is noted and a
new process takes up the cases after it. Both files are written after each case. When the minutes are over,
what is left is listed as not run.

Cases: `run` is `headgate train` with evaluation; `train` steps of one mechanism, its loss falling; `test`
the contract tests of tests/ops/test_device.py; `generate` against the CPU's tokens; `decode` a token over a
long cache; `time` attention forward alone and with backward, against causal SDPA in the same rounds.
"""

import argparse
import json
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import IO, Any

from headgate.files import write_text
from headgate.version import __version__

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "ops" / "test_device.py"
PATIENCE = 150.0
"""Seconds without an answer after which a process is taken to hang; compiling is most of what takes long."""
FEW = ("full", "local", "sparse-geometric", "context-adaptive")
"""One mechanism of each path: SDPA, windows, Triton, plain tiles with FlexAttention."""
ESTIMATES = {"run": 25, "train": 7, "test": 22, "generate": 8, "decode": 4, "time": 5}
"""Seconds of a case of each kind on an A100, guessed: compiling a FlexAttention call takes some seconds."""


def all_cases(*, thorough: bool) -> list[str]:
    """In the order of what matters most, should time run out."""
    import headgate

    names = headgate.mechanisms()
    some = names if thorough else FEW
    tests = re.findall(r"^def (test_\w+)", TESTS.read_text(encoding="utf-8"), re.MULTILINE)
    return [
        "run:full",
        "run:sparse-geometric:--compile",
        *(f"train:{name}" for name in names),
        *(f"train:{name}:compile" for name in some),
        *(f"train:{name}:recompute" for name in some[:1]),
        *(f"generate:{name}" for name in some),
        *(f"time:{name}:64:4096" for name in ("full", *(n for n in names if n != "full"))),
        *(f"test:{name}" for name in tests),
        *(f"decode:{name}" for name in some),
        *(f"time:{name}:128:8192" for name in some),
        *(f"time:{name}:64:16384" for name in some[:1]),
        *("time:FlexAttention:64:4096", "time:flash-attention:64:4096"),
    ]


class Child:
    """A process that carries out cases, and the lines it prints."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what it starts ends with it
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.complaints: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, args=(stream, keep), daemon=True)
            for stream, keep in (
                (self.process.stdout, self.lines.put),
                (self.process.stderr, self.complaints.append),
            )
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: IO[str], keep: Callable[[str], object]) -> None:
        for line in stream:
            keep(line.rstrip())
        if keep == self.lines.put:
            self.lines.put(None)

    def answer(self, patience: float) -> dict[str, Any] | None:
        """The next one; None when it has ended. `queue.Empty` when it takes too long."""
        end = time.monotonic() + patience
        while True:
            line = self.lines.get(timeout=max(0.0, end - time.monotonic()))
            if line is None:
                return None
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found

    def end(self) -> int:
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        code = self.process.wait()
        for thread in self._threads:
            thread.join(5)
        return code


def carried_out(
    cases: Sequence[str], command: Sequence[str], *, seconds: float, patience: float = PATIENCE
) -> Iterator[dict[str, Any]]:
    """The outcome of each case, by processes that run `command` with the cases still to do behind it."""
    left, until = list(cases), time.monotonic() + seconds
    while left and time.monotonic() < until:
        child = Child([*command, *left])
        reason = ""
        try:
            while left and not reason:
                room = until - time.monotonic()
                answer = child.answer(max(0.1, min(patience, room)))
                if answer is None:
                    reason = f"its process ended with code {child.process.wait()}"
                else:
                    assert answer["case"] == left.pop(0)
                    yield answer
        except queue.Empty:
            reason = f"no answer in {patience:.0f} s" if time.monotonic() < until else "time was up"
        finally:
            child.end()
        if reason and time.monotonic() < until and left:
            said = [line for line in child.complaints if line.strip()][-8:]
            yield {"case": left.pop(0), "passed": False, "error": "\n".join([reason, *said])}
    for case in left:
        yield {"case": case, "passed": None, "error": "not run: time was up"}


# What follows runs in the child.


def environment(device: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "headgate": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "device": device,
    }
    for package in ("triton", "flash_attn"):
        try:
            found[package] = __import__(package).__version__
        except ImportError:
            found[package] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
    return found


class Cases:
    def __init__(self, device: str, *, thorough: bool) -> None:
        import torch

        self.device, self.thorough = torch.device(device), thorough
        self.small = device == "cpu"  # where this script itself is tried out

    def outcome(self, case: str) -> dict[str, Any]:
        from headgate import ops

        before, begun = ops.paths_taken(), time.perf_counter()
        kind, name, *options = case.split(":")
        try:
            found = {"passed": True, "error": None, **getattr(self, kind)(name, *options)}
        except ModuleNotFoundError as missing:
            found = {"passed": None, "error": f"not run: {missing}"}
        except Exception as error:
            words = str(error).strip().splitlines() or [""]
            found = {
                "passed": False,
                "error": "\n".join([f"{type(error).__name__}: {words[0]}", *words[1:6]]),
            }
        paths = [path for path, count in ops.paths_taken().items() if count > before.get(path, 0)]
        return {
            "case": case,
            **found,
            "paths": found.get("paths", sorted(paths)),
            "seconds": round(time.perf_counter() - begun, 1),
        }

    def works(self) -> bool:
        """Whether the device still computes: an error of a kernel stays with the process."""
        import torch

        try:
            self.wait()
            return bool(torch.ones(1, device=self.device).item() == 1)
        except Exception:
            return False

    def wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def model(self, mechanism: str) -> Any:
        import headgate

        return headgate.build_model("tiny", mechanism=mechanism, seed=1)

    def test(self, name: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider"]
        few = "60" if self.thorough else "8"
        run = subprocess.run(
            [*command, f"{TESTS}::{name}"],
            cwd=ROOT,
            env=os.environ | {"HEADGATE_DEVICE": str(self.device), "HEADGATE_DEVICE_CASES": few},
            capture_output=True,
            text=True,
        )
        lines = run.stdout.strip().splitlines() or [run.stderr[-500:]]
        if run.returncode:
            raise RuntimeError("\n".join(lines[-6:]))
        return {"said": lines[-1]}

    def run(self, mechanism: str, *options: str) -> dict[str, Any]:
        """The commands as a user gives them: data, training with evaluation, what the summary says."""
        with tempfile.TemporaryDirectory() as home:
            words = [sys.executable, "-m", "headgate"]
            train = ["train", "tiny", "--data", f"{home}/data", "--out", f"{home}/run", *options]
            train += ["--mechanism", mechanism, "--device", str(self.device), "train.context=128"]
            train += ["train.steps=30", "train.evaluate_every=15", "train.precision=bf16"]
            prepare = ["prepare", "recall:context=128,pairs=8,queries=8,sequences=2000", f"{home}/data"]
            for command in (prepare, train):
                done = subprocess.run([*words, *command], cwd=ROOT, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-6:]))
            summary = json.loads(Path(home, "run", "summary.json").read_text(encoding="utf-8"))
        return {
            "loss": summary["final"]["loss"],
            "tokens_per_second": summary["tokens_per_second"],
            "paths": sorted(summary["kernel_paths"]),
        }

    def train(self, mechanism: str, mode: str = "") -> dict[str, Any]:
        """Steps in bf16 on one batch, which must be learnt, and an evaluation of it."""
        import torch

        decoder = self.model(mechanism).to(self.device)
        decoder.recompute = mode == "recompute"
        if mode == "compile":
            for layer in decoder.layers:
                layer.compile(fullgraph=True, backend="aot_eager" if self.small else "inductor")
        length = 128 if self.small else 512
        tokens = torch.randint(4096, (2, length + 1), generator=torch.Generator().manual_seed(0))
        given, wanted = tokens[:, :-1].to(self.device), tokens[:, 1:].to(self.device)
        optimiser = torch.optim.AdamW(decoder.parameters(), lr=2e-3)
        losses = []
        for _ in range(6):
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = decoder(given, wanted)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
            losses.append(decoder(given, wanted))
        first, *_, last = torch.stack(losses).tolist()
        if not last < first - 0.3:
            raise RuntimeError(f"the loss went from {first:.3f} to {last:.3f}; expected it to fall")
        return {"loss": [first, last]}

    def generate(self, mechanism: str) -> dict[str, Any]:
        """The likeliest tokens in fp32 must be the CPU's; then the speed in bf16, also with graphs."""
        import torch

        decoder, prompts = self.model(mechanism), [[5, 7, 11] * 20, [3] * 33, [2, 9] * 40]
        expected = [c.tokens for c in decoder.generate(prompts, 12, temperature=0)]
        decoder = decoder.to(self.device)
        found = [c.tokens for c in decoder.generate(prompts, 12, temperature=0)]
        same = sum(
            a == b
            for one, other in zip(expected, found, strict=True)
            for a, b in zip(one, other, strict=True)
        )
        if same < 30:  # of 36; a tie may fall the other way, and all after it
            raise RuntimeError(f"{same} of 36 tokens are the CPU's; {found[0]} instead of {expected[0]}")
        decoder, count, speeds = decoder.to(torch.bfloat16), 8 if self.small else 128, {}
        for graphs in (False, True)[: 1 + (self.device.type == "cuda")]:
            decoder.generate(prompts, count, graphs=graphs)  # compiled, and recorded
            begun = time.perf_counter()
            tokens = decoder.generate(prompts, count, graphs=graphs)
            self.wait()
            speeds["with graphs" if graphs else "plain"] = sum(len(c.tokens) for c in tokens) / (
                time.perf_counter() - begun
            )
        return {"tokens_per_second": speeds}

    def decode(self, mechanism: str) -> dict[str, Any]:
        """Milliseconds of a token of one sequence over a long cache."""
        import torch

        length = 256 if self.small else 16_384
        decoder = self.model(mechanism).to(self.device, torch.bfloat16)
        cache = decoder.new_cache(length + 64)
        with torch.inference_mode():
            for part in torch.zeros(1, length, dtype=torch.int64, device=self.device).split(2048, 1):
                decoder.hidden(part, cache=cache)
            token, times = torch.zeros(1, 1, dtype=torch.int64, device=self.device), []
            for _ in range(24):
                begun = time.perf_counter()
                decoder.next_logits(token, cache)
                self.wait()
                times.append(time.perf_counter() - begun)
        return {"length": length, "milliseconds": median(times[8:]) * 1e3}

    def time(self, name: str, width: str, length: str) -> dict[str, Any]:
        """Attention of 12 heads, or at width 128 of 16 over 4 of keys, beside causal SDPA."""
        import torch

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

        heads, groups = (12, 12) if width == "64" else (16, 4)
        shape = Shape(1, heads, groups, int(width), 256)
        long = 128 if self.small else int(length)
        if name in PEERS:
            case = Case(name, "peer", PEERS[name](shape), causal_pairs)
        else:
            case = next(case for case in mechanism_cases(shape) if case.name == name)
            case.attend.to(self.device, torch.bfloat16)  # type: ignore[attr-defined]
        base = Case(BASELINE, "peer", sdpa, causal_pairs)
        inputs = tuple(t.detach().to(self.device, torch.bfloat16) for t in shape.inputs(long))
        for t in inputs[1:]:
            t.requires_grad_()
        found: dict[str, Any] = {"width": shape.head_dim, "length": long}
        for way, backward in (("forward", False), ("both", True)):

            def step(case: Case, backward: bool = backward) -> None:
                case.run(inputs, backward=backward)  # type: ignore[arg-type]
                self.wait()

            step(case)
            extra = self.added_memory(lambda case=case, step=step: step(case))  # type: ignore[misc]
            runs = {case.name: lambda: step(case), BASELINE: lambda: step(base)}
            times = interleaved(runs, seconds=0.05 if self.small else 0.5)
            seconds = median(times[case.name])
            work = 4.0 * case.pairs(long) * heads * shape.head_dim * (3.5 if backward else 1)
            found[way] = {
                "milliseconds": seconds * 1e3,
                "tflops": work / seconds / 1e12,
                "of_sdpa": ratios(times, case.name, BASELINE)[0],
                "extra_bytes": extra,
            }
        return found

    def added_memory(self, run: Callable[[], None]) -> int | None:
        import torch

        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before


def _flash(shape: Any) -> Any:
    from flash_attn import flash_attn_func

    def attend(x: Any, q: Any, k: Any, v: Any) -> Any:
        return flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True).transpose(1, 2)

    return attend


def _flex(shape: Any) -> Any:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled, masks = torch.compile(flex_attention), {}

    def attend(x: Any, q: Any, k: Any, v: Any) -> Any:
        t = q.shape[2]
        if t not in masks:
            masks[t] = create_block_mask(lambda b, h, i, j: j <= i, None, None, t, t, device=q.device)
        return compiled(q, k, v, block_mask=masks[t], enable_gqa=q.shape[1] != k.shape[1])

    return attend


PEERS: dict[str, Callable[[Any], Any]] = {"flash-attention": _flash, "FlexAttention": _flex}


def answer(cases: Sequence[str], device: str, *, thorough: bool) -> None:
    """In the child: one line a case. Where the device is left in error, it ends, and another goes on."""
    carry = Cases(device, thorough=thorough)
    for case in cases:
        found = environment(device) | {"case": case} if case == "environment" else carry.outcome(case)
        print(json.dumps(found), flush=True)
        if not carry.works():
            sys.exit(3)


# The page.


def as_markdown(report: dict[str, Any]) -> str:
    outcomes = report["cases"]
    device = report["environment"]
    lines = [f"# headgate {device['headgate']} on {device['device']}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in device.items() if value and name != "case"), ""]
    lines += ["| cases | passed | failed | not run |", "|---|---|---|---|"]
    for kind in ESTIMATES:
        of_kind = [o["passed"] for o in outcomes if o["case"].startswith(f"{kind}:")]
        lines.append(f"| {kind} | {of_kind.count(True)} | {of_kind.count(False)} | {of_kind.count(None)} |")
    failed = [o for o in outcomes if o["passed"] is False]
    lines += ["", *(f"- **{o['case']}**: {o['error'].splitlines()[0]}" for o in failed), ""]
    lines += _times(outcomes)
    paths = sorted({path for o in outcomes for path in o.get("paths", ())})
    lines += ["", f"Paths taken: {', '.join(paths)}.", "", report["send"], ""]
    return "\n".join(lines)


def _times(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| attention | D | T | forward ms | TFLOP/s | of SDPA | with backward ms | TFLOP/s | of SDPA |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        if o["case"].startswith("time:") and o["passed"]:
            cells = (
                f"{o[way]['milliseconds']:.3f} | {o[way]['tflops']:.1f} | {o[way]['of_sdpa']:.2f}"
                for way in ("forward", "both")
            )
            lines.append(
                f"| {o['case'].split(':')[1]} | {o['width']} | {o['length']} | {' | '.join(cells)} |"
            )
    for o in outcomes:
        if o["passed"] and o["case"].startswith("decode:"):
            lines.append(f"\n{o['case']}: {o['milliseconds']:.2f} ms a token over {o['length']:,} tokens.")
        if o["passed"] and o["case"].startswith("generate:"):
            speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in o["tokens_per_second"].items())
            lines.append(f"\n{o['case']}: tokens a second: {speeds}.")
    return lines


SEND = (
    "Please send this page and gpu-report.json back, as an issue of the repository that you have headgate "
    'from, titled "GPU report" and the name of the device. Failures are as welcome as times.'
)


def line(outcome: dict[str, Any]) -> str:
    if outcome["passed"] is None:
        return f"--      {outcome['case']}: {outcome['error']}"
    if not outcome["passed"]:
        return f"FAILED  {outcome['case']}: {outcome['error'].splitlines()[0]}"
    rest = {k: v for k, v in outcome.items() if k not in ("case", "passed", "error", "paths", "seconds")}
    return f"passed  {outcome['case']} ({outcome['seconds']} s) {json.dumps(rest) if rest else ''}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="after which it ends")
    parser.add_argument("--thorough", action="store_true", help="all mechanisms and tests everywhere")
    parser.add_argument("--only", nargs="+", default=[], help="cases that begin so")
    parser.add_argument("--list", action="store_true", help="the cases, and the minutes they may take")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.json"))
    parser.add_argument("--device", default="cuda", help="cpu tries this script itself out")
    parser.add_argument("--answer", nargs="+", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options.answer, options.device, thorough=options.thorough)
        return
    cases = all_cases(thorough=options.thorough)
    if options.only:
        cases = [case for case in cases if case.startswith(tuple(options.only))]
    if options.list:
        guess = sum(ESTIMATES[case.split(":")[0]] for case in cases)
        print(*cases, f"{len(cases)} cases, about {guess / 60:.0f} minutes on an A100", sep="\n")
        return
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print(f"PyTorch {torch.__version__} sees no GPU here, so nothing was tested.", file=sys.stderr)
            sys.exit(2)
    command = [sys.executable, str(Path(__file__).resolve()), "--device", options.device]
    command += ["--thorough"] * options.thorough + ["--answer"]
    first, *outcomes = carried_out(["environment"], command, seconds=120)
    if first.get("passed") is False:
        print(f"The device cannot be asked: {first['error']}", file=sys.stderr)
        sys.exit(1)
    report: dict[str, Any] = {"environment": first, "cases": outcomes, "send": SEND}
    for outcome in carried_out(cases, command, seconds=60 * options.minutes):
        outcomes.append(outcome)
        print(line(outcome), flush=True)
        write_text(options.out, json.dumps(report, indent=1) + "\n")
        write_text(options.out.with_suffix(".md"), as_markdown(report))
    failed = sum(outcome["passed"] is False for outcome in outcomes)
    print(f"{failed} failed. {options.out.with_suffix('.md')} is the page, {options.out} has all.\n{SEND}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
