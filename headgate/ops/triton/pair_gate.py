"""Launches the Triton kernels of pair-gated attention (pair_gate_kernels.py), and picks their tile sizes.

A tile size is measured once for each kind of call and kept. Different tiles add in different orders, so under
`torch.use_deterministic_algorithms(True)` none is measured and the first in the list is taken: results then
repeat from one process to the next, not only within one.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headgate.ops.gpu import NO_TRITON, before_ampere, device_kind, is_planned

WIDTHS = (32, 64, 128)
HIDDEN = (4, 8, 16, 32)
DEVICES = ("cuda",)
_INSTALLED = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16)
TRANSPOSE_FROM = 32
"""Queries from which a copy of the halves in fp32, tokens last, pays: tiles read them again and again."""


@dataclass(frozen=True)
class KernelConfig:
    """A tile of `rows` x `columns` pairs on this many warps, and how many tiles ahead are loaded."""

    rows: int
    columns: int
    warps: int
    stages: int


KERNELS = ("forward", "backward", "backward_queries", "backward_keys")
FEW_QUERIES = KernelConfig(16, 64, 4, 1)
"""For decoding: the smallest tile of queries that tensor cores take."""
PROGRAMS, PART_KEYS = 256, 256
"""Decoding splits a head's keys among programs: about this many of them, with this many keys each."""
INTERPRETED = KernelConfig(64, 32, 4, 1)
"""Under TRITON_INTERPRET=1 kernels run on the CPU, one operation at a time: slow, for tests."""


def configs(kernel: str, width: int, dtype: torch.dtype, backend: str) -> tuple[KernelConfig, ...]:
    """The tiles that may run: those that keep everything in registers (benchmarks/triton_resources.py). fp32
    needs more of them than bf16, and eight of AMD's warps of 64 leave each thread too few."""
    if backend == "interpreted":
        return (INTERPRETED,)
    if dtype == torch.float32:
        if kernel == "forward":
            return KernelConfig(32, 32, 4, 1), KernelConfig(32, 16, 4, 1), FEW_QUERIES
        if backend == "hip":
            return KernelConfig(32, 16, 4, 1), KernelConfig(16, 32, 4, 1)
        return (
            KernelConfig(16, 32, 8, 1),
            KernelConfig(16, 16, 4, 1) if width > 64 or kernel == "backward" else KernelConfig(32, 32, 8, 1),
        )
    if kernel == "forward":
        return KernelConfig(64, 32, 4, 1), KernelConfig(64, 32, 8, 1), KernelConfig(32, 32, 4, 1), FEW_QUERIES
    if backend == "hip":  # 16 rows per warp: in a tile of 32 x 32 four warps would each compute all of it
        return KernelConfig(64, 16, 4, 1), KernelConfig(32, 16, 2, 1)
    if kernel == "backward":  # larger ones spill on sm_80
        return KernelConfig(32, 32, 4, 1), KernelConfig(32, 16, 4, 1)
    if width <= 64:  # 16 rows per warp: sums over columns need no other warp
        if kernel == "backward_queries":
            return KernelConfig(64, 32, 4, 1), KernelConfig(64, 16, 4, 1)
        return KernelConfig(64, 16, 4, 1), KernelConfig(32, 32, 4, 1)
    return KernelConfig(32, 32, 4, 1), KernelConfig(32, 64, 8, 1)


def refuse(q: Tensor, hidden: int) -> str | None:
    """Why the kernels cannot take these heads."""
    if device_kind(q.device) not in DEVICES:
        return f"it runs on a GPU, not on {q.device.type}"
    if not _INSTALLED and not is_planned():
        return NO_TRITON
    if before_ampere(q):
        return "it needs an NVIDIA device of compute capability 8.0 or newer, or one of AMD's"
    if q.dtype not in DTYPES:
        return f"it takes float32 and bfloat16, not {q.dtype}".replace("torch.", "")
    if q.shape[-1] not in WIDTHS:
        return f"head width {q.shape[-1]} is not one of {', '.join(map(str, WIDTHS))}"
    if hidden not in HIDDEN:
        return f"hidden width {hidden} is not one of {', '.join(map(str, HIDDEN))}"
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_half: Tensor,
    key_half: Tensor,
    w2: Tensor,
    b2: Tensor,
    form: str,
    window: int | None,
    out: Tensor,
    softmax: Tensor,
) -> None:
    call = TritonCall(q, k, v, query_half, key_half, w2, b2, form, window)
    parts = call.key_parts
    to, statistics = out[None], softmax[None]
    if parts > 1:
        to, statistics = (t.new_empty((parts, *t.shape), dtype=softmax.dtype) for t in (out, softmax))

    def run(config: KernelConfig) -> None:
        strides = (*call.strides, (*to.stride()[1:4], to.stride(0)))
        grid = (-(-q.shape[2] // config.rows), call.programs, parts)
        call.launch("forward", config, grid, *call.tensors, to, statistics, *strides)

    call.on_device("forward", run)
    if parts > 1:
        top, total = statistics.unbind(-1)
        best = top.amax(0)
        share = total * (top - best).exp()
        softmax.copy_(torch.stack([best, share.sum(0)], -1))
        out.copy_((to * (share / share.sum(0))[..., None]).sum(0))


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_half: Tensor,
    key_half: Tensor,
    w2: Tensor,
    b2: Tensor,
    out: Tensor,
    softmax: Tensor,
    form: str,
    window: int | None,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    d_query_half: Tensor,
    d_key_half: Tensor,
    d_w2: Tensor,
    d_b2: Tensor,
) -> None:
    call = TritonCall(q, k, v, query_half, key_half, w2, b2, form, window)
    d_out, softmax = _rows(d_out), softmax.contiguous()
    delta = (d_out.float() * out.float()).sum(-1)
    saved = (softmax, delta)
    strides = (d_out.stride()[:3], *call.strides)
    batch, heads, queries, hidden = query_half.shape
    grouped = k.shape[1] != heads
    # A group's queries are added up after all of its heads are done.
    per_head = tuple(
        t.new_empty((batch, heads, *k.shape[2:]), dtype=torch.float32) if grouped else t for t in (d_k, d_v)
    )

    def in_parts(tiles: int) -> tuple[Tensor, Tensor]:
        """Where each tile puts its part of d_w2 and d_b2."""
        return delta.new_empty((batch, heads, tiles, hidden)), delta.new_empty((batch, heads, tiles))

    def add_up(of_w2: Tensor, of_b2: Tensor) -> None:
        d_w2.copy_(of_w2.sum((0, 2)))
        d_b2.copy_(of_b2.sum((0, 2)))

    def at_once(config: KernelConfig) -> None:
        tiles = -(-k.shape[2] // config.rows)
        parts = in_parts(tiles)
        sum_q, sum_half = delta.new_zeros(q.shape), delta.new_zeros((batch, heads, hidden, queries))
        results = (sum_q, sum_half, *per_head, d_key_half, *parts)
        grid = (tiles, call.programs)
        call.launch("backward", config, grid, d_out, *call.tensors, *saved, *results, *strides)
        d_q.copy_(sum_q)
        d_query_half.copy_(sum_half.mT)
        add_up(*parts)

    def of_queries(config: KernelConfig) -> None:
        tiles = -(-queries // config.rows)
        parts = in_parts(tiles)
        results = (d_q, d_query_half, *parts)
        grid = (tiles, call.programs)
        call.launch("backward_queries", config, grid, d_out, *call.tensors, *saved, *results, *strides)
        add_up(*parts)

    def of_keys(config: KernelConfig) -> None:
        results = (*per_head, d_key_half)
        grid = (-(-k.shape[2] // config.rows), call.programs)
        call.launch("backward_keys", config, grid, d_out, *call.tensors, *saved, *results, *strides)

    if torch.are_deterministic_algorithms_enabled():
        call.on_device("backward_queries", of_queries)
        call.on_device("backward_keys", of_keys)
    else:
        call.on_device("backward", at_once)
    if grouped:
        for to, part in zip((d_k, d_v), per_head, strict=True):
            to.copy_(part.unflatten(1, (k.shape[1], -1)).sum(2))


class TritonCall:
    """The inputs as the kernels take them, and the constants they are compiled for."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_half: Tensor,
        key_half: Tensor,
        w2: Tensor,
        b2: Tensor,
        form: str,
        window: int | None,
    ) -> None:
        q, k, v = map(_rows, (q, k, v))
        if q.shape[2] >= TRANSPOSE_FROM:
            query_half, key_half = (t.float().mT.contiguous().mT for t in (query_half, key_half))
        self.tensors = (q, k, v, query_half, key_half, w2.contiguous(), b2.contiguous())
        self.strides = (*(t.stride()[:3] for t in (q, k, v)), query_half.stride(), key_half.stride())
        self.sizes = (
            *(q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2]),
            *(k.shape[2] if window is None else min(window, k.shape[2]), 1 / math.sqrt(q.shape[3])),
        )
        self.programs = q.shape[0] * q.shape[1]
        backend = _backend(q)
        self.constants = constants(q.shape[3], w2.shape[1], form, q.dtype, backend)
        lengths = tuple(n.bit_length() for n in (self.programs, q.shape[2], k.shape[2], self.sizes[4]))
        self.kind = (q.device, q.dtype, *self.constants.values(), *lengths)
        self.configs = {n: configs(n, q.shape[3], q.dtype, backend) for n in KERNELS}
        self.key_parts = 1
        if q.shape[2] <= FEW_QUERIES.rows:
            self.configs["forward"] = (FEW_QUERIES,)
            self.key_parts = max(1, min(PROGRAMS // self.programs, -(-k.shape[2] // PART_KEYS)))

    def launch(self, kernel: str, config: KernelConfig, grid: tuple[int, ...], *arguments: Any) -> None:
        from headgate.ops.triton import pair_gate_kernels

        getattr(pair_gate_kernels, kernel)[grid](
            *arguments,
            *self.sizes,
            **self.constants,
            ROWS=config.rows,
            COLUMNS=config.columns,
            num_warps=config.warps,
            num_stages=config.stages,
        )

    def on_device(self, kernel: str, run: Callable[[KernelConfig], None]) -> None:
        with _current_device(self.tensors[0]):
            run(_choose((kernel, *self.kind), self.configs[kernel], run))


def _backend(t: Tensor) -> str:
    if not t.is_cuda:
        return "interpreted"
    return "hip" if torch.version.hip else "cuda"


def constants(width: int, hidden: int, form: str, dtype: torch.dtype, backend: str) -> dict[str, Any]:
    """What a kernel is compiled for. On NVIDIA, fp32 is multiplied as three tf32 products, which keep its
    accuracy, and for bf16 the device's approximate tanh is more exact than bf16 can tell."""
    exact, nvidia = dtype == torch.float32, backend == "cuda"
    precision = "tf32x3" if nvidia and exact else "ieee"
    return {
        "D": width,
        "M": hidden,
        "LOG": form == "log",
        "FAST": nvidia and not exact,
        "PRECISION": "interpreted" if backend == "interpreted" else precision,
    }


_chosen: dict[tuple[Any, ...], KernelConfig] = {}


def _choose(
    kind: tuple[Any, ...], choices: tuple[KernelConfig, ...], run: Callable[[KernelConfig], None]
) -> KernelConfig:
    """The fastest of these configurations for this kind of call."""
    if len(choices) == 1 or torch.are_deterministic_algorithms_enabled():
        return choices[0]
    if kind not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return choices[0]
        from triton.testing import do_bench

        _chosen[kind] = min(
            choices, key=lambda config: float(do_bench(lambda: run(config), warmup=5, rep=20))
        )
    return _chosen[kind]


@contextmanager
def _current_device(t: Tensor) -> Iterator[None]:
    """Triton launches on the current device, wherever the tensors are."""
    if not t.is_cuda:
        yield
        return
    with torch.cuda.device(t.device):
        yield


def _rows(t: Tensor) -> Tensor:
    return t if t.stride(3) == 1 else t.contiguous()
