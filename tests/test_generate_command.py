"""`headgate generate`: text in, text out, from a run folder as training leaves it."""

import io
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

import headgate
from headgate.cli import run
from headgate.cli.prompt import computing_dtype
from headgate.config import ModelConfig
from headgate.data.tokenizers import REPLACEMENT, Detokenizer, Tokenizer, make_tokenizer
from headgate.errors import HeadgateError

SIZES = {"d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "d_mlp": 24}
TEXT = "Grüße, 世界! ½ naïve 👩‍🚀 – end."


def lay_out(folder: Path, vocab_size: int = 257) -> Path:
    """A run folder with one checkpoint, untrained."""
    decoder = headgate.build_model(ModelConfig(vocab_size=vocab_size, **SIZES), "dynamic-sparse", window=8)
    step = folder / "checkpoints" / "step-00000004"
    step.mkdir(parents=True)
    decoder.save(step / "model.safetensors")
    (folder / "tokenizer.json").write_text(make_tokenizer("byte").definition)
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return lay_out(tmp_path / "run")


def generated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    run(["generate", *arguments])
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_it_computes_in_bf16_on_a_gpu_that_has_it(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for supported, expected in ((True, torch.bfloat16), (False, None)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported, **_: supported)
        assert computing_dtype(gpu, None) == expected
    assert computing_dtype(cpu, None) is None
    assert computing_dtype(gpu, "fp32") == torch.float32
    words = [str(run_folder), "--prompt", "the gate", "--max-new-tokens", "9", "--temperature", "0"]
    found = generated(capsys, *words, "--dtype", "bf16", "--device", "cpu")[0]
    half = headgate.load(run_folder).to(torch.bfloat16)
    tokens = half.generate([list(b"the gate")], 9, temperature=0, stop=256)[0].tokens
    assert found == make_tokenizer("byte").decode(tokens) + "\n"
    with pytest.raises(HeadgateError, match="graphs=True needs a GPU"):
        run(["generate", *words, "--graphs", "--device", "cpu"])


def test_the_text_is_that_of_the_tokens(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "the gate", "--max-new-tokens", "30", "--seed", "3", "--top-k", "40"]
    out, err = generated(capsys, str(run_folder), *words)
    prompt = list(b"the gate")
    tokens = headgate.load(run_folder).generate([prompt], 30, seed=3, top_k=40, stop=256)[0].tokens
    whole = bytes(token for token in tokens if token < 256).decode(errors="replace")
    assert "".join(c for c in out if c != REPLACEMENT) == "".join(c for c in whole if c != REPLACEMENT) + "\n"
    assert re.fullmatch(
        r"prompt 8 tokens, [\d,]+ tokens/s; then \d+ tokens, [\d,.]+ tokens/s; ended by .+\n", err
    )
    step = run_folder / "checkpoints" / "step-00000004"
    for other in (step, step / "model.safetensors"):
        assert generated(capsys, str(other), *words)[0] == out
    assert generated(capsys, str(run_folder), *words, "--checkpoint", "4")[0] == out
    words[words.index("3")] = "4"
    assert generated(capsys, str(run_folder), *words)[0] != out


def test_a_model_file_with_a_tokenizer_beside_it(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    model = (run_folder / "checkpoints" / "step-00000004" / "model.safetensors").rename(
        alone / "m.safetensors"
    )
    words = ["--prompt", "a", "--max-new-tokens", "5", "--temperature", "0"]
    with pytest.raises(HeadgateError, match=r"has no tokenizer.json, so it cannot read text"):
        generated(capsys, str(model), *words)
    named = generated(capsys, str(model), *words, "--tokenizer", str(run_folder))
    (alone / "tokenizer.json").write_text((run_folder / "tokenizer.json").read_text())
    assert generated(capsys, str(model), *words)[0] == named[0]
    assert "then 5 tokens" in named[1]
    assert "ended by max_new_tokens" in named[1]


def test_the_prompt_may_come_from_standard_input(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--max-new-tokens", "9", "--temperature", "0"]
    expected = generated(capsys, str(run_folder), "--prompt", "the gate", *words)[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO("the gate"))
    assert generated(capsys, str(run_folder), "--prompt", "-", *words)[0] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    with pytest.raises(HeadgateError, match="standard input is not UTF-8"):
        generated(capsys, str(run_folder), "--prompt", "-", *words)


def test_the_end_of_the_text_is_told_and_not_printed(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = headgate.load(run_folder)
    with torch.no_grad():
        decoder.embedding.weight[256] *= 100  # tied: its logit is the largest or the smallest
        decoder.embedding.weight[256] *= decoder(torch.tensor([[1]]))[0, 0, 256].sign()
    decoder.save(run_folder / "checkpoints" / "step-00000004" / "model.safetensors")
    out, err = generated(capsys, str(run_folder), "--prompt", "\x01", "--temperature", "0")
    assert out == "\n"
    assert re.fullmatch(r"prompt 1 tokens, [\d,]+ tokens/s; ended by the end of the text\n", err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", ""), "the prompt is empty; give at least one word"),
        (("--prompt", "a", "--temperature", "-1"), "temperature=-1.0 is out of range; expected 0"),
        (("--prompt", "a", "--top-p", "1.5"), "top_p=1.5 is out of range"),
        (("--prompt", "a", "--top-k", "0"), "top_k=0 is out of range"),
        (("--prompt", "a", "--max-new-tokens", "0"), "max_new_tokens=0 is too small"),
        (("--prompt", "a", "--skip-below", "0.9"), "skip_below=0.9 is out of range"),
        (("--prompt", "a", "--checkpoint", "7"), "7"),
        (("--prompt", "a", "--tokenizer", "nowhere"), "tokenizer 'nowhere' is unknown"),
    ],
)
def test_a_mistake_is_one_sentence(run_folder: Path, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(HeadgateError) as caught:
        run(["generate", str(run_folder), *arguments])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="nowhere' does not exist; expected a run folder"):
        run(["generate", str(tmp_path / "nowhere"), "--prompt", "a"])
    with pytest.raises(HeadgateError, match="holds no model"):
        run(["generate", str(tmp_path), "--prompt", "a"])
    lay_out(tmp_path / "small", vocab_size=100)
    with pytest.raises(HeadgateError, match="the tokenizer has 257 entries but the model 100"):
        run(["generate", str(tmp_path / "small"), "--prompt", "a"])


def byte_level() -> Tokenizer:
    """As bpe:N and Qwen's: tokens are pieces of bytes."""
    vocabulary = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = LibraryTokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(inner.to_str())


def metaspace() -> Tokenizer:
    """As Llama's: a token tells whether a space stands before it; unknown letters become bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁", "▁Gr", "n", "a", "e", "d", "v", "!", ",", ".", "▁end", "</s>", "<unk>"):
        vocabulary[piece] = len(vocabulary)
    inner = LibraryTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["</s>"])
    return Tokenizer(inner.to_str())


@pytest.mark.parametrize(
    "make", [lambda: make_tokenizer("byte"), byte_level, metaspace], ids=["byte", "byte-level", "metaspace"]
)
def test_streamed_text_is_the_whole_text_and_never_half_a_character(make: object) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    tokens = tokenizer.encode([TEXT])[0].tolist()
    stream = Detokenizer(tokenizer)
    pieces = [stream.add(token) for token in tokens]
    assert stream.rest() == ""
    assert "".join(pieces) == TEXT
    assert len([piece for piece in pieces if piece]) > 20  # it does stream
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("make", [lambda: make_tokenizer("byte"), byte_level], ids=["byte", "byte-level"])
def test_bytes_that_are_no_text_spoil_nothing_after_them(make: object) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    of_byte = {
        byte: tokenizer.encode([bytes([byte]).decode("latin1")])[0].tolist()[-1] for byte in range(0xC0)
    }
    stream = Detokenizer(tokenizer)
    junk = [of_byte[0x80]] * 3
    said = "".join(stream.add(token) for token in [*junk, *tokenizer.encode(["clean 世"])[0].tolist()])
    said += stream.rest()
    assert said.endswith("clean 世")
    assert said.startswith(REPLACEMENT)
    draw = random.Random(0)
    stream = Detokenizer(tokenizer)
    longest = max(len(stream.add(draw.randrange(256))) for _ in range(500))
    assert 1 <= longest <= 8  # whatever comes, no more than a few tokens are held back
    half = Detokenizer(tokenizer)
    assert half.add(tokenizer.encode(["世"])[0].tolist()[0]) == ""
    assert set(half.rest()) == {REPLACEMENT}
