"""Span attention: every path against the dense truth in double precision, outputs and every gradient."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from headgate import ops
from headgate.errors import HeadgateError
from headgate.ops import Span, far_attention, reference, span_attention, window_attention
from headgate.ops.native import library
from headgate.ops.span.native import WIDTHS

EPS = torch.finfo(torch.float32).eps


@dataclass
class Case:
    """Inputs of one call and the upstream gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    d_lse: Tensor
    options: dict[str, Any]
    weight: Tensor | None = None
    key_bias: Tensor | None = None

    @property
    def biases(self) -> dict[str, Tensor]:
        given = {"ring_log_weight": self.weight, "key_bias": self.key_bias}
        return {name: t for name, t in given.items() if t is not None}

    @property
    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.biases.values()]

    def run(
        self,
        function: Any,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        **options: Any,
    ) -> dict[str, Tensor]:
        """Output, log-sum-exp and the gradients of all inputs, computed on the device."""
        inputs = [t.detach().to(device, dtype).requires_grad_() for t in self.inputs]
        biases = dict(zip(self.biases, inputs[3:], strict=True))
        out, lse = function(*inputs[:3], Span(**self.options), **biases, **options)
        grads = torch.autograd.grad([out, lse], inputs, [self.d_out.to(out), self.d_lse.to(lse)])
        names = ["out", "lse", "d_q", "d_k", "d_v", *(f"d_{name}" for name in biases)]
        found = [out.detach(), lse.detach(), *grads]
        return {name: tensor.cpu() for name, tensor in zip(names, found, strict=True)}

    def truth(self) -> dict[str, Tensor]:
        return self.run(reference.span_attention, dtype=torch.float64)

    def tolerances(self) -> dict[str, float]:
        """What rounding to single precision explains.

        A logit is known to about EPS times the sum of its terms' sizes, a sum of n weights to EPS * sqrt(n),
        so a probability to both as a ratio; the gradient of a score is a difference of numbers of the size of
        d_out . v, so its error is that size times as much.
        """
        q, k, v, d_out = (t.double() for t in (self.q, self.k, self.v, self.d_out))
        terms = reference.logits(q.abs(), k.abs()).max().item()
        if self.weight is not None:
            terms += self.weight.abs().max().item()
        largest = 0.0
        if self.key_bias is not None:
            largest = self.key_bias.abs().max().item()
            terms += (self.key_bias.amax(-1) - self.key_bias.amin(-1)).max().item()
        error = EPS * (2 * terms + 4 + k.shape[2] ** 0.5)
        d_p = (d_out @ reference.per_head(q, v).mT).abs().max().item() + self.d_lse.abs().max().item()
        scale = q.shape[-1] ** -0.5
        walk = (q.shape[1] / k.shape[1] * q.shape[2]) ** 0.5  # how a key's sum over queries adds up errors
        return {
            "out": error * v.abs().max().item(),
            "lse": error + EPS * largest,
            "d_q": error * d_p * k.abs().max().item() * scale,
            "d_k": error * d_p * q.abs().max().item() * scale * walk,
            "d_v": error * d_out.abs().max().item() * walk,
            "d_ring_log_weight": error * d_p,
            "d_key_bias": error * d_p * walk,
        }

    def check(self, backend: str, truth: dict[str, Tensor] | None = None, *, device: str = "cpu") -> None:
        result, tolerances = self.run(span_attention, backend=backend, device=device), self.tolerances()
        for name, expected in (truth or self.truth()).items():
            worst = (result[name].double() - expected).abs().max().item()
            shapes = f"q {tuple(self.q.shape)} k {tuple(self.k.shape)} {self.options}"
            assert worst <= tolerances[name], f"{backend} {name}: {worst} > {tolerances[name]} for {shapes}"


def case(
    batch: int = 1,
    heads: int = 4,
    groups: int = 2,
    queries: int = 50,
    keys: int | None = None,
    width: int = 16,
    *,
    scale: float = 1.0,
    order: str = "bhtd",
    seed: int = 0,
    bias: float = 0.0,
    **options: Any,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys

    def make(h: int, t: int, size: float) -> Tensor:
        if order == "bthd":
            return (torch.randn(batch, t, h, width, generator=generator) * size).transpose(1, 2)
        if order == "sliced":
            whole = torch.randn(batch, h + 1, t + 3, width + 5, generator=generator) * size
            return whole[:, 1:, 2:-1, 2:-3]
        if order == "bhdt":
            return (torch.randn(batch, h, width, t, generator=generator) * size).transpose(2, 3)
        return torch.randn(batch, h, t, width, generator=generator) * size

    result = Case(
        make(heads, queries, scale),
        make(groups, keys, scale),
        make(groups, keys, scale),
        make(heads, queries, 1.0),
        torch.randn(batch, heads, queries, generator=generator),
        options,
    )
    if "ring" in options:
        result.weight = torch.randn(batch, heads, queries, generator=generator) - 1
    if bias:
        result.key_bias = torch.randn(batch, heads, keys, generator=generator) * bias
    return result


def random_case(seed: int) -> Case:
    pick = random.Random(seed)
    groups = pick.choice([1, 1, 2, 3])
    keys = pick.choice([1, 2, 3, 5, 17, 48, 49, 63, 96, 97, 111, 130, 193, 210, 330])
    queries = pick.choice(
        [keys, keys, keys, 1, min(keys, 4), min(keys, 5), max(1, keys - 7), (keys + 1) // 2]
    )
    options: dict[str, Any] = {"start": pick.choice([0, 0, 0, 3, 70])}
    window = pick.choice([None, 0, 1, 5, 31, 47, 48, 100, 191, 400])
    if window is not None:
        options["window"] = window
        extra = pick.choice(["", "", "dense_prefix", "pinned", "both", "ring"])
        if extra in ("dense_prefix", "both"):
            options["dense_prefix"] = pick.choice([1, 10, 64, 75, 150])
        if extra in ("pinned", "both"):
            options["pinned"] = pick.choice([1, 4, 7, 72, 90])
        if extra == "ring":
            options["ring"] = max(1, window + pick.choice([0, 1, 13, 48, 200]))
    return case(
        pick.choice([1, 1, 2]),
        groups * pick.choice([1, 1, 2, 3]),
        groups,
        queries,
        keys,
        pick.choice(WIDTHS),
        scale=pick.choice([1.0, 1.0, 1.0, 1e-3, 0.1, 5.0, 30.0]),
        order=pick.choice(["bhtd", "bhtd", "bthd", "sliced", "bhdt"]),
        seed=seed,
        bias=pick.choice([0.0, 0.0, 2.0]),
        **options,
    )


@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(0, 120, 20)], ids=str)
def test_every_path_computes_the_truth_on_random_shapes(seeds: range) -> None:
    backends = ["torch", "reference"] + (["native"] if library.unavailable() is None else [])
    before = torch.get_num_threads()
    try:
        for seed in seeds:
            chosen = random_case(seed)
            torch.set_num_threads(1)  # for tensors this small a second thread only waits
            truth = chosen.truth()
            for backend in backends:
                torch.set_num_threads(2 if backend == "native" and seed % 2 else 1)
                chosen.check(backend, truth)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "chosen",
    [
        case(queries=1),
        case(queries=1, keys=300, window=299),
        case(queries=1, keys=2200),  # decoding: more than one piece of keys
        case(queries=3, keys=2200, window=1500, ring=2000),
        case(queries=2, keys=1500, window=30, pinned=5, heads=8, groups=1),
        case(window=0),
        case(window=0, ring=3),
        case(window=49),
        case(window=50),
        case(window=10**6),
        case(window=5, ring=5),
        case(window=47, ring=10**6),
        case(window=7, dense_prefix=20),
        case(window=7, dense_prefix=10**6),
        case(window=7, pinned=3, start=2),
        case(window=7, pinned=3, start=3),
        case(window=7, pinned=49),
        case(window=7, pinned=10**6, dense_prefix=11),
        case(queries=48, keys=97, window=13, dense_prefix=100, start=30),
        case(queries=2100, heads=2, groups=1, window=20),  # more than one strip of queries
        case(queries=3100, heads=1, groups=1, window=20, pinned=3),
        case(queries=2100, keys=2200, heads=1, groups=1, window=9, ring=60),
        case(queries=400, heads=1, groups=1),  # strips of a full span
        case(queries=400, heads=1, groups=1, window=300, dense_prefix=350),
        case(queries=3100, heads=2, groups=1, window=20, pinned=3, bias=1.0),
        case(queries=3, keys=2200, window=1500, ring=2000, bias=1.0),
    ],
    ids=lambda c: f"{c.q.shape[1]}h-{c.q.shape[2]}q-{c.k.shape[2]}k-{c.options}",
)
def test_edges(chosen: Case, fast_backend: str) -> None:
    chosen.check(fast_backend)


@pytest.mark.parametrize("window", [7, 8, 9])
def test_a_window_is_its_width_and_the_query_itself(backend: str, window: int) -> None:
    """With equal logits every attended value weighs the same, so one-hot values show which they were."""
    t = 20
    v = torch.eye(t, 32)[None, None]
    q = k = torch.zeros(1, 1, t, 32)
    seen = window_attention(q, k, v, window, backend=backend)[0, 0] > 0
    i, j = torch.arange(t)[:, None], torch.arange(32)[None]
    assert torch.equal(seen, (j <= i) & (i - j <= window))
    assert seen[-1].sum() == window + 1


def test_any_thread_count(threads: int, fast_backend: str) -> None:
    case(2, 4, 2, 333, 400, 32, window=100).check(fast_backend)
    case(1, 2, 1, 333, 400, 64).check(fast_backend)


@pytest.mark.parametrize("options", [{}, {"window": 64}, {"window": 20, "ring": 90}], ids=str)
def test_results_repeat_bit_for_bit(threads: int, fast_backend: str, options: dict[str, int]) -> None:
    chosen = case(1, 2, 1, 2100, 2110, 16, **options)
    first = chosen.run(span_attention, backend=fast_backend)
    for _ in range(2):
        again = chosen.run(span_attention, backend=fast_backend)
        for name in first:
            assert torch.equal(first[name], again[name]), name


def test_logits_of_a_hundred_million(backend: str) -> None:
    chosen = case(queries=60, window=30)
    chosen.q, chosen.k = chosen.q * 1e4, chosen.k * 1e4
    logits = reference.logits(chosen.q.double(), chosen.k.double())
    assert logits.abs().max() > 1e8
    result = chosen.run(span_attention, backend=backend)
    for name, tensor in result.items():
        assert tensor.isfinite().all(), name
    # Where one key wins by far the output is its value.
    i, j = reference.positions(chosen.q, chosen.k)
    top = logits.masked_fill(~reference.in_span(i, j, Span(30)), -torch.inf).topk(2).values
    clear = top[..., 0] - top[..., 1] > 1e3
    assert clear.float().mean() > 0.9
    torch.testing.assert_close(result["out"][clear], chosen.truth()["out"][clear].float())


@pytest.mark.parametrize("queries", [1, 300])
def test_a_running_sum_of_ten_thousand_is_a_bias_like_another(backend: str, queries: int) -> None:
    """As forgetting has it: the steps between neighbours are small and exact, the sum is large."""
    chosen = case(1, 2, 1, queries, 300, 16)
    steps = torch.randint(0, 2, (1, 2, 300), generator=torch.Generator().manual_seed(0)) / 16
    chosen.key_bias = steps.cumsum(-1)
    expected = chosen.truth()
    tolerances = chosen.tolerances()
    chosen.key_bias = chosen.key_bias + 1e4
    result = chosen.run(span_attention, backend=backend)
    for name in expected.keys() - {"lse"}:
        worst = (result[name].double() - expected[name]).abs().max().item()
        assert worst <= tolerances[name], f"{name}: {worst} > {tolerances[name]}"


def test_a_running_sum_that_spans_ten_thousand(backend: str) -> None:
    """Far keys then weigh nothing, and near ones as if the sum had begun with them."""
    chosen = case(1, 2, 2, 400, 400, 16)
    chosen.key_bias = torch.arange(400.0).mul(25).expand(1, 2, -1).clone()
    chosen.key_bias += torch.randint(0, 8, (1, 2, 400), generator=torch.Generator().manual_seed(0)) / 8
    expected, result = chosen.truth(), chosen.run(span_attention, backend=backend)
    for name in ("out", "d_q", "d_k", "d_v", "d_key_bias"):
        torch.testing.assert_close(result[name].double(), expected[name], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "groups"), [(1, 1, 2), (3, 70, 1), (1, 1100, 2), (210, 210, 1), (130, 400, 2)]
)
def test_a_bias_by_distance(fast_backend: str, queries: int, keys: int, groups: int) -> None:
    chosen = case(2, 4, groups, queries, keys, 32)
    table = torch.randn(4, keys + 3, generator=torch.Generator().manual_seed(1))
    results = []
    for dtype, backend in ((torch.float32, fast_backend), (torch.float64, "reference")):
        inputs = [t.to(dtype).requires_grad_() for t in (chosen.q, chosen.k, chosen.v, table)]
        out = ops.distance_biased_attention(*inputs, backend=backend)
        results.append([out, *torch.autograd.grad(out, inputs, chosen.d_out.to(dtype))])
    error = chosen.tolerances()
    error["d_table"] = error["d_key_bias"] * 2
    names = ("out", "d_q", "d_k", "d_v", "d_table")
    for name, found, expected in zip(names, *results, strict=True):
        assert (found.double() - expected).abs().max() <= error[name], name


def test_a_closed_ring_is_a_window(backend: str) -> None:
    chosen = case(queries=80)
    q, k, v = chosen.q, chosen.k, chosen.v
    closed = torch.full((1, 4, 80), -torch.inf)
    out, _ = span_attention(q, k, v, Span(9, ring=30), ring_log_weight=closed, backend=backend)
    torch.testing.assert_close(out, window_attention(q, k, v, 9, backend=backend))


def test_nan_is_not_lost(backend: str) -> None:
    chosen = case(queries=60)
    chosen.k[0, 1, 20, 3] = torch.nan
    out, _ = span_attention(chosen.q, chosen.k, chosen.v, Span(10), backend=backend)
    assert out[:, 2:, 20:31].isnan().all()
    assert out[:, :2].isfinite().all()
    if backend != "torch":  # PyTorch's fused attention adds its mask, and NaN - inf is NaN within a tile
        assert out[:, 2:, :20].isfinite().all()


def test_far_and_near_merge_to_full(backend: str) -> None:
    chosen = case(queries=90)
    q, k, v = chosen.q, chosen.k, chosen.v
    near, near_lse = span_attention(q, k, v, Span(20), backend=backend)
    near, near_lse = near[:, :, 21:], near_lse[:, :, 21:]
    far, far_lse = far_attention(q, k, v, 20, backend=backend)
    both = torch.logaddexp(near_lse, far_lse)
    merged = near * (near_lse - both).exp()[..., None] + far * (far_lse - both).exp()[..., None]
    torch.testing.assert_close(merged, ops.causal_attention(q, k, v, backend=backend)[:, :, 21:])


@pytest.mark.parametrize("used", ["out", "lse"])
@pytest.mark.parametrize("window", [None, 11])
def test_gradients_through_one_result_alone(fast_backend: str, used: str, window: int | None) -> None:
    chosen = case(queries=60)
    grads = []
    for dtype, function, options in (
        (torch.float32, span_attention, {"backend": fast_backend}),
        (torch.float64, reference.span_attention, {}),
    ):
        q, k, v = (t.to(dtype).requires_grad_() for t in (chosen.q, chosen.k, chosen.v))
        result = function(q, k, v, Span(window), **options)[used == "lse"]
        grads.append(torch.autograd.grad(result.square().sum(), [q, k]))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"window": 2, "ring": 6}, {"window": 3, "pinned": 2}], ids=str
)
@pytest.mark.parametrize("keys", [9, 11])
def test_gradcheck_of_the_torch_path(keys: int, options: dict[str, int]) -> None:
    chosen = case(1, 2, 1, 9, keys, 4, **options)
    inputs = [t.double().requires_grad_() for t in chosen.inputs]

    def function(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return span_attention(q, k, v, Span(**options), ring_log_weight=weight, backend="torch")

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("queries", [1, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_log_weight_of_another_dtype(fast_backend: str, dtype: torch.dtype, queries: int) -> None:
    """As autocast leaves it beside heads in fp32."""
    chosen = case(queries=queries, keys=90, window=5, ring=40)
    assert chosen.weight is not None
    chosen.weight = chosen.weight.to(dtype).float()  # the same numbers in both

    def attend(q: Tensor, k: Tensor, v: Tensor, span: Span, ring_log_weight: Tensor, **options: Any) -> Any:
        return span_attention(q, k, v, span, ring_log_weight=ring_log_weight.to(dtype), **options)

    same, found = (chosen.run(f, backend=fast_backend) for f in (span_attention, attend))
    for name in same:
        rounding = torch.finfo(dtype).eps if name == "d_ring_log_weight" else 0.0
        torch.testing.assert_close(found[name], same[name], rtol=rounding, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("window", [None, 20])
def test_other_dtypes_take_the_torch_path(dtype: torch.dtype, window: int | None) -> None:
    chosen = case(queries=90, window=window)
    q, k, v = (t.to(dtype) for t in (chosen.q, chosen.k, chosen.v))
    assert ops.explain(span_attention, q, k, v, Span(window)).path == "torch"
    result = chosen.run(span_attention, dtype=dtype)
    expected = chosen.truth()
    assert result["out"].dtype == result["d_k"].dtype == dtype
    assert result["lse"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.bfloat16: 0.06, torch.float16: 8e-3, torch.float64: 1e-12}[dtype]
    for name in expected:
        torch.testing.assert_close(result[name].double(), expected[name], rtol=tolerance, atol=tolerance)


def test_a_second_derivative_says_what_to_do(fast_backend: str) -> None:
    chosen = case()
    q = chosen.q.requires_grad_()
    out, _ = span_attention(q, chosen.k, chosen.v, backend=fast_backend)
    (d_q,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(HeadgateError, match=r"second derivative.*backend='reference'"):
        d_q.sum().backward()


def test_explain_says_why_not_native() -> None:
    chosen = case(width=16)
    here = library.unavailable() is None
    path = ops.explain("window_attention", chosen.q, chosen.k, chosen.v, 5).path
    assert path == ("native" if here else "torch")
    if not here:
        pytest.skip(f"the other reasons were not asked for: {library.unavailable()}")
    q = k = v = torch.zeros(1, 1, 4, 24)
    assert ops.explain("causal_attention", q, k, v).refusals == (
        ("native", "head width 24 is not one of 16, 32, 64, 96, 128"),
        ("sdpa", "it runs on a GPU, not on cpu"),
        ("varlen", "it runs on a GPU, not on cpu"),
        ("flex", "it runs on a GPU, not on cpu"),
    )
    q = k = v = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    text = str(ops.explain("causal_attention", q, k, v))
    assert "not 'native': it computes float32 on the CPU, not bfloat16 on cpu" in text
    with pytest.raises(HeadgateError, match="float32"):
        ops.causal_attention(q, k, v, backend="native")


def arguments(name: str, *, backward: bool) -> tuple[Any, ...]:
    chosen = case(2, 4, 2, 20, 24, 16, ring=9, bias=1.0)
    tensors: list[Tensor | None] = [t.requires_grad_(not backward) for t in chosen.inputs]
    tensors += [None, None]
    span = Span(3, ring=9, start=1).numbers()
    if not backward:
        return (*tensors, span)
    out, lse = getattr(torch.ops.headgate, name)(*tensors, span)
    return (chosen.d_out, chosen.d_lse, *tensors, out, lse, span)


@pytest.mark.compiles
def test_opcheck(fast_backend: str) -> None:
    name = f"span_{fast_backend}"
    forward = getattr(torch.ops.headgate, name).default
    backward = getattr(torch.ops.headgate, f"{name}_backward").default
    torch.library.opcheck(forward, arguments(name, backward=False))
    torch.library.opcheck(backward, arguments(name, backward=True))


@pytest.mark.compiles
def test_compiles_to_one_graph(fast_backend: str) -> None:
    chosen = case(2, 4, 2, 40, 40, 16, order="bthd", window=9)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = window_attention(q, k, v, 9, backend=fast_backend)
        return out.transpose(1, 2).flatten(2).square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        inputs = [t.clone().requires_grad_() for t in (chosen.q, chosen.k, chosen.v)]
        results.append(torch.autograd.grad(function(*inputs), inputs))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_the_projection_after_it_needs_no_copy(fast_backend: str) -> None:
    chosen = case(order="bthd")
    out, _ = span_attention(chosen.q, chosen.k, chosen.v, backend=fast_backend)
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()
