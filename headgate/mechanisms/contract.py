"""What a mechanism is: a module that turns queries, keys and values into attended values.

Shapes everywhere: x (B,Tq,C) the newest tokens after the pre-attention norm; q (B,H,Tq,D); k, v (B,G,Tk,D)
the keys and values known so far, of which the first has position `start` and the last Tq are the newest.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from headgate.config import check_heads, from_dict, require_at_least
from headgate.errors import HeadgateError, suggestion
from headgate.registry import Registry


@dataclass(frozen=True)
class MechanismOptions:
    """Base of every mechanism's options: a frozen dataclass, each field followed by its one-line
    docstring."""


@dataclass(frozen=True)
class Heads:
    """The sizes a mechanism works with."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        require_at_least(self, 1, "d_model", "n_heads", "n_kv_heads", "head_dim")
        check_heads(self.n_heads, self.n_kv_heads)
        if self.head_dim % 2:
            raise HeadgateError(
                f"head_dim={self.head_dim} is odd; RoPE turns pairs of dimensions, so make it even"
            )


class Mechanism(nn.Module):
    """Subclass it in one file and decorate the class with `@register("name")`; nothing else needs to change.

    A token's output may depend on its prefix alone: whole sequences, chunks over a cache and single tokens
    must agree. The contract tests check this, and all else that is said below, for every registered name.
    """

    Options: ClassVar[type[MechanismOptions]] = MechanismOptions
    ablations: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Name of an ablation -> the options that make it."""

    def __init__(self, heads: Heads, options: Any) -> None:
        super().__init__()
        self.heads = heads
        self.options = options
        self.skip_below = 0.0
        """What a gate weighs less than this is left out; `skipping` sets it."""
        self._observer: Callable[[str, Tensor], None] | None = None

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        """The attended values (B,H,Tq,D). A mechanism with a `key_state` also takes `state=None`."""
        raise NotImplementedError

    def reference(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        """The same as `forward`, dense and plain: the formula as it is written, and the truth for tests."""
        raise NotImplementedError

    def first_key(self, position: int) -> int:
        """The earliest key that a query at `position` or later may need; the cache drops what lies before
        it."""
        raise NotImplementedError

    @property
    def first_keys(self) -> int:
        """How many of the sequence's first keys the cache keeps besides, for ever.

        A mechanism that has some sees them right before the others, as if those dropped in between had never
        been, and `start` is 0: so nothing but distances within the window may matter to it.
        """
        return 0

    def pairs(self, length: int) -> int:
        """How many query-key pairs a head evaluates over `length` tokens."""
        raise NotImplementedError

    def pair_operations(self) -> int:
        """Operations that a pair takes beside attention's own, for `headgate plan`: a network of the pair."""
        return 0

    def key_state(self, k: Tensor) -> Tensor | None:
        """Something computed per key (B,...,Tk,...) with Tk in dimension 2, kept in the cache beside k and
        v."""
        return None

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill the parameter called `name` inside this mechanism; by default as the rest of the decoder."""
        initialise_parameter(name, parameter, generator)

    def open(self) -> float:
        """Fill the parameters so that the mechanism starts as full attention, as far as it can.

        Weights that were trained with full attention are retrofitted this way. Returns at how many of the
        first positions it then computes what full attention does: math.inf for all, 0 for none.
        """
        return 0

    def observe(self, name: str, value: Tensor) -> None:
        """Hand a value to an active `headgate.probe`; does nothing otherwise."""
        if self._observer is not None:
            self._observer(name, value)

    @property
    def skips(self) -> bool:
        """Whether it has a gate that `skipping` can follow."""
        return False

    def followed(self, gate: Tensor, *, down: bool = False, up: bool = False) -> Tensor:
        """The gate (B,Tq,H) as it is used: a probe sees it, and inside `skipping` what is less than the
        threshold away from 0 (`down`) or from 1 (`up`) is set to it."""
        self.observe("gate", gate)
        if not self.skip_below:
            return gate
        ends = []
        if down:
            gate = gate.masked_fill(gate < self.skip_below, 0.0)
            ends.append(gate == 0)
        if up:
            gate = gate.masked_fill(gate > 1 - self.skip_below, 1.0)
            ends.append(gate == 1)
        if self.observed:
            self.observe("skipped", torch.stack(ends, -1))
        return gate

    def is_skipping(self, q: Tensor) -> bool:
        """Whether what weighs nothing is not to be computed: for single tokens, where there is no
        gradient."""
        return self.skip_below > 0 and q.shape[2] == 1 and not torch.is_grad_enabled()

    @property
    def observed(self) -> bool:
        """Whether a probe is active, for values that cost something to compute."""
        return self._observer is not None

    def extra_repr(self) -> str:
        return ", ".join(f"{f.name}={getattr(self.options, f.name)!r}" for f in fields(self.options))


def description(mechanism: type[Mechanism]) -> str:
    """What the mechanism's file says of it: a line with its name, then its formula."""
    return inspect.cleandoc(
        sys.modules[mechanism.__module__].__doc__ or mechanism.__doc__ or mechanism.__name__
    )


M = TypeVar("M", bound=type[Mechanism])
MECHANISMS: Registry[type[Mechanism]] = Registry("mechanism", package="headgate.mechanisms")


def register(name: str) -> Callable[[M], M]:
    """Class decorator that gives a mechanism its name everywhere: command line, contract tests, reports."""

    def add(mechanism: M) -> M:
        MECHANISMS.register(name)(mechanism)
        return mechanism

    return add


def make_options(
    name: str, options: Mapping[str, Any], shared: Mapping[str, Any] | None = None
) -> MechanismOptions:
    """The mechanism's options from those given, then the shared ones it has, then its defaults."""
    cls = MECHANISMS.get(name).Options
    known = {f.name for f in fields(cls)}
    for option in options:
        if option not in known:
            raise HeadgateError(f"{name} has no option {option!r}; {suggestion(option, known)}")
    of_shared = {option: value for option, value in (shared or {}).items() if option in known}
    try:
        return from_dict(cls, {**of_shared, **options})
    except HeadgateError as error:
        raise HeadgateError(f"mechanism {name!r}: {error}") from None


def check_shared_options(shared: Mapping[str, Any]) -> None:
    """A shared option that no mechanism has would be ignored for ever: refuse it."""
    known = {f.name for name in MECHANISMS.names() for f in fields(MECHANISMS.get(name).Options)}
    for option in shared:
        if option not in known:
            raise HeadgateError(f"no mechanism has the shared option {option!r}; {suggestion(option, known)}")


def build_mechanism(
    name: str,
    *,
    d_model: int,
    n_heads: int,
    head_dim: int,
    n_kv_heads: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Mechanism:
    """A mechanism by itself, initialised, to be used in any transformer block."""
    heads = Heads(d_model, n_heads, n_heads if n_kv_heads is None else n_kv_heads, head_dim)
    mechanism = MECHANISMS.get(name)(heads, make_options(name, options))
    initialise(mechanism, seed)
    return mechanism


def initialise(module: nn.Module, seed: int, *, skip: Container[str] = ()) -> None:
    """Fill every parameter from a generator seeded by (seed, the parameter's name), so that two models share
    bit for bit every weight they both have. Parameters on the meta device, and those to skip, are left alone.
    """
    owners = {name: m.initialise for name, m in module.named_modules() if hasattr(m, "initialise")}
    for name, parameter in module.named_parameters():
        if parameter.is_meta or name in skip:
            continue
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        fill, local = initialise_parameter, name
        for prefix, own in owners.items():  # outer modules come first
            if not prefix or name.startswith(prefix + "."):
                fill, local = own, name[len(prefix) :].lstrip(".")
        drawn = torch.empty(
            parameter.shape
        )  # drawn on the CPU in fp32, so that device and dtype change nothing
        with torch.no_grad():
            fill(local, drawn, generator)
            parameter.copy_(drawn)


def initialise_parameter(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """The decoder's rule: matrices normal with deviation 0.02, biases 0, norm weights 1."""
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, 0.02, generator=generator)


@contextmanager
def probe(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect what the mechanisms inside `model` observe: {"layers.0.attention.mechanism.gate": [tensor,
    ...]}.

    One tensor a forward pass, detached, in the order of the passes.
    """
    seen: dict[str, list[Tensor]] = {}
    mechanisms = [(name, m) for name, m in model.named_modules() if isinstance(m, Mechanism)]

    def observer(prefix: str) -> Callable[[str, Tensor], None]:
        def see(name: str, value: Tensor) -> None:
            seen.setdefault(f"{prefix}.{name}" if prefix else name, []).append(value.detach())

        return see

    before = [m._observer for _, m in mechanisms]
    for name, mechanism in mechanisms:
        mechanism._observer = observer(name)
    try:
        yield seen
    finally:
        for (_, mechanism), earlier in zip(mechanisms, before, strict=True):
            mechanism._observer = earlier


OPEN = 10.0
"""Bias of an open gate: 1 - sigmoid(10) = 5e-5, which leaves a model's logits alone to about 5e-4. A larger
one would be nearer to the identity, and learn later: the gate's gradient shrinks with it as exp(-bias)."""


@torch.no_grad()
def open_gate(gate: nn.Linear, bias: float = OPEN) -> None:
    """Make a gate the same for every input: sigmoid(bias). Its weights, at 0, still have a gradient."""
    gate.weight.zero_()
    gate.bias.fill_(bias)


@contextmanager
def skipping(model: nn.Module, below: float) -> Iterator[None]:
    """Inside, what a gate of the mechanisms weighs less than `below` counts as nothing, and when single
    tokens are decoded it is not computed."""
    if not 0 <= below <= 0.5:
        raise HeadgateError(f"skip_below={below} is out of range; expected 0, which skips nothing, to 0.5")
    mechanisms = [m for m in model.modules() if isinstance(m, Mechanism) and m.skips]
    if below and not mechanisms:
        raise HeadgateError(
            f"skip_below={below} would do nothing: no mechanism of this model has a learned gate to follow"
        )
    before = [m.skip_below for m in mechanisms]
    for mechanism in mechanisms:
        mechanism.skip_below = below
    try:
        yield
    finally:
        for mechanism, earlier in zip(mechanisms, before, strict=True):
            mechanism.skip_below = earlier


def opened(logits: Tensor) -> Tensor:
    """How far a gate with these logits is open: their sigmoid, computed in fp32 at least. In bf16 a gate
    above 0.998 is 1, and would never learn to close: its gradient is computed as g * (1 - g)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide).sigmoid().to(logits.dtype)


def head_weights(gate: Tensor) -> Tensor:
    """A gate per token and head (B,Tq,H) in the shape that multiplies attended values (B,H,Tq,1)."""
    return gate.transpose(1, 2)[..., None]


def window_pairs(length: int, window: int) -> int:
    """Pairs of `length` queries, each with itself and at most `window` keys before it."""
    growing = min(length, window + 1)
    return growing * (growing + 1) // 2 + (length - growing) * (window + 1)


def require_all_keys(name: str, start: int) -> None:
    if start:
        raise HeadgateError(
            f"{name} needs all keys, but the first one given has position start={start}; give start=0"
        )
