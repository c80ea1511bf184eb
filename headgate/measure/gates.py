"""What the gates do on a passage of held-out text: one value per layer, head and token of each variant."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headgate.data.loader import Windows
from headgate.data.shards import open_split
from headgate.data.tokenizers import Tokenizer
from headgate.mechanisms.contract import probe
from headgate.model.decoder import load

PASSAGE = 192
"""Tokens in the passage; a page shows no more."""


def gates_on_passage(
    runs: Mapping[str, str | os.PathLike[str]], data: str | os.PathLike[str], context: int
) -> dict[str, Any]:
    """The first tokens of the validation split as text, and the gates of each run that has any.

    {"tokens": [text, ...], "variants": {label: {layer: [per head: [per token, in thousandths]]}}}
    """
    split = open_split(data, "val", verify=False)
    length = min(PASSAGE, context, split.tokens - 1)
    tokens, _ = Windows(split, length).read([0])
    definition = Path(data) / "tokenizer.json"
    words = [f"{int(token)} " for token in tokens[0]]  # all that is known without a tokenizer
    if definition.is_file():
        words = token_texts(Tokenizer.of_file(definition), tokens[0].tolist())
    variants = {}
    for label, run in runs.items():
        decoder = load(run)
        with probe(decoder) as seen, torch.no_grad():
            decoder.hidden(tokens)
        layers = {}
        for name, values in seen.items():
            if name.startswith("layers.") and name.endswith(".gate"):
                thousandths = (values[0][0].T * 1000).round().int()  # (H,T)
                layers[name.split(".")[1]] = thousandths.tolist()
        if layers:
            variants[label] = layers
    return {"tokens": words, "variants": variants}


def token_texts(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """The text of each token; where several tokens share a character, the last one gets it."""
    texts, before = [], ""
    for n in range(len(tokens)):
        now = tokenizer.decode(tokens[: n + 1])
        if now.endswith("\ufffd") and n + 1 < len(tokens):
            texts.append("")  # an incomplete character
            continue
        texts.append(now[len(before) :])
        before = now
    return texts
