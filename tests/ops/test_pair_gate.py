"""Pair-gated attention: every path against the dense truth in double precision, output and every gradient."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from headgate import ops
from headgate.errors import HeadgateError
from headgate.ops import pair_gated_attention, reference
from headgate.ops.native import library
from headgate.ops.pair_gate.native import HIDDEN
from headgate.ops.span.native import WIDTHS

EPS = torch.finfo(torch.float32).eps
GELU, SLOPE = 2e-6, 8e-6
"""What the native path's gelu and its slope are off by at most."""
NAMES = ("out", "d_q", "d_k", "d_v", "d_query_half", "d_key_half", "d_w2", "d_b2")
FORMS = ("multiply", "log")


@dataclass
class Case:
    """Inputs of one call, q, k, v, query_half, key_half, w2, b2, and the upstream gradient."""

    inputs: list[Tensor]
    d_out: Tensor
    options: dict[str, Any]

    def run(
        self,
        function: Any,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        **options: Any,
    ) -> dict[str, Tensor]:
        """Output and the gradients of all inputs, computed on the device."""
        inputs = [t.detach().to(device, dtype).requires_grad_() for t in self.inputs]
        out = function(*inputs, **self.options, **options)
        grads = torch.autograd.grad(out, inputs, self.d_out.to(out))
        return {name: t.cpu() for name, t in zip(NAMES, [out.detach(), *grads], strict=True)}

    def truth(self) -> dict[str, Tensor]:
        return self.run(reference.pair_gated_attention, dtype=torch.float64)

    def tolerances(self) -> dict[str, float]:
        """What rounding to single precision explains, and the gelu's own error.

        A score is known to EPS times the sum of its terms' sizes, the gate's logit likewise and to gelu's
        error times its weights; a probability to both as a ratio. The gradient of a score is a difference of
        numbers of the size of d_out . v, so its error is that size times as much; a sum over n of them adds
        up as sqrt(n).
        """
        q, k, v, query_half, key_half, w2, b2 = (t.double() for t in self.inputs)
        d_out = self.d_out.double()
        logits = reference.logits(q.abs(), k.abs()).max().item()
        weights = w2.abs().sum(-1).max().item()
        hidden = query_half.abs().max().item() + key_half.abs().max().item()
        gate = weights * (GELU + 4 * EPS * hidden) + 4 * EPS * (weights * hidden + b2.abs().max().item())
        bend = logits / 4 if self.options["form"] == "multiply" else 1.0  # of the score over the gate's logit
        error = EPS * (2 * logits + 6 + k.shape[2] ** 0.5) + gate * bend
        d_p = 2 * (d_out @ reference.per_head(q, v).mT).abs().max().item()
        walk = (q.shape[1] / k.shape[1] * q.shape[2]) ** 0.5
        pairs = (q.shape[0] * q.shape[2]) ** 0.5
        d_gate = d_p * bend * (error + gate)
        d_half = (d_gate + d_p * bend * SLOPE) * 1.2 * w2.abs().max().item()
        scale = q.shape[-1] ** -0.5
        return {
            "out": error * v.abs().max().item(),
            "d_q": (error + gate) * d_p * k.abs().max().item() * scale,
            "d_k": (error + gate) * d_p * q.abs().max().item() * scale * walk,
            "d_v": error * d_out.abs().max().item() * walk,
            "d_query_half": d_half,
            "d_key_half": d_half * q.shape[2] ** 0.5,
            "d_w2": (d_gate * hidden + d_p * bend * GELU) * pairs,
            "d_b2": d_gate * pairs,
        }

    def check(self, backend: str, truth: dict[str, Tensor] | None = None, *, device: str = "cpu") -> None:
        result, tolerances = self.run(pair_gated_attention, backend=backend, device=device), self.tolerances()
        for name, expected in (truth or self.truth()).items():
            worst = (result[name].double() - expected).abs().max().item()
            shapes = f"{[tuple(t.shape) for t in self.inputs[:4]]} {self.options}"
            assert worst <= tolerances[name], f"{backend} {name}: {worst} > {tolerances[name]} for {shapes}"


def case(
    batch: int = 1,
    heads: int = 4,
    groups: int = 2,
    queries: int = 50,
    keys: int | None = None,
    width: int = 16,
    hidden: int = 8,
    *,
    form: str = "multiply",
    scale: float = 1.0,
    half_scale: float = 1.0,
    order: str = "bhtd",
    bias: float = 2.0,
    seed: int = 0,
    **options: Any,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys

    def make(h: int, t: int, width: int, size: float) -> Tensor:
        if order == "bthd":
            return (torch.randn(batch, t, h, width, generator=generator) * size).transpose(1, 2)
        if order == "sliced":
            whole = torch.randn(batch, h + 1, t + 3, width + 5, generator=generator) * size
            return whole[:, 1:, 2:-1, 2:-3]
        if order == "bhdt":
            return (torch.randn(batch, h, width, t, generator=generator) * size).transpose(2, 3)
        return torch.randn(batch, h, t, width, generator=generator) * size

    w2 = torch.randn(hidden, heads, generator=generator).T / hidden**0.5
    inputs = [
        make(heads, queries, width, scale),
        make(groups, keys, width, scale),
        make(groups, keys, width, scale),
        make(heads, queries, hidden, half_scale),
        make(heads, keys, hidden, half_scale),
        w2 if order == "bhdt" else w2.contiguous(),
        torch.randn(heads, generator=generator) + bias,
    ]
    return Case(inputs, make(heads, queries, width, 1.0), {"form": form, **options})


def random_case(seed: int) -> Case:
    pick = random.Random(seed)
    groups = pick.choice([1, 1, 2, 3])
    keys = pick.choice([1, 2, 3, 5, 17, 47, 48, 49, 63, 96, 97, 111, 130, 193])
    return case(
        pick.choice([1, 1, 2]),
        groups * pick.choice([1, 1, 2, 3]),
        groups,
        pick.choice([keys, keys, keys, 1, min(keys, 4), max(1, keys - 7), (keys + 1) // 2]),
        keys,
        pick.choice(WIDTHS),
        pick.choice(HIDDEN),
        form=pick.choice(FORMS),
        scale=pick.choice([1.0, 1.0, 1.0, 1e-3, 0.1, 5.0, 30.0]),
        half_scale=pick.choice([1.0, 1.0, 1e-3, 0.1, 5.0, 30.0]),
        order=pick.choice(["bhtd", "bhtd", "bthd", "sliced", "bhdt"]),
        bias=pick.choice([2.0, 2.0, 0.0, -5.0]),
        seed=seed,
        window=pick.choice([None, None, 0, 1, 5, 31, 47, 48, 100, 400]),
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small shapes run no faster on two, and much slower beside other work; tests of threads ask for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(0, 80, 20)], ids=str)
def test_every_path_computes_the_truth_on_random_shapes(seeds: range) -> None:
    backends = ["torch", "reference"] + (["native"] if library.unavailable() is None else [])
    for seed in seeds:
        chosen = random_case(seed)
        truth = chosen.truth()
        for backend in backends:
            chosen.check(backend, truth)


@pytest.mark.parametrize(
    ("width", "hidden"), [(16, 4), (16, 32), (32, 8), (64, 16), (64, 4), (96, 32), (128, 8), (128, 16)]
)
def test_the_contract(width: int, hidden: int, fast_backend: str) -> None:
    """1e-4 of the greatest value, for the output and each gradient."""
    for form in FORMS:
        chosen = case(1, 2, 1, 110, 120, width, hidden, form=form)
        result, truth = chosen.run(pair_gated_attention, backend=fast_backend), chosen.truth()
        for name, expected in truth.items():
            worst = (result[name].double() - expected).abs().max() / expected.abs().max()
            assert worst < 1e-4, f"{form} {name}: {worst}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape",
    [
        {"queries": 1},
        {"queries": 1, "keys": 700},  # decoding: more than one chunk of keys
        {"queries": 1, "keys": 300, "window": 299},
        {"window": 0},
        {"window": 49},
        {"window": 10**6},
        {"queries": 300, "heads": 1, "groups": 1},
        {"queries": 300, "heads": 6, "groups": 2, "window": 100, "width": 64, "hidden": 16},
        {"queries": 200, "keys": 333, "hidden": 32, "window": 40},
    ],
    ids=str,
)
def test_edges(shape: dict[str, int], form: str, fast_backend: str) -> None:
    case(form=form, **shape).check(fast_backend)


@pytest.mark.parametrize("form", FORMS)
def test_a_window_is_its_width_and_the_query_itself(backend: str, form: str) -> None:
    """With equal scores every attended value weighs the same, so one-hot values show which they were."""
    t, window = 20, 8
    q = k = torch.zeros(1, 1, t, 32)
    half = torch.zeros(1, 1, t, 4)
    w2, b2 = torch.ones(1, 4), torch.zeros(1)
    v = torch.eye(t, 32)[None, None]
    out = pair_gated_attention(q, k, v, half, half, w2, b2, form=form, window=window, backend=backend)
    i, j = torch.arange(t)[:, None], torch.arange(32)[None]
    assert torch.equal(out[0, 0] > 0, (j <= i) & (i - j <= window))


@pytest.mark.parametrize("form", FORMS)
def test_the_newest_queries_alone_give_the_same(backend: str, form: str) -> None:
    chosen = case(queries=130, form=form)
    q, k, v, query_half, *rest = chosen.inputs
    whole = pair_gated_attention(*chosen.inputs, form=form, backend=backend)
    for last in (1, 3, 60):
        part = pair_gated_attention(
            q[:, :, -last:], k, v, query_half[:, :, -last:], *rest, form=form, backend=backend
        )
        torch.testing.assert_close(part, whole[:, :, -last:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_any_thread_count(threads: int, fast_backend: str, form: str) -> None:
    case(2, 4, 2, 100, 110, 32, form=form, window=60).check(fast_backend)
    case(1, 1, 1, 150, 150, 64, 16, form=form).check(fast_backend)


@pytest.mark.parametrize("count", [3, 5, 8])
def test_more_threads_than_heads(count: int, fast_backend: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        case(1, 3, 1, 300, 320, 32, 16).check(fast_backend)
        case(1, 1, 1, 60, 60, 32, 16, form="log").check(fast_backend)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2), (3, 1, 1)], ids=str)
def test_results_repeat_bit_for_bit(threads: int, fast_backend: str, shape: tuple[int, int, int]) -> None:
    chosen = case(*shape, 130, 140, 32, 16)
    first = chosen.run(pair_gated_attention, backend=fast_backend)
    for _ in range(2):
        again = chosen.run(pair_gated_attention, backend=fast_backend)
        for name in first:
            assert torch.equal(first[name], again[name]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [-1e4, -200.0, -30.0, 30.0, 1e4])
def test_saturated_gates(backend: str, form: str, bias: float) -> None:
    """Closed, the factor makes every score 0 and the logarithm shifts them; open, there is no gate."""
    chosen = case(queries=70, form=form, bias=0.0)
    chosen.inputs[6] = torch.full((4,), bias)
    result = chosen.run(pair_gated_attention, backend=backend)
    for name, tensor in result.items():
        assert tensor.isfinite().all(), name
    q, k, v = chosen.inputs[:3]
    if bias > 0:
        expected = ops.causal_attention(q, k, v, backend="reference")
        torch.testing.assert_close(result["out"], expected, rtol=1e-4, atol=1e-5)
    elif form == "multiply":
        expected = ops.causal_attention(q * 0, k, v, backend="reference")
        torch.testing.assert_close(result["out"], expected, rtol=1e-4, atol=1e-5)
    elif bias > -1e3:
        chosen.check(backend)


@pytest.mark.parametrize("form", FORMS)
def test_extreme_inputs_stay_finite(backend: str, form: str) -> None:
    for which in (slice(0, 2), slice(3, 5), slice(0, 5)):
        chosen = case(queries=60, form=form, window=30)
        chosen.inputs[which] = [t * 1e4 for t in chosen.inputs[which]]
        for name, tensor in chosen.run(pair_gated_attention, backend=backend).items():
            assert tensor.isfinite().all(), (name, which)


def test_nan_is_not_lost(backend: str) -> None:
    for tensor in (1, 4):  # a key, a key's half
        chosen = case(queries=60, groups=4, window=10)
        chosen.inputs[tensor][0, 1, 20, 3] = torch.nan
        out = pair_gated_attention(*chosen.inputs, **chosen.options, backend=backend)
        assert out[:, 1, 20:31].isnan().all()
        assert out[:, [0, 2, 3]].isfinite().all()
        assert out[:, 1, :20].isfinite().all()


def test_nothing_kept_for_the_backward_grows_faster_than_the_sequence(fast_backend: str) -> None:
    def kept(length: int) -> int:
        sizes: list[int] = []
        inputs = [t.requires_grad_() for t in case(queries=length).inputs]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            pair_gated_attention(*inputs, form="multiply", backend=fast_backend)
        return sum(sizes)

    assert 0 < kept(400) < 2.1 * kept(200)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [None, 2])
def test_gradcheck_of_the_torch_path(form: str, window: int | None) -> None:
    chosen = case(1, 2, 1, 4, 6, 3, 2)
    inputs = [t.double().requires_grad_() for t in chosen.inputs]
    assert torch.autograd.gradcheck(
        lambda *t: pair_gated_attention(*t, form=form, window=window, backend="torch"), inputs
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_take_the_torch_path(dtype: torch.dtype) -> None:
    chosen = case(queries=90)
    inputs = [t.to(dtype) for t in chosen.inputs]
    assert ops.explain(pair_gated_attention, *inputs, form="log").path == "torch"
    result, expected = chosen.run(pair_gated_attention, dtype=dtype), chosen.truth()
    tolerance = {torch.bfloat16: 0.08, torch.float16: 1e-2, torch.float64: 1e-12}[dtype]
    for name in NAMES:
        assert result[name].dtype == dtype
        worst = (result[name].double() - expected[name]).abs().max() / expected[name].abs().max()
        assert worst < tolerance, name


def test_a_second_derivative_says_what_to_do(fast_backend: str) -> None:
    inputs = [t.requires_grad_() for t in case().inputs]
    out = pair_gated_attention(*inputs, form="log", backend=fast_backend)
    (d_q,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(HeadgateError, match=r"second derivative.*backend='reference'"):
        d_q.sum().backward()


def test_explain_says_why_not_native() -> None:
    here = library.unavailable() is None
    chosen = case()
    path = ops.explain("pair_gated_attention", *chosen.inputs, form="log").path
    assert path == ("native" if here else "torch")
    if not here:
        pytest.skip(f"the other reasons were not asked for: {library.unavailable()}")
    refusals = {
        "head width 24 is not one of 16, 32, 64, 96, 128": case(width=24).inputs,
        "hidden width 5 is not one of 4, 8, 16, 32": case(hidden=5).inputs,
        "it computes float32 on the CPU, not float64 on cpu": [t.double() for t in chosen.inputs],
        "it takes one dtype, not float32 and float64": [*chosen.inputs[:6], chosen.inputs[6].double()],
    }
    for reason, inputs in refusals.items():
        explanation = ops.explain(pair_gated_attention, *inputs, form="log")
        assert explanation.refusals == (("native", reason), ("triton", "it runs on a GPU, not on cpu"))
        assert explanation.path == "torch"
        with pytest.raises(HeadgateError, match=reason):
            pair_gated_attention(*inputs, form="log", backend="native")


def test_wrong_arguments_are_named() -> None:
    inputs = case().inputs
    with pytest.raises(HeadgateError, match="form='add' is not a choice; expected 'multiply' or 'log'"):
        pair_gated_attention(*inputs, form="add")  # type: ignore[arg-type]
    with pytest.raises(HeadgateError, match=r"key_half has shape \(1, 4, 49, 8\); expected \(1, 4, 50, 8\)"):
        pair_gated_attention(*inputs[:4], inputs[4][:, :, 1:], *inputs[5:], form="log")


@pytest.mark.compiles
@pytest.mark.parametrize("form", FORMS)
def test_opcheck(fast_backend: str, form: str) -> None:
    name = f"pair_gate_{fast_backend}"
    forward = getattr(torch.ops.headgate, name).default
    backward = getattr(torch.ops.headgate, f"{name}_backward").default
    chosen = case(2, 4, 2, 20, 24)
    saved = forward(*chosen.inputs, form, 9)
    torch.library.opcheck(backward, (chosen.d_out, *chosen.inputs, *saved, form, 9))
    torch.library.opcheck(forward, (*(t.requires_grad_() for t in chosen.inputs), form, 9))


@pytest.mark.compiles
def test_compiles_to_one_graph(fast_backend: str) -> None:
    chosen = case(2, 4, 2, 40, order="bthd")

    def loss(*inputs: Tensor) -> Tensor:
        out = pair_gated_attention(*inputs, form="multiply", window=9, backend=fast_backend)
        return out.transpose(1, 2).flatten(2).square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        inputs = [t.clone().requires_grad_() for t in chosen.inputs]
        results.append(torch.autograd.grad(function(*inputs), inputs))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)
