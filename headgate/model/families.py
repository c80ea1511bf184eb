"""Models as Hugging Face stores them: its families' settings and tensor names, from ours and back.

Read and written: Qwen2 (and Qwen2.5), Qwen3, Llama, Mistral and Ministral. Only written, for gated attention:
Qwen3.5 and Step3.5. A setting that our decoder does not compute is refused by name: a model that loads is the
same model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from headgate.config import MOST_LAYERS, ModelConfig, RopeScaling, from_dict
from headgate.errors import HeadgateError
from headgate.grammar import MechanismSpec
from headgate.mechanisms.contract import MECHANISMS, Heads, NoInitialValues, make_options

Family = Literal["qwen", "llama", "mistral", "qwen3_5", "step3p5"]
"""What can be written; qwen means Qwen2 or Qwen3, mistral also Ministral, whichever the model is."""
READ = ("qwen2", "qwen3", "llama", "mistral", "ministral")


@dataclass(frozen=True)
class FamilySettings:
    """What a config.json says about the computation, with transformers' defaults."""

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
    max_position_embeddings: int | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None


DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128}, "mistral": {"sliding_window": 4096}, "ministral": {"sliding_window": 4096},
}  # fmt: skip
"""Where a family's defaults differ from the others'."""
REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
"""Settings for which values other than these would change the computation in ways our decoder does not
follow."""


def read_settings(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The config of a model from its config.json; `where` is that file, for errors."""
    family = values.get("model_type")
    if family not in READ:
        raise HeadgateError(
            f"{where!r} has model_type={family!r}; expected {', '.join(READ)} (qwen2 also for Qwen2.5) or "
            "headgate"
        )
    for name, allowed in REQUIRED.items():
        if name in values and values[name] not in allowed:
            raise HeadgateError(
                f"{where!r} has {name}={values[name]!r}, which headgate's decoder does not compute; "
                f"expected {allowed[0]!r}"
            )
    known = {f.name for f in fields(FamilySettings)}
    given = {name: values[name] for name in values if name in known}
    s = from_dict(FamilySettings, DEFAULTS.get(family, {}) | given, where=where)
    if not 1 <= s.num_hidden_layers <= MOST_LAYERS:
        raise HeadgateError(
            f"{where!r} has num_hidden_layers={s.num_hidden_layers}; expected from 1 to {MOST_LAYERS:,}"
        )
    theta, scaling = _rope(s, where)
    return ModelConfig(
        vocab_size=s.vocab_size,
        d_model=s.hidden_size,
        n_layers=s.num_hidden_layers,
        n_heads=s.num_attention_heads,
        n_kv_heads=s.num_attention_heads if s.num_key_value_heads is None else s.num_key_value_heads,
        head_dim=s.hidden_size // s.num_attention_heads if s.head_dim is None else s.head_dim,
        d_mlp=s.intermediate_size,
        mechanism=_mechanism(s, family, where),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
        tied_embeddings=s.tie_word_embeddings,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=s.rms_norm_eps,
    )


def _rope(s: FamilySettings, where: str) -> tuple[float, RopeScaling | None]:
    rope = dict(s.rope_scaling or s.rope_parameters or {})
    asked = dict(rope)
    kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", kind)
    theta = rope.pop("rope_theta", 1e4 if s.rope_theta is None else s.rope_theta)
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or any(map(_is_mapping, rope.values())):
        raise HeadgateError(f"{where!r} has no single rope_theta; expected one number for all layers")
    if rope.pop("partial_rotary_factor", 1) not in (1, None):
        raise HeadgateError(
            f"{where!r} asks for RoPE with {asked}, on only some of the dimensions; headgate "
            "rotates all of them"
        )
    if kind == "default":
        return float(theta), None
    if kind not in ("linear", "llama3", "yarn"):
        raise HeadgateError(
            f"{where!r} asks for RoPE with {asked}; headgate computes linear, llama3 and yarn scaling, so "
            "remove it if the context need not be stretched"
        )
    given = {name: value for name, value in rope.items() if value is not None}
    if kind != "linear" and s.max_position_embeddings is not None:
        given.setdefault("original_max_position_embeddings", s.max_position_embeddings)
    one, other = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    if one and other and "attention_factor" not in given and "factor" in given:
        given["attention_factor"] = _growth(given["factor"], one) / _growth(given["factor"], other)
    return float(theta), from_dict(RopeScaling, {"rope_type": kind, **given}, where=f"{where}: RoPE")


def _growth(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _mechanism(s: FamilySettings, family: str, where: str) -> tuple[MechanismSpec, ...]:
    """The layers' attention: `full`, or `local` where the layer slides."""
    used = s.use_sliding_window if family.startswith("qwen") else family != "llama"
    window = s.sliding_window if used else None
    types = None if family == "llama" else s.layer_types
    if types is None:
        first = s.max_window_layers if family.startswith("qwen") else 0
        slides = [window is not None and n >= first for n in range(s.num_hidden_layers)]
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
            f"use_sliding_window={used}; expected a window of at least 2 that is in use"
        )
    # They count the keys that are seen; we count the distance to the farthest.
    local = MechanismSpec("local", {} if window is None else {"window": window - 1})
    pattern = [local if slide else MechanismSpec("full") for slide in slides]
    length = next(n for n in range(1, len(pattern) + 1) if all(a == b for a, b in _repeats(pattern, n)))
    return tuple(pattern[:length])


def _repeats(pattern: list[MechanismSpec], length: int) -> list[tuple[MechanismSpec, MechanismSpec]]:
    return [(spec, pattern[n % length]) for n, spec in enumerate(pattern)]


@dataclass(frozen=True)
class _LayerAttention:
    """A layer's attention in other tools' terms."""

    window: int | None
    gate: str | None
    """The name of the linear layer inside the mechanism that gates attention's output."""
    gates: int
    has_bias: bool


@dataclass(frozen=True)
class _Layers:
    """The attention of all layers."""

    each: list[_LayerAttention]

    @property
    def types(self) -> list[str]:
        return ["full_attention" if layer.window is None else "sliding_attention" for layer in self.each]

    @property
    def window(self) -> int | None:
        """How many keys the sliding layers see."""
        return next((layer.window + 1 for layer in self.each if layer.window is not None), None)


def write_settings(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The config.json of the family's model that computes the same as this one, or an error that says why
    there is none."""
    layers = _Layers([_attention(config, n, family) for n in range(config.n_layers)])
    sliding = {layer.window for layer in layers.each if layer.window is not None}
    if len(sliding) > 1:
        raise HeadgateError(
            f"the layers have windows of {' and '.join(map(str, sorted(sliding)))}; {family} has one for "
            "all, so write --to headgate"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= _scaling_settings(config.rope_scaling)
    settings = {
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
        "rope_parameters": rope,
        "attention_bias": False,
        "attention_dropout": 0.0,
        # otherwise transformers would use defaults for some families; what the source says replaces these
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return settings | WRITERS[family](config, layers)


def _qwen(config: ModelConfig, layers: _Layers) -> dict[str, Any]:
    if config.qk_norm == config.qkv_bias:
        other = "" if config.qk_norm else "; without either it may be a Llama: --to llama or --to mistral"
        raise HeadgateError(
            f"qk_norm={config.qk_norm} with qkv_bias={config.qkv_bias} is not a Qwen; Qwen3 has the norm but "
            f"no bias, Qwen2 the bias but no norm{other}"
        )
    return {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "Qwen2ForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "qwen2",
        "use_sliding_window": layers.window is not None,
        "sliding_window": layers.window,
        "layer_types": layers.types,
    }


def _llama(config: ModelConfig, layers: _Layers) -> dict[str, Any]:
    _require_bare(config, "llama")
    if layers.window is not None:
        raise HeadgateError(
            f"the model has windows of {layers.window - 1}, but Llama has none; write --to mistral"
        )
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}


def _mistral(config: ModelConfig, layers: _Layers) -> dict[str, Any]:
    _require_bare(config, "mistral")
    if len(set(layers.types)) == 1:
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": layers.window,
        }
    return {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "sliding_window": layers.window,
        "layer_types": layers.types,
    }


def _require_bare(config: ModelConfig, family: str) -> None:
    if config.qk_norm or config.qkv_bias:
        raise HeadgateError(
            f"qk_norm={str(config.qk_norm).lower()} with qkv_bias={str(config.qkv_bias).lower()} is not "
            f"{family}, which has neither; write --to qwen"
        )


def _qwen3_5(config: ModelConfig, layers: _Layers) -> dict[str, Any]:
    if not config.qk_norm or layers.window is not None:
        raise HeadgateError(
            f"qk_norm={str(config.qk_norm).lower()} with sliding layers: {layers.window is not None}, is not "
            "Qwen3.5, whose full attention has a norm on queries and keys and no window; write --to headgate"
        )
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": config.qkv_bias or any(layer.has_bias for layer in layers.each),
        "layer_types": layers.types,
        "partial_rotary_factor": 1.0,
    }


def _step3p5(config: ModelConfig, layers: _Layers) -> dict[str, Any]:
    if not config.qk_norm or config.qkv_bias:
        raise HeadgateError(
            f"qk_norm={str(config.qk_norm).lower()} with qkv_bias={str(config.qkv_bias).lower()} is not "
            "Step3.5, which has the norm but no bias; write --to headgate"
        )
    if config.rope_scaling is not None and layers.window is not None:
        raise HeadgateError(
            "Step3.5 stretches RoPE only in its full layers, but this model also does in its "
            "windows; write --to headgate"
        )
    for n, layer in enumerate(layers.each):
        if layer.has_bias or layer.gates != config.n_heads:
            what = "a bias" if layer.has_bias else "one value per channel"
            raise HeadgateError(
                f"the gate of layer {n} has {what}, but Step3.5's has one value per head and no bias "
                "(gate_bias=false); write --to headgate"
            )
    return {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "att_impl_type": "GQA",
        "num_attention_groups": config.n_kv_heads,
        "tie_word_embeddings": False,  # vLLM's has an output layer of its own, whatever is said here
        "use_head_wise_attn_gate": True,
        "sliding_window": layers.window or 512,  # transformers wants a number even where no layer slides
        "max_position_embeddings": 32_768,  # vLLM wants a number, too; the source's replaces it
        "layer_types": layers.types,
        "mlp_layer_types": ["dense"] * (config.n_layers - 1) + ["sparse"],
        "moe_layers_enum": str(config.n_layers - 1),
        "moe_num_experts": 1,
        "moe_top_k": 1,
        "moe_intermediate_size": EXPERT,
        "share_expert_dim": config.d_mlp,
        "use_moe": True,
        "moe_router_activation": "softmax",  # nothing else on a CPU, and one expert gets 1 by any
        "moe_router_scaling_factor": 1.0,
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "norm_expert_weight": True,
        "rope_parameters": None,
        "rope_scaling": config.rope_scaling and _scaling_settings(config.rope_scaling),
    }


EXPERT = 32
"""The width of the one routed expert of a step3p5, which adds nothing: vLLM serves none without experts. The
last layer's MLP stands beside it as the expert that all tokens share."""
WRITERS: dict[Family, Callable[[ModelConfig, _Layers], dict[str, Any]]] = {
    "qwen": _qwen, "llama": _llama, "mistral": _mistral, "qwen3_5": _qwen3_5, "step3p5": _step3p5,
}  # fmt: skip
GATED = ("qwen3_5", "step3p5")


def _scaling_settings(s: RopeScaling) -> dict[str, Any]:
    of_type: dict[str, tuple[str, ...]] = {
        "linear": (),
        "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": (
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "truncate",
            "attention_factor",
        ),
    }
    values = {name: getattr(s, name) for name in ("rope_type", "factor", *of_type[s.rope_type])}
    return {name: value for name, value in values.items() if value is not None}


def _attention(config: ModelConfig, layer: int, family: Family) -> _LayerAttention:
    spec = config.layer_mechanism(layer)
    options = make_options(spec.name, spec.options, config.shared_options)
    if options.positions == "none":
        raise HeadgateError(
            f"layer {layer} has positions=none, but {family} rotates the keys of every layer; write --to "
            "headgate"
        )
    heads = Heads(config.d_model, config.n_heads, config.n_kv_heads, config.head_dim)
    with torch.device("meta"), NoInitialValues():
        mechanism = MECHANISMS.get(spec.name)(heads, options)
    span, gate = mechanism.plain_span(), None
    if family in GATED:
        span, gate = mechanism.gated_span() or (None, None)
    if span is None or span.pinned or (span.window is not None and span.dense_prefix > span.window + 1):
        expected = "attention times a learned gate" if family in GATED else "'full' and a plain window"
        raise HeadgateError(
            f"the attention of layer {layer} is {spec.name!r}, which no {family} computes with these "
            f"options; only {expected}, under whatever name, can be written that way, so write --to headgate"
        )
    if span.window == 0:
        raise HeadgateError(
            f"layer {layer} has window=0, so a token sees only itself; transformers decodes a window "
            "of one key wrongly, so write --to headgate"
        )
    if gate is None:
        return _LayerAttention(span.window, None, 0, False)
    linear = cast(nn.Linear, mechanism.get_submodule(gate))
    return _LayerAttention(span.window, gate, linear.weight.shape[0], linear.bias is not None)


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Our name -> that in the families that can be read, for every tensor but the mechanisms' own."""
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


def our_name(theirs: str) -> str:
    """Of a tensor of a mechanism that `headgate.model.hf.use` put into one of their models."""
    return theirs.removeprefix("model.").replace(".self_attn.", ".attention.", 1)


def tensors_as(family: Family, config: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A family's tensors, from ours."""
    theirs = {name: ours[mine] for mine, name in tensor_names(config).items()}
    if family not in GATED:
        return theirs
    norm, biased = ours["norm.weight"], write_settings(config, family)["attention_bias"]
    # The norms of these families multiply by 1 + weight.
    theirs |= {name: tensor - 1 for name, tensor in theirs.items() if "norm" in name}
    for n in range(config.n_layers):
        layer = _attention(config, n, family)
        gate = f"layers.{n}.attention.mechanism.{layer.gate}"
        attention = f"model.layers.{n}.self_attn"
        if family == "step3p5":
            theirs[f"{attention}.g_proj.weight"] = ours[f"{gate}.weight"]
            continue
        size = (config.n_heads, config.head_dim, -1)
        for kind in ("weight", "bias") if biased else ("weight",):
            zeros = torch.zeros(config.n_heads * config.head_dim, dtype=norm.dtype)
            query = ours.get(f"layers.{n}.attention.q_proj.{kind}", zeros)
            values = ours.get(f"{gate}.{kind}", zeros)
            if len(values) == config.n_heads:  # a head's gate applies to each of its channels
                values = values.repeat_interleave(config.head_dim, 0)
            both = torch.cat([query.reshape(size), values.reshape(size)], 1)
            theirs[f"{attention}.q_proj.{kind}"] = both.reshape(-1, *query.shape[1:])
        for letter in "kvo" if biased else "":
            weight = theirs[f"{attention}.{letter}_proj.weight"]
            theirs.setdefault(f"{attention}.{letter}_proj.bias", weight.new_zeros(len(weight)))
    if family == "step3p5":
        theirs.setdefault("lm_head.weight", ours["embedding.weight"])
        last, width = f"model.layers.{config.n_layers - 1}", config.d_model
        theirs |= {
            f"{last}.share_expert.{part}_proj.weight": theirs.pop(f"{last}.mlp.{part}_proj.weight")
            for part in ("gate", "up", "down")
        }
        shapes = {
            "gate_proj.weight": (1, EXPERT, width),
            "up_proj.weight": (1, EXPERT, width),
            "down_proj.weight": (1, width, EXPERT),
            "gate.weight": (1, width),
            "router_bias": (1,),
        }
        theirs |= {f"{last}.moe.{name}": norm.new_zeros(shape) for name, shape in shapes.items()}
    return theirs
