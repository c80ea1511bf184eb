"""What our transformers models share: their config, their cache, and how padded rows reach the decoder.

Padding never reaches a mechanism: mechanisms' rules are about absolute positions, which padding would shift.
Rows padded on the left are moved to start at position 0, computed, and moved back; a row's tokens cannot see
what is to the right of them anyway.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from headgate.config import ModelConfig, from_dict, to_dict
from headgate.errors import HeadgateError
from headgate.mechanisms.contract import initialise
from headgate.model import remote
from headgate.model.cache import Cache
from headgate.model.decoder import Decoder
from headgate.model.weights import MODEL_TYPE


class HeadgateConfig(PreTrainedConfig):  # type: ignore[misc]
    """The fields of `ModelConfig`, with the same names and meanings, where transformers looks for them.

    A folder that it is saved to can be loaded with trust_remote_code=True.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "d_mlp",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tied_embeddings",
    }

    vocab_size: int = 4096
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32
    d_mlp: int = 352
    mechanism: Any = "full"
    shared_options: Any = None
    qk_norm: bool = True
    qkv_bias: bool = False
    tied_embeddings: bool = True
    start: str = "qwen"
    embedding_deviation: float | None = None
    rope_theta: float = 1e6
    rope_scaling: Any = None
    norm_eps: float = 1e-6
    max_position_embeddings: int | None = None
    """For other tools: the decoder itself has no longest context."""
    return_logits: bool = True
    """Whether forward returns logits along with a loss; without them the loss never holds (B,T,V) numbers."""
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        plain = to_dict(self.decoder_config())  # mistakes surface now, and text is parsed
        self.mechanism, self.shared_options = plain["mechanism"], plain["shared_options"]
        self.rope_scaling = plain["rope_scaling"]
        super().__post_init__(**kwargs)

    def decoder_config(self) -> ModelConfig:
        values = {name: getattr(self, name) for name in ModelConfig.__dataclass_fields__}
        return from_dict(ModelConfig, values | {"shared_options": self.shared_options or {}})

    @classmethod
    def of(cls, config: ModelConfig, **more: Any) -> "HeadgateConfig":
        return cls(**to_dict(config), **more)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        self.auto_map = remote.auto_map(remote.CLASSES)
        super().save_pretrained(save_directory, **options)
        remote.write_loader(Path(save_directory), remote.CLASSES)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: transformers would copy this file into every folder that is saved."""


class GenerationCache:
    """Our cache in the form that transformers' `generate` handles."""

    is_compileable = False
    is_croppable = False  # dropped keys cannot come back

    def __init__(self, decoder: Decoder) -> None:
        self.inner = decoder.new_cache()
        self.columns = 0
        """Columns of input seen so far, including padding."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.inner.select(beam_idx.tolist())


class States(NamedTuple):
    """What the decoder computes for a batch."""

    hidden: Tensor
    """(B,T,C), after the last norm."""
    spans: list[tuple[int, int]]
    """Where each row's tokens begin and end."""
    documents: Tensor | None
    cache: GenerationCache | None


class HeadgatePreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    config_class = HeadgateConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]
    _skip_keys_device_placement = ["past_key_values"]

    def __init__(self, config: HeadgateConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.decoder_config())
        for parameter in self.decoder.parameters():
            parameter._is_hf_initialized = not parameter.is_meta  # type: ignore[attr-defined]

    @classmethod
    def of(cls, decoder: Decoder, **settings: Any) -> "HeadgatePreTrainedModel":
        """This very decoder, for code that takes a transformers model."""
        with torch.device("meta"):
            model = cls(HeadgateConfig.of(decoder.config, **settings))
        model.decoder = decoder
        return model

    def states(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> States:
        """The first part of all our models; the arguments are those of their `forward`."""
        if input_ids is None or inputs_embeds is not None:
            raise HeadgateError("inputs_embeds cannot be used with a headgate model; give input_ids")
        if output_attentions or output_hidden_states:
            raise HeadgateError(
                "a headgate model returns no attentions or hidden states; see headgate.probe for its gates"
            )
        if past_key_values is None and use_cache:
            past_key_values = GenerationCache(self.decoder)
        if not isinstance(past_key_values, GenerationCache | None):
            raise HeadgateError(
                f"past_key_values is a {type(past_key_values).__name__}; a headgate model keeps its own, "
                "so give use_cache=True and then pass on what it returns"
            )
        seen = 0 if past_key_values is None else past_key_values.columns
        spans = row_spans(attention_mask, input_ids.shape, seen)
        documents = self._documents(position_ids, spans, past_key_values)
        if documents is not None:
            hidden = self.decoder.hidden(input_ids, documents=documents)
        elif past_key_values is None:
            hidden = self._whole(input_ids, spans)
        elif seen == 0:
            hidden = self._begun(input_ids, spans, past_key_values)
        else:
            hidden = self._continued(input_ids, spans, past_key_values)
        return States(hidden, spans, documents, past_key_values)

    def _whole(self, tokens: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Without a cache: rows are moved to the left, computed together, and moved back."""
        first = torch.tensor([begin for begin, _ in spans], device=tokens.device)[:, None]
        if not first.any():
            return self.decoder.hidden(tokens)
        longest = max(end - begin for begin, end in spans)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        there = (columns[:longest] + first).clamp(max=tokens.shape[1] - 1)
        back = (columns - first).clamp(0, longest - 1)  # on padding, whatever is at the end
        hidden = self.decoder.hidden(tokens.gather(1, there))
        return hidden.gather(1, back[..., None].expand(-1, -1, hidden.shape[2]))

    def _begun(self, tokens: Tensor, spans: Sequence[tuple[int, int]], cache: GenerationCache) -> Tensor:
        """The prompts: rows of one length at a time, each length with its own cache, then joined."""
        width = tokens.shape[1]
        if any(end < width for _, end in spans):
            raise HeadgateError(
                "the prompts are padded on the right, so new tokens would not follow them; pad on the left: "
                "tokenizer.padding_side = 'left'"
            )
        by_first: dict[int, list[int]] = {}
        for row, (begin, _) in enumerate(spans):
            by_first.setdefault(begin, []).append(row)
        cache.columns = width
        if len(by_first) == 1:
            (begin,) = by_first
            hidden = self.decoder.hidden(tokens[:, begin:], cache=cache.inner)
            return F.pad(hidden, (0, 0, begin, 0))
        caches = []
        hidden = self.decoder.norm.weight.new_zeros(len(spans), width, self.decoder.config.d_model)
        for begin, rows in by_first.items():
            caches.append(self.decoder.new_cache())
            part = self.decoder.hidden(tokens[rows, begin:], cache=caches[-1])
            hidden[rows, begin:] = part
        cache.inner = Cache.join(caches)
        joined = [row for rows in by_first.values() for row in rows]
        cache.inner.select([joined.index(row) for row in range(len(spans))])
        return hidden

    def _continued(self, tokens: Tensor, spans: Sequence[tuple[int, int]], cache: GenerationCache) -> Tensor:
        if any(span != (0, tokens.shape[1]) for span in spans):
            raise HeadgateError("the tokens that follow a cache have padding among them; give them without")
        cache.columns += tokens.shape[1]
        return self.decoder.hidden(tokens, cache=cache.inner)

    def _documents(
        self,
        position_ids: Tensor | None,
        spans: Sequence[tuple[int, int]],
        cache: GenerationCache | None,
    ) -> Tensor | None:
        """The documents (B,T) of packed rows, whose positions start at 0 again with each, as transformers'
        packing collators make them; None for plain rows. Otherwise positions follow from the mask and the
        cache, and any others would be a different computation."""
        if position_ids is None:
            return None
        packed = position_ids.expand(len(spans), -1)
        counted = (packed[:, :1] == 0).all() and (
            (packed[:, 1:] == packed[:, :-1] + 1) | (packed[:, 1:] == 0)
        ).all()
        whole = all(span == (0, packed.shape[1]) for span in spans)
        if cache is None and whole and counted and (packed[:, 1:] == 0).any():
            return (packed == 0).cumsum(1)
        given = packed.tolist()
        lengths = [0] * len(spans) if cache is None or not cache.columns else cache.inner.lengths
        for row, ((begin, end), length) in enumerate(zip(spans, lengths, strict=True)):
            if given[row][begin:end] != list(range(length, length + end - begin)):
                raise HeadgateError(
                    f"position_ids of row {row} do not count its tokens from {length} on; a headgate model "
                    "counts them itself, and accepts others only for packed rows: each document from 0 on, "
                    "without padding or a cache"
                )
        return None

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing to do: transformers would copy this file into every folder that is saved."""

    def initialize_weights(self) -> None:
        """Give what a checkpoint lacked the values that a new decoder has."""
        parameters = self.decoder.named_parameters()
        loaded = {name for name, p in parameters if getattr(p, "_is_hf_initialized", False)}
        initialise(self.decoder, 0, skip=loaded)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.decoder.embedding = value
        self.decoder.config = replace(self.decoder.config, vocab_size=value.num_embeddings)

    def get_output_embeddings(self) -> nn.Module | None:
        return None if self.config.tied_embeddings else self.decoder.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder.head = new_embeddings

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.decoder.recompute

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        if every_n_layers != 1:
            raise HeadgateError(f"every_n_layers={every_n_layers} is not possible; all layers are recomputed")
        self.decoder.recompute = enable


def row_spans(mask: Tensor | None, shape: Sequence[int], seen: int) -> list[tuple[int, int]]:
    """Where each row's tokens begin and end among the new columns; `seen` columns were given before."""
    rows, width = shape
    if mask is None:
        return [(0, width)] * rows
    if mask.ndim != 2 or mask.shape[0] != rows or mask.shape[1] not in (width, seen + width):
        raise HeadgateError(
            f"attention_mask has shape {tuple(mask.shape)}; expected ({rows}, {seen + width}), "
            "a number for each token"
        )
    real = mask[:, -width:].bool().cpu()
    counts = real.sum(1)
    first = real.int().argmax(1)
    spans = list(zip(first.tolist(), (first + counts).tolist(), strict=True))
    for row, (begin, end) in enumerate(spans):
        if begin == end or not real[row, begin:end].all():
            what = "no token" if begin == end else "padding between tokens"
            raise HeadgateError(
                f"attention_mask of row {row} has {what}; expected tokens in one piece, with padding on the "
                "left or on the right"
            )
    return spans
