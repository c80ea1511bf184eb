"""Span attention beside its peers: causal SDPA, local-attention and FlexAttention's forward, in one run.

    python benchmarks/span_peers.py                     windows, full spans and small shapes
    python benchmarks/span_peers.py --only window --lengths 1024 2048 --backend torch
    python benchmarks/span_peers.py --threads 1         on a busy machine: CPU time of the one thread

Forward and backward are timed together, the routes in turn, so that a disturbance hits all of them. A ratio
is the median over the rounds of (peer's time / ours) in the same round, with the quartiles behind it. Useful
flops are those of the allowed pairs alone: 2 products in the forward and 5 in the backward, 2 * D flops a
pair each; `of sgemm` is that per second as a share of a 2048 x 2048 matrix product's, timed in the same
rounds. Extra memory is the growth of the process's peak during one forward and backward, measured in a
process of its own.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.machine import Peak, keep_memory
from headgate.ops import causal_attention, window_attention
from headgate.ops.native import library

Route = Callable[[Tensor, Tensor, Tensor], Tensor]


def clock() -> float:
    """One thread's own time is not disturbed by other processes; several threads' can only be wall time."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def ours(window: int | None, backend: str) -> Route:
    if window is None:
        return lambda q, k, v: causal_attention(q, k, v, backend=backend)
    return lambda q, k, v: window_attention(q, k, v, window, backend=backend)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def local_attention(window: int) -> Route | None:
    try:
        from local_attention import LocalAttention
    except ImportError:
        return None
    options = {"use_rotary_pos_emb": False, "exact_windowsize": True}
    return LocalAttention(window, causal=True, look_backward=1, look_forward=0, **options)


def flex_forward(window: int, length: int) -> Route | None:
    """Compiled FlexAttention, which has no backward on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j <= window)

    try:
        mask = create_block_mask(allowed, None, None, length, length, device="cpu")
        compiled = torch.compile(flex_attention, dynamic=False)
        compiled(*(torch.randn(1, 8, length, 64) for _ in range(3)), block_mask=mask)
    except Exception as error:  # what it refuses differs from release to release
        print(f"FlexAttention was not timed: {str(error).splitlines()[0]}")
        return None
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def make(batch: int, heads: int, length: int, width: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, length, width)
    q, k, v, d_out = (torch.randn(shape, generator=generator) for _ in range(4))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()], d_out


def seconds(route: Route, inputs: list[Tensor], d_out: Tensor | None) -> float:
    began = clock()
    if d_out is None:
        with torch.no_grad():
            route(*inputs)
    else:
        torch.autograd.grad(route(*inputs), inputs, d_out)
    return clock() - began


def pairs(length: int, window: int | None) -> int:
    reach = length - 1 if window is None else min(window, length - 1)
    return (reach + 1) * (reach + 2) // 2 + (length - reach - 1) * (reach + 1)


def spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:5.2f}x ({low:.2f}-{high:.2f})"


def rounds(
    routes: dict[str, Route], inputs: list[Tensor], d_out: Tensor | None, repeats: int
) -> dict[str, list[float]]:
    """The seconds of every route in every round, and of the matrix product."""
    square = torch.randn(2048, 2048)
    times: dict[str, list[float]] = {name: [] for name in [*routes, "sgemm"]}
    for n in range(repeats + 1):  # the first warms up
        for name, route in routes.items():
            spent = seconds(route, inputs, d_out)
            if n > 0:
                times[name].append(spent)
        began = clock()
        square @ square
        if n > 0:
            times["sgemm"].append(clock() - began)
    return times


def peak_growth(shape: tuple[int, int, int, int], window: int | None, backend: str) -> float:
    """Megabytes."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_growth, (shape, window, backend))


def _peak_growth(shape: tuple[int, int, int, int], window: int | None, backend: str) -> float:
    route = (
        sdpa
        if backend == "sdpa"
        else local_attention(window or 0)
        if backend == "local"
        else ours(window, backend)
    )
    assert route is not None
    small, d_small = make(1, shape[1], 512, shape[3])
    seconds(route, small, d_small)  # what loading and compiling take is not counted
    inputs, d_out = make(*shape)
    peak = Peak()
    seconds(route, inputs, d_out)
    return peak.bytes() / 2**20


def table(shape: tuple[int, int, int, int], window: int | None, options: argparse.Namespace) -> None:
    batch, heads, length, width = shape
    inputs, d_out = make(*shape)
    routes: dict[str, Route] = {"headgate": ours(window, options.backend), "causal SDPA": sdpa}
    peer = None if window is None or length % window else local_attention(window)
    if peer is not None:
        routes["local-attention"] = peer
    times = rounds(routes, inputs, d_out, max(3, min(options.repeats, options.repeats * 4096 // length)))
    flops = 7 * 2 * width * pairs(length, window) * batch * heads
    share = [
        flops / own / (2 * 2048**3 / product)
        for own, product in zip(times["headgate"], times["sgemm"], strict=True)
    ]
    name = "full" if window is None else f"window {window}"
    own = statistics.median(times["headgate"]) * 1e3
    print(f"B={batch} H={heads} D={width} T={length} {name}: {own:.1f} ms", end="")
    print(f", of sgemm {statistics.median(share):.2f}", end="")
    for other in list(routes)[1:]:
        ratios = [peer / own for own, peer in zip(times["headgate"], times[other], strict=True)]
        print(f"; faster than {other} {spread(ratios)}", end="")
    print(flush=True)
    if options.memory:
        others = [] if window is None else ["local"] if peer is not None else []
        for backend in [options.backend, *others]:
            print(
                f"    extra peak memory, {backend}: {peak_growth(shape, window, backend):.0f} MB", flush=True
            )
    if options.flex and window is not None:
        flex = flex_forward(window, length)
        if flex is not None:
            both: dict[str, Route] = {"headgate": ours(window, options.backend), "flex": flex}
            alone = rounds(both, inputs, None, 5)
            ratios = [f / own for own, f in zip(alone["headgate"], alone["flex"], strict=True)]
            print(f"    forward alone: faster than compiled FlexAttention {spread(ratios)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, help="torch's own setting if not given")
    parser.add_argument("--backend", default="native", help="native, torch or auto")
    parser.add_argument("--only", choices=["window", "full", "small"], help="one of the tables")
    parser.add_argument("--memory", action="store_true", help="measure extra peak memory as well")
    parser.add_argument("--flex", action="store_true", help="time FlexAttention's forward as well")
    options = parser.parse_args()
    keep_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    build = library.instruction_set()
    print(f"{torch.get_num_threads()} threads, native build: {build}, path: {options.backend}")
    if options.only in (None, "window"):
        for length in options.lengths:
            table((1, 8, length, 64), options.window, options)
    if options.only in (None, "full"):
        for length in [512, *(n for n in options.lengths if n <= 4096)]:
            table((1, 8, length, 64), None, options)
    if options.only in (None, "small"):
        for length, window in ((256, 32), (512, 64), (256, None), (512, None)):
            table((8, 4, length, 32), window, options)


if __name__ == "__main__":
    main()
