"""How long a step takes on this machine, from parts of the model itself timed on the spot.

A layer's own products and norms on some tokens, its mechanism on one sequence, a chunk of the loss, AdamW on
some weights: each takes a few tens of milliseconds at the model's own widths, and is then scaled. A
mechanism's cost at a longer context follows a * tokens + b * pairs through two lengths.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from headgate.config import Config
from headgate.data.loader import DocumentLengths
from headgate.grammar import MechanismSpec
from headgate.mechanisms.contract import Mechanism, NoInitialValues
from headgate.model.decoder import Decoder, Layer
from headgate.ops.rotary import rotation
from headgate.plan.devices import Seconds
from headgate.plan.memory_trace import light_recomputation
from headgate.train.evaluate import autocast
from headgate.train.summary import mechanisms_of, pairs_per_token

M = TypeVar("M", bound=nn.Module)
DEVICE = torch.device("cpu")
WORK = 4e9
"""About this many operations are timed at once."""
SHORT = 32
"""Sequences for timing a layer without its attention, which at this length is next to nothing."""
LONGEST = 1024
CLASSES = 8192
WEIGHTS = 1 << 20
FORWARD = 1 / 3
"""The forward pass's share of a forward and backward pass."""


@dataclass(frozen=True)
class CpuTiming:
    layers: Seconds
    """All layers without their attention, per token."""
    attention: Seconds
    """All layers' mechanisms, per sequence."""
    loss: Seconds
    """A token."""
    step: Seconds
    """Clipping and AdamW, for all weights."""
    context: int

    def seconds(self, sequences: int, *, recompute: bool) -> Seconds:
        """The time of a step of this many sequences; a recomputed layer goes forward twice."""
        again = 1 + FORWARD if recompute else 1.0
        tokens = sequences * self.context
        layers = self.layers.times(tokens * again) + self.attention.times(sequences * again)
        return layers + self.loss.times(tokens) + self.step


def time_model(config: Config, decoder: Decoder, documents: DocumentLengths | None = None) -> CpuTiming:
    model, context, precision = config.model, config.train.context, config.train.precision
    pattern = mechanisms_of(decoder)[: len(model.mechanism)]
    depths = [len(range(n, model.n_layers, len(pattern))) for n in range(len(pattern))]
    sequences = config.train.batch_size * config.train.accumulation
    attention = Seconds(0, 0, 0)
    for mechanism, depth in zip(pattern, depths, strict=True):
        share = 1.0  # of the pairs in whole contexts
        if documents is not None:
            share = pairs_per_token(mechanism, context, documents) / pairs_per_token(mechanism, context)
        of_layer = _mechanism(mechanism, sequences, context, precision)
        attention = attention + of_layer.times(depth * share)
    tokens = sequences * context
    return CpuTiming(
        _layer(config, tokens).times(model.n_layers),
        attention,
        _loss(decoder, tokens),
        _optimiser().times(decoder.parameter_count() / WEIGHTS),
        context,
    )


def _filled(make: Callable[[], M]) -> M:
    """With arbitrary values in all weights: the time of a product does not depend on them."""
    with NoInitialValues():
        module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.01)
    return module


def _layer(config: Config, tokens: int) -> Seconds:
    """The time of a token in a layer with plain attention over short sequences."""
    model = config.model
    layer = _filled(lambda: Layer(model, MechanismSpec("full")))
    weights = sum(p.numel() for p in layer.parameters())
    sequences = max(1, min(tokens, int(WORK / (6 * weights))) // SHORT)
    x = torch.randn(sequences, SHORT, model.d_model, requires_grad=True)
    cos, sin = rotation(torch.arange(SHORT), model.head_dim, model.rope_theta, model.rope_scaling)

    def run() -> None:
        with autocast(DEVICE, config.train.precision):
            out = layer(x, cos, sin, None)
        out.sum().backward()

    return Seconds.of(run).times(1 / (sequences * SHORT))


def _mechanism(mechanism: Mechanism, sequences: int, context: int, precision: str) -> Seconds:
    """The time of one sequence, out of this many, in a mechanism, forward and backward."""
    heads = mechanism.heads
    per_pair = 7 * heads.n_heads * (2 * heads.head_dim + mechanism.pair_operations())
    longest = 1 << int(math.log2(max(128.0, min(LONGEST, math.sqrt(2 * WORK / per_pair)))))
    copy = _filled(lambda: type(mechanism)(heads, mechanism.options))
    if context <= longest:
        together = min(sequences, max(1, int(WORK / (per_pair * mechanism.pairs(context)))))
        return _attended(copy, context, precision, together).times(1 / together)
    short, long = (_attended(copy, length, precision) for length in (longest // 2, longest))
    pairs = {length: mechanism.pairs(length) for length in (longest // 2, longest, context)}

    def at(field: str) -> float:
        first, second = getattr(short, field), getattr(long, field)
        return extrapolated(
            [(longest // 2, pairs[longest // 2], first), (longest, pairs[longest], second)],
            context,
            pairs[context],
        )

    return Seconds(*sorted(map(at, ("low", "expected", "high"))))  # three lines may cross


def extrapolated(points: list[tuple[int, int, float]], tokens: int, pairs: int) -> float:
    """a * tokens + b * pairs through two points; if pairs grow as tokens do, in proportion to the second
    point's tokens."""
    (n1, p1, c1), (n2, p2, c2) = points
    if p2 / n2 < 1.2 * p1 / n1:
        return c2 * pairs / p2
    per_pair = max(0.0, (c2 / n2 - c1 / n1) / (p2 / n2 - p1 / n1))
    per_token = max(0.0, c2 / n2 - per_pair * p2 / n2)
    return per_token * tokens + per_pair * pairs


def _attended(mechanism: Mechanism, length: int, precision: str, sequences: int = 1) -> Seconds:
    heads = mechanism.heads
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def drawn(n: int) -> Tensor:
        return torch.randn(sequences, length, n, heads.head_dim, dtype=dtype).transpose(1, 2).requires_grad_()

    x = torch.randn(sequences, length, heads.d_model, requires_grad=True)
    q, k, v = drawn(heads.n_heads), drawn(heads.n_kv_heads), drawn(heads.n_kv_heads)

    def run() -> None:
        with autocast(DEVICE, precision):
            out = mechanism(x, q, k, v)
        out.sum().backward()

    with light_recomputation():
        return Seconds.of(run)


def _loss(decoder: Decoder, tokens: int) -> Seconds:
    """The time of a token in the output head: the passes that make up a chunk of the loss."""
    width, classes = decoder.config.d_model, decoder.config.vocab_size
    some = min(classes, CLASSES)
    rows = min(decoder.loss_rows(tokens), max(64, int(WORK / (6 * width * some))))
    x, weight = torch.randn(rows, width), torch.randn(some, width)
    logits, d_weight = torch.empty(rows, some), torch.zeros(some, width)

    def run() -> None:
        torch.mm(x, weight.T, out=logits)
        logits.sub_(logits.amax(1, keepdim=True))
        total = logits.exp_().sum(1, keepdim=True)
        logits.mul_(1 / total)
        torch.mm(logits, weight)
        d_weight.addmm_(logits.T, x, alpha=-1)

    return Seconds.of(run).times(classes / some / rows)


def _optimiser() -> Seconds:
    """The time of the norm, clipping and AdamW over WEIGHTS weights."""
    weight, gradient, mean, square = (torch.full((WEIGHTS,), 0.01) for _ in range(4))
    step = torch.ones(())

    def run() -> None:
        torch.linalg.vector_norm(gradient)
        gradient.mul_(1.0)
        torch._fused_adamw_(
            [weight],
            [gradient],
            [mean],
            [square],
            [],
            [step],
            lr=1e-4,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return Seconds.of(run)
