"""Which path an op takes, and what it says when it takes none."""

import pytest
import torch
from torch import Tensor

from headgate import ops
from headgate.errors import HeadgateError
from headgate.ops import dispatch


def qkv(length: int = 6, heads: int = 4, groups: int = 2, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, length, width, generator=generator)
    k, v = torch.randn(2, 2, groups, length, width, generator=generator)
    return q, k, v


def test_a_named_backend_is_taken_and_recorded() -> None:
    before = ops.paths_taken().get("span_attention:reference", 0)
    out = ops.window_attention(*qkv(), 2, backend="reference")
    assert ops.paths_taken()["span_attention:reference"] == before + 1
    assert torch.allclose(out, ops.window_attention(*qkv(), 2, backend="torch"), atol=1e-6)


def test_explain_tells_the_path_without_running_it() -> None:
    before = ops.paths_taken()
    explanation = ops.explain("window_attention", *qkv(), 2, backend="reference")
    assert (explanation.op, explanation.path) == ("span_attention", "reference")
    assert "span_attention takes the path 'reference'" in str(explanation)
    assert ops.explain(ops.causal_attention, *(t.double() for t in qkv())).path == "torch"
    assert ops.paths_taken() == before


def test_a_refusal_says_why_and_the_next_path_is_taken() -> None:
    op = dispatch.Op("example")
    op.path("first", refuse=lambda value: "it is odd" if value % 2 else None)(lambda value: ("first", value))
    op.path("second")(lambda value: ("second", value))
    assert op("auto", 2) == ("first", 2)
    assert op("auto", 3) == ("second", 3)
    with pytest.raises(HeadgateError, match="example has no path for this: first: it is odd"):
        op("first", 3)
    with pytest.raises(HeadgateError, match="'secnd' is not a path of example; did you mean 'second'"):
        op("secnd", 3)


def test_forced_holds_for_every_op_inside() -> None:
    before = ops.paths_taken().get("combiner_attention:reference", 0)
    with dispatch.forced("reference"):
        ops.combiner_attention(*qkv(), block=2)
    assert ops.paths_taken()["combiner_attention:reference"] == before + 1
    assert ops.explain("combiner_attention", *qkv(), block=2).path != "reference"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[0], k, v), "expected q (B,H,Tq,D)"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), "do not fit"),
        (lambda q, k, v: (q[..., 1:], k, v), "do not fit"),
        (lambda q, k, v: (q[:, :3], k, v), "3 query heads are not a multiple of 2 key heads"),
        (lambda q, k, v: (q, k[:, :, 1:], v[:, :, 1:]), "6 queries over 5 keys"),
        (lambda q, k, v: (q[:, :, :0], k, v), "0 queries over 6 keys"),
        (lambda q, k, v: (q.double(), k, v), "expected one dtype and one device"),
    ],
)
def test_tensors_that_do_not_fit_get_one_clear_sentence(change, words: str) -> None:
    for call in (
        lambda q, k, v: ops.window_attention(q, k, v, 2),
        lambda q, k, v: ops.top_k_attention(q, k, v),
        lambda q, k, v: ops.combiner_attention(q, k, v, block=2),
    ):
        with pytest.raises(HeadgateError) as caught:
            call(*change(*qkv()))
        assert words in str(caught.value)


def test_options_that_make_no_sense_get_one_clear_sentence() -> None:
    q, k, v = qkv()
    weight = torch.zeros(2, 4, 6)
    cases = [
        (lambda: ops.window_attention(q, k, v, -1), "window=-1 is negative"),
        (lambda: ops.causal_attention(q, k, v, start=-1), "start=-1 is negative"),
        (lambda: ops.span_attention(q, k, v, ops.Span(2, ring=4)), "ring=4 without ring_log_weight"),
        (
            lambda: ops.span_attention(q, k, v, ops.Span(4, ring=2), ring_log_weight=weight),
            "expected window <= ring",
        ),
        (
            lambda: ops.span_attention(q, k, v, ops.Span(2, ring=4), ring_log_weight=weight[:1]),
            r"ring_log_weight has shape \(1, 4, 6\)",
        ),
        (lambda: ops.span_attention(q, k, v, ring_log_weight=weight), "ring_log_weight without a ring"),
        (lambda: ops.combiner_attention(q, k, v, block=0), "block=0 is too small"),
        (lambda: ops.block_selected_attention(q, k, v, block=0), "block=0 is too small"),
        (lambda: ops.strided_attention(q, k, v, window=2, stride=0), "stride=0 is too small"),
        (
            lambda: ops.distance_biased_attention(q, k, v, torch.zeros(4, 5)),
            r"expected \(H,L\) = \(4, at least 6\)",
        ),
        (lambda: ops.explain("window_attentin", q, k, v, 2), "did you mean 'window_attention'"),
        (lambda: ops.explain("paths_taken"), "it is not an attention op"),
    ]
    for call, words in cases:
        with pytest.raises(HeadgateError, match=words):
            call()
