"""FlexAttention's path: masks pair by pair and block by block, and its eager form as an oracle on the CPU."""

import random
from typing import Any

import pytest
import test_span
import torch
import torch.nn.attention.flex_attention as torch_flex
from test_blocks import tensors
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from headgate import ops
from headgate.errors import HeadgateError
from headgate.mechanisms.contract import build_mechanism
from headgate.ops import Span, flex, reference, span_attention
from headgate.ops.blocks import choose_blocks
from headgate.ops.native import library
from headgate.ops.span import sdpa
from headgate.ops.triton import pair_gate

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path as it is, on the CPU: eager FlexAttention computes all pairs under the same masks, and can
    then be differentiated too, which PyTorch refuses there for its compiled form."""
    monkeypatch.setattr(flex, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(flex, "_TRITON", True)
    monkeypatch.setattr(flex, "_compiled", lambda: torch_flex.flex_attention)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)


def random_span(seed: int) -> flex.SeenPairs:
    pick = random.Random(seed)
    keys = pick.choice([1, 5, 127, 128, 129, 200, 256, 300, 385, 512, 640])
    queries = pick.choice([keys, keys, 1, max(1, keys - 128), max(1, keys - 37), (keys + 1) // 2])
    nearest = pick.choice([0, 0, 0, 1, 40, 128, 130])
    farthest = nearest + pick.choice([0, 1, 20, 127, 128, 129, 300, 1000])
    if nearest:
        return flex.SeenPairs(queries, keys, nearest, farthest)
    prefix, first = pick.choice([0, 0, 1, 100, 128, 260, 9999]), pick.choice([0, 0, 1, 7, 128, 200, 9999])
    return flex.SeenPairs(queries, keys, 0, farthest, prefix, first)


def dense(span: flex.SeenPairs) -> Tensor:
    """Which pairs are seen, by the reference: (Tq,Tk)."""
    j = torch.arange(span.keys)[None]
    i = j[0, span.keys - span.queries :, None]
    if span.nearest:
        return (i - j >= span.nearest) & (i - j <= span.farthest)
    return reference.in_span(i, j, Span(span.farthest, span.dense_prefix, span.pinned))


def by_blocks(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Whether any and whether all pairs of each block are seen, by looking at all of them."""
    rows, columns = (-(-n // flex.BLOCK) for n in seen.shape[-2:])
    pad = (0, columns * flex.BLOCK - seen.shape[-1], 0, rows * flex.BLOCK - seen.shape[-2])
    blocks = torch.nn.functional.pad(seen, pad).unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))
    return blocks.any(-1).any(-2), blocks.all(-1).all(-2)


class Called(TorchDispatchMode):
    """The names of the ops that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_a_mask_takes_no_sort_and_a_log_sum_exp_is_asked_for_where_it_is_used(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled layer builds its mask with every call."""
    with Called() as called:
        flex.SeenPairs(300, 300, 0, 100).mask(torch.device("cpu"))
    assert "searchsorted" in called.names
    assert not called.names & {"sort", "argsort", "topk"}
    asked = []

    def attend(*given: Any, **options: Any) -> Any:
        asked.append(options["return_aux"])
        return torch_flex.flex_attention(*given, **options)

    monkeypatch.setattr(flex, "_compiled", lambda: attend)
    q = torch.randn(1, 2, 140, 32)
    alone = ops.window_attention(q, q, q, 20, backend="flex")
    both = span_attention(q, q, q, Span(20), backend="flex")
    assert asked == [None, torch_flex.AuxRequest(lse=True)]
    assert torch.equal(alone, both[0])


@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(0, 150, 50)], ids=str)
def test_masks_are_exact_pair_by_pair_and_block_by_block(seeds: range) -> None:
    for seed in seeds:
        span = random_span(seed)
        seen = dense(span)
        i, j = torch.arange(span.queries)[:, None], torch.arange(span.keys)[None]
        zero = torch.zeros((), dtype=torch.int64)
        assert torch.equal(span.pairs(seen.device)(zero, zero, i, j), seen), span
        some, every = by_blocks(seen)
        found_some, found_every = span.blocks(seen.device)
        assert torch.equal(found_some, some), span
        assert torch.equal(found_every, every), span


def test_a_mask_is_the_one_that_pytorch_builds_from_all_pairs() -> None:
    for seed in range(12):
        span = random_span(seed)
        ours = span.mask(torch.device("cpu"))
        pairs = span.pairs(torch.device("cpu"))
        theirs = torch_flex.create_block_mask(pairs, 1, 1, span.queries, span.keys, device="cpu")
        assert ours.shape == theirs.shape
        for name in ("kv", "full_kv", "q", "full_q"):
            counts, places = (getattr(ours, f"{name}_{n}") for n in ("num_blocks", "indices"))
            assert torch.equal(counts, getattr(theirs, f"{name}_num_blocks")), (span, name)
            listed = torch.arange(places.shape[-1]) < counts[..., None]
            assert torch.equal(places[listed], getattr(theirs, f"{name}_indices")[listed]), (span, name)
            assert places.dtype == counts.dtype == torch.int32


def check(chosen: test_span.Case) -> None:
    """As on the other paths, but that FlexAttention's log-sum-exp comes from base 2, two roundings more."""
    result, expected, tolerances = (
        chosen.run(span_attention, backend="flex"),
        chosen.truth(),
        chosen.tolerances(),
    )
    tolerances["lse"] += 2 * test_span.EPS * expected["lse"].abs().max().item()
    for name, truth in expected.items():
        worst = (result[name].double() - truth).abs().max().item()
        assert worst <= tolerances[name], f"{name}: {worst} > {tolerances[name]} for {chosen.options}"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("seeds", [range(4), range(4, 8)], ids=str)
def test_outputs_and_every_gradient_are_the_truth(seeds: range) -> None:
    for seed in seeds:
        check(test_span.random_case(seed))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "options",
    [
        {"queries": 130},
        {"queries": 300, "window": 100, "dense_prefix": 140},
        {"queries": 290, "window": 30, "pinned": 7, "start": 2},
        {"queries": 300, "window": 60, "ring": 200},
        {"queries": 1, "keys": 300, "window": 60, "ring": 200},
        {"queries": 40, "keys": 300, "window": 10**6},
        {"queries": 20, "window": 5, "ring": 10**6},
    ],
    ids=str,
)
def test_lengths_of_several_blocks(options: dict[str, int]) -> None:
    check(test_span.case(**options))


def random_documents(rows: int, length: int, seed: int) -> Tensor:
    pick = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, length, generator=pick) < 0.02).cumsum(1)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 40},
        {"window": 60, "dense_prefix": 70},
        {"window": 30, "pinned": 7},
        {"window": 9, "ring": 80},
    ],
    ids=str,
)
def test_documents(options: dict[str, int]) -> None:
    chosen = test_span.case(batch=2, queries=300, keys=300, **options)
    chosen.options["first_keys"] = ops.document_starts(random_documents(2, 300, seed=3))
    check(chosen)


def test_blocks_of_documents_hide_no_pair_and_show_no_other() -> None:
    for seed in range(60):
        span = random_span(seed)
        if span.queries < span.keys:
            continue
        starts = ops.document_starts(random_documents(3, span.keys, seed))
        if starts is None:
            continue
        seen = torch.stack(
            [
                span.pairs(starts.device, starts)(
                    torch.tensor(b),
                    torch.tensor(0),
                    torch.arange(span.queries)[:, None],
                    torch.arange(span.keys)[None],
                )
                for b in range(3)
            ]
        )
        some, every = by_blocks(seen)
        found_some, found_every = span.blocks_of_documents(starts)
        assert (found_some >= some).all()
        assert (found_every <= every).all()
        if not span.dense_prefix and not span.pinned and not span.nearest and span.farthest >= span.keys:
            assert torch.equal(found_some, some)


@pytest.mark.usefixtures("on_cpu")
def test_a_closed_ring_is_a_window_and_has_no_nan_gradient() -> None:
    chosen = test_span.case(queries=80)
    inputs = [t.requires_grad_() for t in (chosen.q, chosen.k, chosen.v, torch.full((1, 4, 80), -torch.inf))]
    out, _ = span_attention(*inputs[:3], Span(9, ring=30), ring_log_weight=inputs[3], backend="flex")
    torch.testing.assert_close(out, ops.window_attention(*inputs[:3], 9, backend="reference"))
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert gradient.isfinite().all()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "case",
    [
        # batch, heads, groups, queries, keys, width, block, scale
        (1, 2, 2, 1, 1, 16, 4, 1.0),
        (2, 4, 2, 150, 150, 16, 8, 1.0),
        (1, 4, 1, 129, 300, 16, 64, 3.0),
        (1, 2, 2, 1, 400, 16, 100, 9.0),
        (1, 2, 1, 300, 300, 16, 150, 20.0),
    ],
    ids=str,
)
def test_block_selection_is_the_references(case: tuple[Any, ...]) -> None:
    *sizes, block, scale = case
    q, k, v = (t.float() for t in tensors(0, *sizes))
    chosen = choose_blocks(q, k, block=block, scale=scale)
    mask = flex.selected_mask(q, k, chosen, block)
    i, j = reference.positions(q, k)
    selected = reference.selected_blocks(q, k, block=block, scale=scale).repeat_interleave(block, -1)
    selected = torch.nn.functional.pad(selected, (0, k.shape[2] - selected.shape[-1]))
    seen = (j <= i) & ((j // block == i // block) | selected)
    assert torch.equal(mask.to_dense().bool(), by_blocks(seen)[0])
    results = []
    for backend in ("flex", "reference"):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = ops.block_selected_attention(*inputs, block=block, scale=scale, backend=backend)
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for ours, truth in zip(*results, strict=True):
        assert (ours - truth).abs().max() <= 1e-5 * max(1.0, truth.abs().max().item())


def test_masks_are_kept_and_training_may_use_what_evaluation_made() -> None:
    q = torch.zeros(1, 1, 70, 16)
    span = flex.SeenPairs(70, 70, 0, 9)
    with torch.inference_mode():
        kept = flex._mask_of(q, span)
    assert flex._mask_of(q, flex.SeenPairs(70, 70, 0, 9)) is kept
    assert flex._mask_of(q, flex.SeenPairs(70, 70, 0, 8)) is not kept
    assert not kept.kv_indices.is_inference()
    assert flex._kept_mask.cache_info().maxsize == 64


@pytest.mark.compiles
@pytest.mark.usefixtures("on_cpu")
def test_lengths_and_windows_share_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of decoding must not compile anew: once for the first length, then for any."""
    counter = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(torch_flex.flex_attention, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    k = torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for length, window in ((200, 50), (201, 50), (250, 30), (257, 20), (258, None), (290, 60)):
            keys = k[:, :, :length]
            q = keys[:, :1, -1:]
            out = span_attention(q, keys[:, :1], keys[:, 1:], Span(window), backend="flex")[0]
            truth = reference.span_attention(q, keys[:, :1], keys[:, 1:], Span(window))[0]
            torch.testing.assert_close(out, truth)
            if length == 250:
                at_first = counter.frame_count
    assert counter.frame_count <= at_first + 1  # once more where the keys begin to fill a third block


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without values on a device that need not be there."""
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda")


def test_a_gpu_takes_flex_attention_and_each_refusal_has_its_reason() -> None:
    q, k = on_gpu(1, 4, 300, 64), on_gpu(1, 2, 300, 64)
    for op, options in (
        ("window_attention", {"window": 20, "pinned": 5}),
        ("biased_attention", {"key_bias": on_gpu(1, 4, 300)}),
        ("span_attention", {"span": Span(20, ring=40), "ring_log_weight": on_gpu(1, 4, 300)}),
        ("block_selected_attention", {"block": 64}),
    ):
        explanation = ops.explain(op, q, k, k, **options)
        assert explanation.path == "flex", op
    for tensor, reason in (
        (on_gpu(1, 1, 9, 8, dtype=torch.float32), "head width 8 is below 16"),
        (on_gpu(1, 1, 9, 16, dtype=torch.float64), "it takes float32, bfloat16 and float16, not float64"),
    ):
        explanation = ops.explain("span_attention", tensor, tensor, tensor)
        assert explanation.path == "torch"
        assert ("flex", reason) in explanation.refusals
    with torch.compiler.set_stance("force_eager"):
        explanation = ops.explain("window_attention", q, k, k, 20, pinned=5)
    assert explanation.path == "torch"
    assert "without it FlexAttention computes all pairs" in str(explanation)
    with pytest.raises(HeadgateError, match="it runs on a GPU, not on cpu"):
        ops.causal_attention(*(torch.zeros(1, 1, 4, 16) for _ in range(3)), backend="flex")


def test_a_gpu_takes_sdpa_for_plain_causal_attention() -> None:
    q, k = on_gpu(1, 4, 300, 64), on_gpu(1, 2, 300, 64)
    assert ops.explain("causal_attention", q, k, k).name == "sdpa:flash"
    assert "takes the path 'sdpa:flash'" in str(ops.explain("causal_attention", q, k, k))
    assert ops.explain("causal_attention", on_gpu(1, 4, 1, 64), k, k).name == "sdpa:flash"
    assert ops.explain("window_attention", q, k, k, 299).path == "sdpa"  # it hides nothing
    one = on_gpu(1, 4, 1, 64)
    assert ops.explain("window_attention", one, k, k, 20, pinned=3, dense_prefix=9).path == "sdpa"
    q32, k32 = on_gpu(1, 4, 300, 64, dtype=torch.float32), on_gpu(1, 2, 300, 64, dtype=torch.float32)
    assert ops.explain("causal_attention", q32, k32, k32).name == "sdpa:efficient"
    wide = on_gpu(1, 4, 300, 512)
    refused = ("sdpa", "PyTorch has only its dense kernel for heads wider than 256")
    assert refused in ops.explain("causal_attention", wide, wide, wide).refusals
    for op, queries, options, reason in (
        ("window_attention", 300, {"window": 298}, "it has no windows"),
        ("span_attention", 300, {}, "its log-sum-exp has no gradient"),
        ("causal_attention", 20, {}, "its causal mask is for as many queries as keys, or for one query"),
    ):
        explanation = ops.explain(op, on_gpu(1, 4, queries, 64), k, k, **options)
        assert explanation.path == "varlen"
        assert ("sdpa", reason) in explanation.refusals
    here = ops.explain("causal_attention", *(torch.zeros(1, 1, 4, 16, dtype=torch.float64) for _ in range(3)))
    assert ("sdpa", "it runs on a GPU, not on cpu") in here.refusals


@pytest.mark.parametrize(
    ("queries", "keys", "span"),
    [
        (1, 1, Span()),
        (1, 70, Span()),
        (70, 70, Span()),
        (1, 70, Span(9)),
        (1, 70, Span(9, pinned=5)),
        (1, 70, Span(9, pinned=5, start=3)),
        (1, 12, Span(9, pinned=5)),
        (1, 70, Span(9, dense_prefix=70)),
        (1, 70, Span(9, dense_prefix=69)),
    ],
    ids=str,
)
def test_sdpa_computes_what_the_reference_does(
    queries: int, keys: int, span: Span, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "DEVICES", ("cpu",))
    chosen = test_span.case(2, 4, 2, queries, keys, 16)
    inputs = [t.float().requires_grad_() for t in (chosen.q, chosen.k, chosen.v)]
    found = ops.attention(*inputs, span, backend="sdpa")
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    truth = reference.span_attention(*doubles, span)[0]
    d_out = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for ours, theirs in zip(
        (found, *torch.autograd.grad(found, inputs, d_out.float())),
        (truth, *torch.autograd.grad(truth, doubles, d_out)),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_sdpa_never_takes_its_dense_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads in fp32 have none of the fused kernels on a GPU, so each gets its keys."""
    monkeypatch.setattr(sdpa, "DEVICES", ("cpu",))
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        enabled = torch.backends.cuda.math_sdp_enabled()
        seen.append((k.shape[1], options["enable_gqa"], enabled))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", attend)
    for dtype in (torch.float32, torch.bfloat16):
        q, k = torch.zeros(1, 4, 9, 16, dtype=dtype), torch.zeros(1, 2, 9, 16, dtype=dtype)
        ops.causal_attention(q, k, k, backend="sdpa")
    assert seen == [(4, False, False), (2, True, False)]


VARIANTS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "full": ("full", {}, {"span_attention:sdpa:efficient"}),
    "near-far": ("near-far", {"window": 40, "stretch": 2}, {"span_attention:flex"}),
    "local": ("local", {"window": 40, "global_tokens": 3}, {"span_attention:flex"}),
    "dynamic-sparse": ("dynamic-sparse", {"window": 40, "dense_prefix": 60}, {"span_attention:flex"}),
    "head-gated": ("head-gated", {"window": 40}, {"span_attention:flex"}),
    "context-adaptive": (
        "context-adaptive",
        {"window": 40, "max_window": 60},
        {"span_attention:flex", "top_k_attention:torch"},
    ),
    "context-adaptive by blocks": (
        "context-adaptive",
        {"window": 40, "max_window": 60, "select": "block", "block": 16},
        {"span_attention:flex", "block_selected_attention:flex"},
    ),
    "sparse-geometric": ("sparse-geometric", {"hidden": 4}, {"pair_gated_attention:triton"}),
    "sparse-geometric by strides": (
        "sparse-geometric",
        {"sparsity": "fixed", "window": 20, "stride": 8},
        {"strided_attention:torch", "span_attention:flex"},
    ),
    "positional": ("positional", {}, {"span_attention:torch"}),
    "combiner": ("combiner", {"block": 16}, {"combiner_attention:torch"}),
}


@pytest.mark.compiles
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_training_step_traces_to_one_graph(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward take the paths of a GPU on fake tensors; the graphs then run here, and match."""
    monkeypatch.setattr(pair_gate, "DEVICES", ("cpu",))
    monkeypatch.setattr(sdpa, "DEVICES", ("cpu",))
    monkeypatch.setattr(library, "unavailable", lambda: "this test takes the paths of a GPU")
    name, options, paths = VARIANTS[variant]
    length = 150 if name != "sparse-geometric" else 33  # interpreted kernels are slow
    mechanism = build_mechanism(name, d_model=32, n_heads=2, head_dim=32, n_kv_heads=1, **options)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, length, 32, generator=generator)
    heads = [torch.randn(1, h, length, 32, generator=generator) for h in (2, 1, 1)]
    torch.compiler.reset()
    results = []
    for run in (mechanism, torch.compile(mechanism, fullgraph=True, backend="aot_eager")):
        before = ops.paths_taken()
        inputs = [t.clone().requires_grad_() for t in heads]
        out = run(x, *inputs)
        weights = [*inputs, *mechanism.parameters()]
        results.append([out, *torch.autograd.grad(out.square().sum(), weights)])
        if run is mechanism:
            assert paths <= {path for path, count in ops.paths_taken().items() if count > before.get(path, 0)}
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.compiles
def test_compiled_for_the_cpu_it_computes_the_same() -> None:
    """The output alone: PyTorch's code for the CPU returns no log-sum-exp."""
    chosen = test_span.case(1, 2, 1, 150, 200, 32)
    q, k, v = chosen.q, chosen.k, chosen.v
    mask = flex.SeenPairs(150, 200, 0, 60, 70, 3).mask(q.device)
    with torch.no_grad():
        out = flex._compiled()(q, k, v, block_mask=mask, enable_gqa=True)
        expected, _ = reference.span_attention(q, k, v, Span(60, 70, 3))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_the_gpu_paths_ask_for_the_same_devices() -> None:
    assert flex.DEVICES == pair_gate.DEVICES == ("cuda",)
