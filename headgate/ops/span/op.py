"""Span attention: each query attends to the contiguous keys that end at itself.

One op serves full causal attention, windows, a window after a dense prefix, first tokens visible to all, and
a ring of keys further out that enters with a per-query log-weight: `Span` says which. It also returns the
log-sum-exp, differentiably, so that branches over disjoint keys can be merged exactly.

A bias may be added to the logits: one per key, or one by the distance between query and key. `documents`
(B,T) says which document each token belongs to, where several share a sequence: none is then seen from
another.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D); ring_log_weight and lse (B,H,Tq); key_bias (B,H,Tk); distance_bias
(H,L), L at least Tk. The output's memory layout is (B,Tq,H,D), as the projection after it wants; a gradient
has its input's layout if that has whole rows.
"""

from typing import Any

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import flex, reference
from headgate.ops.dispatch import Op, check, forced_backend
from headgate.ops.documents import document_starts
from headgate.ops.registration import refuse_gradient, register, register_gradient
from headgate.ops.span import native, sdpa, tiled, varlen
from headgate.ops.span.options import Span

SPAN = Op("span_attention")


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    start: int = 0,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of every query over all keys up to itself."""
    return attention(q, k, v, Span(start=start), documents=documents, backend=backend)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    dense_prefix: int = 0,
    pinned: int = 0,
    start: int = 0,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention over the keys i-window <= j <= i: window + 1 of them, including the query's own.

    A query at a position below `dense_prefix` sees all keys up to itself; the first `pinned` positions are
    visible to every later query. Positions are those in a token's document.
    """
    span = Span(window, dense_prefix, pinned, start=start)
    return attention(q, k, v, span, documents=documents, backend=backend)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span,
    *,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention over a span, without a ring: only the output (B,H,Tq,D), which more paths can compute."""
    check(q, k, v)
    span.check()
    span = within(documents, q, k, span)
    result: tuple[Tensor, Any] = SPAN(backend, q, k, v, span.simplest(k.shape[2]), output_only=True)
    return result[0]


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor,
    span: Span = Span(),  # noqa: B008 - a tuple
    *,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention over a span with `key_bias` (B,H,Tk) added to each key's logits: the output (B,H,Tq,D).

    Only differences of biases matter, and nothing else is rounded: a running sum that has grown to thousands
    loses no more than fp32 itself does. `span_attention` takes a key_bias too, and returns the
    log-sum-exp.
    """
    check(q, k, v)
    span.check()
    span = within(documents, q, k, span)
    check_key_bias(q, k, key_bias)
    result: tuple[Tensor, Any] = SPAN(
        backend, q, k, v, span.simplest(k.shape[2]), key_bias=key_bias, output_only=True
    )
    return result[0]


def distance_biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    span: Span = Span(),  # noqa: B008 - a tuple
    *,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax over j <= i of q.k / sqrt(D) + bias[h, i-j]; bias (H,L) with L at least the number of keys.

    Only the span's documents are used: a window would hide what the bias weighs.
    """
    check(q, k, v)
    if span.window is not None:
        raise HeadgateError(f"window={span.window} given with a bias by distance; expected none")
    span = within(documents, q, k, span)
    if bias.ndim != 2 or bias.shape[0] != q.shape[1] or bias.shape[1] < k.shape[2]:
        raise HeadgateError(
            f"bias has shape {tuple(bias.shape)}; expected (H,L) = ({q.shape[1]}, at least {k.shape[2]})"
        )
    result: tuple[Tensor, Any] = SPAN(backend, q, k, v, span, distance_bias=bias, output_only=True)
    return result[0]


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span = Span(),  # noqa: B008 - a tuple
    *,
    ring_log_weight: Tensor | None = None,
    key_bias: Tensor | None = None,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The op in full: the output (B,H,Tq,D) and the log-sum-exp of the attended logits (B,H,Tq).

    Keys at a distance above `span.window` and up to `span.ring` enter with `ring_log_weight` added to their
    logit, every key with its `key_bias` if there is one.
    """
    check(q, k, v)
    span.check()
    span = within(documents, q, k, span)
    check_ring(q, span, ring_log_weight)
    if key_bias is not None:
        check_key_bias(q, k, key_bias)
    result: tuple[Tensor, Tensor] = SPAN(
        backend,
        q,
        k,
        v,
        span.simplest(k.shape[2]),
        ring_log_weight=ring_log_weight,
        key_bias=key_bias,
        output_only=False,
    )
    return result


def far_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    span: Span = Span(),  # noqa: B008 - a tuple
    *,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention over the keys beyond a window, j < i-window, of the queries that have any.

    Those are the last n of the Tq; returns the output (B,H,n,D) and the log-sum-exp (B,H,n), n = 0 if none.
    It is an ordinary causal attention: the keys without the last window + 1, against as many queries. Those
    that have no such key in their document get an output of 0 and a log-sum-exp of -inf. Only the span's
    start and documents are used.
    """
    check(q, k, v)
    span = within(documents, q, k, Span(start=span.start, first_keys=span.first_keys))
    span._replace(window=window).check()
    far = max(0, k.shape[2] - window - 1)
    n = min(q.shape[2], far)
    if n == 0:
        return q[:, :, :0], q[:, :, :0, 0]
    tail = q[:, :, q.shape[2] - n :]
    if span.first_keys is not None:
        span = span._replace(first_keys=span.first_keys[:, q.shape[2] - n :])
    return span_attention(tail, k[:, :, :far], v[:, :, :far], span, backend=backend)


def within(documents: Tensor | None, q: Tensor, k: Tensor, span: Span) -> Span:
    """The span within each token's document."""
    if documents is None:
        return span
    if span.start or q.shape[2] != k.shape[2] or documents.shape != (q.shape[0], k.shape[2]):
        raise HeadgateError(
            f"documents of shape {tuple(documents.shape)} were given for {q.shape[2]} queries over "
            f"{k.shape[2]} keys from position {span.start} on in {q.shape[0]} rows; expected (B,T) and whole "
            "sequences: as many queries as keys, from 0 on"
        )
    return span._replace(first_keys=document_starts(documents))


def check_ring(q: Tensor, span: Span, log_weight: Tensor | None) -> None:
    if log_weight is None:
        if span.ring:
            raise HeadgateError(
                f"ring={span.ring} without ring_log_weight; give the log-weight of each query, (B,H,Tq)"
            )
    elif not span.ring:
        raise HeadgateError("ring_log_weight without a ring; give the span the distance its ring reaches")
    elif log_weight.shape != q.shape[:3]:
        given, expected = tuple(log_weight.shape), tuple(q.shape[:3])
        raise HeadgateError(f"ring_log_weight has shape {given}; expected (B,H,Tq) = {expected}")


def check_key_bias(q: Tensor, k: Tensor, key_bias: Tensor) -> None:
    expected = (*q.shape[:2], k.shape[2])
    if tuple(key_bias.shape) != expected:
        raise HeadgateError(f"key_bias has shape {tuple(key_bias.shape)}; expected (B,H,Tk) = {expected}")


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? ring_log_weight, Tensor? key_bias, Tensor? distance_bias, "
    "Tensor? first_keys"
)


def _results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, h, t, d = q.shape
    return q.new_empty((b, t, h, d)).transpose(1, 2), q.new_empty((b, h, t), dtype=tiled.accumulator(q))


def _gradients(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring_log_weight: Tensor | None,
    key_bias: Tensor | None,
    distance_bias: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    """For an input that is not there, a gradient without elements."""
    biases = (
        q.new_empty((0,) if t is None else t.shape, dtype=tiled.accumulator(q))
        for t in (ring_log_weight, key_bias, distance_bias)
    )
    d_q, d_k, d_v = (torch.empty_like(t) if t.stride(-1) == 1 else t.new_empty(t.shape) for t in (q, k, v))
    return d_q, d_k, d_v, *biases


def _register(name: str, path: Any) -> Any:
    """A path from a module with `forward` and `backward`, which fill what is allocated here.

    With a bias per key these count the log-sum-exp from the bias of the query's own key, so that it is not
    rounded to the size of a running sum: the weights in the backward pass come from it.
    """
    op = register(name, f"({_INPUTS}, SymInt[] span) -> (Tensor, Tensor)", _results, path.forward)
    backward = register(
        f"{name}_backward",
        f"(Tensor d_out, Tensor? d_lse, {_INPUTS}, Tensor out, Tensor lse, SymInt[] span)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _gradients,
        path.backward,
    )

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        *tensors, ctx.span = inputs
        ctx.save_for_backward(*tensors, *output)

    def gradient(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        if d_out is None:
            d_out = torch.zeros_like(out)
        d_q, d_k, d_v, *biases = backward(d_out, d_lse, *inputs, out, lse, ctx.span)
        if inputs[4] is not None and d_lse is not None:
            biases[1][:, :, biases[1].shape[2] - d_lse.shape[2] :] -= d_lse
        given = zip(inputs[3:6], biases, strict=True)
        return d_q, d_k, d_v, *(None if t is None else d.to(t.dtype) for t, d in given), None, None

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        span: Span,
        *,
        output_only: bool,
        ring_log_weight: Tensor | None = None,
        key_bias: Tensor | None = None,
        distance_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = op(q, k, v, ring_log_weight, key_bias, distance_bias, span.first_keys, span.numbers())
        if key_bias is not None and not output_only:
            lse = lse + key_bias[:, :, k.shape[2] - q.shape[2] :]
        return out, lse

    register_gradient(name, setup, gradient)
    refuse_gradient(f"{name}_backward")
    return run


def branch_path(q: Tensor) -> str:
    """Which of `native` and `torch` computes causal attention that is a branch of a larger softmax."""
    wanted = forced_backend()
    return "native" if wanted in ("auto", "native") and native.refuse(q) is None else "torch"


def causal_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, path: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k, v through causal attention that is one branch of a larger softmax, given the
    output and the log-sum-exp of the whole; by the path that `branch_path` chose for the forward pass."""
    backward = getattr(torch.ops.headgate, f"span_{path}_backward")
    gradients: tuple[Tensor, ...] = backward(
        d_out, None, q, k, v, None, None, None, None, out, lse, Span().numbers()
    )
    return gradients[0], gradients[1], gradients[2]


def _with_log_sum_exp(attend: Any) -> Any:
    """A path that returns it whether or not it is asked for."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, span: Span, *, output_only: bool, **biases: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = attend(q, k, v, span, **biases)
        return result

    return run


def _refuse_flex(q: Tensor, *args: Any, distance_bias: Tensor | None = None, **options: Any) -> str | None:
    return "it has no bias by distance" if distance_bias is not None else flex.refuse(q)


SPAN.path("native", refuse=lambda q, *args, **options: native.refuse(q))(_register("span_native", native))
SPAN.path("sdpa", refuse=sdpa.refuse, kernel=sdpa.kernel)(sdpa.causal_attention)
SPAN.path("varlen", refuse=varlen.refuse)(varlen.span_attention)
SPAN.path("flex", refuse=_refuse_flex)(flex.span_attention)
SPAN.path("torch")(_register("span_torch", tiled))
SPAN.path("reference")(_with_log_sum_exp(reference.span_attention))
