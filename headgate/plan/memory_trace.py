"""A training step without arithmetic: the real code runs on tensors that have shapes but no values, while
every allocation is traced. So what the planner says about memory comes from the model, the mechanisms and
autograd themselves, autocast included, in milliseconds.

The step is traced in segments (embedding, each layer, the loss; then backwards), because layers with the same
mechanism are alike: one of each is run, and `walk` strings their figures together for the whole depth.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.linear_cross_entropy import (
    _linear_cross_entropy_batch_chunked_accumulator as _loss,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from headgate.config import ModelConfig
from headgate.mechanisms.contract import Mechanism
from headgate.model.decoder import Decoder
from headgate.ops import tiles
from headgate.ops.active import BY_HEAD
from headgate.ops.dispatch import paths_taken
from headgate.ops.gpu import planned_for
from headgate.plan.meta_rules import result_of
from headgate.train.evaluate import autocast
from headgate.train.summary import mechanisms_of

CPU = torch.device("cpu")
DIRECT_TOKENS, GPU_DIRECT_TOKENS = 4096, 1 << 15
"""Up to this many tokens a pass is run as it is; beyond, its figures are on the line through two smaller
ones, at which tiles and chunks of the loss already have their greatest size."""


LARGE = 1 << 16
"""The number of elements from which a newly made tensor has no values either."""
FACTORIES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.full.default,
}
LOSS = torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default


class Shadow(Tensor):
    """A CPU tensor as far as dispatch, autograd and autocast can see, with a meta tensor in its place."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, requires_grad: bool = False) -> "Shadow":
        made: Shadow = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=CPU,
            requires_grad=requires_grad,
        )
        made.meta = meta
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} met a tensor without values outside a memory trace")


class Ledger(TorchDispatchMode):
    """Tracks what is live: every storage from the op that makes it until nothing refers to it."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.moved = 0
        """Bytes that the ops read and wrote, counted op by op."""
        self.kernels = 0
        """Ops that compute something: on a GPU, each is at least one kernel to start."""
        self._known: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the import alone would take as long as PyTorch's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, shape = tree_flatten((args, kwargs or {}))
        if func is LOSS:
            with self:  # opaque to autograd, but its chunks are most of what the loss needs
                return _loss(*args[:11], *args[12:])
        if not any(isinstance(leaf, Shadow) for leaf in flat) and not _makes_large(func, args):
            result = func(*args, **(kwargs or {}))
            self.kernels += func not in FACTORIES and not func.is_view
            for tensor in tree_flatten(result)[0]:
                if isinstance(tensor, Tensor):
                    self.follow(tensor)
            return result
        plain = [_meta(leaf) for leaf in flat]
        given_as = {
            id(meta): leaf for meta, leaf in zip(plain, flat, strict=True) if isinstance(leaf, Tensor)
        }
        given, options = tree_unflatten(plain, shape)
        if "device" in options:
            options["device"] = torch.device("meta")
        leaves, shape = tree_flatten(result_of(func, given, options))
        read = {_storage(leaf)._cdata for leaf in plain if isinstance(leaf, Tensor)}
        touched = [leaf for leaf in plain if isinstance(leaf, Tensor)]
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func._schema.is_mutable or any(_storage(leaf)._cdata not in read for leaf in made):
            self.moved += sum(map(_bytes, [*touched, *made]))
            self.kernels += 1
        return tree_unflatten([self._wrapped(leaf, given_as) for leaf in leaves], shape)

    def _wrapped(self, leaf: Any, given_as: dict[int, Tensor]) -> Any:
        """A result as the caller knows it: a tensor that was written to is the one that was given."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in given_as:
            return given_as[id(leaf)]
        self.follow(leaf)
        return Shadow(leaf)

    def follow(self, tensor: Tensor, *, counted: bool = True) -> None:
        storage = _storage(tensor)
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counted else 0
        self._known[key] = size
        weakref.finalize(storage, self._forget, key)
        self.live += size
        self.peak = max(self.peak, self.live)

    def shadow(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Shadow:
        """A tensor that existed before, and is not counted."""
        meta = torch.empty_strided(shape, _contiguous(shape), dtype=dtype, device="meta")
        self.follow(meta, counted=False)
        return Shadow(meta)

    def shadow_parameters(self, module: nn.Module) -> None:
        """Replace meta parameters with shadows."""
        made: dict[Tensor, nn.Parameter] = {}
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if isinstance(parameter.data, Shadow):
                    continue
                if parameter not in made:
                    self.follow(parameter, counted=False)
                    made[parameter] = nn.Parameter(Shadow(parameter.data))
                setattr(part, name, made[parameter])

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[n + 1 :]) for n in range(len(shape))]


def _makes_large(func: Any, args: Any) -> bool:
    """Whether it makes a new tensor too large to be worth the memory. Small ones are real: positions and
    counts, whose values the code may depend on."""
    return func in FACTORIES and math.prod(args[0]) >= LARGE


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, Shadow):
        return leaf.meta
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Segment:
    """A part of a step: its highest point above where it starts, and how much it then leaves or frees."""

    peak: float
    kept: float

    def between(self, other: "Segment", share: float) -> "Segment":
        """On the line from this one to the other, `share` of the way."""
        return Segment(
            self.peak + share * (other.peak - self.peak), self.kept + share * (other.kept - self.kept)
        )


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass, in bytes. Layers are in the order of the pattern, not of time."""

    embedding: Segment
    layers: tuple[Segment, ...]
    loss: Segment
    loss_back: Segment
    layers_back: tuple[Segment, ...]
    embedding_back: Segment
    between_layers: float
    """What is freed when the next layer starts: the previous one's input, unless something keeps it."""
    moved: tuple[float, ...]
    """Bytes read and written by ops: all but the layers, then each layer, forward and backward."""
    kernels: tuple[float, ...]
    """Ops that compute something, as `moved`."""
    paths: tuple[frozenset[str], ...]
    """Those that the ops of each layer's mechanism took in the forward pass."""

    def between(self, other: "Pass", share: float) -> "Pass":
        pairs = zip(self.layers, other.layers, strict=True)
        back = zip(self.layers_back, other.layers_back, strict=True)
        return Pass(
            self.embedding.between(other.embedding, share),
            tuple(a.between(b, share) for a, b in pairs),
            self.loss.between(other.loss, share),
            self.loss_back.between(other.loss_back, share),
            tuple(a.between(b, share) for a, b in back),
            self.embedding_back.between(other.embedding_back, share),
            self.between_layers + share * (other.between_layers - self.between_layers),
            tuple(a + share * (b - a) for a, b in zip(self.moved, other.moved, strict=True)),
            tuple(a + share * (b - a) for a, b in zip(self.kernels, other.kernels, strict=True)),
            self.paths,
        )


def run_pass(
    model: ModelConfig, precision: str, sequences: int, length: int, *, recompute: bool, device: str = "cpu"
) -> Pass:
    """Trace a pass over the first repeat of the pattern of layers, with such a device's paths and tiles."""
    pattern = min(len(model.mechanism), model.n_layers)
    decoder = blank_decoder(replace(model, n_layers=pattern))
    ledger = Ledger()
    with ledger, light_recomputation(), planned_for(device):
        tokens = ledger.shadow((sequences, length), torch.int64)
        ledger.shadow_parameters(decoder)
        marks, freed, paths = _marked_step(decoder, ledger, precision, tokens, recompute)
    segments = [Segment(m.peak - m.before, m.after - m.before) for m in marks]
    forward, back = slice(1, pattern + 1), slice(pattern + 3, 2 * pattern + 3)

    def by_layer(counts: list[int]) -> tuple[float, ...]:
        each = [a + b for a, b in zip(counts[forward], counts[back][::-1], strict=True)]
        return sum(counts) - sum(each), *each

    return Pass(
        segments[0],
        tuple(segments[forward]),
        segments[pattern + 1],
        segments[pattern + 2],
        tuple(segments[back][::-1]),
        segments[-1],
        freed,
        by_layer([m.moved for m in marks]),
        by_layer([m.kernels for m in marks]),
        tuple(paths),
    )


def blank_decoder(model: ModelConfig) -> Decoder:
    """A decoder with shapes only, on the meta device."""
    with torch.device("meta"):
        return Decoder(model)


class _Recomputed(torch.autograd.Function):
    """Does what torch.utils.checkpoint does, without first importing a compiler."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        ctx.function = function
        ctx.others = [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg if isinstance(arg, Tensor) else None for arg in args))
        ctx.cast = torch.is_autocast_enabled("cpu")
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        args = [
            other if saved is None else saved.detach().requires_grad_(saved.requires_grad)
            for saved, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        with torch.enable_grad(), autocast(CPU, "bf16" if ctx.cast else "fp32"):
            out = ctx.function(*args)
        torch.autograd.Variable._execution_engine.run_backward(
            out if isinstance(out, tuple) else (out,),
            d_outs,
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        return None, *(arg.grad if isinstance(arg, Tensor) else None for arg in args)


def _recomputed(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return _Recomputed.apply(function, *args)


@contextmanager
def light_recomputation() -> Iterator[None]:
    """Inside, tiled ops recompute their tiles without the compiler."""
    with patch.object(tiles, "checkpoint", _recomputed):
        yield


def _paths_since(before: dict[str, int]) -> frozenset[str]:
    """Those taken since, but for an op that only shares heads out to others."""
    taken = (path.split(":")[:2] for path, n in paths_taken().items() if n > before.get(path, 0))
    return frozenset(path for op, path in taken if op != BY_HEAD.name)


@dataclass(frozen=True)
class _Mark:
    """A segment as it was followed: bytes live before it, at its highest point and after it, and its work."""

    before: int
    peak: int
    after: int
    moved: int
    kernels: int


def _marked_step(
    decoder: Decoder, ledger: Ledger, precision: str, tokens: Tensor, recompute: bool
) -> tuple[list[_Mark], int, list[frozenset[str]]]:
    """Each segment in order of time; the bytes of the first layer's input if nothing keeps it for the
    backward pass; and the paths that each layer took."""
    marks: list[_Mark] = []
    inputs: list[tuple[Any, int]] = []
    paths: list[frozenset[str]] = []
    state = [ledger.live, ledger.moved, ledger.kernels]
    ledger.peak = ledger.live

    def mark(*_: Any) -> None:
        before, moved, kernels = state
        marks.append(_Mark(before, ledger.peak, ledger.live, ledger.moved - moved, ledger.kernels - kernels))
        state[:] = [ledger.live, ledger.moved, ledger.kernels]
        ledger.peak = ledger.live

    class Marked(nn.Module):
        def __init__(self, layer: nn.Module, *, first: bool) -> None:
            super().__init__()
            self.layer, self.first = layer, first

        def forward(self, x: Tensor, *rest: Any, with_values: bool = False) -> Any:
            if self.first:
                mark()
                x.register_hook(mark)
                storage = _storage(x.meta if isinstance(x, Shadow) else x)
                inputs.append((weakref.ref(storage), storage.nbytes()))
            run = partial(self.layer, with_values=with_values)
            before = paths_taken()
            out = _recomputed(run, x, *rest) if recompute else run(x, *rest)
            paths.append(_paths_since(before))
            mark()
            (out[0] if with_values else out).register_hook(mark)
            return out

    decoder.layers = nn.ModuleList(Marked(layer, first=not n) for n, layer in enumerate(decoder.layers))
    with autocast(CPU, precision):
        loss = decoder(tokens, tokens)
    mark()
    freed = sum(size for kept, size in inputs if kept() is None)
    loss.backward()
    mark()
    return marks, freed, paths


_RUNS: dict[tuple[Any, ...], Pass] = {}
"""Kept for this process: plans for several contexts come from the same two runs."""


class Passes:
    """Passes over any number of sequences of one length. Those with many tokens are on the line through two
    smaller runs: memory is linear in the tokens once tiles have reached their greatest size."""

    def __init__(
        self, model: ModelConfig, precision: str, length: int, *, recompute: bool, device: str = "cpu"
    ) -> None:
        self.model, self.precision, self.length, self.recompute = model, precision, length, recompute
        self.device = device

    @cached_property
    def pattern(self) -> list[Mechanism]:
        """The layers' mechanisms, until they repeat."""
        depth = min(len(self.model.mechanism), self.model.n_layers)
        return mechanisms_of(blank_decoder(replace(self.model, n_layers=depth)))

    def of(self, sequences: int) -> Pass:
        length, tokens = self.length, sequences * self.length
        most = DIRECT_TOKENS if self.device == "cpu" else GPU_DIRECT_TOKENS
        half = most // 2
        if tokens <= most:
            return self._run(sequences, length)
        few = max(1, half // length)
        shapes = [(1, half), (1, 2 * half)] if length > half else [(few, length), (2 * few, length)]
        first, second = (self._run(*shape) for shape in shapes)
        begin, end = (batch * context for batch, context in shapes)
        between = first.between(second, (tokens - begin) / (end - begin))
        rest, *layers = between.moved
        for n, mechanism in enumerate(self.pattern):
            points = [
                (batch * context, batch * mechanism.pairs(context), run.moved[n + 1])
                for (batch, context), run in zip(shapes, (first, second), strict=True)
            ]
            layers[n] += _beyond_linear(points, tokens, sequences * mechanism.pairs(length))
        return replace(between, moved=(rest, *layers))

    def _run(self, sequences: int, length: int) -> Pass:
        key = (repr(self.model), self.precision, sequences, length, self.recompute, self.device)
        if key not in _RUNS:
            _RUNS[key] = run_pass(
                self.model,
                self.precision,
                sequences,
                length,
                recompute=self.recompute,
                device=self.device,
            )
        return _RUNS[key]


def _beyond_linear(points: Sequence[tuple[int, int, float]], tokens: int, pairs: int) -> float:
    """How far a cost of a * tokens + b * pairs, known at two points, is above the line through them: the
    scores of paths that go over all pairs are moved in full, though never held in full."""
    (n1, p1, c1), (n2, p2, c2) = points
    if p2 / n2 < 1.2 * p1 / n1:
        return 0.0
    per_pair = (c2 / n2 - c1 / n1) / (p2 / n2 - p1 / n1)
    per_token = c1 / n1 - per_pair * p1 / n1
    line = c1 + (c2 - c1) * (tokens - n1) / (n2 - n1)
    return max(0.0, per_token * tokens + per_pair * pairs - line)


def _pair(batch: int) -> tuple[int, int]:
    return max(1, batch), 2 * max(1, batch)


@dataclass(frozen=True)
class Memory:
    """The most that one device holds at once during a step, by kind, in bytes."""

    weights: float
    gradients: float
    optimiser: float
    activations: float
    loss: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimiser + self.activations + self.loss


@dataclass(frozen=True)
class Sizes:
    """Parameters of a decoder: of each layer of the pattern, and of everything else."""

    layers: tuple[int, ...]
    rest: int
    depth: int

    @classmethod
    def of(cls, decoder: Decoder) -> "Sizes":
        pattern = min(len(decoder.config.mechanism), decoder.config.n_layers)
        layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder.layers]
        return cls(tuple(layers[:pattern]), decoder.parameter_count() - sum(layers), len(layers))

    @property
    def total(self) -> int:
        return self.rest + sum(self.layers[n % len(self.layers)] for n in range(self.depth))


def walk(run: Pass, sizes: Sizes, *, accumulated: bool, shards: int = 1, gathered: int = 4) -> Memory:
    """The highest point of a step at full depth. `accumulated`: all gradients exist from the start.

    With shards (FSDP2) a device has its share of weights, gradients and optimiser state; only the embedding,
    the layer at work and the next one are whole, at `gathered` bytes per weight, and a layer's gradients
    until they are passed on: while they accumulate, until the last pass of the step.
    """
    width, pattern = 4, len(run.layers)
    weights = width * sizes.total / shards
    if shards > 1:
        weights += gathered * (sizes.rest + 2 * max(sizes.layers))
    optimiser = 2 * width * sizes.total / shards
    shared = 1 / shards
    gradients = float(width * sizes.total) if accumulated else 0.0
    moments: list[Memory] = []
    activations = 0.0

    def moment(segment: Segment, gradients: float, loss: float = 0.0, *, is_loss: bool = False) -> None:
        own = loss + segment.peak if is_loss else loss
        moments.append(
            Memory(weights, gradients, optimiser, activations + (0.0 if is_loss else segment.peak), own)
        )

    moment(run.embedding, gradients)
    activations += run.embedding.kept
    for n in range(sizes.depth):
        if n and n % pattern == 0:  # within a pattern the layers' own figures include this
            activations -= run.between_layers
        moment(run.layers[n % pattern], gradients)
        activations += run.layers[n % pattern].kept
    moment(run.loss, gradients, is_loss=True)
    moment(run.loss_back, gradients, run.loss.kept, is_loss=True)
    held = run.loss.kept + run.loss_back.kept  # the output head's gradient, where it is not yet added
    for n in reversed(range(sizes.depth)):
        segment, own = run.layers_back[n % pattern], width * sizes.layers[n % pattern]
        moment(segment, gradients + held)
        activations += segment.kept - own
        gradients += 0 if accumulated else own * shared
    moment(run.embedding_back, gradients + held)
    if not accumulated:
        moments.append(Memory(weights, width * sizes.total * shared, optimiser, 0.0, 0.0))
    return max(moments, key=lambda memory: memory.total)
