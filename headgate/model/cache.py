"""The keys and values of past tokens, per layer, from the first key that any later query may need.

A layer's cache lives in buffers that are written at their end. Dropped keys cost nothing: the live part is a
view, and when the end is reached it moves to the front (or to larger buffers), which a windowed mechanism
does once in about a window of tokens. So its memory stays bounded and its time per token constant, whatever
the length.
"""

import torch
from torch import Tensor

from headgate.errors import HeadgateError


class LayerCache:
    def __init__(self) -> None:
        self.start = 0
        """Position of the first key held."""
        self._begin = self._end = 0
        self._buffers: list[Tensor] = []  # keys, values, and the mechanism's key state if it has one

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def append(self, *new: Tensor) -> list[Tensor]:
        """Add tensors (B,heads,T,...) of the newest tokens; returns views of all that is held."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new):
            raise HeadgateError(
                "a cache carries no gradients; run the decoder with a cache under torch.no_grad()"
            )
        held, added = len(self), new[0].shape[2]
        if self._buffers and self._buffers[0].shape[0] != new[0].shape[0]:
            raise HeadgateError(
                f"a batch of {new[0].shape[0]} was given to a cache of batch {self._buffers[0].shape[0]}; "
                "use a new cache for another batch"
            )
        capacity = self._buffers[0].shape[2] if self._buffers else 0
        if self._end + added > capacity:
            wanted = 2 * (held + added)
            # Moving in place would overlap unless the live part lies beyond its own length.
            fits = held <= self._begin and held + added <= capacity <= 2 * wanted
            target = self._buffers if fits else [t.new_empty(*t.shape[:2], wanted, *t.shape[3:]) for t in new]
            for old, fresh in zip(self._buffers, target, strict=False):
                fresh[:, :, :held] = old[:, :, self._begin : self._end]
            self._buffers, self._begin, self._end = target, 0, held
        for buffer, tensor in zip(self._buffers, new, strict=True):
            buffer[:, :, self._end : self._end + added] = tensor
        self._end += added
        return [buffer[:, :, self._begin : self._end] for buffer in self._buffers]

    def drop_before(self, position: int) -> None:
        """Forget the keys before `position`."""
        dropped = min(max(0, position - self.start), len(self))
        self._begin += dropped
        self.start += dropped


class Cache:
    """What a decoder keeps between calls: give the same one to each call, with the next tokens."""

    def __init__(self, n_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(n_layers)]
        self.length = 0
        """Tokens seen so far; the next one has this position."""

    @property
    def bytes(self) -> int:
        """Memory of the buffers."""
        return sum(layer.bytes for layer in self.layers)
