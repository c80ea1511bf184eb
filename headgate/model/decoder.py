"""The Qwen decoder: pre-norm RMSNorm, grouped-query attention with RoPE, SwiGLU; a mechanism in every layer.

Shapes: tokens (B,T), x (B,T,C), q (B,H,T,D), k and v (B,G,T,D), logits (B,T,V).
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headgate.config import Config, ModelConfig, from_dict, to_dict
from headgate.errors import HeadgateError, suggestion
from headgate.files import kind, named, read_json
from headgate.grammar import MechanismSpec, parse_mechanisms
from headgate.machine import avoid_broken_tiles
from headgate.mechanisms.contract import (
    MECHANISMS,
    Heads,
    NoInitialValues,
    Past,
    check_shared_options,
    initialise,
    initialise_parameter,
    make_options,
    require_registered,
)
from headgate.model.cache import Cache, Group, LayerCache
from headgate.model.generate import Completion, Prompts, Sampling, Stop, Stream, generate
from headgate.model.tensors import KEY as DIGEST
from headgate.model.tensors import read_metadata, read_tensors, write_tensors
from headgate.model.weights import INDEX, MODEL_TYPE, PREFIX, Weights, settings_config
from headgate.ops.dispatch import forced_backend, is_transformed
from headgate.ops.documents import document_starts
from headgate.ops.gpu import send
from headgate.ops.loss import linear_cross_entropy, rows_at_once
from headgate.ops.norm import is_plain, rms_norm
from headgate.ops.rotary import rotation
from headgate.recipes import get_recipe

Held = Sequence[tuple[slice | Tensor, LayerCache]]
"""A layer's part of the cache: for each group of rows, which rows of the batch they are, and their keys."""


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, spec: MechanismSpec) -> None:
        super().__init__()
        c, h, g, d = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(c, h * d, bias=config.qkv_bias)
        self.k_proj = nn.Linear(c, g * d, bias=config.qkv_bias)
        self.v_proj = nn.Linear(c, g * d, bias=config.qkv_bias)
        self.o_proj = nn.Linear(h * d, c, bias=False)
        self.q_norm = RMSNorm(d, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        options = make_options(spec.name, spec.options, config.shared_options)
        self.mechanism = MECHANISMS.get(spec.name)(Heads(c, h, g, d), options)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        first_values: Tensor | None,
        cache: Held | None,
        documents: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What attention adds to the stream, and the projected values."""
        q, k, v = self.project(x)
        return self.put_out(self.attend(x, q, k, v, cos, sin, first_values, cache, documents)), v

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.q_norm(q), self.k_norm(k), v

    def attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        first_values: Tensor | None,
        cache: Held | None,
        documents: Tensor | None,
    ) -> Tensor:
        """The attended values (B,H,T,D)."""
        if cache is None or len(cache) == 1:
            held = None if cache is None else cache[0][1]
            past = Past(rotation=(cos, sin), first_values=first_values, cache=held, documents=documents)
            return cast(Tensor, self.mechanism(x, q, k, v, past))
        out = torch.empty_like(q)
        for rows, held in cache:
            first = None if first_values is None else first_values[rows]
            past = Past(rotation=(cos[rows], sin[rows]), first_values=first, cache=held)
            out[rows] = self.mechanism(x[rows], q[rows], k[rows], v[rows], past)
        return out

    def put_out(self, attended: Tensor) -> Tensor:
        return cast(Tensor, self.o_proj(attended.transpose(1, 2).flatten(2)))

    def _heads(self, t: Tensor) -> Tensor:
        return t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.down_proj = nn.Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, spec: MechanismSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config, spec)
        self.mlp_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        first_values: Tensor | None = None,
        cache: Held | None = None,
        documents: Tensor | None = None,
        *,
        with_values: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The stream after this layer; with its attention's values, if later layers want them."""
        attended, values = self.attention(self.attention_norm(x), cos, sin, first_values, cache, documents)
        x = self._add(x, attended)
        return (x, values) if with_values else x

    def _add(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        """What `Attention.attend` takes from the stream: its norm and the projections."""
        normed = self.attention_norm(x)
        return normed, *self.attention.project(normed)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """The stream after this layer, from the stream before it and the attended values."""
        return self._add(x, self.attention.put_out(attended))


class Decoder(nn.Module):
    """decoder(tokens) -> logits; decoder(tokens, targets) -> mean loss; with a cache, tokens are the next
    ones."""

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        check_shared_options(config.shared_options)
        self.config = config
        self.recompute = False
        """Recompute each layer in the backward pass instead of keeping what it needs."""
        with NoInitialValues():
            self.embedding = nn.Embedding(config.vocab_size, config.d_model)
            self.layers = nn.ModuleList(
                Layer(config, config.layer_mechanism(n)) for n in range(config.n_layers)
            )
            self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
            if not config.tied_embeddings:
                self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        used = {MECHANISMS.get(config.layer_mechanism(n).name) for n in range(config.n_layers)}
        self.shares_first_values = any(mechanism.uses_first_values for mechanism in used)
        initialise(self, seed)

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """By the config's `start`; a mechanism fills its own parameters."""
        scaled = self.config.start == "scaled"
        if name == "embedding.weight":
            deviation = self.config.embedding_deviation or (1.0 if scaled else 0.02)
            parameter.normal_(0.0, deviation, generator=generator)
        elif scaled and name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
        elif scaled and parameter.ndim == 2:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        else:
            initialise_parameter(name, parameter, generator)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        positions: Literal["document", "stream"] = "document",
        count_boundaries: bool = False,
        cache: Cache | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        predict: bool = False,
    ) -> Tensor:
        """Logits (B,T,V), or with targets the cross-entropy over those that are not -100: their mean or sum,
        or (B,T) with 0 where the target is -100. To predict is to return the likeliest next tokens (B,T).

        The loss never holds the logits of the whole batch: they are made and consumed in chunks.

        `documents` (B,T) says which document each token belongs to, where several share a row: equal within
        one, and never returning to an earlier one; best kept on the CPU, where they are read. Nothing then
        attends across documents, positions start again with each (or continue through the row, with
        positions="stream"), and the target of a document's last token, which is another's first, does not
        count unless `count_boundaries`.
        """
        x = self.hidden(tokens, cache=cache, documents=documents, positions=positions)
        if predict:
            parts = x.flatten(0, 1).split(rows_at_once(self.config.vocab_size, x.device))
            likeliest = [self.logits(part).argmax(-1) for part in parts]
            return torch.cat(likeliest).unflatten(0, tokens.shape)
        if targets is None:
            return self.logits(x)
        if targets.shape != tokens.shape:
            given, expected = tuple(targets.shape), tuple(tokens.shape)
            raise HeadgateError(f"targets have shape {given}; expected the tokens' shape {expected}")
        if documents is not None and not count_boundaries:
            ends = documents[:, :-1] != documents[:, 1:]
            ends = send(ends, targets.device)
            targets = torch.cat([targets[:, :-1].masked_fill(ends, -100), targets[:, -1:]], 1)
        return self.loss(x, targets, reduction=reduction)

    def loss(self, x: Tensor, targets: Tensor, *, reduction: Literal["mean", "sum", "none"]) -> Tensor:
        """The cross-entropy of final states (B,T,C), as `forward` returns it. An output layer with an adapter
        or hooks makes all logits at once; so do torch.func and the reference backend, which can be
        differentiated twice."""
        plain = self.config.tied_embeddings or is_plain(self.head)
        if not plain or is_transformed() or forced_backend() == "reference":
            flat = self.logits(x).flatten(0, 1).float()
            loss = F.cross_entropy(flat, targets.flatten(), ignore_index=-100, reduction=reduction)
            return loss.unflatten(0, targets.shape) if reduction == "none" else loss
        weight = self.embedding.weight if self.config.tied_embeddings else self.head.weight
        loss = linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), reduction=reduction)
        return loss.unflatten(0, targets.shape) if reduction == "none" else loss

    def loss_rows(self, tokens: int) -> int:
        """How many tokens have their logits in memory at once while the loss is computed."""
        return min(tokens, rows_at_once(self.config.vocab_size, self.embedding.weight.device))

    def hidden(
        self,
        tokens: Tensor,
        *,
        cache: Cache | None = None,
        documents: Tensor | None = None,
        positions: Literal["document", "stream"] = "document",
    ) -> Tensor:
        """The final states (B,T,C), after the last norm."""
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise HeadgateError(
                f"tokens have shape {tuple(tokens.shape)}; expected (B,T) with at least one token"
            )
        starts = None if documents is None else _starts_in(documents, tokens, cache)
        cos, sin, groups = self.placed(tokens, cache, starts if positions == "document" else None)
        x, first_values = self.embedding(tokens), None
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()  # sharded weights are gathered in half precision; the residual stream stays in fp32
        for n, layer in enumerate(self.layers):
            held = None if cache is None else [(rows, group.layers[n]) for rows, group in groups]
            run: Callable[..., Any] = layer
            if self.recompute and torch.is_grad_enabled():
                run = partial(checkpoint, layer, use_reentrant=False)
            if n == 0 and self.shares_first_values:
                x, first_values = run(x, cos, sin, None, held, starts, with_values=True)
            else:
                x = run(x, cos, sin, first_values, held, starts)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return cast(Tensor, self.norm(x))

    def placed(
        self, tokens: Tensor, cache: Cache | None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, list[tuple[slice | Tensor, Group]]]:
        """The rotations for the tokens' positions, and the cache's part for each group of rows."""
        if cache is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            places = places if starts is None else places - starts
            groups = []
        else:
            cache.claim(tokens.shape[0])
            places = cache.positions(tokens.shape[1], tokens.device)
            groups = cache.parts(tokens.device)
        rope = self.config.rope_theta, self.config.rope_scaling
        return *rotation(places, self.config.head_dim, *rope), groups

    def next_logits(self, tokens: Tensor, cache: Cache) -> Tensor:
        """The logits (B,V) after the tokens (B,T)."""
        return self.logits(self.hidden(tokens, cache=cache)[:, -1])

    def logits(self, x: Tensor) -> Tensor:
        """From final states (...,C): (...,V)."""
        if self.config.tied_embeddings:
            return F.linear(x, self.embedding.weight)
        return cast(Tensor, self.head(x))

    def new_cache(self, most: int | None = None) -> Cache:
        """An empty cache; `most` tokens is the longest that a row will get, if known."""
        return Cache(len(self.layers), most)

    def generate(
        self,
        tokens: Prompts,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Stop = (),
        stream: Stream | None = None,
        skip_below: float | None = None,
        prefill_chunk: int = 512,
        graphs: bool = False,
    ) -> list[Completion]:
        """Continue every prompt, (B,T) or a list of token lists of any lengths; returns each row's new tokens
        and why they ended.

        temperature=0 takes the most likely token; otherwise tokens are drawn as `Sampling` says, each row
        with its own random numbers. `stop` is a token, or a list of tokens and token sequences that end a row
        when they occur among its new tokens. `stream(row, token)` is called with every token as soon as it is
        chosen. `skip_below` skips the computation behind gates below it (`headgate.skipping`).
        `prefill_chunk` tokens of the prompts are run at once, which bounds the memory of a long prompt beyond
        its cache. `graphs` records the parts of a step between attentions as CUDA graphs.
        """
        sampling = Sampling(repetition_penalty, temperature, top_k, top_p, min_p, seed)
        return generate(
            self,
            tokens,
            max_new_tokens,
            sampling=sampling,
            stop=stop,
            stream=stream,
            skip_below=skip_below,
            prefill_chunk=prefill_chunk,
            graphs=graphs,
        )

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file that `headgate.load` reads: the weights, and the config in its
        header."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            write_tensors(temporary, self.state_dict(), header_of(self.config))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _starts_in(documents: Tensor, tokens: Tensor, cache: Cache | None) -> Tensor | None:
    if documents.shape != tokens.shape:
        given, expected = tuple(documents.shape), tuple(tokens.shape)
        raise HeadgateError(f"documents have shape {given}; expected the tokens' shape {expected}")
    if cache is not None:
        raise HeadgateError(
            "several documents in a row are for whole sequences; run them without a cache, or each by itself"
        )
    return document_starts(documents, tokens.device)


def build_model(
    recipe_or_config: str | Config | ModelConfig,
    mechanism: str | Sequence[str] | None = None,
    *,
    seed: int | None = None,
    **options: Any,
) -> Decoder:
    """A decoder from a recipe's name or a config, with this mechanism in its layers.

    The mechanism is written as `grammar.parse_mechanisms` says, just as on the command line; a list is a
    pattern that repeats over the layers. Options go to every mechanism of the pattern that has them; one that
    none has is an error.
    """
    given = get_recipe(recipe_or_config) if isinstance(recipe_or_config, str) else recipe_or_config
    config = given.model if isinstance(given, Config) else given
    if seed is None:
        seed = given.seed if isinstance(given, Config) else 0
    return Decoder(with_mechanism(config, mechanism, **options), seed=seed)


def with_mechanism(
    config: ModelConfig, mechanism: str | Sequence[str] | None = None, **options: Any
) -> ModelConfig:
    """The config with another mechanism (None keeps its own) and options for those that have them."""
    specs = config.mechanism if mechanism is None else parse_mechanisms(mechanism)
    if not specs:
        raise HeadgateError("mechanism=[] names no mechanism; give at least one, such as 'full'")
    known = [set(MECHANISMS.get(spec.name).Options.__dataclass_fields__) for spec in specs]
    for option in options:
        if not any(option in names for names in known):
            among = suggestion(option, set.union(*known))
            raise HeadgateError(f"{' and '.join(s.name for s in specs)} has no option {option!r}; {among}")
    return replace(
        config,
        mechanism=tuple(
            MechanismSpec(
                spec.name, {**spec.options, **{o: value for o, value in options.items() if o in names}}
            )
            for spec, names in zip(specs, known, strict=True)
        ),
    )


def load(path: str | os.PathLike[str]) -> Decoder:
    """The decoder in a safetensors file that `Decoder.save` wrote; in a folder with a model.safetensors, such
    as a checkpoint or what `save_pretrained` wrote, sharded or not; or in the latest checkpoint of a run
    folder."""
    if (Path(path) / INDEX).is_file():
        file, weights = Path(path) / INDEX, Weights.of_folder(Path(path))
        tensors = {name: weights.tensor(name) for name in weights.names()}
    else:
        file = model_file(path)
        tensors = read_tensors(file)
    config = header_config(file)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    with torch.device("meta"):
        decoder = Decoder(config)
    expected = {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise HeadgateError(
                f"{str(file)!r} does not fit its config: {name} is {given.get(name, 'missing')}, "
                f"expected {expected.get(name, 'nothing of that name')}"
            )
    decoder.load_state_dict(tensors, assign=True)
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors.values()):
        avoid_broken_tiles()
    return decoder


def model_file(path: str | os.PathLike[str]) -> Path:
    """The safetensors file that `load` reads for a path."""
    path = named(path, "the model")
    file = path / "model.safetensors" if path.is_dir() else path
    if file.is_file():
        return file
    saved = sorted(path.glob("checkpoints/step-*/model.safetensors"))
    if not saved:
        found = f" (it is {kind(path)})" if file == path else ""
        raise HeadgateError(
            f"{str(path)!r} holds no model{found}; expected a .safetensors file, a folder with "
            "model.safetensors, or a run folder with a checkpoint"
        )
    return saved[-1]


def header_of(config: ModelConfig) -> dict[str, str]:
    """The metadata for a file of this model's weights, from which `header_config` reads the config back."""
    return {"headgate": json.dumps(to_dict(config))}


def header_config(file: Path) -> ModelConfig:
    """The config in the header of a file that `Decoder.save` wrote; for one that transformers saved, in the
    config.json beside it."""
    metadata = {} if file.name == INDEX else read_metadata(file)
    beside = file.parent / "config.json"
    if "headgate" not in metadata:
        settings = read_json(beside) if beside.is_file() else {}
        if settings.get("model_type") == MODEL_TYPE:
            config = settings_config(settings, str(beside))
            require_registered(config, file)
            return config
        raise HeadgateError(
            f"{str(file)!r} has no headgate config in its header; write it with Decoder.save, or "
            "turn it into one with headgate convert"
        )
    unknown = metadata.keys() - {"format", "headgate", DIGEST}
    if unknown:
        raise HeadgateError(f"{str(file)!r} is damaged: {min(unknown)!r} in its header is unknown")
    try:
        values = json.loads(metadata["headgate"])
        config = from_dict(ModelConfig, dict(values))
    except (ValueError, TypeError, RecursionError) as error:  # a HeadgateError is a ValueError
        raise HeadgateError(f"the config in the header of {str(file)!r} is damaged: {error}") from error
    require_registered(config, file)
    return config
