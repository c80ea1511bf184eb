"""Our decoder as transformers models: importing this file registers them with the Auto classes.

    import headgate.model.hf
    model = AutoModelForCausalLM.from_pretrained("folder")      one that `headgate convert` wrote

AutoModel gives the final states, AutoModelForSequenceClassification a class for each row.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        GenerationMixin,
    )
    from transformers.generation import GenerationMode
    from transformers.modeling_outputs import (
        BaseModelOutputWithPast,
        CausalLMOutputWithPast,
        SequenceClassifierOutput,
    )
except ImportError as error:
    raise ImportError(
        "headgate.model.hf needs transformers; install it with: pip install 'headgate[hf]'"
    ) from error

from headgate.errors import HeadgateError
from headgate.model.pretrained import GenerationCache, HeadgateConfig, HeadgatePreTrainedModel
from headgate.model.use import (
    SavedClassifierWithMechanism,
    SavedStatesWithMechanism,
    SavedWithMechanism,
    take_out,
    use,
)
from headgate.model.weights import MODEL_TYPE

__all__ = [
    "HeadgateConfig",
    "HeadgateForCausalLM",
    "HeadgateForSequenceClassification",
    "HeadgateModel",
    "SavedClassifierWithMechanism",
    "SavedStatesWithMechanism",
    "SavedWithMechanism",
    "take_out",
    "use",
]

IGNORED = -100
"""The label of a token that does not count."""


class HeadgateModel(HeadgatePreTrainedModel):
    """The final states of the tokens, without a head."""

    def __init__(self, config: HeadgateConfig) -> None:
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """The states (B,T,C) after the last norm."""
        found = self.states(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_attentions,
            output_hidden_states,
        )
        output = BaseModelOutputWithPast(last_hidden_state=found.hidden, past_key_values=found.cache)
        return output.to_tuple() if return_dict is False else output


class HeadgateForSequenceClassification(HeadgatePreTrainedModel):
    """A row's class, or with one label its number, from the state of its last token."""

    def __init__(self, config: HeadgateConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.d_model, config.num_labels, bias=False)
        self.post_init()

    def initialize_weights(self) -> None:
        super().initialize_weights()
        if not getattr(self.score.weight, "_is_hf_initialized", False):
            nn.init.normal_(self.score.weight, std=0.02)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits (B,labels), and with labels their loss, as `config.problem_type` says.

        A row ends with the last token of its mask; without a mask, with the last that is not padding.
        """
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = (input_ids != self.config.pad_token_id).long()
            attention_mask[:, 0] |= attention_mask.sum(1) == 0  # a row of padding alone counts as one token
        found = self.states(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        last = torch.tensor([end - 1 for _, end in found.spans], device=found.hidden.device)
        logits = self.score(found.hidden[torch.arange(len(last), device=last.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output


class HeadgateForCausalLM(HeadgatePreTrainedModel, GenerationMixin):  # type: ignore[misc]
    accepts_loss_kwargs = True  # Trainer then says how many targets a step has over all its batches

    def __init__(self, config: HeadgateConfig) -> None:
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B,T,V), and with labels the mean loss of each token's prediction of the next label.

        A label counts unless it is -100 or unless it, or the token before it, is padding.
        `return_logits=False` leaves the logits out, and with them most of the loss's memory.
        """
        hidden, spans, documents, cache = self.states(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_attentions,
            output_hidden_states,
        )
        loss = logits = None
        with_logits = self.config.return_logits if return_logits is None else return_logits
        if with_logits or labels is None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.decoder.logits(hidden[:, kept] if labels is None else hidden)
        if labels is not None:
            targets = shifted_labels(labels, spans)
            if documents is not None:
                ends = F.pad(documents[:, 1:] != documents[:, :-1], (0, 1))
                targets = targets.masked_fill(ends, IGNORED)
            count = (targets != IGNORED).sum()
            loss = self._loss_sum(hidden, logits, targets) / count
            if num_items_in_batch is not None:
                # Trainer counts the labels after a row's first column, which with padding are more than the
                # targets: a row's first token has none before it.
                loss = loss.where(count > 0, 0) * (labels[:, 1:] != IGNORED).sum() / num_items_in_batch
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return output.to_tuple() if return_dict is False else output

    def _loss_sum(self, hidden: Tensor, logits: Tensor | None, targets: Tensor) -> Tensor:
        if logits is None:
            return self.decoder.loss(hidden, targets, reduction="sum")
        flat = logits.flatten(0, 1).float()
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: str, *rest: Any
    ) -> None:
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            raise HeadgateError(
                "assisted generation takes tokens back, which a headgate model's cache cannot do; leave the "
                "assistant out"
            )
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise HeadgateError(
                f"cache_implementation={generation_config.cache_implementation!r} is not possible; "
                "a headgate model keeps its own cache, so leave the setting out"
            )
        given = model_kwargs.get("past_key_values")
        if given is not None:
            given._is_user_defined = True  # it outlives this call
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = GenerationCache(self.decoder)


def shifted_labels(labels: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Each token's target, the label after it; ignored where either is padding."""
    targets = torch.full_like(labels, IGNORED)
    for row, (begin, end) in enumerate(spans):
        targets[row, begin : end - 1] = labels[row, begin + 1 : end]
    return targets


AutoConfig.register(MODEL_TYPE, HeadgateConfig, exist_ok=True)
AutoModel.register(HeadgateConfig, HeadgateModel, exist_ok=True)
AutoModelForCausalLM.register(HeadgateConfig, HeadgateForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(HeadgateConfig, HeadgateForSequenceClassification, exist_ok=True)
