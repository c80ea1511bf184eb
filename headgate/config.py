"""What a run is: frozen dataclasses, strict JSON in and out, dotted overrides.

Every value is checked against its field's type as it is read, and an unknown key is an error that names the
closest one, so no misspelt setting is ever silently ignored.
"""

import dataclasses
import json
import math
import os
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from headgate import files
from headgate.errors import HeadgateError, suggestion
from headgate.grammar import MechanismSpec, literal, parse_mechanisms

T = TypeVar("T")
MOST_LAYERS, MOST_WIDTH, MOST_TOKENS, MOST_SEQUENCES = 1000, 1 << 24, 1 << 22, 1 << 20
"""Far beyond any model, context or batch; anything larger is a mistake that would be noticed only
after a long wait."""


@dataclass(frozen=True)
class RopeScaling:
    """RoPE stretched beyond the context first trained with; names and meanings are transformers'
    own."""

    rope_type: Literal["linear", "llama3", "yarn"]
    """linear: all frequencies are divided by the factor. llama3, yarn: only the low ones, with a smooth
    transition."""
    factor: float
    """How many times longer the context becomes."""
    original_max_position_embeddings: int | None = None
    """The original context, for llama3 and yarn, which decides what frequencies count as low."""
    low_freq_factor: float = 1.0
    """llama3: a frequency is low if it turns at most this often over the original context."""
    high_freq_factor: float = 4.0
    """llama3: a frequency that turns at least this often is left alone."""
    beta_fast: float = 32.0
    """yarn: a frequency that turns more often than this is left alone."""
    beta_slow: float = 1.0
    """yarn: a frequency that turns less often than this is divided by the whole factor."""
    truncate: bool = True
    """yarn: whether the transition begins and ends at whole dimensions."""
    attention_factor: float | None = None
    """yarn: the factor on rotated queries and keys; 1 + log(factor) / 10 when null."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "factor", "original_max_position_embeddings")
        if self.rope_type != "linear" and self.original_max_position_embeddings is None:
            raise HeadgateError(
                f"RoPE scaling of type {self.rope_type!r} lacks original_max_position_embeddings, the "
                "context before stretching"
            )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if not 0 < getattr(self, low) < getattr(self, high):
                raise HeadgateError(
                    f"{low}={getattr(self, low)} with {high}={getattr(self, high)}; expected two numbers "
                    "above 0, the second one larger"
                )


@dataclass(frozen=True)
class ModelConfig:
    """A Qwen-architecture decoder and the attention mechanism of each of its layers."""

    vocab_size: int
    """Entries in the embedding; at least as many as in the tokenizer."""
    d_model: int
    """Width C of the residual stream."""
    n_layers: int
    n_heads: int
    """Query heads H."""
    n_kv_heads: int
    """Key and value heads G; H is a multiple of it."""
    head_dim: int
    """Width D of a head; even, for RoPE."""
    d_mlp: int
    """Hidden width of the SwiGLU MLP."""
    mechanism: tuple[MechanismSpec, ...] = (MechanismSpec("full"),)
    """The layers' mechanism: one for all, or a pattern that repeats over them."""
    shared_options: Mapping[str, Any] = field(default_factory=dict)
    """Values for every mechanism that has an option of that name, such as windows scaled to the context."""
    qk_norm: bool = True
    """RMSNorm on queries and keys (Qwen3); off for Qwen2."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2)."""
    tied_embeddings: bool = True
    """Whether the head shares the embedding's weights; a scaled start needs a separate head."""
    start: Literal["qwen", "scaled"] = "qwen"
    """Initial weights. qwen: matrices normal 0.02. scaled: embedding normal 1, output and down projections
    0, other matrices normal 1/sqrt(inputs), so that attention does not drown out the token."""
    embedding_deviation: float | None = None
    """Standard deviation of the embedding's initial values; the start's own when null."""
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    """How RoPE is stretched to longer contexts, as in Llama 3.1; null for plain RoPE."""
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_at_least(
            self, 1, "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_mlp"
        )
        check_heads(self.n_heads, self.n_kv_heads)
        for name, value, most in (
            ("n_layers", self.n_layers, MOST_LAYERS),
            ("vocab_size", self.vocab_size, 1 << 31),
            *((name, getattr(self, name), MOST_WIDTH) for name in ("d_model", "d_mlp")),
            ("n_heads * head_dim", self.n_heads * self.head_dim, MOST_WIDTH),
        ):
            require_at_most(name, value, most)
        if self.head_dim % 2:
            raise HeadgateError(
                f"head_dim={self.head_dim} is odd; RoPE rotates pairs of dimensions, so choose an even one"
            )
        if self.embedding_deviation is not None and not self.embedding_deviation > 0:
            raise HeadgateError(
                f"embedding_deviation={self.embedding_deviation} is too small; it must be above 0"
            )
        if self.start == "scaled" and self.tied_embeddings:
            raise HeadgateError(
                "start='scaled' with tied_embeddings=true would make every token predict itself; "
                "set model.tied_embeddings=false"
            )
        if not self.mechanism:
            raise HeadgateError("mechanism=[] names no mechanism; give at least one, such as 'full'")

    def layer_mechanism(self, layer: int) -> MechanismSpec:
        return self.mechanism[layer % len(self.mechanism)]


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained; the batch of one optimiser step is batch_size * accumulation sequences."""

    renamed: ClassVar[Mapping[str, str]] = {"gate_learning_rate": "mechanism_rate"}
    """Former names of settings, which saved configs may still use -> their current names."""

    context: int
    """Tokens in a training sequence."""
    batch_size: int
    """Sequences in one forward pass over all processes."""
    steps: int
    """Optimiser steps."""
    learning_rate: float
    """Peak learning rate."""
    first_context: int | None = None
    """Length of the first sequences, doubled in equal shares of the steps up to `context`; every step has as
    many tokens. Default: `context` throughout."""
    documents: Literal["stream", "mask"] = "stream"
    """mask: no token attends to a document other than its own. stream: it sees everything before it."""
    document_positions: Literal["document", "stream"] = "document"
    """With masked documents: whether positions start again with each, or continue through the sequence."""
    boundaries: Literal["ignore", "count"] = "ignore"
    """With masked documents: whether a document's last token has the next one's first as its target."""
    packing: Literal["stream", "whole"] = "stream"
    """Sequences are cut from the stream of documents, or filled with whole ones (masked) and padded."""
    accumulation: int = 1
    """Forward passes whose gradients make up one step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the layers' matrices, at a rate matched to AdamW's, and AdamW for everything else."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = 0
    warmup_share: float = 0.0
    """The warm-up as a share of the steps, instead of their number."""
    final_learning_rate: float = 0.0
    """Where the schedule ends, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's: how much of its two averages each step keeps."""
    momentum: float = 0.95
    """Muon's."""
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Applied to matrices only; the rates below do not change it."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    embedding_rate: float = 1.0
    """Learning rate of the embedding, as a multiple of train.learning_rate; likewise the others."""
    query_key_rate: float = 1.0
    value_rate: float = 1.0
    attention_output_rate: float = 1.0
    """For the output projection. From a scaled start it acts as a multiplier on attention's output."""
    mlp_rate: float = 1.0
    head_rate: float = 1.0
    mechanism_rate: float = 1.0
    """For a mechanism's own parameters."""
    precision: Literal["fp32", "bf16", "bf16-products"] = "fp32"
    """Precision of the arithmetic; the weights are always fp32. bf16 uses autocast. bf16-products: only the
    factors of matrix products are rounded to bf16, on processors that are faster at that."""
    evaluate_every: int = 500
    """Steps between evaluations; the last step is always evaluated."""
    evaluate_tokens: int = 65_536
    """How many tokens of the validation split to use, from its start: whole sequences, at least one."""
    document_tokens: int | None = None
    """The same for the losses per document that the last evaluation keeps; null for the whole split."""

    @property
    def tokens(self) -> int:
        """Tokens that a run is trained on."""
        return self.steps * self.batch_size * self.accumulation * self.context

    def __post_init__(self) -> None:
        require_at_least(
            self, 1, "context", "batch_size", "steps", "accumulation", "evaluate_every", "evaluate_tokens"
        )
        require_at_least(self, 1, "document_tokens", "first_context")
        require_at_most("context", self.context, MOST_TOKENS)
        if self.contexts[0] != (self.first_context or self.context):
            raise HeadgateError(
                f"first_context={self.first_context} cannot be doubled until it is context={self.context}; "
                "choose the context divided by 2, 4, 8, ..."
            )
        require_at_most("batch_size", self.batch_size, MOST_SEQUENCES)
        require_at_most("accumulation", self.accumulation, MOST_SEQUENCES)
        require_at_least(self, 0, "warmup_steps", "weight_decay", "final_learning_rate")
        if self.packing == "whole" and (self.documents, self.boundaries) != ("mask", "ignore"):
            raise HeadgateError(
                f"packing='whole' with documents={self.documents!r} and boundaries={self.boundaries!r}: "
                "documents are packed in an order of their own, in which none continues another; "
                "set train.documents=mask and train.boundaries=ignore"
            )
        for name in ("learning_rate", "eps", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise HeadgateError(f"{name}={getattr(self, name)} must be above 0 and finite")
        require_at_least(self, 0, *(f.name for f in dataclasses.fields(self) if f.name.endswith("_rate")))
        for name, value in (
            ("betas", max(self.betas)),
            ("betas", min(self.betas)),
            ("momentum", self.momentum),
        ):
            if not 0 <= value < 1:
                raise HeadgateError(
                    f"{name}={getattr(self, name)} is out of range; expected at least 0 and below 1"
                )
        if not 0 <= self.warmup_share < 1:
            raise HeadgateError(
                f"warmup_share={self.warmup_share} is out of range; expected a share from 0 to below 1"
            )
        if self.warmup_steps and self.warmup_share:
            raise HeadgateError(
                f"warmup_steps={self.warmup_steps} and warmup_share={self.warmup_share} both set the "
                "length of the warm-up; set one of them to 0"
            )

    @property
    def contexts(self) -> tuple[int, ...]:
        """The lengths that sequences have, each for an equal share of the steps."""
        found = [self.context]
        while found[0] % 2 == 0 and found[0] > (self.first_context or self.context):
            found.insert(0, found[0] // 2)
        return tuple(found)

    def context_at(self, step: int) -> int:
        """The length of the sequences of a step, the first being step 1."""
        return self.contexts[(step - 1) * len(self.contexts) // self.steps]

    @property
    def warmup(self) -> int:
        """Steps in the warm-up."""
        return self.warmup_steps or round(self.warmup_share * self.steps)


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's result except the data."""

    model: ModelConfig
    train: TrainConfig
    seed: int = 0
    """Seeds the weights (with each parameter's name) and the order of the data."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """What differs between two plain configs, each as `path=before and not now`."""
    found = []
    for key in sorted(before.keys() | now.keys()):
        old, new, path = before.get(key), now.get(key), _join(where, key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, path)
        elif old != new:
            found.append(f"{path}={json.dumps(old)}, not {json.dumps(new)}")
    return found


def check_heads(n_heads: int, n_kv_heads: int) -> None:
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise HeadgateError(
            f"n_heads={n_heads} is not a multiple of n_kv_heads={n_kv_heads}; "
            "every key head must serve the same number of query heads"
        )


def require_at_least(config: object, least: float, *names: str) -> None:
    """Raise unless each named field is at least `least`; a field that is None is skipped."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise HeadgateError(f"{name}={value} is too small; it must be at least {least}")


def require_at_most(name: str, value: int, most: int) -> None:
    if value > most:
        raise HeadgateError(f"{name}={value} is too large; it must be at most {most:,}")


def to_dict(config: Any) -> dict[str, Any]:
    """Plain JSON values; `from_dict` turns them back into an equal config."""
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def from_dict(cls: type[T], values: Mapping[str, Any], *, where: str = "") -> T:
    """Build the dataclass `cls` from plain values; `where` is the dotted path that errors name."""
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    renamed: Mapping[str, str] = getattr(cls, "renamed", {})
    values = {renamed.get(key, key): value for key, value in values.items()}
    for key in values:
        if key not in known:
            raise HeadgateError(f"unknown key {_join(where, key)!r}; {suggestion(key, known)}")
    given = {key: _checked(value, hints[key], _join(where, key)) for key, value in values.items()}
    for name, f in known.items():
        if (
            name not in given
            and f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
        ):
            raise HeadgateError(f"key {_join(where, name)!r} is missing; it has no default")
    return cls(**given)


def load(cls: type[T], path: str | os.PathLike[str]) -> T:
    """Read a config written by `save`, or by hand."""
    values = files.read_sealed(path, object_pairs_hook=_unique)
    try:
        return from_dict(cls, values)
    except HeadgateError as error:
        raise HeadgateError(f"{str(path)!r}: {error}") from error


def save(config: Any, path: str | os.PathLike[str], *, seal: bool = False) -> None:
    """Write a config as JSON, whole or not at all; if sealed, it is not meant to be edited, and `load`
    refuses it if it was."""
    values = to_dict(config)
    files.write_json(path, files.sealed(values) if seal else values)


def as_overrides(config: Any) -> list[str]:
    """Every setting of a config, in the form that `override` takes."""
    lines = []

    def add(values: Mapping[str, Any], before: str) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping) and value:
                add(value, f"{before}{name}.")
            else:
                text = value if isinstance(value, str) else json.dumps(value)
                lines.append(f"{before}{name}={text}")

    add(to_dict(config), "")
    return lines


def override(config: T, assignments: Iterable[str]) -> T:
    """A copy with assignments applied, such as `model.d_model=256`; a value is read as JSON or else as
    text."""
    values = to_dict(config)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise HeadgateError(f"override {assignment!r} has no value; write it as model.d_model=256")
        *parents, last = path.strip().split(".")
        node, where = values, ""
        for key in parents:
            node, where = _child(node, key, where), _join(where, key)
        if last not in node and not _is_options(where):
            raise HeadgateError(f"unknown key {path.strip()!r}; {suggestion(last, node)}")
        value = literal(text)
        if last == "mechanism":
            value = _plain(_read_patterns(value, load_files=True))  # the user wrote it, so files may run
        node[last] = value
    return from_dict(type(config), values)


def _child(node: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    if key not in node:
        raise HeadgateError(f"unknown key {_join(where, key)!r}; {suggestion(key, node)}")
    child = node[key]
    if not isinstance(child, dict):
        raise HeadgateError(
            f"{_join(where, key)!r} is a single value and has no keys of its own; assign to it whole"
        )
    return child


def _is_options(where: str) -> bool:
    """Options are open dictionaries here: the mechanism that takes them checks their names."""
    return where.endswith("options")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise HeadgateError(f"key {twice!r} appears twice in one JSON object; keep one of them")
    return result


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _read_patterns(value: Any, *, load_files: bool) -> Any:
    """Mechanisms written as text, alone or in a list, become specs; anything else is returned as it is."""
    items = value if isinstance(value, (list, tuple)) else [value]
    read: list[Any] = []
    for item in items:
        read += parse_mechanisms(item, load_files=load_files) if isinstance(item, str) else [item]
    return read


def _checked(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type that `hint` asks for, or an error that names `where`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return from_dict(hint, value, where=where)  # type: ignore[arg-type]
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
    elif origin is Literal:
        if value in arguments:
            return value
        if isinstance(value, str):
            raise HeadgateError(
                f"{where}={value!r} is not a choice; {suggestion(value, map(str, arguments))}"
            )
    elif origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (a for a in arguments if a is not type(None))
        return _checked(value, hint, where)
    elif origin is tuple:
        if arguments[0] is MechanismSpec:
            value = _read_patterns(value, load_files=False)
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            value = [value]
        if arguments[-1] is Ellipsis:
            return tuple(_checked(item, arguments[0], f"{where}[{n}]") for n, item in enumerate(value))
        if len(value) == len(arguments):
            return tuple(
                _checked(v, a, f"{where}[{n}]") for n, (v, a) in enumerate(zip(value, arguments, strict=True))
            )
    elif origin in (Mapping, dict) or origin is typing.get_origin(Mapping[str, Any]):
        if isinstance(value, Mapping):
            return dict(value)
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise HeadgateError(f"{where}={value} is not finite; expected a number")
        return float(value)
    elif isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint)
    if dataclasses.is_dataclass(hint) or origin in (Mapping, dict):
        expected = "an object of settings"
    elif origin is tuple:
        expected = f"a list of {len(arguments)}"
    elif origin is Literal:
        expected = f"one of {', '.join(map(str, arguments))}"
    shown = repr(value) if len(repr(value)) < 200 else f"{repr(value)[:200]}..."
    raise HeadgateError(f"{where}={shown} is not {expected}")
