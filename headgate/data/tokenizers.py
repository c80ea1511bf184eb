"""Tokenizers: `byte`, `bpe:N` trained here, or any tokenizer.json, on this machine or on the Hub.

All of them end up as tokenizer.json files, so one copy beside the shards is all that decoding needs.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headgate import files
from headgate.data.sources import decode, reach, reading
from headgate.errors import HeadgateError

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = "vocab.json"
"""With merges.txt beside it: a byte-level BPE as published with GPT-2."""
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""What tokenizers made for pre-training call the token that ends a document."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that do not form a character, or not yet."""
LONGEST_CHARACTER = 4
"""The most bytes, and so tokens, that a UTF-8 character takes."""
WORDS_KEPT = 1 << 16
"""Words whose tokens the library caches; its own 10,000 are too few for the tail of a language."""
LARGEST_BPE = 1 << 20
"""Entries; the library allocates memory for all of them at once."""
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


class Tokenizer:
    """A tokenizer.json and the token that closes each document.

    Text is always just text: a document that spells out a special token is encoded letter by letter, so that
    the closing token cannot be forged.
    """

    def __init__(self, definition: str, *, end_of_text: str | None = None) -> None:
        import tokenizers

        if end_of_text == "":
            raise HeadgateError("the token that ends a text has an empty name; name one with --end-of-text")
        try:
            self._inner = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises Exception itself
            raise HeadgateError(f"the tokenizers library cannot load this tokenizer: {error}") from error
        self._inner.encode_special_tokens = True
        self._inner.no_truncation()
        self._inner.no_padding()
        if hasattr(self._inner.model, "_resize_cache"):
            self._inner.model._resize_cache(WORDS_KEPT)
        self.definition = definition
        self.vocab_size = self._inner.get_vocab_size()
        if any(self._inner.id_to_token(number) is None for number in range(self.vocab_size)):
            self.vocab_size = 1 + max(self._inner.get_vocab().values())  # its numbers have gaps
        find = self._inner.token_to_id
        self.end_of_text = end_of_text or next((end for end in KNOWN_ENDS if find(end) is not None), "")
        printable = self.end_of_text.encode(errors="replace").decode()  # no token is broken text
        found = find(printable) if printable == self.end_of_text else None
        if found is None:
            given = f"has no token {end_of_text!r}" if end_of_text else f"has none of {', '.join(KNOWN_ENDS)}"
            raise HeadgateError(f"the tokenizer {given}; name the token that ends a text with --end-of-text")
        self.end_of_text_id = int(found)
        self._is_bytes = self.vocab_size == 257 and [*map(find, BYTE_TOKENS)] == [*range(256)]

    @classmethod
    def of_file(cls, path: str | os.PathLike[str], *, end_of_text: str | None = None) -> "Tokenizer":
        """The tokenizer in a file; errors name the file."""
        definition = files.read_text(path)
        try:
            return cls(definition, end_of_text=end_of_text)
        except HeadgateError as error:
            raise HeadgateError(f"{str(path)!r}: {error}") from error

    @property
    def dtype(self) -> np.dtype[Any]:
        """Two bytes per token hold 65,536 entries; beyond that it takes four."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, without the closing one."""
        if self._is_bytes:  # the same result as the library's, a hundred times faster
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype) for text in texts]
        try:
            encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises Exception itself
            raise HeadgateError(f"the tokenizer cannot encode this text: {error}") from error
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._inner.decode([int(token) for token in tokens], skip_special_tokens=False))


class Detokenizer:
    """Text from tokens as they arrive. A character whose bytes are spread over several tokens is held back
    until it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._before: list[
            int
        ] = []  # tokenizers drop the space of a first token, so none is decoded as the first
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """The text that has become certain, if any."""
        self._held.append(token)
        return self._release(keep=LONGEST_CHARACTER - 1)

    def rest(self) -> str:
        """What is still held back when no more tokens come."""
        return self._release(keep=0)

    def _release(self, keep: int) -> str:
        text = ""
        while self._held:
            known = len(self._decode(self._before))
            new = self._decode(self._before + self._held)[known:]
            if not new.endswith(REPLACEMENT):
                self._before, self._held = self._held, []
                return text + new
            if len(self._held) <= keep:
                break
            text += self._decode(self._held[:1])  # no character begins with it, or it would be complete
            self._held = self._held[1:]
        return text


def make_tokenizer(
    name: str, *, end_of_text: str | None = None, training_texts: Callable[[], Iterable[str]] = tuple
) -> Tokenizer:
    """The tokenizer called `name`; only `bpe:N` reads `training_texts`."""
    if name == "byte":
        return Tokenizer(_byte_definition(), end_of_text=end_of_text)
    kind, _, size = name.partition(":")
    if kind == "bpe":
        if not size.isdecimal() or len(size) > 9 or not 257 <= int(size) <= LARGEST_BPE:
            raise HeadgateError(
                f"tokenizer {name!r} is not bpe:N with N from 257 to {LARGEST_BPE}, as in bpe:4096"
            )
        return Tokenizer(_trained_definition(int(size), training_texts()), end_of_text=end_of_text)
    definition, default_end = _read(name)
    try:
        try:
            return Tokenizer(definition, end_of_text=end_of_text)
        except HeadgateError:
            if end_of_text is not None or not default_end:
                raise
            return Tokenizer(definition, end_of_text=default_end)
    except HeadgateError as error:
        raise HeadgateError(f"tokenizer {name!r}: {error}") from error


def local_file(name: str) -> Path | None:
    """The local tokenizer.json, or vocab.json with a merges.txt beside it, that `name` refers to, if any."""
    path = Path(name)
    if path.is_dir():
        files_of_it = [path / file for file in ("tokenizer.json", VOCABULARY) if (path / file).is_file()]
        if not files_of_it:
            raise HeadgateError(
                f"tokenizer folder {name!r} has no tokenizer.json, nor vocab.json with merges.txt; expected "
                "one of them"
            )
        path = files_of_it[0]
    found = files.kind(path)
    if found not in ("", "missing"):
        raise HeadgateError(f"tokenizer {name!r} is {found}; expected a file, or a folder that holds one")
    return None if found else path


def definition_of(path: Path) -> str:
    """The tokenizer.json that a local file is or can be turned into."""
    if path.name != VOCABULARY:
        return files.read_text(path).removeprefix("\ufeff")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = path.with_name("merges.txt")
    lines = files.read_text(merges).splitlines()
    pairs = []
    for line in lines:
        first, space, second = line.partition(" ")
        if line.startswith("#version") or not line:
            continue
        if not (first and second and space) or " " in second:
            raise HeadgateError(f"{str(merges)!r} holds {line!r}; expected two tokens per line")
        pairs.append((first, second))
    vocabulary = files.read_json(path)
    if not all(isinstance(number, int) and 0 <= number < 1 << 32 for number in vocabulary.values()):
        raise HeadgateError(f"{str(path)!r} is not a vocabulary; expected tokens with their numbers")
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    except Exception as error:  # the library raises Exception itself
        raise HeadgateError(f"{str(path)!r} and {merges.name} do not match: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end for end in KNOWN_ENDS if end in vocabulary])
    return str(tokenizer.to_str())


def _byte_definition() -> str:
    from tokenizers import Tokenizer, decoders, models

    model = models.BPE({token: byte for byte, token in enumerate(BYTE_TOKENS)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([END_OF_TEXT])
    return str(tokenizer.to_str())


def _trained_definition(size: int, texts: Iterable[str]) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < size:
        raise HeadgateError(
            f"tokenizer 'bpe:{size}' found only {tokenizer.get_vocab_size()} entries in the training split; "
            "ask for fewer, add more text, or raise --max-tokens, which limits what it learns from"
        )
    return str(tokenizer.to_str())


def _read(name: str) -> tuple[str, str | None]:
    """A tokenizer.json, and the end-of-text token that the tokenizer_config.json beside it names."""
    path = local_file(name)
    if path is not None:
        folder, filename = path.parent.as_posix(), path.name
    elif "://" in name or (name.count("/") == 1 and not name.startswith((".", "/"))):
        folder, filename = name if "://" in name else f"hf://{name}", "tokenizer.json"
    else:
        raise HeadgateError(
            f"tokenizer {name!r} is unknown; expected 'byte', 'bpe:N', a tokenizer.json, a vocab.json with "
            "merges.txt beside it, a folder with either, or a name on the Hub such as Qwen/Qwen3-0.6B"
        )
    filesystem, root = reach(folder, "tokenizer")
    with reading(name, filesystem):
        if path is None:
            definition = decode(filesystem.cat_file(f"{root}/{filename}"), name)
        else:
            definition = definition_of(path)
        config_path = f"{root}/tokenizer_config.json"
        config = {}
        if filesystem.exists(config_path):
            text = decode(filesystem.cat_file(config_path), config_path)
            try:
                config = json.loads(text)
            except ValueError as error:
                raise HeadgateError(f"{config_path!r} is not JSON: {error}; fix it, or remove it") from error
    end = config.get("eos_token") if isinstance(config, dict) else None
    end = end.get("content") if isinstance(end, dict) else end
    return definition, end if isinstance(end, str) else None
