"""Text in, text out: a run's decoder and its tokenizer together, as `headgate generate` uses them."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headgate.data.tokenizers import Detokenizer, Tokenizer, make_tokenizer
from headgate.errors import HeadgateError
from headgate.model.decoder import Decoder, load
from headgate.train import checkpoint
from headgate.train.folder import RunFolder


def open_model(
    path: str | os.PathLike[str],
    *,
    which: str = "last",
    tokenizer: str | None = None,
    end_of_text: str | None = None,
) -> tuple[Decoder, Tokenizer]:
    """The decoder in a run folder, a checkpoint folder or a file, and the tokenizer beside it or from its
    run."""
    path = Path(path)
    if not path.exists():
        raise HeadgateError(
            f"{str(path)!r} does not exist; expected a run folder, a checkpoint or a model file"
        )
    if which != "last":
        path = checkpoint.find(RunFolder(path), which)
    decoder = load(path)
    name = tokenizer if tokenizer is not None else str(find_tokenizer(path))
    words = make_tokenizer(name, end_of_text=end_of_text)
    if words.vocab_size > decoder.config.vocab_size:
        raise HeadgateError(
            f"the tokenizer has {words.vocab_size:,} entries but the model {decoder.config.vocab_size:,}, so "
            "they do not belong together; give the model's own with --tokenizer"
        )
    return decoder, words


def computing_dtype(device: torch.device, name: str | None) -> torch.dtype | None:
    """The dtype of that name, or what a GPU computes fastest in; None leaves the weights as they are."""
    if name is not None:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else None


def find_tokenizer(path: Path) -> Path:
    """tokenizer.json in the folder, or above it if the folder is a checkpoint of a run."""
    folder = path if path.is_dir() else path.parent
    above = folder.resolve().parent
    for home in (folder, *((above.parent,) if above.name == "checkpoints" else ())):
        if (home / "tokenizer.json").is_file():
            return home / "tokenizer.json"
    raise HeadgateError(
        f"{str(path)!r} has no tokenizer.json, so it cannot read text; name one with --tokenizer"
    )


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for '-'; both are UTF-8, whatever the locale says."""
    if prompt != "-":
        return _text(os.fsencode(prompt), "the prompt")
    if sys.stdin is None:
        raise HeadgateError("standard input is closed; give the prompt itself")
    return _text(getattr(sys.stdin, "buffer", None) or sys.stdin, "standard input")


def _text(given: Any, what: str) -> str:
    data = given if isinstance(given, bytes) else given.read()
    try:
        return data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError as error:
        raise HeadgateError(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None


def write(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    say: Callable[[str], object],
    **options: Any,
) -> str:
    """Continue the prompt until the end of the text or `max_new_tokens`, passing the words to `say` as they
    come; returns a line about its speed."""
    tokens = tokenizer.encode([prompt])[0].tolist()
    if not tokens:
        raise HeadgateError("the prompt is empty; give at least one word, or - to read standard input")
    words, begun = Detokenizer(tokenizer), time.perf_counter()
    times: list[float] = []

    def stream(row: int, token: int) -> None:
        times.append(time.perf_counter())
        if token != tokenizer.end_of_text_id:
            say(words.add(token))

    done = decoder.generate(
        [tokens], max_new_tokens, stop=tokenizer.end_of_text_id, stream=stream, **options
    )[0]
    say(words.rest())
    line = f"prompt {len(tokens):,} tokens, {len(tokens) / (times[0] - begun):,.0f} tokens/s"
    if len(times) > 1:
        line += f"; then {len(times):,} tokens, {(len(times) - 1) / (times[-1] - times[0]):,.1f} tokens/s"
    return f"{line}; ended by {'the end of the text' if done.ended == 'stop' else 'max_new_tokens'}"
