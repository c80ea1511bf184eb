"""What a training run will take, before it starts: work, memory by part, what fits, time, cost.

Memory is traced through the real code (`memory_trace`), work is counted as a run's summary counts it, and
time is a range. On a GPU it follows from the datasheet and the shares of it that training reaches, at best
and at worst; on the CPU, parts of the model itself are timed on the spot (`cpu_timing`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from headgate.config import Config
from headgate.data.loader import document_lengths
from headgate.data.shards import Split
from headgate.errors import HeadgateError
from headgate.mechanisms.contract import Past
from headgate.plan import cpu_timing
from headgate.plan.devices import CPU, Device, Seconds
from headgate.plan.memory_trace import Ledger, Memory, Pass, Passes, Sizes, blank_decoder, walk
from headgate.train.summary import flops_per_token, mechanisms_of, pairs_by_layer

PLAIN = "no option"
USABLE = 0.9
"""The share of a device's memory that a plan fills: the rest goes to the program and to gaps between
tensors."""
PRODUCTS = (0.7, 0.4)
"""The share of a GPU's peak that large matrix products reach in training, at best and at worst."""
VECTOR = (0.5, 0.2)
"""The same, of the fp32 peak, for whatever else a mechanism does to each pair."""
MOVED = (0.4, 1.1)
"""Bytes moved as a multiple of what the ops of the plain code move: at best most passes are fused."""
LAUNCH = (3e-6, 12e-6)
"""Seconds in which the host starts a kernel: a GPU that works faster waits for it."""
OPTIMISER_KERNELS = 20
"""Clipping and fused AdamW go over all weights in a few kernels each."""
LINK = (0.8, 0.4)
"""The share of its links' speed that an exchange between devices reaches."""


@dataclass(frozen=True)
class PathSpeed:
    """What attention's products reach on a path."""

    share: tuple[float, float]
    """Of the peak of the dtype they are multiplied in, at best and at worst."""
    backward: float
    """The backward pass over the forward."""
    in_fp32: bool = False
    """Whether they are in fp32 whatever the precision."""


PATHS = {
    "sdpa": PathSpeed((0.65, 0.3), 2.5),  # five products against two
    "varlen": PathSpeed((0.6, 0.25), 2.5),
    "flex": PathSpeed((0.5, 0.2), 2.5),
    "triton": PathSpeed((0.5, 0.2), 4.0),  # the pair's network twice more: docs/gpu.md, what bounds them
    "torch": PathSpeed((0.4, 0.1), 3.0, in_fp32=True),  # scores go through memory, and are made again
}
"""By the path's name; shares of FlashAttention-2's and FlexAttention's published figures, and for `torch` of
the bytes that a tile of scores moves beside its products."""


@dataclass(frozen=True)
class Fit:
    """A way to run a step: how many sequences are on a device at once, and what that needs."""

    recompute: bool
    shard: bool
    sequences: int
    """For one pass on one device."""
    accumulation: int
    memory: Memory
    fits: bool
    seconds: Seconds

    @property
    def options(self) -> str:
        """As `headgate train` takes them."""
        return " ".join(["--recompute"] * self.recompute + ["--shard"] * self.shard) or PLAIN


@dataclass(frozen=True)
class Plan:
    config: Config
    device: Device
    count: int
    parameters: int
    mechanism_parameters: int
    flops: dict[str, float]
    """For a step on all devices, forward and backward: linear, attention, total."""
    bytes_moved: float
    """By the ops of a step on all devices, counted op by op."""
    asked: Fit
    """The recipe's own batch, without recomputation or sharding."""
    ways: tuple[Fit, ...]
    """For each choice of options, the largest number of sequences that fits; one sequence if none does."""
    paths: tuple[str, ...]
    """That the mechanisms' ops take on this device."""
    cache: float
    """Bytes that must be kept to decode after one sequence of this context, in fp32."""
    price: float | None
    """Price of one device per hour, as the user gave it."""

    @property
    def best(self) -> Fit | None:
        """The fastest way that fits; the first of those whose times cannot be told apart."""
        fitting = [way for way in (self.asked, *self.ways) if way.fits]
        least = min((way.seconds.expected for way in fitting), default=0.0)
        return next((way for way in fitting if way.seconds.expected <= 1.05 * least), None)

    def hours(self, way: Fit) -> Seconds:
        return way.seconds.times(self.config.train.steps / 3600)

    def cost(self, way: Fit) -> Seconds | None:
        return None if self.price is None else self.hours(way).times(self.price * self.count)

    def to_dict(self) -> dict[str, Any]:
        train = self.config.train

        def of(way: Fit) -> dict[str, Any]:
            cost = self.cost(way)
            return {
                **asdict(way),
                "memory": {**asdict(way.memory), "total": way.memory.total},
                "hours": asdict(self.hours(way)),
                "cost": None if cost is None else asdict(cost),
            }

        return {
            "mechanism": [asdict(spec) for spec in self.config.model.mechanism],
            "context": train.context,
            "tokens": train.tokens,
            "device": asdict(self.device),
            "count": self.count,
            "parameters": self.parameters,
            "mechanism_parameters": self.mechanism_parameters,
            "flops_per_step": self.flops,
            "bytes_per_step": self.bytes_moved,
            "asked": of(self.asked),
            "ways": [of(way) for way in self.ways],
            "best": None if self.best is None else of(self.best),
            "paths": list(self.paths),
            "cache_bytes": self.cache,
            "price": self.price,
        }


def make_plan(
    config: Config,
    device: Device,
    *,
    count: int = 1,
    price: float | None = None,
    all_ways: bool = True,
    split: Split | None = None,
) -> Plan:
    """Without all ways, others are tried only if what is asked for does not fit. Where documents are masked,
    attention's work is that of the documents of `split`, or of whole contexts without one."""
    return Planner(config, device, count, price, split).plan(all_ways=all_ways)


class Planner:
    def __init__(
        self,
        config: Config,
        device: Device,
        count: int,
        price: float | None = None,
        split: Split | None = None,
    ) -> None:
        if count < 1:
            raise HeadgateError(f"count={count} is too small; it must be at least 1")
        if price is not None and not 0 <= price < float("inf"):
            raise HeadgateError(f"price={price} is not a price; give that of one device per hour")
        if device.name == CPU and count > 1:
            raise HeadgateError(f"count={count} of this machine cannot be measured; plan for one")
        train = config.train
        self.total = train.batch_size * train.accumulation
        if self.total % count:
            raise HeadgateError(
                f"a step of {self.total} sequences cannot be shared evenly among {count} devices; "
                "choose a count that divides it, or another train.batch_size"
            )
        self.config, self.device, self.count, self.price = config, device, count, price
        self.decoder = blank_decoder(config.model)
        self.sizes = Sizes.of(self.decoder)
        self.mechanisms = mechanisms_of(self.decoder)
        self.documents = None if split is None else document_lengths(split, train)
        self.forward = flops_per_token(self.decoder, train.context, self.documents)
        self.pairs = pairs_by_layer(self.decoder, train.context, self.documents)
        self.head = 2.0 * config.model.vocab_size * config.model.d_model
        """Operations of the output head for a token: it is never recomputed."""
        self.share = self.total // count
        """Sequences in a step on one device."""
        self.passes = {
            recompute: Passes(
                config.model, train.precision, train.context, recompute=recompute, device=device.kind
            )
            for recompute in (False, True)
        }
        self._found: dict[tuple[bool, int], Pass] = {}

    def plan(self, *, all_ways: bool = True) -> Plan:
        train, count = self.config.train, self.count
        tokens = self.total * train.context
        own = max(1, train.batch_size // count)
        while self.share % own:
            own -= 1
        asked = self.way(own, recompute=False, shard=False)
        choices = [
            (recompute, shard) for shard in (False, True)[: min(2, count)] for recompute in (False, True)
        ]
        if asked.fits and not all_ways:
            choices = []
        ways = [self.largest(recompute=recompute, shard=shard) for recompute, shard in choices]
        return Plan(
            config=self.config,
            device=self.device,
            count=count,
            parameters=self.decoder.parameter_count(),
            mechanism_parameters=sum(p.numel() for m in self.mechanisms for p in m.parameters()),
            flops={name: 3 * value * tokens for name, value in _named(self.forward).items()},
            bytes_moved=count * self.moved(self.run(own, recompute=False), own, shards=1),
            asked=asked,
            ways=tuple(ways),
            paths=tuple(sorted(set().union(*self.run(own, recompute=False).paths))),
            cache=self.cache(),
            price=self.price,
        )

    def run(self, sequences: int, *, recompute: bool) -> Pass:
        key = recompute, sequences
        if key not in self._found:
            self._found[key] = self.passes[recompute].of(sequences)
        return self._found[key]

    def memory(self, sequences: int, *, recompute: bool, shard: bool) -> Memory:
        # DDP keeps the gradients in buckets all the time; sharded ones, and those of a single pass, come and
        # go.
        accumulated = sequences < self.share or (self.count > 1 and not shard)
        return walk(
            self.run(sequences, recompute=recompute),
            self.sizes,
            accumulated=accumulated,
            shards=self.count if shard else 1,
            gathered=self.gathered,
        )

    @property
    def gathered(self) -> int:
        """Bytes of a sharded weight while it is whole."""
        return 2 if self.config.train.precision == "bf16" else 4

    def way(self, sequences: int, *, recompute: bool, shard: bool) -> Fit:
        memory = self.memory(sequences, recompute=recompute, shard=shard)
        return Fit(
            recompute,
            shard,
            sequences,
            self.share // sequences,
            memory,
            memory.total <= USABLE * self.device.memory,
            self.seconds(sequences, recompute=recompute, shard=shard),
        )

    def largest(self, *, recompute: bool, shard: bool) -> Fit:
        """The way that fits with the most sequences."""
        for passes in range(1, self.share):
            if self.share % passes == 0:
                sequences = self.share // passes
                memory = self.memory(sequences, recompute=recompute, shard=shard)
                if memory.total <= USABLE * self.device.memory:
                    return self.way(sequences, recompute=recompute, shard=shard)
        return self.way(1, recompute=recompute, shard=shard)

    def moved(self, run: Pass, sequences: int, *, shards: int) -> float:
        """Bytes that the ops of a step move on one device; AdamW reads four numbers per weight and writes
        three."""
        of_pass = self.over_layers(run.moved)
        return of_pass * (self.share // sequences) + 28 * self.sizes.total / shards

    def over_layers(self, counts: tuple[float, ...]) -> float:
        """Of all but the layers and then of each layer of the pattern, for the whole depth."""
        rest, *layers = counts
        return rest + sum(layers[n % len(layers)] for n in range(self.sizes.depth))

    def seconds(self, sequences: int, *, recompute: bool, shard: bool) -> Seconds:
        if self.device.name == CPU:
            return self.cpu_timing.seconds(self.share, recompute=recompute)
        low, high = (self.bound(end, sequences, recompute=recompute, shard=shard) for end in (0, 1))
        return Seconds(low, math.sqrt(low * high), high)

    def bound(self, end: int, sequences: int, *, recompute: bool, shard: bool) -> float:
        """A GPU's seconds at best (end 0), where data movement hides behind arithmetic, and at worst (1)."""
        train, device, forward = self.config.train, self.device, self.forward
        tokens = self.share * train.context
        peak = device.bf16 if train.precision == "bf16" else device.fp32
        again = 1 if recompute else 0
        layers = (3 + again) * (forward["linear"] - self.head) * tokens
        products = (layers + 3 * self.head * tokens) / (peak * PRODUCTS[end])
        run = self.run(sequences, recompute=recompute)
        attention = sum(
            self.attention(n, run.paths[n % len(run.paths)], end, again) for n in range(self.sizes.depth)
        )
        shards = self.count if shard else 1
        moving = MOVED[end] * self.moved(run, sequences, shards=shards) / device.bandwidth
        passes = self.share // sequences
        started = LAUNCH[end] * (passes * self.over_layers(run.kernels) + OPTIMISER_KERNELS)
        exchanged = 0.0
        if self.count > 1:
            # Gradients go once a step, in fp32: an all-reduce sends all twice. Sharded weights are gathered
            # twice a pass, and their gradients sent on.
            sent = 2 * self.gathered * passes + 4 if shard else 8
            exchanged = sent * self.sizes.total * (1 - 1 / self.count) / (device.link * LINK[end])
        arithmetic = products + attention
        if end:
            return max(arithmetic + moving, started) + exchanged
        return max(arithmetic, moving, exchanged, started)

    def attention(self, layer: int, paths: Iterable[str], end: int, again: int) -> float:
        """Seconds of a layer's attention in a step: at best its paths do as much of it each, at worst the
        slowest does all."""
        mechanism, device, heads = self.mechanisms[layer], self.device, self.config.model
        pairs = self.pairs[layer]
        tokens = self.share * self.config.train.context
        half = self.config.train.precision == "bf16"

        def seconds(path: PathSpeed) -> float:
            peak = device.bf16 if half and not path.in_fp32 else device.fp32
            products = 4.0 * heads.head_dim / (peak * path.share[end])
            besides = mechanism.pair_operations() / (device.fp32 * VECTOR[end])
            return (1 + again + path.backward) * (products + besides)

        of_pair = [seconds(PATHS[path]) for path in sorted(paths)]
        return (max(of_pair) if end else fmean(of_pair)) * pairs * tokens * heads.n_heads

    @cached_property
    def cpu_timing(self) -> cpu_timing.CpuTiming:
        return cpu_timing.time_model(self.config, self.decoder, self.documents)

    def cache(self) -> float:
        """Keys, values and what else a mechanism keeps, from the first key still needed."""
        model, context = self.config.model, self.config.train.context
        total = 0.0
        for mechanism in self.mechanisms[: len(self.sizes.layers)]:
            length = context - mechanism.first_key(context)
            with Ledger() as ledger:
                keys = ledger.shadow((1, model.n_kv_heads, 1, model.head_dim))
                ledger.shadow_parameters(mechanism)
                x = ledger.shadow((1, 1, model.d_model))
                queries = ledger.shadow((1, model.n_heads, 1, model.head_dim))
                _, *kept = mechanism.prepare(x, queries, keys, keys, Past())
            layers = len(range(self.mechanisms.index(mechanism), self.sizes.depth, len(self.sizes.layers)))
            total += layers * length * 4 * sum(t.numel() for t in kept)
        return total


def _named(forward: dict[str, float]) -> dict[str, float]:
    return {"linear": forward["linear"], "attention": forward["attention"], "total": forward["forward"]}


def with_batch(config: Config, *, context: int | None, batch: int | None) -> Config:
    """The config with another context and number of sequences per pass; it trains on as many tokens."""
    train = config.train
    context, batch = context or train.context, batch or train.batch_size
    steps = max(1, round(train.tokens / (batch * train.accumulation * context)))
    return replace(config, train=replace(train, context=context, batch_size=batch, steps=steps))


def make_plans(
    config: Config,
    mechanisms: Sequence[Any],
    contexts: Sequence[int],
    device: Device,
    *,
    count: int = 1,
    price: float | None = None,
    split: Split | None = None,
) -> list[Plan]:
    """A plan for each mechanism (a tuple of specs) at each context, with as many tokens per step
    throughout."""
    plans = []
    tokens = config.train.batch_size * config.train.context
    for context in contexts:
        batch = max(count, tokens // context)
        asked = with_batch(config, context=context, batch=batch - batch % count)
        for mechanism in mechanisms:
            changed = replace(asked, model=replace(asked.model, mechanism=mechanism))
            plans.append(make_plan(changed, device, count=count, price=price, all_ways=False, split=split))
    return plans
