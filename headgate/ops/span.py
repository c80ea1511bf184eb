"""Span attention: each query attends to the contiguous keys that end at itself.

One op serves full causal attention, windows, a window after a dense prefix, first tokens visible to all, and
a ring of keys further out that enters with a per-query log-weight. It returns the log-sum-exp as well,
differentiably, so that branches over disjoint keys can be merged exactly.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D); ring_log_weight and lse (B,H,Tq). The output lies in memory as
(B,Tq,H,D), as the projection after it wants it; a gradient lies as its input does if that has whole rows.
"""

from typing import Any

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import flex, reference, sdpa, span_torch
from headgate.ops.dispatch import Op, check
from headgate.ops.native import span as span_native
from headgate.ops.registration import refuse_gradient, register, register_gradient

SPAN = Op("span_attention")


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, start: int = 0, backend: str = "auto") -> Tensor:
    """Attention of every query over all keys up to itself."""
    check(q, k, v, start=start)
    return _attend(q, k, v, start=start, backend=backend, output_only=True)[0]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    dense_prefix: int = 0,
    global_tokens: int = 0,
    start: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Attention over the keys i-window <= j <= i: window + 1 of them, the query's own among them.

    A query at a position below `dense_prefix` sees all keys up to itself; the first `global_tokens` positions
    are visible to every later query.
    """
    check(q, k, v, window=window, dense_prefix=dense_prefix, global_tokens=global_tokens, start=start)
    return _attend(
        q,
        k,
        v,
        window=window,
        dense_prefix=dense_prefix,
        global_tokens=global_tokens,
        start=start,
        backend=backend,
        output_only=True,
    )[0]


def far_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, start: int = 0, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attention over the keys beyond a window, j < i-window, of the queries that have any.

    Those are the last n of the Tq; returns the output (B,H,n,D) and the log-sum-exp (B,H,n), n = 0 if none.
    It is an ordinary causal attention: the keys without the last window + 1, against as many queries.
    """
    check(q, k, v, window=window, start=start)
    far = max(0, k.shape[2] - window - 1)
    n = min(q.shape[2], far)
    if n == 0:
        return q[:, :, :0], q[:, :, :0, 0]
    tail = q[:, :, q.shape[2] - n :]
    return span_attention(tail, k[:, :, :far], v[:, :, :far], start=start, backend=backend)


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    dense_prefix: int = 0,
    global_tokens: int = 0,
    ring: int = 0,
    ring_log_weight: Tensor | None = None,
    start: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The op in full: the output (B,H,Tq,D) and the log-sum-exp of the attended logits (B,H,Tq).

    Keys at a distance above `window` and up to `ring` enter with `ring_log_weight` added to their logit.
    """
    check(q, k, v, window=window, dense_prefix=dense_prefix, global_tokens=global_tokens, start=start)
    if ring_log_weight is not None:
        if window is None or ring < window or global_tokens or dense_prefix:
            raise HeadgateError(
                f"ring={ring} lies outside a plain window: window={window}, dense_prefix={dense_prefix} and "
                f"global_tokens={global_tokens} were given, expected window <= ring and 0 for the others"
            )
        if ring_log_weight.shape != q.shape[:3]:
            given = tuple(ring_log_weight.shape)
            raise HeadgateError(
                f"ring_log_weight has shape {given}; expected (B,H,Tq) = {tuple(q.shape[:3])}"
            )
    elif ring:
        raise HeadgateError(
            f"ring={ring} without ring_log_weight; give the log-weight of each query, (B,H,Tq)"
        )
    return _attend(
        q,
        k,
        v,
        window=window,
        dense_prefix=dense_prefix,
        global_tokens=global_tokens,
        ring=ring,
        ring_log_weight=ring_log_weight,
        start=start,
        backend=backend,
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    dense_prefix: int = 0,
    global_tokens: int = 0,
    ring: int = 0,
    ring_log_weight: Tensor | None = None,
    start: int,
    backend: str,
    output_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """By the path that fits; with `output_only` the log-sum-exp may be missing."""
    if window is not None and ring_log_weight is None and window >= k.shape[2] - 1:
        window, dense_prefix, global_tokens = None, 0, 0  # it hides nothing, and a full span is the fastest
    result: tuple[Tensor, Tensor] = SPAN(
        backend,
        q,
        k,
        v,
        window=window,
        dense_prefix=dense_prefix,
        global_tokens=global_tokens,
        ring=ring,
        ring_log_weight=ring_log_weight,
        start=start,
        output_only=output_only,
    )
    return result


_OPTIONS = "SymInt? window, SymInt dense_prefix, SymInt global_tokens, SymInt ring, SymInt start"
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? ring_log_weight"


def _results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, h, t, d = q.shape
    return q.new_empty((b, t, h, d)).transpose(1, 2), q.new_empty((b, h, t), dtype=span_torch.accumulator(q))


def _gradients(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_weight = q.new_empty(q.shape[:3] if weight is not None else (0,), dtype=span_torch.accumulator(q))
    d_q, d_k, d_v = (torch.empty_like(t) if t.stride(-1) == 1 else t.new_empty(t.shape) for t in (q, k, v))
    return d_q, d_k, d_v, d_weight


def _register(name: str, path: Any) -> Any:
    """An op and its backward from a module with `forward` and `backward`, which fill what is allocated
    here."""
    op = register(name, f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)", _results, path.forward)
    backward = register(
        f"{name}_backward",
        f"(Tensor d_out, Tensor? d_lse, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS})"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        _gradients,
        path.backward,
    )

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.options = inputs[4:]

    def gradient(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, weight, out, lse = ctx.saved_tensors
        if d_out is None:
            d_out = torch.zeros_like(out)
        d_q, d_k, d_v, d_weight = backward(d_out, d_lse, q, k, v, weight, out, lse, *ctx.options)
        d_weight = None if weight is None else d_weight.to(weight.dtype)
        return d_q, d_k, d_v, d_weight, *(None for _ in ctx.options)

    register_gradient(name, setup, gradient)
    refuse_gradient(f"{name}_backward")
    return op


def _path(op: Any) -> Any:
    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None,
        dense_prefix: int,
        global_tokens: int,
        ring: int,
        ring_log_weight: Tensor | None,
        start: int,
        output_only: bool,
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = op(
            q, k, v, ring_log_weight, window, dense_prefix, global_tokens, ring, start
        )
        return result

    return run


def _with_log_sum_exp(attend: Any) -> Any:
    """A path that returns it whether or not it is asked for."""

    def run(*tensors: Tensor, output_only: bool, **options: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = attend(*tensors, **options)
        return result

    return run


def causal_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k, v through causal attention that is one branch of a larger softmax, given the
    output and the log-sum-exp of the whole."""
    native = span_native.refuse(q) is None
    backward = torch.ops.headgate.span_native_backward if native else torch.ops.headgate.span_torch_backward
    d_q, d_k, d_v, _ = backward(d_out, None, q, k, v, None, out, lse, None, 0, 0, 0, 0)
    return d_q, d_k, d_v


SPAN.path("native", refuse=lambda q, *args, **options: span_native.refuse(q))(
    _path(_register("span_native", span_native))
)
SPAN.path("sdpa", refuse=sdpa.refuse)(sdpa.causal_attention)
SPAN.path("flex", refuse=flex.refuse)(_with_log_sum_exp(flex.span_attention))
SPAN.path("torch")(_path(_register("span_torch", span_torch)))
SPAN.path("reference")(_with_log_sum_exp(reference.span_attention))
