"""The truth: every op as dense attention over all pairs, with the arguments of its fast twin.

Shapes: q (B,H,Tq,D); k, v (B,G,Tk,D), H a multiple of G. The first key has position `start`, the last Tq keys
belong to the queries, so query row r has position start + Tk - Tq + r. Causal always: j <= i.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.ops.documents import stretches
from headgate.ops.gpu import has_double
from headgate.ops.span.options import Span


def positions(q: Tensor, k: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Query positions i (Tq,1) and key positions j (1,Tk)."""
    j = torch.arange(start, start + k.shape[2], device=k.device)
    return j[k.shape[2] - q.shape[2] :, None], j[None, :]


def per_head(q: Tensor, kv: Tensor) -> Tensor:
    """Keys or values (B,G,Tk,D) repeated for the query heads they serve: (B,H,Tk,D)."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def logits(q: Tensor, k: Tensor) -> Tensor:
    return q @ per_head(q, k).mT / math.sqrt(q.shape[-1])  # (B,H,Tq,Tk)


def attend(scores: Tensor, allowed: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the allowed pairs: the output (B,H,Tq,D) and the log-sum-exp of the scores (B,H,Tq)."""
    scores = scores.masked_fill(~allowed, -math.inf)
    return scores.softmax(-1).to(v.dtype) @ per_head(q, v), scores.logsumexp(-1)


def in_span(i: Tensor, j: Tensor, span: Span) -> Tensor:
    """Which pairs a span includes, apart from its ring."""
    if span.window is None:
        return j <= i
    return (j <= i) & ((i < span.dense_prefix) | (j < span.pinned) | (i - j <= span.window))


def in_ring(i: Tensor, j: Tensor, span: Span) -> Tensor:
    assert span.window is not None
    return (i - j > span.window) & (i - j <= span.ring)


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span = Span(),  # noqa: B008 - a tuple
    *,
    ring_log_weight: Tensor | None = None,
    key_bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if span.first_keys is not None:  # each document by itself
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf)
        for part in stretches(span.first_keys, k.shape[2]):
            ring = None if ring_log_weight is None else part.of(ring_log_weight)
            bias = None if key_bias is None else part.of_keys(key_bias)
            biases = {"ring_log_weight": ring, "key_bias": bias, "distance_bias": distance_bias}
            alone = span._replace(first_keys=None)
            of_part = span_attention(part.of(q), part.of_keys(k), part.of_keys(v), alone, **biases)
            out[part.row, :, part.queries], lse[part.row, :, part.queries] = (t[0] for t in of_part)
        return out, lse
    i, j = positions(q, k, span.start)
    scores, allowed = logits(q, k), in_span(i, j, span)
    own_bias = None
    if key_bias is not None:
        # A running sum as bias may be large; its differences lose nothing to rounding.
        own_bias = key_bias[:, :, k.shape[2] - q.shape[2] :]
        scores = scores + (key_bias[:, :, None] - own_bias[..., None])
    if distance_bias is not None:
        scores = scores + distance_bias[:, (i - j).clamp(min=0)]
    if ring_log_weight is not None:
        ring = in_ring(i, j, span)
        scores = scores + torch.where(ring, ring_log_weight[..., None], 0.0)
        allowed = allowed | ring
    out, lse = attend(scores, allowed, q, v)
    return out, lse if own_bias is None else lse + own_bias


def strided_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int, stride: int) -> Tensor:
    i, j = positions(q, k)
    return attend(logits(q, k), (j <= i) & ((i - j <= window) | (j % stride == 0)), q, v)[0]


def pair_gate(query_half: Tensor, key_half: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The gate's logit for every pair (B,H,Tq,Tk) from its halves (B,H,Tq,M) and (B,H,Tk,M)."""
    hidden = F.gelu(query_half[:, :, :, None] + key_half[:, :, None], approximate="tanh")
    return torch.einsum("bhijm,hm->bhij", hidden, w2) + b2[:, None, None]


def pair_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_half: Tensor,
    key_half: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    form: str,
    window: int | None = None,
) -> Tensor:
    i, j = positions(q, k)
    gate, scores = pair_gate(query_half, key_half, w2, b2), logits(q, k)
    scores = scores * gate.sigmoid() if form == "multiply" else scores + F.logsigmoid(gate)
    return attend(scores, in_span(i, j, Span(window)), q, v)[0]


def top_count(i: Tensor, scale: float) -> Tensor:
    """k_i = ceil(scale * sqrt(i + 1)), in double precision so that perfect squares stay exact."""
    wide = (i if has_double(i.device) else i.cpu()).double()
    return torch.ceil(scale * torch.sqrt(wide + 1)).long().to(i.device)


def best(scores: Tensor, allowed: Tensor, count: Tensor) -> Tensor:
    """Which entries of the last dimension are among the `count` highest allowed ones; ties go to the
    later."""
    scores = scores.masked_fill(~allowed, -math.inf).flip(-1)
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1).flip(-1)
    return allowed & (rank < count)


def top_k_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float = 1.0) -> Tensor:
    i, j = positions(q, k)
    scores = logits(q, k)
    return attend(scores, best(scores, (j <= i).expand_as(scores), top_count(i, scale)), q, v)[0]


def selected_blocks(q: Tensor, k: Tensor, *, block: int, scale: float) -> Tensor:
    """Which complete past blocks each query attends to: (B,H,Tq,blocks)."""
    i, _ = positions(q, k)
    n = k.shape[2] // block
    means = k[:, :, : n * block].unflatten(2, (n, block)).mean(3)
    past = torch.arange(n, device=q.device) < i // block
    count = -(-top_count(i, scale) // block)
    scores = q @ per_head(q, means).mT
    return best(scores, past.expand_as(scores), count)


def block_selected_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block: int, scale: float = 1.0, chosen: Tensor | None = None
) -> Tensor:
    i, j = positions(q, k)
    if chosen is None:
        blocks = selected_blocks(q, k, block=block, scale=scale)
    else:
        blocks = (chosen[..., None] == torch.arange(k.shape[2] // block, device=q.device)).any(-2)
    seen = blocks.repeat_interleave(block, dim=-1)
    seen = F.pad(seen, (0, k.shape[2] - seen.shape[-1]))
    return attend(logits(q, k), (j <= i) & ((j // block == i // block) | seen), q, v)[0]


def compressed_attention(q: Tensor, k: Tensor, v: Tensor, *, block: int) -> Tensor:
    i, _ = positions(q, k)
    n = k.shape[2] // block
    keys, values = (t[:, :, : n * block].unflatten(2, (n, block)).mean(3) for t in (k, v))
    nothing = keys.new_zeros(*keys.shape[:2], 1, keys.shape[3])  # what a query without such a block sees
    seen = torch.cat([i < block, torch.arange(n, device=q.device) < i // block], -1)
    keys, values = torch.cat([nothing, keys], 2), torch.cat([nothing, values], 2)
    return attend(logits(q, keys), seen, q, values)[0]


def combiner_attention(q: Tensor, k: Tensor, v: Tensor, *, block: int) -> Tensor:
    i, j = positions(q, k)
    n = k.shape[2] // block
    k_blocks, v_blocks = (t[:, :, : n * block].unflatten(2, (n, block)) for t in (k, v))
    summary_k = k_blocks.amax(3)  # (B,G,n,D)
    inside = torch.einsum("bgnd,bgnjd->bgnj", summary_k, k_blocks) / math.sqrt(q.shape[-1])
    summary_v = torch.einsum("bgnj,bgnjd->bgnd", inside.softmax(-1), v_blocks)
    own = (j <= i) & (j // block == i // block)
    earlier = torch.arange(n, device=q.device) < i // block
    keys, values = torch.cat([k, summary_k], 2), torch.cat([v, summary_v], 2)
    return attend(logits(q, keys), torch.cat([own, earlier], -1), q, values)[0]


def short_convolution(t: Tensor, taps: Tensor, documents: Tensor | None, queries: int) -> Tensor:
    """One matrix of T x T for each tap, with a 1 where the token that many before is the same document's."""
    j = torch.arange(t.shape[2], device=t.device)
    of_heads = t.repeat_interleave(taps.shape[1] // t.shape[1], 1)
    ids = j.new_zeros(1, len(j)) if documents is None else documents
    same = ids[:, None, :, None] == ids[:, None, None, :]
    shifts = [((j[:, None] - j == c) & same).to(t.dtype) for c in range(taps.shape[0])]
    whole = sum(tap[:, None] * (shift @ of_heads) for tap, shift in zip(taps, shifts, strict=True))
    assert isinstance(whole, Tensor)
    return whole[:, :, t.shape[2] - queries :]
