"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464): a memory of fixed size instead of keys.

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    out_t = S_t q_t

Token by token that is T small products. The fast paths take a chunk of tokens at once: what a chunk writes
into the memory solves a triangular system (the UT transform), after which everything is matrix products, and
only the memory itself passes from chunk to chunk. Decays enter as exponentials of differences of their
running log, which are never above 1.

Shapes: q, k, v (B,H,T,D); log_decay = log alpha and beta (B,H,T); the memory S^T (B,H,D,D), keys by values.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.ops import delta_native
from headgate.ops.dispatch import Op, check
from headgate.ops.documents import by_document, lengths
from headgate.ops.span import native

DELTA = Op("gated_delta")
CHUNK = 64


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    memory: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """What the memory answers to each query (B,H,T,D), and the memory after the last token, in at least fp32.

    `memory` is the one before the first token; None is an empty one. Every head has its own key. With
    `documents` (B,T) the memory is empty where a document begins.
    """
    check(q, k, v)
    if q.shape != k.shape or not log_decay.shape == beta.shape == q.shape[:3]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, log_decay, beta))
        raise HeadgateError(
            f"q, k, log_decay and beta have shapes {shapes}; expected q and k (B,H,T,D), the others (B,H,T)"
        )
    if documents is not None:
        return _by_document(documents, q, k, v, log_decay, beta, memory, backend)
    wide = torch.promote_types(q.dtype, torch.float32)
    given = [t.to(wide) for t in (q, k, v, log_decay, beta)]
    if memory is None:
        memory = given[0].new_zeros(*q.shape[:2], q.shape[3], q.shape[3])
    with torch.autocast(q.device.type, enabled=False):
        out, memory = DELTA(backend, *given, memory.to(wide))
    return out.to(q.dtype), memory


def by_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence as written."""
    outs = []
    for t in range(q.shape[2]):
        memory = memory * log_decay[:, :, t, None, None].exp()
        held = (k[:, :, t, None] @ memory)[:, :, 0]  # what the memory holds under this key
        written = beta[:, :, t, None] * (v[:, :, t] - held)
        memory = memory + k[:, :, t, :, None] * written[:, :, None]
        outs.append(q[:, :, t, None] @ memory)
    return torch.cat(outs, 2), memory


def _by_document(
    documents: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    memory: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if memory is not None:
        raise HeadgateError("a memory continues one document; leave it out with documents")
    memories: list[Tensor] = []

    def alone(*given: Tensor) -> Tensor:
        out, after = gated_delta(*given, backend=backend)
        memories.append(after)
        return out

    out = by_document(documents, alone, q, k, v, log_decay, beta)
    if len(memories) == 1:  # every row is one document
        return out, memories[0]
    last = accumulate(len(row) for row in lengths(documents))
    return out, torch.cat([memories[n - 1] for n in last])


def _refuse_native(*given: Tensor) -> str | None:
    if given[0].shape[2] == 1 and torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return "a single token with a gradient fills no chunk"
    return native.refuse(given[0])


DELTA.path("native", refuse=_refuse_native)(delta_native.delta_in_chunks)


@DELTA.path("torch")
def _torch(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    if q.shape[2] == 1:
        return by_token(q, k, v, log_decay, beta, memory)
    length, size = q.shape[2], min(CHUNK, q.shape[2])
    more = -length % size
    if more:  # keys of 0 that write nothing, and no decay
        q, k, v = (torch.nn.functional.pad(t, (0, 0, 0, more)) for t in (q, k, v))
        log_decay, beta = (torch.nn.functional.pad(t, (0, more)) for t in (log_decay, beta))
    q, k, v, log_decay, beta = (t.unflatten(2, (-1, size)) for t in (q, k, v, log_decay, beta))
    since = log_decay.cumsum(3)  # the log of the decay since the chunk's start (B,H,N,C)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()  # (B,H,N,C,C)
    from_start, to_end = since.exp()[..., None], (since[..., -1:] - since).exp()[..., None]

    # A token writes beta (v - what was held under its key), which includes what the chunk's earlier tokens
    # wrote: (I + L) written = beta (v - what the chunk found), with L strictly lower triangular.
    weighted = beta[..., None] * k
    lower = weighted @ k.mT * decay  # the solver reads only what is below the diagonal
    sides = torch.cat([beta[..., None] * v, weighted * from_start], -1)
    solved = torch.linalg.solve_triangular(lower, sides, upper=False, unitriangular=True)
    fresh, found = solved.chunk(2, -1)
    inside = q @ k.mT * decay
    asked, kept = q * from_start, (k * to_end).mT
    last = since[..., -1:].exp()[..., None]
    batch = memory.shape[:2]
    memory = memory.flatten(0, 1)
    outs = []
    # Unbound at once: a gradient by slices would fill all of it with zeros for each.
    chunks = (t.flatten(0, 1).unbind(1) for t in (fresh, found, inside, asked, kept, last))
    for fresh, found, inside, asked, kept, last in zip(*chunks, strict=True):
        written = torch.baddbmm(fresh, found, memory, alpha=-1)
        outs.append(torch.baddbmm(asked @ memory, inside, written))
        memory = torch.baddbmm(last * memory, kept, written)
    out = torch.stack(outs, 1).unflatten(0, batch).flatten(2, 3)
    return out[:, :, :length], memory.unflatten(0, batch)


@DELTA.path("reference")
def _reference(*given: Any) -> tuple[Tensor, Tensor]:
    return by_token(*given)
