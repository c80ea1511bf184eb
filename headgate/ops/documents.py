"""Documents that share a sequence: where each begins, and ops that run on one at a time.

`documents` (B,T) says which document each token belongs to: equal within a document, and a row never returns
to an earlier one. Nothing attends across documents, and positions count from a document's start.
"""

from collections.abc import Callable, Iterator, MutableMapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from headgate.errors import HeadgateError
from headgate.ops.gpu import send

_on_host: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
"""The values of ids and starts that were sent to a device: asking the device for them would mean waiting."""


def document_starts(documents: Tensor, device: torch.device | None = None) -> Tensor | None:
    """Where in its row each token's document begins, (B,T) int64; None if every row is one document.

    They are found on the CPU, so that ids already there make no GPU wait; `device` is where they go.
    """
    if documents.ndim != 2 or documents.is_floating_point() or documents.is_complex():
        raise HeadgateError(
            f"documents are {documents.dtype} of shape {tuple(documents.shape)}; expected whole numbers (B,T)"
        )
    device = device or documents.device
    documents = _known(documents)
    changed = documents[:, 1:] != documents[:, :-1]
    if not changed.any():
        return None
    if (documents[:, 1:] < documents[:, :-1]).any():
        _refuse_returns(documents, changed)
    places = torch.arange(1, documents.shape[1])
    starts = torch.zeros_like(documents, dtype=torch.int64)
    starts[:, 1:] = torch.where(changed, places, 0).cummax(1).values
    return send_ids(starts, device)


def send_ids(documents: Tensor, device: torch.device) -> Tensor:
    """Ids or starts on a device, whose values are known here too; the tensor must not be written to."""
    sent = send(documents, device)
    if sent is not documents:
        _on_host[sent] = documents
    return sent


def _known(documents: Tensor) -> Tensor:
    """Ids or starts on the CPU."""
    found = _on_host.get(documents)
    return documents.cpu() if found is None else found


def _refuse_returns(documents: Tensor, changed: Tensor) -> None:
    ordered = documents.sort(1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(1)
    for row in torch.nonzero(changed.sum(1) != distinct).flatten().tolist()[:1]:
        left, seen = set(), documents[row].tolist()
        for before, now in pairwise(seen):
            if now != before:
                left.add(before)
            if now in left:
                raise HeadgateError(
                    f"documents return to {now} in row {row} after another document has begun; give each "
                    "document in a row its own id"
                )


class Stretch(NamedTuple):
    """The queries of one document and the keys that they see."""

    row: int
    queries: slice
    keys: slice

    def of(self, t: Tensor) -> Tensor:
        """The document's part of a tensor (B,heads,Tq,...)."""
        return t[self.row : self.row + 1, :, self.queries]

    def of_keys(self, t: Tensor) -> Tensor:
        """The document's part of a tensor (B,heads,Tk,...)."""
        return t[self.row : self.row + 1, :, self.keys]


def stretches(first_keys: Tensor, keys: int) -> Iterator[Stretch]:
    """The documents of every row, by the first key of each query; skips queries that see no key."""
    queries = first_keys.shape[1]
    for row, firsts in enumerate(_known(first_keys)):
        edges = (torch.nonzero(firsts[1:] != firsts[:-1]).flatten() + 1).tolist()
        for begin, end in zip([0, *edges], [*edges, queries], strict=True):
            first = int(firsts[begin])
            last = keys - queries + end
            if first < last:
                begin = max(begin, first - (keys - queries))
                yield Stretch(row, slice(begin, end), slice(first, last))


def lengths(documents: Tensor) -> list[list[int]]:
    """The lengths of each row's documents, given their ids or starts."""
    return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in _known(documents)]


def by_document(documents: Tensor, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """run(...) on each document's part of the tensors (B,heads,T,...), with the results put together again.

    For ops with rules by position: packed documents and separate ones then agree by construction.
    """
    for tensor in tensors:
        if tensor.shape[:1] + tensor.shape[2:3] != documents.shape:
            raise HeadgateError(
                f"documents of shape {tuple(documents.shape)} were given for a tensor of shape "
                f"{tuple(tensor.shape)}; expected (B,T) and whole sequences: as many queries as keys"
            )
    if document_starts(documents) is None:
        return run(*tensors)
    rows = []
    for parts, sizes in zip(
        zip(*(t.split(1) for t in tensors), strict=True), lengths(documents), strict=True
    ):
        pieces = zip(*(part.split(sizes, 2) for part in parts), strict=True)
        rows.append(torch.cat([run(*piece) for piece in pieces], 2))
    return torch.cat(rows)
