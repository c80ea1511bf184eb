"""Tokenizers give back what they were given, and the token that closes a document cannot be forged."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from data_examples import make_texts
from hypothesis import given
from hypothesis import strategies as st

from headgate.data.tokenizers import Tokenizer, make_tokenizer
from headgate.errors import HeadgateError

TEXTS = make_texts(400)
BYTE = make_tokenizer("byte")
BPE = make_tokenizer("bpe:300", training_texts=lambda: TEXTS)


@given(st.text())
def test_bytes_are_tokens(text: str) -> None:
    (tokens,) = BYTE.encode([text])
    assert tokens.tolist() == list(text.encode())
    assert BYTE.decode(tokens) == text
    (general,) = BYTE._inner.encode_batch_fast([text], add_special_tokens=False)
    assert tokens.tolist() == general.ids


@given(st.text())
def test_bpe_gives_back_the_text(text: str) -> None:
    (tokens,) = BPE.encode([text])
    assert BPE.decode(tokens) == text
    assert tokens.dtype == np.uint16


@pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])
def test_a_text_cannot_forge_the_end_of_text(tokenizer: Tokenizer) -> None:
    text = f"a {tokenizer.end_of_text} b"
    (tokens,) = tokenizer.encode([text])
    assert tokenizer.end_of_text_id not in tokens
    assert tokenizer.decode([*tokens, tokenizer.end_of_text_id]) == text + tokenizer.end_of_text


def test_training_is_deterministic_and_of_the_size_asked_for() -> None:
    assert (BYTE.vocab_size, BPE.vocab_size) == (257, 300)
    for _ in range(3):
        assert make_tokenizer("bpe:300", training_texts=lambda: iter(TEXTS)).definition == BPE.definition
    assert make_tokenizer("bpe:300", training_texts=lambda: TEXTS[:100]).definition != BPE.definition


def test_two_bytes_a_token_up_to_65536_entries() -> None:
    definition = json.loads(BPE.definition)
    for size, dtype in ((1 << 16, "<u2"), ((1 << 16) + 1, "<u4")):
        known = dict(definition["model"]["vocab"])
        known.update({f"entry {number}": number for number in range(len(known), size)})
        changed = {**definition, "model": {**definition["model"], "vocab": known}}
        tokenizer = Tokenizer(json.dumps(changed))
        assert (tokenizer.vocab_size, tokenizer.dtype) == (size, np.dtype(dtype))


def test_gaps_in_the_numbers_are_counted() -> None:
    changed = json.loads(BPE.definition)
    changed["model"]["vocab"]["far"] = 500
    assert Tokenizer(json.dumps(changed)).vocab_size == 501


def test_truncation_and_padding_of_a_tokenizer_are_turned_off() -> None:
    definition = json.loads(BPE.definition)
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    tokenizer = Tokenizer(json.dumps(definition))
    assert [t.tolist() for t in tokenizer.encode(TEXTS[:9])] == [t.tolist() for t in BPE.encode(TEXTS[:9])]


def test_it_travels_to_a_worker() -> None:
    copy = pickle.loads(pickle.dumps(BPE))
    assert copy.encode(TEXTS[:1])[0].tolist() == BPE.encode(TEXTS[:1])[0].tolist()
    assert copy.end_of_text_id == BPE.end_of_text_id


def test_from_a_path_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BPE.definition)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert make_tokenizer(str(name)).definition == BPE.definition


def test_the_end_of_text_is_found_or_asked_for(tmp_path: Path) -> None:
    renamed = BPE.definition.replace("<|endoftext|>", "[END]")
    (tmp_path / "tokenizer.json").write_text(renamed)
    with pytest.raises(HeadgateError, match=r"has none of <\|endoftext\|>, .*--end-of-text"):
        make_tokenizer(str(tmp_path))
    assert make_tokenizer(str(tmp_path), end_of_text="[END]").end_of_text_id == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "[END]"}}')
    assert make_tokenizer(str(tmp_path)).end_of_text == "[END]"
    with pytest.raises(HeadgateError, match=r"has no token '\[FIN\]'"):
        make_tokenizer(str(tmp_path), end_of_text="[FIN]")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bite", "tokenizer 'bite' is unknown; expected 'byte', 'bpe:N'"),
        ("bpe:many", "'bpe:many' is not bpe:N with N from 257 to 1048576"),
        ("bpe:3000000000", "'bpe:3000000000' is not bpe:N"),
        ("bpe:99999999999999999999", "'bpe:9+' is not bpe:N"),
        ("bpe:256", "'bpe:256' is not bpe:N"),
        ("bpe:90000", r"'bpe:90000' found only \d+ entries in the training split; .* raise --max-tokens"),
        ("./absent/tokenizer.json", "is unknown"),
        ("folder", "folder 'folder' has no tokenizer.json"),
        ("broken.json", "the tokenizers library cannot load this tokenizer"),
        ("beside", "'.*/beside/tokenizer_config.json' is not JSON: .*; fix it, or remove it"),
    ],
)
def test_a_bad_tokenizer_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "tokenizer.json").write_text(BYTE.definition)
    (tmp_path / "beside" / "tokenizer_config.json").write_text("{")
    with pytest.raises(HeadgateError, match=words):
        make_tokenizer(name, training_texts=lambda: TEXTS)


def test_qwen(shared: Path) -> None:
    tokenizer = make_tokenizer(str(shared / "tokenizers" / "qwen3"))
    assert (tokenizer.vocab_size, tokenizer.dtype.itemsize) == (151_669, 4)
    assert tokenizer.end_of_text == "<|endoftext|>"
    assert [tokenizer.decode(tokens) for tokens in tokenizer.encode(TEXTS[:9])] == TEXTS[:9]
