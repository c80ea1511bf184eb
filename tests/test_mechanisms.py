"""The contract that every mechanism meets, over the registry and each mechanism's ablations.

A mechanism registered anywhere is tested by existing: `mechanism_example` below stands for somebody else's
file.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

import mechanism_example  # noqa: F401  (registers a mechanism, as a user's own file would)
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headgate
from headgate.errors import HeadgateError
from headgate.mechanisms import MECHANISMS, Mechanism, Past
from headgate.mechanisms.contract import build_mechanism
from headgate.model.cache import LayerCache
from headgate.ops import reference
from headgate.ops.dispatch import forced

WINDOW, PREFIX, BLOCK = 16, 40, 8
SMALL = {
    "window": WINDOW,
    "max_window": 24,
    "dense_prefix": PREFIX,
    "block": BLOCK,
    "stride": 8,
    "hidden": 8,
    "stretch": 2,
}
SMALL_OF = {"nsa": {"top_k": 4}}
HEADS, WIDTH, MODEL = 4, 16, 24
KINDS = {
    "fp32": (torch.float32, "auto", 1e-4),
    "fp32-torch": (torch.float32, "torch", 1e-4),
    "fp64": (torch.float64, "torch", 1e-8),
}
SHAPES = [
    # length, batch, key heads, kind: every length with grouped heads and without, on every path
    (1, 1, HEADS, "fp32"),
    (1, 3, 2, "fp32-torch"),
    (2, 3, 2, "fp32"),
    (WINDOW - 1, 1, 2, "fp32"),
    (WINDOW, 1, HEADS, "fp32-torch"),
    (WINDOW + 1, 3, 2, "fp32"),
    (WINDOW + 1, 1, 2, "fp64"),
    (2 * WINDOW + 3, 3, HEADS, "fp32"),
    (63, 1, 2, "fp32-torch"),
    (63, 3, HEADS, "fp64"),
    (111, 1, 2, "fp32"),
    (111, 3, HEADS, "fp32-torch"),
]
SUBTRACTING = ("differential", "gated-delta")
"""What takes away beside adding: a value's weight may be negative."""
EXTREMES = [
    # path, length, scale of the inputs, value of every bias
    ("auto", 1, 1e4, None),
    ("torch", PREFIX + WINDOW + 5, 1e4, -1e4),
    ("auto", PREFIX + WINDOW + 5, 1e4, 1e4),
    ("torch", 1, 1e-4, 1e4),
    ("auto", PREFIX + WINDOW + 5, 1e-4, -1e4),
    ("torch", PREFIX + WINDOW + 5, 1.0, 1e4),
    ("auto", PREFIX + WINDOW + 5, 1.0, -1e4),
]


@dataclass(frozen=True)
class Variant:
    name: str
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.options)])

    def build(self, kv_heads: int = HEADS, head_dim: int = WIDTH, **more: Any) -> Mechanism:
        known = {f.name for f in fields(MECHANISMS.get(self.name).Options)}
        small = SMALL | SMALL_OF.get(self.name, {})
        options = {key: value for key, value in small.items() if key in known} | dict(self.options) | more
        return as_a_later_layer(
            build_mechanism(
                self.name, d_model=MODEL, n_heads=HEADS, head_dim=head_dim, n_kv_heads=kv_heads, **options
            )
        )


def as_a_later_layer(mechanism: Mechanism) -> Mechanism:
    """What reads the first layer's values gets some, a function of its own."""
    prepare = mechanism.prepare

    def with_first_values(x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, ...]:
        past.first_values = v.flip(-1)
        return prepare(x, q, k, v, past)

    if mechanism.uses_first_values:
        mechanism.prepare = with_first_values
    return mechanism


def variants() -> list[Variant]:
    """Every mechanism with every choice of its options that no ablation makes, and each of these ablated."""
    found = []
    for name in MECHANISMS.names():
        cls = MECHANISMS.get(name)
        ablated = {option for ablation in cls.ablations.values() for option in ablation}
        hints = get_type_hints(cls.Options)
        bases: list[dict[str, Any]] = [{}]
        for field in fields(cls.Options):
            if field.name == "positions":
                continue  # nothing is rotated here: test_decoder has it
            if get_origin(hints[field.name]) is Literal and field.name not in ablated:
                bases += [
                    {field.name: choice} for choice in get_args(hints[field.name]) if choice != field.default
                ]
            elif hints[field.name] is int and field.default == 0:
                bases += [{field.name: 3}]
        for base in bases:
            found += [Variant(name, tuple((base | dict(a)).items())) for a in ({}, *cls.ablations.values())]
    return found


VARIANTS = variants()
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


@pytest.fixture(params=["auto", "torch"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The implementation that ops take: the best one for the input (native in fp32), or plain PyTorch."""
    with forced(request.param):
        yield request.param


each_path = pytest.mark.usefixtures("path")


def tensors(
    variant: Variant,
    *,
    length: int,
    batch: int = 1,
    kv_heads: int = HEADS,
    head_dim: int = WIDTH,
    seed: int = 0,
) -> dict[str, Tensor]:
    """x, q, k, v in fp64. q and k are multiples of 1/8, so that logits are exact in any precision and order
    of summation: selections by rank then agree between paths, and have ties to break."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": draw(batch, length, MODEL),
        "q": (draw(batch, HEADS, length, head_dim) * 8).round() / 8,
        "k": (draw(batch, kv_heads, length, head_dim) * 8).round() / 8,
        "v": draw(batch, kv_heads, length, head_dim),
    }


def shaken(mechanism: Mechanism, seed: int = 1, by: float = 0.3) -> Mechanism:
    """Parameters moved off their initial values, so that zeros and ones hide nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=by)
    return mechanism


def results(
    mechanism: Mechanism, run: Any, inputs: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The output and the gradients of all inputs and parameters, for one random direction."""
    mechanism.zero_grad()
    leaves = {name: t.detach().clone().to(dtype).requires_grad_() for name, t in inputs.items()}
    out = run(*leaves.values())
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (out * direction.to(out)).sum().backward()
    gradients = {**leaves, **dict(mechanism.named_parameters())}
    return {"output": out.detach()} | {
        name: torch.zeros_like(t) if t.grad is None else t.grad.clone() for name, t in gradients.items()
    }


def assert_close(given: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """Relative to the largest expected value, or to 0.1 where all vanish: they are then differences of terms
    of size 1, as q's gradient at T=1, whose rounding does not vanish with them."""
    given, expected = given.double(), expected.double()
    error = (given - expected).abs().max().item() / max(0.1, expected.abs().max().item())
    assert error <= tolerance, f"{what}: relative error {error:.2e} above {tolerance:.0e}"


@each_variant
@pytest.mark.parametrize(("length", "batch", "kv_heads", "kind"), SHAPES)
def test_forward_is_the_reference(
    variant: Variant, length: int, batch: int, kv_heads: int, kind: str
) -> None:
    dtype, path, tolerance = KINDS[kind]
    mechanism = shaken(variant.build(kv_heads)).to(dtype)
    inputs = tensors(variant, length=length, batch=batch, kv_heads=kv_heads, seed=length)
    with forced(path):
        fast = results(mechanism, mechanism, inputs, dtype)
    plain = results(mechanism, mechanism.reference, inputs, dtype)
    for name in plain:
        assert_close(fast[name], plain[name], tolerance, name)


@each_variant
def test_forward_over_reference_ops_is_the_reference(variant: Variant) -> None:
    """What a mechanism makes of its ops, apart from how they are computed."""
    mechanism = shaken(variant.build(2)).double()
    inputs = tensors(variant, length=63, batch=2, kv_heads=2)
    with forced("reference"):
        composed = results(mechanism, mechanism, inputs, torch.float64)
    plain = results(mechanism, mechanism.reference, inputs, torch.float64)
    for name in plain:
        assert_close(composed[name], plain[name], 1e-8, name)


@each_variant
def test_a_plain_span_says_all_there_is_to_it(variant: Variant) -> None:
    mechanism = variant.build(2).double()
    span = mechanism.plain_span()
    if span is None:
        return
    inputs = tensors(variant, length=63, kv_heads=2)
    expected, _ = reference.span_attention(inputs["q"], inputs["k"], inputs["v"], span)
    assert_close(mechanism(*inputs.values()), expected, 1e-8)
    assert not list(mechanism.parameters())


@each_path
@each_variant
def test_documents_of_a_sequence_are_as_if_alone(variant: Variant) -> None:
    """Outputs and every gradient, whether the mechanism handles documents or is run for each."""
    rows = [[1, PREFIX + WINDOW + 9, 3, 2 * BLOCK + 1], [WINDOW + 2, PREFIX + 3, 25]]
    mechanism = shaken(variant.build(2))
    inputs = tensors(variant, length=sum(rows[0]), batch=2, kv_heads=2)
    ids = torch.tensor([[n for n, size in enumerate(row) for _ in range(size)] for row in rows])
    starts = headgate.ops.document_starts(ids)

    def packed(*given: Tensor) -> Tensor:
        return mechanism(*given, Past(documents=starts))

    def separate(*given: Tensor) -> Tensor:
        whole = []
        for row, sizes in enumerate(rows):
            parts = [t[row : row + 1].split(sizes, 1 if n == 0 else 2) for n, t in enumerate(given)]
            whole.append(torch.cat([mechanism(*part) for part in zip(*parts, strict=True)], 2))
        return torch.cat(whole)

    together = results(mechanism, packed, inputs, torch.float32)
    alone = results(mechanism, separate, inputs, torch.float32)
    for name in alone:
        assert_close(together[name], alone[name], 1e-5, name)


@each_path
@each_variant
def test_no_token_sees_a_later_one(variant: Variant) -> None:
    length = PREFIX + WINDOW + 7
    mechanism = shaken(variant.build(2))
    inputs = {n: t.float() for n, t in tensors(variant, length=length, batch=2, kv_heads=2).items()}
    with torch.no_grad():
        fast, plain = mechanism(*inputs.values()), mechanism.reference(*inputs.values())
        for cut in (1, 7, 8, 9, WINDOW, WINDOW + 1, PREFIX - 1, PREFIX, PREFIX + 1, length - 1):
            changed = {}
            for name, t in inputs.items():
                noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(cut)) * 5
                axis = 1 if name == "x" else 2
                later = torch.arange(length).unflatten(0, (1, length) if axis == 1 else (1, 1, length)) >= cut
                changed[name] = torch.where(later[..., None], noise, t)
            assert torch.equal(mechanism.reference(*changed.values())[:, :, :cut], plain[:, :, :cut])
            assert (mechanism(*changed.values())[:, :, :cut] - fast[:, :, :cut]).abs().max() <= 1e-5
            assert not torch.equal(mechanism(*changed.values())[:, :, cut:], fast[:, :, cut:])


def through_cache(mechanism: Mechanism, inputs: dict[str, Tensor], sizes: list[int]) -> Tensor:
    """Run the tokens in chunks of these sizes; the cache holds what first_key asks for and no more."""
    cache, outputs, done = LayerCache(), [], 0
    with torch.no_grad():
        for size in sizes:
            at = slice(done, done + size)
            x, (q, k, v) = inputs["x"][:, at], (inputs[n][:, :, at] for n in "qkv")
            outputs.append(mechanism(x, q, k, v, Past(cache=cache)))
            done += size
            first = mechanism.first_key(done)
            assert len(cache) == done - first + min(first, mechanism.pinned_keys)
    return torch.cat(outputs, 2)


@each_variant
@pytest.mark.parametrize("backend", ["auto", "torch"])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_whole_chunked_and_one_by_one_agree(variant: Variant, backend: str, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 2 * PREFIX + 2 * WINDOW), label="length")
    cuts = data.draw(st.lists(st.integers(1, max(1, length - 1)), max_size=6), label="cuts")
    edges = sorted({0, length, *(c for c in cuts if c < length)})
    sizes = [b - a for a, b in pairwise(edges)]
    mechanism = shaken(variant.build(2))
    inputs = {
        n: t.float() for n, t in tensors(variant, length=length, batch=2, kv_heads=2, seed=length).items()
    }
    with forced(backend), torch.no_grad():
        whole = mechanism(*inputs.values())
        assert_close(through_cache(mechanism, inputs, sizes), whole, 1e-4, "chunked")


@each_path
@each_variant
def test_one_by_one_across_every_edge(variant: Variant) -> None:
    length = PREFIX + 2 * WINDOW + 3
    mechanism = shaken(variant.build(2))
    inputs = {n: t.float() for n, t in tensors(variant, length=length, kv_heads=2).items()}
    with torch.no_grad():
        whole = mechanism(*inputs.values())
    assert_close(through_cache(mechanism, inputs, [1] * length), whole, 1e-4, "one by one")
    across = [
        edge for base in (BLOCK, WINDOW, PREFIX, PREFIX + WINDOW) for edge in (base - 1, base, base + 1)
    ]
    for edge in across:
        assert_close(through_cache(mechanism, inputs, [edge, length - edge]), whole, 1e-4, f"cut at {edge}")


def weights(mechanism: Mechanism, run: Any, length: int, seed: int = 0) -> Tensor:
    """How much of each key's value reaches each query, (H,T,T): attend with one-hot values of width T."""
    inputs = {
        n: t.float() for n, t in tensors(VARIANTS[0], length=length, head_dim=length, seed=seed).items()
    }
    inputs["v"] = torch.eye(length).expand(1, HEADS, length, length)
    with torch.no_grad():
        return run(*inputs.values())[0]


@each_path
@each_variant
def test_the_same_keys_get_weight_as_in_the_formula(variant: Variant) -> None:
    length = 2 * WINDOW + 2 * BLOCK + 16
    mechanism = variant.build(head_dim=length)
    fast, plain = weights(mechanism, mechanism, length), weights(mechanism, mechanism.reference, length)
    assert torch.equal(fast.abs() > 1e-12, plain.abs() > 1e-12)
    if variant.name not in SUBTRACTING:
        assert (fast >= 0).all()


def allowed(variant: Variant, i: int) -> set[int] | None:
    """Which keys the formula allows a query at position i, where this does not depend on the input."""
    options = SMALL | {"global_tokens": 0, "gate": "learned"} | dict(variant.options)
    everything, window = set(range(i + 1)), options["window"]
    near = everything if window is None else set(range(max(0, i - window), i + 1))
    wide = set(range(max(0, i - options["max_window"]), i + 1))
    if variant.name == "local":
        return near | set(range(min(options["global_tokens"], i + 1)))
    if variant.name == "dynamic-sparse":
        return everything if i < options["dense_prefix"] else near
    if variant.name == "head-gated":
        return near if options["gate"] == "local" else everything
    if variant.name == "context-adaptive" and options["gate"] == "local":
        return wide
    if variant.name == "sparse-geometric" and options.get("sparsity") == "fixed":
        return near | set(range(0, i + 1, options["stride"]))
    if variant.name in ("full", "positional", "combiner", "sparse-geometric", "gated", "sinks"):
        return everything
    return None


FIXED_SETS = [v for v in VARIANTS if allowed(v, 0) is not None]


@pytest.mark.parametrize("variant", FIXED_SETS, ids=str)
@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_exact_key_sets_at_the_edges(variant: Variant, window: int) -> None:
    length = 64
    if "window" in {f.name for f in fields(MECHANISMS.get(variant.name).Options)}:
        variant = Variant(variant.name, tuple(({"window": window} | dict(variant.options)).items()))
    mechanism = variant.build(head_dim=length)
    got = weights(mechanism, mechanism, length).amax(0) > 1e-12
    for i in range(length):
        assert set(got[i].nonzero().flatten().tolist()) == allowed(variant, i), f"query {i}"
    if variant.name != "combiner":  # it sees keys through summaries, fewer pairs than keys
        assert mechanism.pairs(length) == sum(len(allowed(variant, i) or ()) for i in range(length))


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_exact_key_sets_of_near_and_far_heads(window: int) -> None:
    length = 64
    mechanism = Variant("near-far", (("window", window),)).build(head_dim=length)
    got = weights(mechanism, mechanism, length) > 1e-12
    reaches = [window, window, 2 * window, 2 * window]
    for head, reach in enumerate(reaches):
        for i in range(length):
            assert got[head, i].nonzero().flatten().tolist() == list(range(max(0, i - reach), i + 1))
    assert mechanism.pairs(length) == int(got.sum()) // HEADS


@each_variant
def test_pairs_grow_with_the_length_and_never_shrink(variant: Variant) -> None:
    mechanism = variant.build()
    counts = [mechanism.pairs(n) for n in range(1, 80)]
    assert counts[0] >= 1
    assert all(b > a for a, b in pairwise(counts))
    firsts = [mechanism.first_key(p) for p in range(200)]
    assert all(0 <= f <= p for p, f in enumerate(firsts))
    assert firsts == sorted(firsts)


def same_as_full(mechanism: Mechanism, length: int) -> None:
    inputs = tensors(VARIANTS[0], length=length, batch=2)
    full = Variant("full", ()).build().double()
    given, expected = (results(m.double(), m, inputs, torch.float64) for m in (mechanism, full))
    for name in ("output", "q", "k", "v"):
        assert_close(given[name], expected[name], 1e-10, name)


def set_gate(mechanism: Mechanism, value: float) -> Mechanism:
    """Saturate the gate through its last bias."""
    gate = mechanism.gate[-1] if isinstance(mechanism.gate, torch.nn.Sequential) else mechanism.gate
    with torch.no_grad():
        gate.bias.fill_(value)
    return mechanism


def test_identity_dynamic_sparse_open_within_its_dense_prefix() -> None:
    same_as_full(set_gate(Variant("dynamic-sparse", ()).build(), 60.0), PREFIX)
    same_as_full(Variant("dynamic-sparse", (("gate", "open"),)).build(), PREFIX)
    with pytest.raises(AssertionError):
        same_as_full(Variant("dynamic-sparse", (("gate", "open"),)).build(), PREFIX + 1)


def test_identity_near_far_open_within_its_window() -> None:
    same_as_full(set_gate(Variant("near-far", ()).build(), 60.0), WINDOW + 1)
    same_as_full(Variant("near-far", (("gate", "open"),)).build(), WINDOW + 1)
    with pytest.raises(AssertionError):
        same_as_full(Variant("near-far", (("gate", "open"),)).build(), WINDOW + 2)


def test_identity_head_gated_at_global() -> None:
    same_as_full(set_gate(Variant("head-gated", ()).build(), -60.0), 111)
    same_as_full(Variant("head-gated", (("gate", "global"),)).build(), 111)


def test_identity_sparse_geometric_with_neither() -> None:
    same_as_full(
        Variant(
            "sparse-geometric", tuple(MECHANISMS.get("sparse-geometric").ablations["neither"].items())
        ).build(),
        111,
    )


def test_identity_context_adaptive_that_selects_every_key() -> None:
    same_as_full(set_gate(Variant("context-adaptive", (("top_k", 20.0),)).build(), -60.0), 111)
    same_as_full(
        Variant("context-adaptive", (("top_k", 20.0), ("gate", "global"), ("select", "block"))).build(), 111
    )


@each_variant
def test_opened_it_starts_as_full_attention_as_far_as_it_says(variant: Variant) -> None:
    """And no farther, and its gate has a gradient to leave that state by."""
    mechanism, inputs = variant.build().double(), tensors(variant, length=63)
    reach = mechanism.start_as_full()
    found = results(mechanism, mechanism, inputs, torch.float64)
    expected, same = Variant("full", ()).build()(*inputs.values()), int(min(reach, 63))
    if same > 0:
        assert_close(found["output"][:, :, :same], expected[:, :, :same], 1e-3)
    if same < 63:
        assert (found["output"] - expected).abs().max() > 1e-2
    for name, _ in mechanism.named_parameters() if same else ():
        if name in ("gate.weight", "gate.bias", "gate.3.weight", "gate.3.bias", "w2", "log_std"):
            assert found[name].abs().max() > 1e-8, name


@pytest.mark.parametrize("name", ["dynamic-sparse", "head-gated", "context-adaptive", "near-far"])
def test_an_open_gate_learns_in_bf16_too(name: str) -> None:
    """There it is 1 in forward, and g * (1 - g) would leave it no gradient."""
    mechanism = Variant(name, ()).build()
    mechanism.start_as_full()
    inputs = [t.float() for t in tensors(Variant(name, ()), length=63).values()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mechanism(*inputs).square().sum().backward()
    for parameter_name, parameter in mechanism.gate.named_parameters():
        if parameter_name in ("weight", "bias", "3.weight", "3.bias"):
            assert parameter.grad.abs().max() > 0, parameter_name


def test_context_adaptive_width_moves_between_its_two_windows() -> None:
    narrow, wide = (Variant("local", (("window", w),)).build().double() for w in (WINDOW, 24))
    inputs = tensors(VARIANTS[0], length=63)
    adaptive = Variant("context-adaptive", (("gate", "local"),)).build().double()
    for value, plain in ((-1e3, narrow), (60.0, wide)):
        with torch.no_grad():
            adaptive.width.bias.fill_(value)
            assert_close(adaptive(*inputs.values()), plain(*inputs.values()), 1e-10)


def test_ties_go_to_the_later_key() -> None:
    """Equal keys everywhere: the newest ceil(sqrt(i + 1)) get all the weight."""
    length = 30
    mechanism = Variant("context-adaptive", (("gate", "global"),)).build(head_dim=length)
    ones = torch.ones(1, HEADS, length, length)
    out = mechanism(torch.zeros(1, length, MODEL), ones, ones, torch.eye(length).expand_as(ones))
    for i in range(length):
        count = next(n for n in range(i + 2) if n * n >= i + 1)
        assert out[0, 0, i].nonzero().flatten().tolist() == list(range(i + 1 - count, i + 1))


@each_variant
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_gradients_reach_every_parameter_from_the_start(variant: Variant, kv_heads: int) -> None:
    mechanism = variant.build(kv_heads)
    found = results(mechanism, mechanism, tensors(variant, length=111, kv_heads=kv_heads), torch.float32)
    for name, parameter in mechanism.named_parameters():
        assert found[name].isfinite().all(), name
        per_unit = found[name].abs().flatten(1).amax(1) if parameter.ndim > 1 else found[name].abs()
        assert (per_unit > 0).all(), f"{name}: some of it gets no gradient"


@each_variant
@pytest.mark.parametrize(("path", "length", "scale", "saturation"), EXTREMES, indirect=["path"])
def test_nothing_is_nan_at_the_extremes(
    variant: Variant, path: str, length: int, scale: float, saturation: float | None
) -> None:
    mechanism = variant.build(2)
    if saturation is not None:
        with torch.no_grad():
            for name, parameter in mechanism.named_parameters():
                if name.endswith(("bias", "b2")):
                    parameter.fill_(saturation)
    inputs = {n: t * scale for n, t in tensors(variant, length=length, kv_heads=2).items()}
    for run in (mechanism, mechanism.reference):
        for name, value in results(mechanism, run, inputs, torch.float32).items():
            assert value.isfinite().all(), name


@each_path
@each_variant
@pytest.mark.parametrize("heads", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_mixed_precision_gives_what_single_does(variant: Variant, heads: torch.dtype) -> None:
    """Heads in bf16, as projections under autocast leave them, or in fp32, as a norm does; parameters in
    fp32. Their numbers are exact in bf16, logits in fp32: a selection is the same in both."""
    mechanism = shaken(variant.build(2))
    inputs = {n: t.bfloat16().float() for n, t in tensors(variant, length=63, kv_heads=2).items()}

    def autocast(x: Tensor, *qkv: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mechanism(x, *(t.to(heads) for t in qkv))

    single = results(mechanism, mechanism.reference, inputs, torch.float32)
    for name, found in results(mechanism, autocast, inputs, torch.float32).items():
        assert_close(found, single[name], 0.03, name)


@each_variant
def test_a_probe_sees_the_gate_and_leaves_no_trace(variant: Variant) -> None:
    mechanism = variant.build(2)
    inputs = {n: t.float() for n, t in tensors(variant, length=63, batch=2, kv_heads=2).items()}
    silent = mechanism(*inputs.values())
    with headgate.probe(mechanism) as seen:
        observed = mechanism(*inputs.values())
    mechanism(*inputs.values())
    assert torch.equal(silent, observed)
    assert all(len(values) == 1 for values in seen.values())
    if getattr(mechanism, "gate", None) is not None or hasattr(mechanism, "b2"):
        assert seen["gate"][0].shape == (2, 63, HEADS)
        assert ((seen["gate"][0] > 0) & (seen["gate"][0] < 1)).all()
        assert not seen["gate"][0].requires_grad


def test_block_selection_recalls_most_of_the_exact_top_k() -> None:
    """Recall counts the exact top keys that lie in attended blocks: all while one block holds everything."""
    mechanism = Variant("context-adaptive", (("select", "block"),)).build()
    inputs = {n: t.float() for n, t in tensors(VARIANTS[0], length=111).items()}
    with headgate.probe(mechanism) as seen, torch.no_grad():
        mechanism(*inputs.values())
    recall = seen["recall"][0]
    assert recall.shape == (1, HEADS, 111)
    assert (recall[:, :, :BLOCK] == 1).all()
    assert 0.1 < recall[:, :, 64:].mean() < 1


@pytest.mark.parametrize("pattern", [["output-gated-example"], ["output-gated-example", "full"]])
def test_a_third_party_mechanism_trains_in_a_decoder(pattern: list[str]) -> None:
    decoder = headgate.build_model("tiny", mechanism=pattern, seed=1)
    assert type(decoder.layers[0].attention.mechanism).__name__ == "OutputGated"
    assert decoder.layers[0].attention.mechanism.options.window == 32  # the recipe's shared option reaches it
    tokens = torch.randint(4096, (2, 65), generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = decoder(tokens[:, :-1], tokens[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


SIZES = {"d_model": 24, "n_heads": 4, "head_dim": 16}


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("dynamic-spars", {}, "unknown mechanism 'dynamic-spars'; did you mean 'dynamic-sparse'?"),
        ("local", {"windw": 3}, "local has no option 'windw'; did you mean 'window'?"),
        ("full", {"window": 3}, "full has no option 'window'"),
        ("local", {"window": -1}, "window=-1 is too small; it must be at least 0"),
        ("dynamic-sparse", {"window": -2}, "window=-2 is too small"),
        ("dynamic-sparse", {"dense_prefix": -1}, "dense_prefix=-1 is too small; it must be at least 0"),
        ("local", {"window": 2.5}, "window=2.5 is not a whole number"),
        ("local", {"window": None}, "window=None is not a whole number"),
        ("local", {"global_tokens": -1}, "global_tokens=-1 is too small"),
        ("head-gated", {"gate": "globl"}, "gate='globl' is not a choice; did you mean 'global'?"),
        ("context-adaptive", {"max_window": 8}, "max_window=8 is below window=256"),
        ("context-adaptive", {"top_k": 0}, "top_k=0.0 must be above 0"),
        ("context-adaptive", {"block": 0}, "block=0 is too small"),
        ("sparse-geometric", {"hidden": 0}, "hidden=0 is too small"),
        ("combiner", {"block": 0}, "block=0 is too small"),
        ("full", {"n_kv_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
        ("full", {"n_kv_heads": 0}, "n_kv_heads=0 is too small"),
        ("full", {"head_dim": 15}, "head_dim=15 is odd"),
    ],
)
def test_bad_arguments_get_one_clear_sentence(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadgateError) as caught:
        build_mechanism(name, **(SIZES | arguments))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_that_were_trimmed_away_are_refused_where_all_are_needed() -> None:
    for variant in VARIANTS:
        mechanism = variant.build()
        if variant.name in ("combiner", "context-adaptive", "moba", "nsa") and mechanism.first_key(100) == 0:
            inputs = {n: t.float() for n, t in tensors(variant, length=9).items()}
            with pytest.raises(
                HeadgateError, match="needs all keys, but the first one given has position start=5"
            ):
                mechanism(*inputs.values(), Past(start=5))


def test_every_mechanism_stands_on_a_shelf() -> None:
    shelves: dict[str, list[str]] = {}
    for name in headgate.mechanisms():
        shelves.setdefault(MECHANISMS.get(name).shelf, []).append(name)
    assert shelves == {
        "papers": ["context-adaptive", "dynamic-sparse", "head-gated", "sparse-geometric"],
        "baselines": ["combiner", "full", "local", "positional"],
        "second shelf": [
            "differential",
            "exclusive",
            "forgetting",
            "gated",
            "gated-delta",
            "moba",
            "nsa",
            "shifted",
            "sinks",
            "value-residual",
        ],
        "own": ["near-far", "output-gated-example", "short-path"],
    }
    with pytest.raises(HeadgateError, match="'full' is already registered"):
        headgate.mechanisms.register("full")(type("Another", (Mechanism,), {}))


def test_initial_values_follow_the_formulas() -> None:
    ours = build_mechanism("sparse-geometric", d_model=24, n_heads=8, head_dim=64)
    assert torch.allclose(torch.nn.functional.softplus(ours.gamma), torch.ones(8))
    assert (ours.b2 == 2).all()
    assert (ours.b1 == 0).all()
    assert ours.w1_q.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert ours.w2.std().item() == pytest.approx(1 / 4, rel=0.2)
    near_far = build_mechanism("near-far", **SIZES)
    assert near_far.gate.bias.sigmoid().tolist() == pytest.approx([0.05] * 4)
    prior = build_mechanism("positional", **SIZES)
    assert prior.mean[0].tolist() == [0, 4, 8, 12]
    assert (prior.log_std == 0).all()
    assert (prior.weight == 0).all()
    gated = build_mechanism("dynamic-sparse", d_model=512, n_heads=8, head_dim=16)
    assert (gated.gate.bias == 0).all()
    assert gated.gate.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_random_cuts_are_not_all_alike() -> None:
    """Guards the contract itself: another input must give another output, or comparisons would prove
    nothing."""
    rng = random.Random(0)
    for variant in VARIANTS:
        mechanism = shaken(variant.build())
        a, b = (tensors(variant, length=20, seed=rng.randrange(1000)) for _ in range(2))
        assert not torch.allclose(mechanism.double()(*a.values()), mechanism(*b.values()))
