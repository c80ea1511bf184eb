"""What a mechanism is: a module that turns queries, keys and values into attended values.

A mechanism is two small functions. `prepare` sees only the newest tokens and decides what is kept of them: it
rotates, shifts or mixes, and may add a state per key. `attend` sees everything that is kept. Between the two
is the cache, if there is one; both get a `Past`, which knows where the tokens are and what came before.

Shapes everywhere: x (B,Tq,C) the newest tokens after the pre-attention norm; q (B,H,Tq,D); k, v (B,G,Tk,D),
in `attend` the keys and values kept so far, of which the last Tq are the newest.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headgate import registry
from headgate.config import ModelConfig, check_heads, from_dict, require_at_least
from headgate.errors import HeadgateError, suggestion
from headgate.ops import Span, block_means
from headgate.ops.dispatch import forced
from headgate.ops.documents import lengths
from headgate.ops.gpu import has_double
from headgate.ops.rotary import rotate
from headgate.registry import Registry


@dataclass(frozen=True)
class MechanismOptions:
    """Base of every mechanism's options: a frozen dataclass, each field followed by its one-line
    docstring."""

    positions: Literal["rope", "none"] = "rope"
    """Whether queries and keys are rotated by their positions."""


@dataclass(frozen=True)
class Heads:
    """The sizes that a mechanism works with."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        require_at_least(self, 1, "d_model", "n_heads", "n_kv_heads", "head_dim")
        check_heads(self.n_heads, self.n_kv_heads)
        if self.head_dim % 2:
            raise HeadgateError(
                f"head_dim={self.head_dim} is odd; RoPE rotates pairs of dimensions, so make it even"
            )


class KeyCache(Protocol):
    """Where the keys of past tokens are kept; `headgate.model.cache.LayerCache` is one."""

    start: int
    carried: dict[str, Tensor]

    @property
    def end(self) -> int: ...

    def append(self, *new: Tensor) -> list[Tensor]: ...

    def drop_before(self, position: int, *, keep: int = 0) -> None: ...

    def __len__(self) -> int: ...

    def held(self) -> list[Tensor]: ...

    def blocks_of(self, name: str) -> "KeyCache": ...


class Past:
    """Where the tokens of a call are, and what the tokens before them left.

    `Past()` is the start of a sequence, with queries and keys that are already rotated or need not be: what
    `mechanism(x, q, k, v)` in a transformer block of your own means. With a cache, pass the same one to each
    call.
    """

    def __init__(
        self,
        *,
        rotation: tuple[Tensor, Tensor] | None = None,
        first_values: Tensor | None = None,
        cache: KeyCache | None = None,
        start: int = 0,
        documents: Tensor | None = None,
    ) -> None:
        self.rotation = rotation
        """Cosines and sines of the newest tokens' positions."""
        self.first_values = first_values
        """The first layer's values (B,G,Tq,D) of the newest tokens; None in the first layer."""
        self.cache = cache
        self.documents = documents
        """Where the document of each token begins, as `ops.document_starts` returns it; None for a single
        document. Only mechanisms that `handle_documents` ever see more than one."""
        self._start = start
        if documents is not None and (cache is not None or start):
            raise HeadgateError(
                "several documents in a sequence are for whole sequences; run them without a cache, or each "
                "by itself"
            )

    @property
    def start(self) -> int:
        """Position of the first key kept."""
        return self._start if self.cache is None else self.cache.start

    def span(
        self, window: int | None = None, *, dense_prefix: int = 0, pinned: int = 0, ring: int = 0
    ) -> Span:
        """Which of the keys kept a query sees, for the ops."""
        return Span(window, dense_prefix, pinned, ring, self.start, self.documents)

    def require_all_keys(self, name: str) -> None:
        if self.start:
            raise HeadgateError(
                f"{name} needs all keys, but the first one given has position start={self.start}; "
                "give all keys from the first one on"
            )

    def rotate(self, t: Tensor) -> Tensor:
        """The newest tokens' queries or keys, or some of their dimensions, rotated by their positions."""
        if self.rotation is None:
            return t
        cos, sin = self.rotation
        step = 2 * cos.shape[-1] // t.shape[-1]  # half of the dimensions rotate by every second angle
        return rotate(t, cos[..., ::step], sin[..., ::step])

    def carried(self, name: str) -> Tensor | None:
        """What the previous call passed on under this name; None at the start of a sequence."""
        return None if self.cache is None else self.cache.carried.get(name)

    def carry(self, name: str, value: Tensor) -> None:
        """Pass a tensor (B,...) of fixed size on to the call with the next tokens."""
        if self.cache is not None:
            self.cache.carried[name] = value

    def with_previous(self, name: str, t: Tensor, count: int = 1) -> Tensor:
        """t (B,heads,Tq,...) preceded by its values at the `count` tokens before, which are 0 before the
        first: (B,heads,count+Tq,...)."""
        assert self.documents is None, "the tokens before may be another document's"
        return self._with_previous(name, t, count)

    def previous(self, name: str, t: Tensor) -> Tensor:
        """The values of t (B,heads,Tq,...) at the token before each, 0 for the first of a document."""
        before = self._with_previous(name, t, 1)[:, :, :-1]
        if self.documents is None:
            return before
        first = self.documents == torch.arange(t.shape[2], device=t.device)
        return before.masked_fill(first.view(first.shape[0], 1, -1, *[1] * (t.ndim - 3)), 0.0)

    def running_sum(self, name: str, t: Tensor) -> Tensor:
        """The sum of t (B,heads,Tq) over the document's tokens up to each; in fp64 if the device has it, so
        that chunks change nothing."""
        running = (t.double() if has_double(t.device) else t.float()).cumsum(2)
        if self.documents is not None:
            earlier = torch.nn.functional.pad(running, (1, 0)).gather(2, self.documents[:, None].expand_as(t))
            return running - earlier
        before = self.carried(name)
        running = running if before is None else running + before
        self.carry(name, running[:, :, -1:])
        return running

    def _with_previous(self, name: str, t: Tensor, count: int) -> Tensor:
        before = self.carried(name)
        if before is None:
            before = t.new_zeros((*t.shape[:2], count, *t.shape[3:]))
        whole = torch.cat([before, t], 2)
        if self.cache is not None:
            self.carry(name, whole[:, :, whole.shape[2] - count :].clone())
        return whole

    def extend(self, *new: Tensor) -> list[Tensor]:
        """Keep tensors (B,heads,Tq,...) of the newest tokens; returns those of all tokens kept."""
        return list(new) if self.cache is None else self.cache.append(*new)

    def per_block(
        self, name: str, block: int, summarise: Callable[..., tuple[Tensor, ...]], *kept: Tensor
    ) -> list[Tensor]:
        """summarise(*kept) for the complete blocks of `block` keys, from the first key on: tensors
        (B,heads,n,...) with one row per block. With a cache a block is summarised once, when it is
        complete."""
        assert self.documents is None, "blocks are counted from a document's start"
        complete = kept[0].shape[2] // block
        if self.cache is None or not complete:
            return list(summarise(*(t[:, :, : complete * block] for t in kept)))
        blocks = self.cache.blocks_of(name)
        done = len(blocks)
        if complete == done:
            return blocks.held()
        return blocks.append(*summarise(*(t[:, :, done * block : complete * block] for t in kept)))

    def block_means(self, block: int, *kept: Tensor) -> list[Tensor] | None:
        """Keys, or keys and values, as the mean of every complete block; None if no cache keeps them
        yet."""
        if self.cache is None:
            return None
        return self.per_block("means", block, lambda *new: tuple(block_means(t, block) for t in new), *kept)

    def of_documents(self, row: int, sizes: list[int]) -> list["Past"]:
        """The past of each document in a row by itself."""
        rotations: list[Any] = [None] * len(sizes)
        if self.rotation is not None:
            of_row = (t[row] if t.ndim > 2 else t for t in self.rotation)
            rotations = list(zip(*(t.split(sizes, -2) for t in of_row), strict=True))
        values: Sequence[Any] = [None] * len(sizes)
        if self.first_values is not None:
            values = self.first_values[row : row + 1].split(sizes, 2)
        return [Past(rotation=r, first_values=v) for r, v in zip(rotations, values, strict=True)]

    def forget(self, first_key: Callable[[int], int], pinned_keys: int) -> None:
        """Drop the keys that no later query needs."""
        if self.cache is not None:
            self.cache.drop_before(first_key(self.cache.end), keep=pinned_keys)


class Mechanism(nn.Module):
    """Subclass it in one file and decorate the class with `@register("name")`; nothing else needs to change.

    A token's output may depend only on its prefix: whole sequences, chunks over a cache and single tokens
    must agree. The contract tests check this, and everything else stated below, for every registered name.
    Only `attend` must be written.
    """

    Options: ClassVar[type[MechanismOptions]] = MechanismOptions
    ablations: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Name of an ablation -> the options that make it."""
    tunable: ClassVar[Mapping[str, tuple[float, float] | list[Any]]] = {}
    """One or two options to be tuned along with a recipe's settings: name -> a range, or a list of values."""
    renamed_options: ClassVar[Mapping[str, str]] = {}
    """Former names of options, which saved models may still use -> their current names."""
    uses_first_values: ClassVar[bool] = False
    """Whether it reads `past.first_values`."""
    handles_documents: ClassVar[bool] = False
    """Whether it keeps several documents in a sequence apart by itself: everything that it takes from other
    tokens comes through `past.span()`, `past.previous` or `past.running_sum`. It is then as fast as its ops;
    otherwise it is run once per document, which is right for any mechanism."""
    shelf: ClassVar[str] = "own"
    """The heading under which `headgate mechanisms` lists it."""

    def __init__(self, heads: Heads, options: Any) -> None:
        super().__init__()
        self.heads = heads
        self.options = options
        self.skip_below = 0.0
        """Gates closer than this to 0 or 1 are rounded; `skipping` sets it."""
        self._observer: Callable[[str, Tensor], None] | None = None

    def prepare(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, ...]:
        """From the newest tokens' projections to what `attend` gets for them: q, k, v, and any number of
        states per key (B,heads,Tq,...), which are kept and dropped with the keys."""
        if self.options.positions == "none":
            return q, k, v
        return past.rotate(q), past.rotate(k), v

    attend: Callable[..., Tensor]
    """attend(x, q, k, v, past, *states) -> the attended values (B,H,Tq,D), over all keys kept; must be
    written."""

    def _attend_by_reference(self, *given: Any) -> Tensor:
        with forced("reference"):
            return self.attend(*given)

    dense: Callable[..., Tensor] = _attend_by_reference
    """The same as `attend`, dense and plain: the formula as written, and the truth for tests. By default,
    `attend` with the reference ops."""

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past | None = None) -> Tensor:
        """The attended values (B,H,Tq,D) of the newest tokens, which are kept if `past` has a cache."""
        past = Past() if past is None else past
        if past.documents is not None and not self.handles_documents:
            return self._run_by_document(self.attend, x, q, k, v, past)
        return self._run(self.attend, x, q, k, v, past)

    def reference(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past | None = None) -> Tensor:
        """What `forward` must return, computed by `dense`."""
        past = Past() if past is None else past
        if past.documents is not None:
            return self._run_by_document(self.dense, x, q, k, v, past)
        return self._run(self.dense, x, q, k, v, past)

    def _run_by_document(
        self, attend: Callable[..., Tensor], x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past
    ) -> Tensor:
        """Each document by itself, with its own past."""
        assert past.documents is not None
        sizes, of_rows = lengths(past.documents), zip(*(t.split(1) for t in (x, q, k, v)), strict=True)
        rows = []
        with _laid_together(self, sizes):
            for row, (of_row, sizes_of_row) in enumerate(zip(of_rows, sizes, strict=True)):
                parts = (t.split(sizes_of_row, 1 if n == 0 else 2) for n, t in enumerate(of_row))
                pasts = past.of_documents(row, sizes_of_row)
                alone = [self._run(attend, *part) for part in zip(*parts, pasts, strict=True)]
                rows.append(torch.cat(alone, 2))
        return torch.cat(rows)

    def _run(
        self, attend: Callable[..., Tensor], x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past
    ) -> Tensor:
        q, *kept = self.prepare(x, q, k, v, past)
        k, v, *states = past.extend(*kept)
        out = attend(x, q, k, v, past, *states)
        past.forget(self.first_key, self.pinned_keys)
        return out

    def first_key(self, position: int) -> int:
        """The earliest key that a query at `position` or later may need; the cache drops anything before it.
        A mechanism that keeps no keys returns `position`."""
        return 0

    @property
    def pinned_keys(self) -> int:
        """How many of the sequence's first keys the cache also keeps, for ever.

        A mechanism that has some sees them right before the others, as if the dropped ones in between had
        never existed, and `past.start` is 0: so only distances within the window may matter to it.
        """
        return 0

    def pairs(self, length: int) -> int:
        """How many query-key pairs a head evaluates over `length` tokens, averaged over heads."""
        causal = length * (length + 1) // 2
        if type(self).first_key is Mechanism.first_key:
            return causal
        pinned = self.pinned_keys
        return causal - sum(max(0, first - pinned) for first in map(self.first_key, range(length)))

    def pair_operations(self) -> int:
        """Operations per pair besides attention's own, for `headgate plan`: a network applied to each
        pair."""
        return 0

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill the parameter called `name` inside this mechanism; by default like the rest of the decoder."""
        initialise_parameter(name, parameter, generator)

    def start_as_full(self) -> float:
        """Fill the parameters so that the mechanism starts as full attention, as far as it can.

        This is how weights trained with full attention are retrofitted. Returns for how many of the first
        positions it then computes the same as full attention: math.inf for all, 0 for none.
        """
        return 0

    def plain_span(self) -> Span | None:
        """Which keys a query sees, if with these options it is plain softmax attention over them, which other
        tools compute too; None otherwise."""
        return None

    def gated_span(self) -> tuple[Span, str] | None:
        """Which keys a query sees and the name of its gate, if with these options it is softmax attention
        over those keys, weighted per head or per channel by the sigmoid of a linear layer of x, which other
        tools compute too; None otherwise."""
        return None

    def observe(self, name: str, value: Tensor) -> None:
        """Pass a value of any shape to an active `headgate.probe`; does nothing otherwise."""
        if self._observer is not None:
            self._observer(name, value)

    @property
    def observed(self) -> bool:
        """Whether a probe is active, for values that cost something to compute."""
        return self._observer is not None

    @property
    def skips(self) -> bool:
        """Whether it has a gate that `skipping` can follow."""
        return False

    def followed(self, gate: Tensor, *, down: bool = False, up: bool = False) -> Tensor:
        """The gate as it is used: a probe sees it, and inside `skipping` gates within the threshold of 0
        (`down`) or of 1 (`up`) are rounded."""
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
        """Whether what has no weight is skipped: for single tokens, without a gradient."""
        return self.skip_below > 0 and q.shape[2] == 1 and not torch.is_grad_enabled()

    def extra_repr(self) -> str:
        return ", ".join(f"{f.name}={getattr(self.options, f.name)!r}" for f in fields(self.options))


def description(mechanism: type[Mechanism]) -> str:
    """What the mechanism's file says about it: a line with its name, then its formula."""
    return inspect.cleandoc(
        sys.modules[mechanism.__module__].__doc__ or mechanism.__doc__ or mechanism.__name__
    )


M = TypeVar("M", bound=type[Mechanism])
MECHANISMS: Registry[type[Mechanism]] = registry.MECHANISMS


def register(name: str) -> Callable[[M], M]:
    """Class decorator that gives a mechanism its name everywhere: command line, contract tests, reports."""

    def add(mechanism: M) -> M:
        MECHANISMS.register(name)(mechanism)
        return mechanism

    return add


def on_shelf(shelf: str) -> list[str]:
    """The names of the mechanisms on a shelf."""
    return [name for name in MECHANISMS.names() if MECHANISMS.get(name).shelf == shelf]


def make_options(
    name: str, options: Mapping[str, Any], shared: Mapping[str, Any] | None = None
) -> MechanismOptions:
    """The mechanism's options: the given ones, then the shared ones that it has, then its defaults."""
    mechanism = MECHANISMS.get(name)
    cls, known = mechanism.Options, {f.name for f in fields(mechanism.Options)}
    options = {mechanism.renamed_options.get(option, option): value for option, value in options.items()}
    for option in options:
        if option not in known:
            raise HeadgateError(f"{name} has no option {option!r}; {suggestion(option, known)}")
    of_shared = {option: value for option, value in (shared or {}).items() if option in known}
    try:
        return from_dict(cls, {**of_shared, **options})
    except HeadgateError as error:
        raise HeadgateError(f"mechanism {name!r}: {error}") from None


def require_registered(model: ModelConfig, source: object) -> None:
    """Raise if a model read from a file uses an unknown mechanism."""
    for spec in model.mechanism:
        if spec.name not in MECHANISMS.names():
            raise HeadgateError(
                f"{str(source)!r} uses the mechanism {spec.name!r}, which is not registered; if it is in "
                "a file of yours, add --mechanism-file FILE, or call headgate.use_file(FILE) in Python"
            )


def check_shared_options(shared: Mapping[str, Any]) -> None:
    """Refuse a shared option that no mechanism has, since it would always be ignored."""
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
    """A mechanism by itself, initialised, for use in any transformer block."""
    heads = Heads(d_model, n_heads, n_heads if n_kv_heads is None else n_kv_heads, head_dim)
    with NoInitialValues():
        mechanism = MECHANISMS.get(name)(heads, make_options(name, options))
    initialise(mechanism, seed)
    return mechanism


class NoInitialValues(TorchFunctionMode):
    """The parameters of modules made inside are left as memory is, for `initialise` to fill. On the meta
    device, where drawing values does nothing, PyTorch would import its compiler for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            filled = args[0] if args else kwargs["tensor"]
            if isinstance(filled, nn.Parameter):
                return filled
        return func(*args, **kwargs)


def initialise(module: nn.Module, seed: int, *, skip: Container[str] = ()) -> None:
    """Fill every parameter from a generator seeded by (seed, the parameter's name), so that two models share
    every common weight bit for bit. Parameters on the meta device, and those to skip, are left alone.
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
    """The decoder's rule: matrices normal with standard deviation 0.02, biases 0, norm weights 1."""
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, 0.02, generator=generator)


@contextmanager
def _laid_together(mechanism: Mechanism, sizes: list[list[int]]) -> Iterator[None]:
    """Inside, what a probe would see document by document is collected; values per token (1,T,...) are then
    shown as one (B,T,...), and others one by one."""
    see = mechanism._observer
    collected: dict[str, list[Tensor]] = {}
    if see is not None:
        mechanism._observer = lambda name, value: collected.setdefault(name, []).append(value)
    try:
        yield
    finally:
        mechanism._observer = see
    for name, values in collected.items():
        if [value.shape[:2] for value in values] == [(1, size) for row in sizes for size in row]:
            values = [torch.cat([torch.cat([values.pop(0) for _ in row], 1) for row in sizes])]
        for value in values:
            mechanism.observe(name, value)


@contextmanager
def probe(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect what the mechanisms inside `model` observe: {"layers.0.attention.mechanism.gate": [tensor,
    ...]}.

    One detached tensor per forward pass, in the order of the passes.
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


@contextmanager
def skipping(model: nn.Module, below: float) -> Iterator[None]:
    """Inside, gates within `below` of 0 or 1 are rounded, and what then has no weight is skipped when single
    tokens are decoded."""
    if not 0 <= below <= 0.5:
        raise HeadgateError(f"skip_below={below} is out of range; expected 0, which skips nothing, to 0.5")
    mechanisms = [m for m in model.modules() if isinstance(m, Mechanism) and m.skips]
    if below and not mechanisms:
        raise HeadgateError(
            f"skip_below={below} would do nothing: no mechanism in this model has a learned gate to follow"
        )
    before = [m.skip_below for m in mechanisms]
    for mechanism in mechanisms:
        mechanism.skip_below = below
    try:
        yield
    finally:
        for mechanism, earlier in zip(mechanisms, before, strict=True):
            mechanism.skip_below = earlier


def window_pairs(length: int, window: int) -> int:
    """Pairs of `length` queries, each with itself and at most `window` keys before it."""
    growing = min(length, window + 1)
    return growing * (growing + 1) // 2 + (length - growing) * (window + 1)
