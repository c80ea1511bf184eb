"""Pair-gated attention: every query-key pair's logit passes a small network of the pair before the softmax.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D); query_half (B,H,Tq,M), key_half (B,H,Tk,M): the two halves of the
gate's hidden layer, whose sum is the only thing computed per pair; w2 (H,M), b2 (H).
"""

from typing import Literal

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import reference
from headgate.ops.dispatch import Op, check
from headgate.ops.tiles import query_tiles, recomputed

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
    start: int = 0,
    backend: str = "auto",
) -> Tensor:
    """softmax(a * s) v with form "multiply", softmax(a + log s) v with "log", over j <= i or a window.

    a = q.k / sqrt(D) and s = sigmoid(w2 . gelu(query_half + key_half) + b2).
    """
    check(q, k, v, window=window, start=start)
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
    result: Tensor = PAIR_GATE(
        backend, q, k, v, query_half, key_half, w2, b2, form=form, window=window, start=start
    )
    return result


@PAIR_GATE.path("torch")
def _torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_half: Tensor,
    key_half: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    form: str,
    window: int | None,
    start: int,
) -> Tensor:
    offset = k.shape[2] - q.shape[2]
    reach = k.shape[2] if window is None else min(k.shape[2], window + 64)
    outputs = []
    for a, b in query_tiles(q.shape[2], q.shape[0] * q.shape[1] * reach * w2.shape[-1], most=64):
        low = 0 if window is None else max(0, offset + a - window)

        def tile(*tensors: Tensor, low: int = low) -> Tensor:
            return reference.pair_gated_attention(*tensors, form=form, window=window, start=start + low)

        keys = slice(low, offset + b)
        outputs.append(
            recomputed(
                tile,
                q[:, :, a:b],
                k[:, :, keys],
                v[:, :, keys],
                query_half[:, :, a:b],
                key_half[:, :, keys],
                w2,
                b2,
            )
        )
    return torch.cat(outputs, 2)


PAIR_GATE.path("reference")(reference.pair_gated_attention)
