"""What attention costs: interleaved times as ratios, growth with the length, extra peak memory.

Machines are noisy, so nothing is timed alone: in every round each case runs once, right after the baseline,
and a case's figure is the median over rounds of its time divided by the baseline's in the same round.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headgate import ops
from headgate.errors import HeadgateError, suggestion
from headgate.grammar import parse_mechanisms, split_mechanisms
from headgate.machine import Peak, memory
from headgate.mechanisms import MECHANISMS, Mechanism
from headgate.mechanisms.contract import Heads, initialise, make_options

BASELINE = "causal SDPA"
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of a measurement's tensors; C = n_heads * head_dim."""

    batch: int = 1
    n_heads: int = 8
    n_kv_heads: int = 8
    head_dim: int = 64
    window: int = 256

    def heads(self) -> Heads:
        return Heads(self.n_heads * self.head_dim, self.n_heads, self.n_kv_heads, self.head_dim)

    def refuse_too_long(self, length: int) -> None:
        """Raise, before anything is drawn, if x, q, k, v, the output and their gradients cannot fit."""
        numbers = 2 * self.batch * length * self.head_dim * (3 * self.n_heads + 2 * self.n_kv_heads)
        if 4 * numbers > memory():
            raise HeadgateError(
                f"attention over {self.batch:,} x {length:,} tokens, {self.n_heads:,} heads of "
                f"{self.head_dim:,}, needs at least {4 * numbers / 1e9:,.0f} GB, and this machine has "
                f"{memory() / 1e9:,.0f} GB"
            )

    def inputs(self, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, q, k, v in the memory layout that projections produce: (B,T,heads,D), viewed as
        (B,heads,T,D)."""
        generator = torch.Generator().manual_seed(length)

        def draw(heads: int) -> Tensor:
            t = torch.randn(self.batch, length, heads, self.head_dim, generator=generator)
            return t.transpose(1, 2).requires_grad_()

        x = torch.randn(self.batch, length, self.n_heads * self.head_dim, generator=generator)
        return x, draw(self.n_heads), draw(self.n_kv_heads), draw(self.n_kv_heads)


@dataclass(frozen=True)
class Case:
    """Something to measure: `attend(x, q, k, v)`, and the query-key pairs that it must evaluate."""

    name: str
    kind: str
    attend: Attend
    pairs: Callable[[int], int]
    backward: bool = True

    def run(self, inputs: tuple[Tensor, Tensor, Tensor, Tensor], *, backward: bool) -> None:
        if not backward:
            with torch.no_grad():
                self.attend(*inputs)
            return
        out = self.attend(*inputs)
        torch.autograd.grad(out, inputs[1:], torch.ones_like(out))


@dataclass
class Figure:
    """One case at one length: seconds, ratio to the baseline with quartiles, useful speed, extra memory."""

    name: str
    kind: str
    length: int
    passes: str
    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    gflops: float
    sgemm_share: float
    extra_bytes: int | None = None


@dataclass
class Measurement:
    shape: Shape
    threads: int
    sgemm_gflops: float
    figures: list[Figure] = field(default_factory=list)
    growth: dict[str, float] = field(default_factory=dict)
    """Measured exponent of forward+backward time as a function of length, by case."""
    not_run: dict[str, str] = field(default_factory=dict)


def causal_pairs(length: int) -> int:
    return length * (length + 1) // 2


def sdpa(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def baseline() -> Case:
    return Case(BASELINE, "baseline", sdpa, causal_pairs)


def op_cases(shape: Shape, hidden: int = 16) -> list[Case]:
    """Every attention op with the given window; the pair gate's halves are drawn once per
    length."""
    w, heads = shape.window, shape.heads()

    def of(mechanism: str, **options: Any) -> Callable[[int], int]:
        cls = MECHANISMS.get(mechanism)
        return cls(heads, make_options(mechanism, options)).pairs

    def ring(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weight = torch.full(q.shape[:3], -0.7)
        return ops.span_attention(q, k, v, ops.Span(w, ring=2 * w), ring_log_weight=weight)[0]

    def pair_gate(form: Any) -> Attend:
        w2, b2 = torch.full((shape.n_heads, hidden), 0.25), torch.full((shape.n_heads,), 2.0)

        def attend(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            half = x.unflatten(-1, (shape.n_heads, -1)).transpose(1, 2)[..., :hidden].contiguous()
            return ops.pair_gated_attention(q, k, v, half, half.neg(), w2, b2, form=form)

        return attend

    bias = torch.zeros(shape.n_heads, 1)
    window_pairs = of("local", window=w)
    return [
        Case("causal_attention", "op", lambda x, q, k, v: ops.causal_attention(q, k, v), causal_pairs),
        Case("window_attention", "op", lambda x, q, k, v: ops.window_attention(q, k, v, w), window_pairs),
        Case("span_attention with ring", "op", ring, of("local", window=2 * w)),
        Case("pair_gated_attention multiply", "op", pair_gate("multiply"), causal_pairs),
        Case("pair_gated_attention log", "op", pair_gate("log"), causal_pairs),
        Case(
            "block_selected_attention",
            "op",
            lambda x, q, k, v: ops.block_selected_attention(q, k, v, block=64),
            of("context-adaptive", select="block", gate="global"),
        ),
        Case("top_k_attention", "op", lambda x, q, k, v: ops.top_k_attention(q, k, v), causal_pairs),
        Case(
            "combiner_attention",
            "op",
            lambda x, q, k, v: ops.combiner_attention(q, k, v, block=64),
            of("combiner"),
        ),
        Case(
            "strided_attention",
            "op",
            lambda x, q, k, v: ops.strided_attention(q, k, v, window=w, stride=64),
            of("sparse-geometric", sparsity="fixed", window=w),
        ),
        Case(
            "biased_attention",
            "op",
            lambda x, q, k, v: ops.biased_attention(q, k, v, x[..., : shape.n_heads].transpose(1, 2)),
            causal_pairs,
        ),
        Case(
            "distance_biased_attention",
            "op",
            lambda x, q, k, v: ops.distance_biased_attention(q, k, v, bias.expand(-1, k.shape[2])),
            causal_pairs,
        ),
    ]


def mechanism_cases(shape: Shape, names: list[str] | None = None) -> list[Case]:
    """Mechanisms in the usual notation; by default all that are registered. Windows are the shape's unless an
    option says otherwise. The layers of a pattern run one after another."""
    known = MECHANISMS.names()
    variants = ["context-adaptive:select=block", "sparse-geometric:gate=log"]
    shared = {"window": shape.window, "max_window": 2 * shape.window, "dense_prefix": 2 * shape.window}
    cases = []
    for name in known + [v for v in variants if v.partition(":")[0] in known] if names is None else names:
        layers = []
        for spec in parse_mechanisms(name):
            layer = MECHANISMS.get(spec.name)(shape.heads(), make_options(spec.name, spec.options, shared))
            initialise(layer, 0)
            layers.append(layer)
        pattern = Pattern(layers)
        cases.append(Case(name, "mechanism", pattern, pattern.pairs))
    return cases


class Pattern(nn.Module):
    """Mechanisms on the same tensors, one after the other; a module, so that it can be moved to a device."""

    def __init__(self, layers: Sequence[Mechanism]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, *others = (layer(x, q, k, v) for layer in self.layers)
        return sum(others, cast(Tensor, first))

    def pairs(self, length: int) -> int:
        return sum(cast(Mechanism, layer).pairs(length) for layer in self.layers)


def peer_cases(shape: Shape) -> tuple[list[Case], dict[str, str]]:
    """Other packages' attention with the same meaning, where installed; and why the rest were not
    run."""
    cases, missing = [], {}
    w = shape.window
    pairs = next(case.pairs for case in op_cases(shape) if case.name == "window_attention")
    if shape.n_heads != shape.n_kv_heads:
        missing["local-attention"] = "it has no grouped heads"
    else:
        try:
            from local_attention import LocalAttention
        except ImportError:
            missing["local-attention"] = "it is not installed; pip install headgate[bench]"
        else:
            # Its window is a bucket; looking one bucket back with exact_windowsize gives a window of the w
            # keys before.
            local = LocalAttention(
                window_size=w,
                causal=True,
                look_backward=1,
                look_forward=0,
                exact_windowsize=True,
                autopad=True,
                dim=None,
                use_rotary_pos_emb=False,
            )

            def of_local(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return local(*(t.flatten(0, 1) for t in (q, k, v))).unflatten(0, (q.shape[0], -1))

            cases.append(Case("local-attention window", "peer", of_local, pairs))
    try:
        cases.append(Case("FlexAttention window", "peer", flex_window(shape), pairs, backward=False))
    except Exception as error:  # whatever its compiler raises is the reason
        missing["FlexAttention"] = (
            f"it does not compile here: {type(error).__name__}: {str(error).splitlines()[0]}"
        )
    return cases, missing


def flex_window(shape: Shape) -> Attend:
    """FlexAttention with a window mask, compiled; it has no backward pass on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks: dict[int, Any] = {}

    def attend(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        if length not in masks:
            masks[length] = create_block_mask(
                lambda b, h, i, j: (j <= i) & (i - j <= shape.window),
                None,
                None,
                length,
                length,
                device="cpu",
            )
        with torch.no_grad():
            q, k, v = (t.detach() for t in (q, k, v))
            return compiled(q, k, v, block_mask=masks[length], enable_gqa=q.shape[1] != k.shape[1])

    probe = torch.randn(1, shape.n_heads, 128, shape.head_dim)
    attend(probe, probe, probe[:, : shape.n_kv_heads], probe[:, : shape.n_kv_heads])
    return attend


def sgemm_gflops(size: int = 1024) -> float:
    """The machine's best matrix product: the ceiling that attention is measured against."""
    a, b = torch.randn(2, size, size)
    best = math.inf
    for _ in range(12):
        begun = clock()
        torch.mm(a, b)
        best = min(best, clock() - begun)
    return 2 * size**3 / best / 1e9


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    least_rounds: int = 3,
    most_rounds: int = 30,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, list[float]]:
    """Seconds of each run by name, one entry per round; every run takes one turn per round.

    Each runs once beforehand, untimed. Rounds continue for about `seconds`.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        progress(f"warming up {name}")
        run()
    begun, rounds = clock(), 0
    while rounds < least_rounds or (rounds < most_rounds and clock() - begun < seconds):
        rounds += 1
        progress(f"round {rounds}")
        for name, run in runs.items():
            at = clock()
            run()
            times[name].append(clock() - at)
    return times


def clock() -> float:
    """With one thread, its own processor time, which other programs do not disturb; with several, or on a
    GPU, the wall clock."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.thread_time() if alone else time.perf_counter()


def ratios(times: Mapping[str, list[float]], name: str, to: str) -> tuple[float, float, float]:
    """Median and quartiles over the rounds of one run's time relative to another's in the same round."""
    each = sorted(a / b for a, b in zip(times[name], times[to], strict=True))
    return median(each), each[len(each) // 4], each[-1 - len(each) // 4]


def measure(
    cases: list[Case],
    lengths: list[int],
    shape: Shape,
    *,
    seconds: float = 6.0,
    most_rounds: int = 30,
    progress: Callable[[str], None] = lambda text: None,
) -> Measurement:
    """Time every case at every length, forward and forward+backward, interleaved with the baseline.

    A length takes about `seconds` for the baseline and for each case, with 3 to `most_rounds` rounds.
    """
    result = Measurement(shape, torch.get_num_threads(), sgemm_gflops())
    for length in lengths:
        inputs = shape.inputs(length)
        for passes, backward in (("forward", False), ("forward+backward", True)):
            chosen = [baseline(), *(case for case in cases if case.backward or not backward)]
            runs = {case.name: partial(case.run, inputs, backward=backward) for case in chosen}
            times = interleaved(
                runs,
                seconds=seconds * len(chosen) / 4,
                most_rounds=most_rounds,
                progress=lambda text, at=f"T={length} {passes}": progress(f"{at}: {text}"),  # type: ignore[misc]
            )
            for case in chosen:
                result.figures.append(_figure(case, length, passes, times, result.sgemm_gflops, shape))
    for case in [baseline(), *cases]:
        points = [
            (f.length, f.seconds)
            for f in result.figures
            if f.name == case.name and f.passes == ("forward+backward" if case.backward else "forward")
        ]
        if len(points) > 1:
            result.growth[case.name] = slope(points)
    return result


def _figure(
    case: Case, length: int, passes: str, times: Mapping[str, list[float]], sgemm: float, shape: Shape
) -> Figure:
    seconds = median(times[case.name])
    # Two products in the forward pass and five in the backward, each 2 D flops per pair.
    products = 7 if passes == "forward+backward" else 2
    flops = 2 * products * shape.head_dim * case.pairs(length) * shape.n_heads * shape.batch
    gflops = flops / seconds / 1e9
    return Figure(
        case.name,
        case.kind,
        length,
        passes,
        seconds,
        *ratios(times, case.name, BASELINE),
        gflops,
        gflops / sgemm,
    )


def slope(points: list[tuple[int, float]]) -> float:
    """The exponent p in seconds ~ length ** p, by least squares on logarithms."""
    xs, ys = [math.log(length) for length, _ in points], [math.log(seconds) for _, seconds in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum(
        (x - mean_x) ** 2 for x in xs
    )


def select_cases(shape: Shape, names: list[str] | None) -> list[Case]:
    """All ops and mechanisms, or those named."""
    if names is None:
        return [*op_cases(shape), *mechanism_cases(shape)]
    by_name = {case.name: case for case in op_cases(shape)}
    chosen = []
    for name in names:
        if name in by_name:
            chosen.append(by_name[name])
            continue
        for written in split_mechanisms(name):
            if not written.file and written.name not in MECHANISMS.names():
                known = [*by_name, *MECHANISMS.names()]
                raise HeadgateError(
                    f"there is nothing called {written.name!r} to measure; {suggestion(written.name, known)}"
                )
        chosen += mechanism_cases(shape, [name])
    return chosen


def extra_memory(case: str, lengths: list[int], shape: Shape) -> dict[int, int]:
    """Peak memory of a forward and backward pass above its inputs, by length, in a fresh process."""
    question = {"case": case, "lengths": lengths, "shape": vars(shape), "threads": torch.get_num_threads()}
    run = subprocess.run(
        [sys.executable, "-m", "headgate.measure.speed", json.dumps(question)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MALLOC_TRIM_THRESHOLD_": "0"},
    )
    if run.returncode:
        raise HeadgateError(f"measuring the memory of {case!r} failed: {run.stderr.strip().splitlines()[-1]}")
    return {int(length): value for length, value in json.loads(run.stdout).items()}


def _answer(question: dict[str, Any]) -> dict[int, int]:
    """In the fresh process: run once at a small size, so that what is loaded on first use does not count,
    then measure."""
    torch.set_num_threads(question["threads"])
    shape = Shape(**question["shape"])
    name = question["case"]
    (case,) = [baseline()] if name == BASELINE else select_cases(shape, [name])
    case.run(shape.inputs(64), backward=case.backward)
    answers = {}
    for length in question["lengths"]:
        inputs = shape.inputs(length)
        peak = Peak()
        case.run(inputs, backward=case.backward)
        answers[length] = peak.bytes()
    return answers


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.argv[1]))))
