"""A mechanism in a transformers model, in one line; and our kernels as one of its attention implementations.

    model = AutoModelForCausalLM.from_pretrained("Qwen3-0.6B")
    headgate.model.hf.use(model, "dynamic-sparse", window=512)
    model = AutoModelForCausalLM.from_pretrained("Qwen3-0.6B", attn_implementation="headgate")

transformers calls an attention function with queries and keys that are already rotated, and keys and values
from its own cache. A mechanism that keeps nothing else attends to them as they are. For one with its own
`prepare`, a hook before the module suppresses the rotation, so that the mechanism gets the newest queries and
keys as projected, and it keeps what it makes of them in a cache beside the model's. Its x is the attention
module's input, which the hook sets aside.

Padding never reaches a mechanism: rows are computed from their first token on, those of one length together.
"""

import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headgate import ops
from headgate.config import ModelConfig, to_dict
from headgate.errors import HeadgateError
from headgate.mechanisms.contract import MECHANISMS, Heads, Mechanism, Past, initialise, make_options
from headgate.model import remote
from headgate.model.cache import LayerCache
from headgate.model.decoder import with_mechanism
from headgate.model.weights import MODEL_TYPE, Weights, remembered

NAME = MODEL_TYPE
"""The name of our attention in transformers, and of what the config remembers."""
FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "gemma", "gemma3_text")
REORDERING = ("reorder_cache", "crop", "batch_select_indices", "batch_repeat_interleave")


def use(
    model: PreTrainedModel,
    mechanism: str | Sequence[str] | None = None,
    *,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    **options: Any,
) -> PreTrainedModel:
    """Put a mechanism into the layers of a loaded model, which is changed and returned.

    Its weights start so that the model computes what it did, as far as the mechanism can, just as with
    `headgate convert --mechanism`. `layers` selects some of the layers; the others stay. Without a mechanism,
    it is the one that the model was saved with, with its weights.
    """
    take_out(model)
    config, attention = model.config.get_text_config(), _attention_modules(model)
    chosen, again = layers, mechanism is None
    ours = ModelConfig(
        vocab_size=config.vocab_size,
        d_model=config.hidden_size,
        n_layers=len(attention),
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=attention[0].head_dim,
        d_mlp=config.intermediate_size,
    )
    if again:
        ours, chosen = remembered(ours, {NAME: getattr(config, NAME, None)}, "this model")
    ours = with_mechanism(ours, mechanism, **options)
    places = list(range(len(attention))) if chosen is None else sorted(set(chosen))
    if not places or not 0 <= places[0] <= places[-1] < len(attention):
        raise HeadgateError(f"layers={list(chosen or ())}; expected numbers from 0 to {len(attention) - 1}")
    sliding = [n for n in places if _slides(config, n)]
    if sliding:
        full = [n for n in range(len(attention)) if n not in sliding]
        raise HeadgateError(
            f"layer {sliding[0]} of this model slides over its keys and forgets the others, so no mechanism "
            f"can take its place; {f'give layers={full}' if full else 'load it with sliding_window=None'}"
        )
    made = [_make(ours, n, attention[n], seed) for n in places]
    if again:
        _load(model, attention, dict(zip(places, made, strict=True)))
    for n, new in zip(places, made, strict=True):
        module = attention[n]
        module.mechanism = new
        kept = type(new).prepare is Mechanism.prepare and new.options.positions == "rope"
        module.headgate_as_they_are = kept
        module.headgate_handle = module.register_forward_pre_hook(_lay_by, with_kwargs=True)
    config.headgate = {"mechanism": to_dict(ours)["mechanism"], "layers": places}
    config.auto_map = remote.auto_map(remote.USED)
    model.headgate_before = config._attn_implementation
    model.set_attn_implementation(NAME)
    model.save_pretrained = partial(_save, model)
    return model


def take_out(model: PreTrainedModel) -> PreTrainedModel:
    """Remove what `use` put into a model."""
    config = model.config.get_text_config()
    for module in [m for m in model.modules() if hasattr(m, "headgate_handle")]:
        module.headgate_handle.remove()
        del module.headgate_handle, module.headgate_as_they_are, module.mechanism
    if hasattr(model, "headgate_before"):
        model.set_attn_implementation(model.headgate_before)
        del model.headgate_before, model.save_pretrained, config.headgate, config.auto_map
    return model


class SavedWithMechanism:
    """What the auto_map of a folder names if its model was saved with a mechanism in it."""

    auto: Any = AutoModelForCausalLM

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, config: Any, **options: Any) -> PreTrainedModel:
        kind = cls.auto._model_mapping[type(config)]
        return use(kind.from_pretrained(folder, *args, config=config, **options))

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing to do: the model is of transformers' own class."""


class SavedStatesWithMechanism(SavedWithMechanism):
    auto = AutoModel


class SavedClassifierWithMechanism(SavedWithMechanism):
    auto = AutoModelForSequenceClassification


def _save(model: PreTrainedModel, folder: str | os.PathLike[str], **options: Any) -> None:
    type(model).save_pretrained(model, folder, **options)
    remote.write_loader(Path(folder), remote.USED)


def _attention_modules(model: PreTrainedModel) -> list[Any]:
    """The attention modules of all layers, if they compute something that a mechanism can replace."""
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise HeadgateError(
            f"model_type={config.model_type!r} is not one whose attention a mechanism can replace; "
            f"those are {', '.join(FAMILIES)}"
        )
    for name in ("attn_logit_softcapping", "attention_dropout"):
        if getattr(config, name, None):
            raise HeadgateError(
                f"this model has {name}={getattr(config, name)}, which mechanisms do not compute; set it to "
                "0 or None if the model can do without"
            )
    found = [m for m in model.modules() if hasattr(m, "q_proj") and hasattr(m, "layer_idx")]
    return sorted(found, key=lambda module: module.layer_idx)


def _slides(config: Any, layer: int) -> bool:
    types = getattr(config, "layer_types", None)
    if types is not None:
        return bool(types[layer] == "sliding_attention")
    return getattr(config, "sliding_window", None) is not None


def _make(config: ModelConfig, layer: int, module: Any, seed: int) -> Mechanism:
    spec = config.layer_mechanism(layer)
    kind = MECHANISMS.get(spec.name)
    if kind.uses_first_values:
        raise HeadgateError(
            f"{spec.name} needs the first layer's values, which transformers does not pass on; use "
            "headgate convert --mechanism instead"
        )
    heads = Heads(config.d_model, config.n_heads, config.n_kv_heads, config.head_dim)
    mechanism = kind(heads, make_options(spec.name, spec.options))
    named = nn.ModuleDict({"attention": nn.ModuleDict({"mechanism": mechanism})})
    initialise(nn.ModuleDict({"layers": nn.ModuleDict({str(layer): named})}), seed)  # as in our decoder
    mechanism.start_as_full()
    weight = module.o_proj.weight
    return mechanism.to(weight.device, weight.dtype).train(module.training)


def _load(model: PreTrainedModel, attention: Sequence[Any], made: dict[int, Mechanism]) -> None:
    """The mechanisms' weights from the folder that the model came from, or from the Hub's cache."""
    folder = Path(model.config._name_or_path)
    if not folder.is_dir():
        folder = Path(snapshot_download(model.config._name_or_path, local_files_only=True))
    weights = Weights.of_folder(folder)
    names = {module: name for name, module in model.named_modules()}
    for n, mechanism in made.items():
        for own, parameter in mechanism.named_parameters():
            name = f"{names[attention[n]]}.mechanism.{own}"
            if name not in weights:  # saved with a head and read without, or the other way about
                base = f"{model.base_model_prefix}."
                name = name.removeprefix(base) if name.startswith(base) else base + name
            if name not in weights or weights.shape(name) != tuple(parameter.shape):
                raise HeadgateError(f"{model.config._name_or_path!r} has no {name} of the right shape")
            with torch.no_grad():
                parameter.copy_(weights.tensor(name))


def _lay_by(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before attention: set aside what its function will not get. A mechanism that rotates by itself gets
    queries and keys not yet rotated: undoing a rotation would cost digits, which a recurrence amplifies."""
    x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    cos, sin = kwargs["position_embeddings"]
    module.headgate_call = x, (cos, sin), kwargs.get("past_key_values")
    if not module.headgate_as_they_are:
        kwargs = kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
    return args, kwargs


def attend_for_transformers(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """In transformers' terms: q (B,H,Tq,D), k and v (B,G,Tk,D) including its cache, mask (B,Tk) where there
    is padding. Returns (B,Tq,H,D)."""
    for name, value in (
        ("dropout", dropout),
        ("softcap", others.get("softcap")),
        ("s_aux", others.get("s_aux")),
    ):
        if value is not None and value is not False and not (isinstance(value, float) and value == 0):
            raise HeadgateError(f"attn_implementation='headgate' does not compute {name}; use another one")
    if not getattr(module, "is_causal", True) or others.get("output_attentions"):
        raise HeadgateError(
            "attn_implementation='headgate' is causal and returns no attention weights; use 'eager' for them"
        )
    if k.shape != v.shape:
        raise HeadgateError(
            "attn_implementation='headgate' needs keys and values of one width; use another one"
        )
    if scaling is not None and not math.isclose(scaling, q.shape[-1] ** -0.5):
        q = q * (scaling * q.shape[-1] ** 0.5)
    begins = _first_columns(mask, k)
    _refuse_packed(position_ids, begins, k.shape[2])
    if hasattr(module, "headgate_call"):
        call = module.headgate_call
        del module.headgate_call
        run: _Mechanism | _Plain = _Mechanism(module, *call)
    else:
        run = _Plain(None if sliding_window is None else sliding_window - 1)
    by_begin: dict[int, list[int]] = {}
    for row, begin in enumerate(begins):
        by_begin.setdefault(begin, []).append(row)
    if by_begin.keys() <= {0}:
        return run(q, k, v, slice(None), 0).transpose(1, 2), None
    out = torch.zeros_like(q)
    for begin, rows in by_begin.items():
        # queries before the first key are padding themselves
        first = max(0, begin - (k.shape[2] - q.shape[2]))
        out[rows, :, first:] = run(q[rows, :, first:], k[rows, :, begin:], v[rows, :, begin:], rows, first)
    return out.transpose(1, 2), None


class _Plain:
    def __init__(self, window: int | None) -> None:
        self.window = window

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rows: Any, first: int) -> Tensor:
        return ops.attention(q, k, v, ops.Span(self.window))


class _Mechanism:
    def __init__(self, module: Any, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Any) -> None:
        self.mechanism, self.layer, self.x, self.cache = module.mechanism, module.layer_idx, x, cache
        self.as_they_are: bool = module.headgate_as_they_are
        """Whether it takes rotated queries and keys from the model's cache."""
        half = rotation[0].shape[-1] // 2
        self.cos, self.sin = (t[..., :half] for t in rotation)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rows: Any, first: int) -> Tensor:
        x = self.x[rows, first:]
        if self.as_they_are:
            return self.mechanism.attend(x, q, k, v, Past())
        wide = torch.promote_types(q.dtype, torch.float32)
        cos, sin = (t.expand(len(self.x), -1, -1)[rows, None, first:].to(wide) for t in (self.cos, self.sin))
        if q.shape[2] == k.shape[2]:  # a row's first token has position 0, whatever comes before it
            a, b = cos[:, :, :1], sin[:, :, :1]
            length = torch.hypot(a, b)  # not 1 where the model scales its logits this way
            cos, sin = (cos * a + sin * b) / length, (sin * a - cos * b) / length
        past = Past(rotation=(cos, sin), cache=self._kept(q, k, rows))
        return self.mechanism(x, q, k[:, :, -q.shape[2] :], v[:, :, -q.shape[2] :], past)

    def _kept(self, q: Tensor, k: Tensor, rows: Any) -> LayerCache | None:
        """What the mechanism keeps beside the model's cache, if there is one and nothing is being learned."""
        if self.cache is None or (torch.is_grad_enabled() and q.shape[2] == k.shape[2]):
            return None
        if rows != slice(None):
            raise HeadgateError(
                "this mechanism keeps more than keys and values, so rows of different lengths cannot be "
                "generated together with it; give them one by one, or use headgate convert"
            )
        if not hasattr(self.cache, "headgate_layers"):
            self.cache.headgate_layers = {}
            for name in REORDERING:
                setattr(self.cache, name, _refuse_reordering)
        kept: LayerCache = self.cache.headgate_layers.setdefault(self.layer, LayerCache())
        if kept.end + q.shape[2] != k.shape[2]:
            raise HeadgateError(
                f"the cache holds {k.shape[2] - q.shape[2]} tokens, of which the mechanism has seen "
                f"{kept.end}; start with a new cache under torch.no_grad()"
            )
        return kept


def _refuse_reordering(*args: Any, **kwargs: Any) -> None:
    raise HeadgateError(
        "this mechanism keeps more than keys and values, so beams and assisted generation cannot reorder its "
        "cache; give use_cache=False, or use headgate convert"
    )


def _first_columns(mask: Tensor | None, k: Tensor) -> list[int]:
    """The column in which each row's tokens begin; they cannot see what is to their right."""
    if mask is None:
        return [0] * k.shape[0]
    if mask.ndim != 2 or mask.shape != (k.shape[0], k.shape[2]):
        raise HeadgateError(
            f"attention_mask has shape {tuple(mask.shape)}; expected {(k.shape[0], k.shape[2])}"
        )
    real = mask.bool()
    first = real.int().argmax(1)
    whole = torch.arange(k.shape[2], device=mask.device)
    ends = first + real.sum(1)
    if not torch.equal(real, (whole >= first[:, None]) & (whole < ends[:, None])):
        raise HeadgateError(
            "attention_mask has padding between tokens; expected tokens in one piece, padded on the left "
            "or on the right"
        )
    found: list[int] = first.tolist()
    return found


def _refuse_packed(position_ids: Tensor | None, begins: Sequence[int], keys: int) -> None:
    if position_ids is None or position_ids.ndim != 2:
        return
    offset = keys - position_ids.shape[1]
    falls = position_ids[:, 1:] < position_ids[:, :-1]  # a new text begins
    columns = torch.arange(1, position_ids.shape[1], device=position_ids.device) + offset
    inside = columns > torch.tensor(list(begins), device=position_ids.device)[:, None]
    if (falls & inside).any():
        raise HeadgateError(
            "position_ids start again inside a row: packed texts would see one another; give each its own row"
        )


def _mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **others: Any
) -> Tensor | None:
    if int(kv_offset) + kv_length > int(q_offset) + q_length:
        raise HeadgateError(
            "attn_implementation='headgate' needs a cache that holds the tokens seen and no more; static "
            "caches have room for others, so leave cache_implementation out"
        )
    if others.get("allow_is_causal_skip", True) is False:
        raise HeadgateError(
            "attn_implementation='headgate' is plainly causal; packed texts and other masks need 'sdpa'"
        )
    mask: Tensor | None = flash_attention_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **others)
    return mask


ALL_ATTENTION_FUNCTIONS.register(NAME, attend_for_transformers)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
