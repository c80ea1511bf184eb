"""Qwen2, Qwen2.5 and Qwen3 as Hugging Face stores them: their settings and tensor names, from ours and back.

Qwen2.5 is Qwen2 with other sizes. A setting that our decoder does not compute is refused by name: a model
that loads is the same model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from headgate.config import MechanismSpec, ModelConfig, from_dict
from headgate.errors import HeadgateError
from headgate.mechanisms.contract import MECHANISMS, Heads, make_options

FAMILIES = ("qwen2", "qwen3")
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class QwenSettings:
    """What a Qwen config.json says about the computation, with the defaults that transformers has."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_parameters: Mapping[str, Any] | None = None
    rope_scaling: Mapping[str, Any] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None


REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
"""Settings that other values than these would change the computation in ways our decoder does not follow."""


def read_settings(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The config of a Qwen model from its config.json; `where` is that file, for errors."""
    family = values.get("model_type")
    if family not in FAMILIES:
        raise HeadgateError(
            f"{where!r} is of model_type={family!r}; expected qwen2 (also for Qwen2.5), qwen3 or headgate"
        )
    for name, allowed in REQUIRED.items():
        if name in values and values[name] not in allowed:
            raise HeadgateError(
                f"{where!r} has {name}={values[name]!r}, which headgate's decoder does not compute; "
                f"expected {allowed[0]!r}"
            )
    known = {f.name for f in fields(QwenSettings)}
    s = from_dict(QwenSettings, {name: values[name] for name in values if name in known}, where=where)
    derived = 128 if family == "qwen3" else s.hidden_size // s.num_attention_heads
    return ModelConfig(
        vocab_size=s.vocab_size,
        d_model=s.hidden_size,
        n_layers=s.num_hidden_layers,
        n_heads=s.num_attention_heads,
        n_kv_heads=s.num_attention_heads if s.num_key_value_heads is None else s.num_key_value_heads,
        head_dim=derived if s.head_dim is None else s.head_dim,
        d_mlp=s.intermediate_size,
        mechanism=_mechanism(s, where),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
        tied_embeddings=s.tie_word_embeddings,
        rope_theta=_rope_theta(s, where),
        norm_eps=s.rms_norm_eps,
    )


def _rope_theta(s: QwenSettings, where: str) -> float:
    rope = dict(s.rope_scaling or s.rope_parameters or {})
    asked = dict(rope)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    theta = rope.pop("rope_theta", 1e4 if s.rope_theta is None else s.rope_theta)
    if kind != "default" or rope.pop("partial_rotary_factor", 1) not in (1, None):
        raise HeadgateError(
            f"{where!r} asks for RoPE with {asked}; headgate computes plain RoPE alone, so remove it "
            "if the context need not be stretched"
        )
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or any(map(_is_mapping, rope.values())):
        raise HeadgateError(f"{where!r} has no single rope_theta; expected one number for all layers")
    return float(theta)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _mechanism(s: QwenSettings, where: str) -> tuple[MechanismSpec, ...]:
    """The layers' attention: `full`, or `local` where the layer slides."""
    window = s.sliding_window if s.use_sliding_window else None
    types = s.layer_types
    if types is None:
        slides = [window is not None and n >= s.max_window_layers for n in range(s.num_hidden_layers)]
    else:
        if len(types) != s.num_hidden_layers or set(types) - {"full_attention", "sliding_attention"}:
            raise HeadgateError(
                f"{where!r} has layer_types={list(types)}; expected 'full_attention' or 'sliding_attention' "
                f"for each of the {s.num_hidden_layers} layers"
            )
        slides = [kind == "sliding_attention" for kind in types]
    if any(slides) and (window is None or window < 2):
        raise HeadgateError(
            f"{where!r} has sliding layers with sliding_window={s.sliding_window} and "
            f"use_sliding_window={s.use_sliding_window}; expected a window of at least 2 that is in use"
        )
    # Qwen counts the keys that are seen, we the distance to the farthest.
    local = MechanismSpec("local", {} if window is None else {"window": window - 1})
    pattern = [local if slide else MechanismSpec("full") for slide in slides]
    length = next(n for n in range(1, len(pattern) + 1) if all(a == b for a, b in _repeats(pattern, n)))
    return tuple(pattern[:length])


def _repeats(pattern: list[MechanismSpec], length: int) -> list[tuple[MechanismSpec, MechanismSpec]]:
    return [(spec, pattern[n % length]) for n, spec in enumerate(pattern)]


def write_settings(config: ModelConfig) -> dict[str, Any]:
    """The config.json of the Qwen model that computes what this one does, or an error that says why none."""
    if config.qk_norm == config.qkv_bias:
        raise HeadgateError(
            f"qk_norm={config.qk_norm} with qkv_bias={config.qkv_bias} is no Qwen; Qwen3 has the norm and no "
            "bias, Qwen2 the bias and no norm"
        )
    family = "qwen3" if config.qk_norm else "qwen2"
    windows = [_window(config, n) for n in range(config.n_layers)]
    sliding = {window for window in windows if window is not None}
    if len(sliding) > 1:
        raise HeadgateError(
            f"the layers have windows of {' and '.join(map(str, sorted(sliding)))}; Qwen has one for all, so "
            "write --to headgate"
        )
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_mlp,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": bool(sliding),
        "sliding_window": sliding.pop() + 1 if sliding else None,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def _window(config: ModelConfig, layer: int) -> int | None:
    spec = config.layer_mechanism(layer)
    options = make_options(spec.name, spec.options, config.shared_options)
    if options.positions == "none":
        raise HeadgateError(
            f"layer {layer} has positions=none, but Qwen rotates the keys of every layer; write --to headgate"
        )
    heads = Heads(config.d_model, config.n_heads, config.n_kv_heads, config.head_dim)
    with torch.device("meta"):
        span = MECHANISMS.get(spec.name)(heads, options).plain_span()
    if span is None or span.pinned or (span.window is not None and span.dense_prefix > span.window + 1):
        raise HeadgateError(
            f"the attention of layer {layer} is {spec.name!r}, which no Qwen computes; only 'full' and a "
            "plain window, under whatever name, can be written as Qwen, so write --to headgate"
        )
    if span.window == 0:
        raise HeadgateError(
            f"layer {layer} has window=0, so that a token sees itself alone; transformers decodes a window "
            "of one key wrongly, so write --to headgate"
        )
    return span.window


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Our name -> Qwen's, of every tensor but the mechanisms' own."""
    names = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not config.tied_embeddings:
        names["head.weight"] = "lm_head.weight"
    projections = [f"{letter}_proj.weight" for letter in "qkvo"]
    if config.qkv_bias:
        projections += [f"{letter}_proj.bias" for letter in "qkv"]
    if config.qk_norm:
        projections += ["q_norm.weight", "k_norm.weight"]
    for n in range(config.n_layers):
        ours, theirs = f"layers.{n}", f"model.layers.{n}"
        names[f"{ours}.attention_norm.weight"] = f"{theirs}.input_layernorm.weight"
        names[f"{ours}.mlp_norm.weight"] = f"{theirs}.post_attention_layernorm.weight"
        names |= {f"{ours}.attention.{name}": f"{theirs}.self_attn.{name}" for name in projections}
        names |= {
            f"{ours}.mlp.{p}_proj.weight": f"{theirs}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")
        }
    return names
