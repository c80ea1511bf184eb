"""Pair-gated attention: every query-key pair's logit passes a small network of the pair before the softmax.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D); query_half (B,H,Tq,M), key_half (B,H,Tk,M): the two halves of the
gate's hidden layer, whose sum is the only thing computed per pair; w2 (H,M), b2 (H).
"""

from typing import Any, Literal

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.dispatch import Op, check
from headgate.ops.documents import by_document
from headgate.ops.pair_gate import native, tiled
from headgate.ops.registration import refuse_gradient, register, register_gradient
from headgate.ops.span.options import Span
from headgate.ops.span.tiled import accumulator
from headgate.ops.triton import pair_gate as pair_gate_triton

PAIR_GATE = Op("pair_gated_attention")


def pair_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_half: Tensor,
    key_half: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    form: Literal["multiply", "log"],
    window: int | None = None,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(a * s) v with form "multiply", softmax(a + log s) v with "log", over j <= i or a window.

    a = q.k / sqrt(D) and s = sigmoid(w2 . gelu(query_half + key_half) + b2).
    """
    check(q, k, v)
    Span(window).check()
    hidden = w2.shape[-1]
    expected = {
        "query_half": (query_half, (*q.shape[:3], hidden)),
        "key_half": (key_half, (*q.shape[:2], k.shape[2], hidden)),
        "w2": (w2, (q.shape[1], hidden)),
        "b2": (b2, (q.shape[1],)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != tuple(shape):
            raise HeadgateError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")
    if form not in ("multiply", "log"):
        raise HeadgateError(f"form={form!r} is not a choice; expected 'multiply' or 'log'")
    if documents is not None:

        def alone(q: Tensor, k: Tensor, v: Tensor, query_half: Tensor, key_half: Tensor) -> Tensor:
            gate = (query_half, key_half, w2, b2)
            return pair_gated_attention(q, k, v, *gate, form=form, window=window, backend=backend)

        return by_document(documents, alone, q, k, v, query_half, key_half)
    result: Tensor = PAIR_GATE(backend, q, k, v, query_half, key_half, w2, b2, form=form, window=window)
    return result


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor query_half, Tensor key_half, Tensor w2, Tensor b2"
_OPTIONS = "str form, SymInt? window"


def _results(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The output, and for each query's softmax the greatest score and the sum relative to it."""
    b, h, t, d = q.shape
    out = q.new_empty((b, t, h, d)).transpose(1, 2)
    return out, q.new_empty((b, h, t, 2), dtype=accumulator(q))


def _gradients(d_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs[:7])


def _register(name: str, path: Any) -> Any:
    """An op and its backward from a module with `forward` and `backward`, which fill what is allocated
    here."""
    op = register(name, f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)", _results, path.forward)
    backward = register(
        f"{name}_backward",
        f"(Tensor d_out, {_INPUTS}, Tensor out, Tensor softmax, {_OPTIONS}) -> ({', '.join(['Tensor'] * 7)})",
        _gradients,
        path.backward,
    )

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:7], *output)
        ctx.options = inputs[7:]

    def gradient(ctx: Any, d_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return *backward(d_out, *ctx.saved_tensors, *ctx.options), None, None

    register_gradient(name, setup, gradient)
    refuse_gradient(f"{name}_backward")
    return op


def _path(op: Any) -> Any:
    def run(*tensors: Tensor, form: str, window: int | None) -> Tensor:
        result: Tensor = op(*tensors, form, window)[0]
        return result

    return run


def _refuse_native(q: Tensor, *others: Tensor, **options: Any) -> str | None:
    dtypes = {t.dtype for t in (q, *others)}
    if len(dtypes) > 1:
        return (
            f"it takes one dtype, not {' and '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}"
        )
    return native.refuse(q, others[4].shape[-1])


PAIR_GATE.path("native", refuse=_refuse_native)(_path(_register("pair_gate_native", native)))
PAIR_GATE.path(
    "triton", refuse=lambda q, *others, **options: pair_gate_triton.refuse(q, others[4].shape[-1])
)(_path(_register("pair_gate_triton", pair_gate_triton)))
PAIR_GATE.path("torch")(_path(_register("pair_gate_torch", tiled)))
PAIR_GATE.path("reference")(reference.pair_gated_attention)
