"""The parts of a decoding step whose shapes never change, each recorded once as a CUDA graph and replayed.

A kernel for one token takes microseconds, and so does launching it from Python; a graph launches all its
kernels at once. Attention grows with every token and runs as it is. Everything between two attentions (output
projection, MLP, norms, the next layer's projections) has the shapes of the batch, and becomes a graph.

Recorded tensors stay in place: a replay reads its inputs and writes its outputs where they were.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.model.cache import Cache

if TYPE_CHECKING:
    from headgate.model.decoder import Decoder

DEVICES = ("cuda",)
PATIENCE = 8
"""Tokens that a batch is decoded plainly before its step is recorded: rows that end make a new batch."""

Run = Callable[..., tuple[Tensor, ...]]


def record(run: Run, inputs: Sequence[Tensor]) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
    """A function that replays run(*inputs), and its outputs, which each replay overwrites."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(3):  # what is made at the first call, such as workspaces, must not be recorded
            run(*inputs)
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(*inputs)
    return graph.replay, outputs


class Recorded:
    """A function of tensors that is replayed after its first call."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._inputs: list[Tensor] = []
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, *given: Tensor, kept: int = 0) -> tuple[Tensor, ...]:
        """The first `kept` of the given tensors are outputs of another recording, and stay where they are."""
        if not self._inputs:
            self._inputs = [*given[:kept], *(t.clone() for t in given[kept:])]
            self._replay, self.outputs = record(self._run, self._inputs)
        for to, t in zip(self._inputs[kept:], given[kept:], strict=True):
            to.copy_(t)
        self._replay()
        return self.outputs


class GraphedStep:
    """The logits (B,V) after one more token of every row, as `Decoder.next_logits` returns them."""

    def __init__(self, decoder: "Decoder") -> None:
        device = decoder.embedding.weight.device
        if device.type not in DEVICES:
            raise HeadgateError(
                f"graphs=True needs a GPU that records CUDA graphs; the model is on {device}: leave it out"
            )
        self.decoder = decoder
        self._seen: dict[int, int] = {}
        self._parts: dict[int, list[Recorded]] = {}

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor:
        batch, decoder = tokens.shape[0], self.decoder
        self._seen[batch] = self._seen.get(batch, 0) + 1
        if self._seen[batch] <= PATIENCE:
            return decoder.next_logits(tokens, cache)
        if batch not in self._parts:
            self._parts = {batch: [Recorded(run) for run in self._runs()]}
        begin, *others = self._parts[batch]
        cos, sin, groups = decoder.placed(tokens, cache)
        x, *projected = begin(tokens)
        first_values = None
        layers: list[Any] = list(decoder.layers)
        for n, (layer, after) in enumerate(zip(layers, others, strict=True)):
            held = [(rows, group.layers[n]) for rows, group in groups]
            out = layer.attention.attend(*projected, cos, sin, first_values, held, None)
            for _, kept in held:
                _own(kept.carried, projected)
            if n == 0 and decoder.shares_first_values:
                first_values = projected[3]
            x, *projected = after(x, out, kept=1)
        cache.advance(1)
        return x

    def _runs(self) -> list[Run]:
        """From the tokens to the first attention; then from each to the next; finally to the logits."""
        decoder = self.decoder
        layers: list[Any] = list(decoder.layers)

        def begin(tokens: Tensor) -> tuple[Tensor, ...]:
            x = decoder.embedding(tokens)
            return x, *layers[0].before(x)

        def between(n: int, x: Tensor, out: Tensor) -> tuple[Tensor, ...]:
            x = layers[n].after(x, out)
            return x, *layers[n + 1].before(x)

        def end(x: Tensor, out: Tensor) -> tuple[Tensor, ...]:
            return (decoder.logits(decoder.norm(layers[-1].after(x, out))[:, -1]),)

        return [begin, *(partial(between, n) for n in range(len(layers) - 1)), end]


def _own(carried: dict[str, Tensor], recorded: Sequence[Tensor]) -> None:
    """Copy what a mechanism carries to the next token if it is in memory that the next replay overwrites."""
    places = {t.untyped_storage().data_ptr() for t in recorded}
    for name, t in carried.items():
        if t.untyped_storage().data_ptr() in places:
            carried[name] = t.clone()
