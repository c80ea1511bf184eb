"""Preparing: the same bytes for any number of workers, no text in two splits, refusals that lose nothing."""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_examples import Run, make_texts, tree, write_mixed, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from headgate.data import prepare as preparing
from headgate.data import shards, workers
from headgate.data.prepare import Request, prepare
from headgate.data.shards import Manifest, check_data, open_split, read_manifest
from headgate.data.splits import Seen, document_key, parse_shares, split_of
from headgate.data.tokenizers import Tokenizer
from headgate.errors import HeadgateError


def documents_of(folder: Path, split: str) -> list[str]:
    """The texts of a prepared split, decoded with the folder's own tokenizer."""
    manifest = read_manifest(folder)
    assert manifest is not None
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text())
    texts = []
    for shard in open_split(folder, split).shards:
        tokens, start = shard.load_tokens(), 0
        for end in shard.load_ends().tolist():
            assert tokens[end - 1] == tokenizer.end_of_text_id
            texts.append(tokenizer.decode(tokens[start : end - 1]))
            start = end
    return texts


def all_documents(folder: Path) -> dict[str, list[str]]:
    manifest = read_manifest(folder)
    assert manifest is not None
    return {s.name: documents_of(folder, s.name) if s.tokens else [] for s in manifest.splits}


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_every_document_comes_out_once_in_order(tmp_path: Path, tokenizer: str) -> None:
    texts = write_mixed(tmp_path / "in")
    manifest = prepare(Request(str(tmp_path / "in"), tokenizer), tmp_path / "out", workers=1)
    found = all_documents(tmp_path / "out")
    keys = np.array([document_key(text.encode()) for text in texts], dtype=np.uint64)
    for number, name in enumerate(shards.SPLITS):
        mine = [
            text for text, split in zip(texts, split_of(keys, (80, 10, 10)), strict=True) if split == number
        ]
        assert found[name] == mine
        record = manifest.split(name)
        assert record.documents == len(mine)
        assert record.bytes == sum(len(text.encode()) for text in mine)
    assert all(found.values())
    assert check_data(tmp_path / "out") == manifest
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "manifest.json",
        "sources.jsonl",
        "tokenizer.json",
        *shards.SPLITS,
    }


@pytest.mark.parametrize(
    "changes",
    [{}, {"dedup": True}, {"max_tokens": 3000}, {"dedup": True, "max_tokens": 9000, "tokenizer": "byte"}],
    ids=["plain", "dedup", "max_tokens", "both"],
)
def test_any_number_of_workers_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    write_mixed(tmp_path / "in")
    request = replace(Request(str(tmp_path / "in"), "bpe:300"), **changes)
    prepare(request, tmp_path / "whole", workers=1)
    expected = tree(tmp_path / "whole")
    for count, characters in ((1, 500), (2, 500), (2, 3000), (5, 1)):
        monkeypatch.setattr(workers, "CHUNK_CHARACTERS", characters)
        out = tmp_path / f"{count}-{characters}"
        prepare(request, out, workers=count)
        assert tree(out) == expected


def test_repeats_stay_in_one_split_and_can_be_dropped(tmp_path: Path, small_chunks: None) -> None:
    texts = write_mixed(tmp_path / "in", 400)
    plain = prepare(Request(str(tmp_path / "in"), "byte"), tmp_path / "plain", workers=2)
    kept = Counter(text for split in all_documents(tmp_path / "plain").values() for text in split)
    assert kept == Counter(texts)
    in_splits = Counter(text for split in all_documents(tmp_path / "plain").values() for text in set(split))
    assert max(in_splits.values()) == 1
    assert plain.repeats_dropped == 0
    dropped = prepare(Request(str(tmp_path / "in"), "byte", dedup=True), tmp_path / "dedup", workers=2)
    found = [text for split in all_documents(tmp_path / "dedup").values() for text in split]
    assert Counter(found) == Counter(set(texts))
    assert dropped.repeats_dropped == len(texts) - len(set(texts)) > 0


def test_a_document_keeps_its_split_in_another_file_and_order(tmp_path: Path) -> None:
    texts = sorted(set(make_texts(200)))
    write_parquet(tmp_path / "a.parquet", texts)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in reversed(texts)))
    for name in ("a.parquet", "b.jsonl"):
        prepare(Request(str(tmp_path / name), "byte"), tmp_path / name[0], workers=1)
    first, second = all_documents(tmp_path / "a"), all_documents(tmp_path / "b")
    assert {name: set(split) for name, split in first.items()} == {n: set(s) for n, s in second.items()}


@given(
    st.lists(st.integers(0, 2**64 - 1)), st.tuples(st.integers(1, 99), st.integers(0, 99), st.integers(0, 99))
)
def test_shares_are_exact(keys: list[int], shares: tuple[int, int, int]) -> None:
    total = sum(shares)
    expected = []
    for key in keys:
        bounds = [sum(shares[: n + 1]) * 2**64 // total for n in range(3)]
        expected.append(next(n for n in range(3) if key < bounds[n]))
    assert split_of(np.array(keys, dtype=np.uint64), shares).tolist() == expected


def test_the_splits_have_their_shares() -> None:
    keys = np.array([document_key(str(n).encode()) for n in range(20_000)], dtype=np.uint64)
    counts = np.bincount(split_of(keys, (80, 10, 10)), minlength=3)
    assert np.abs(counts / 20_000 - [0.8, 0.1, 0.1]).max() < 0.01
    assert np.bincount(split_of(keys, (1, 0, 0)), minlength=3).tolist() == [20_000, 0, 0]


@given(st.lists(st.lists(st.integers(0, 60), max_size=30), max_size=20))
def test_seen_finds_every_repeat(tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("seen") / "keys"
    seen, known = Seen(path, 0), set()
    for batch in batches:
        keys = np.array(batch, dtype=np.uint64)
        fresh = seen.first_time(keys)
        expected = [key not in known and key not in batch[:n] for n, key in enumerate(batch)]
        assert fresh.tolist() == expected
        seen.add(keys[fresh])
        known.update(batch)
        seen.flush()
        seen.close()
        seen = Seen(path, len(known))


def test_bpe_learns_from_the_training_split_alone(tmp_path: Path) -> None:
    texts = make_texts(300)
    write_parquet(tmp_path / "a.parquet", texts)
    prepare(Request(str(tmp_path / "a.parquet"), "bpe:300"), tmp_path / "whole", workers=1)
    train = documents_of(tmp_path / "whole", "train")
    assert len(train) < len(texts)
    write_parquet(tmp_path / "b.parquet", train)
    prepare(Request(str(tmp_path / "b.parquet"), "bpe:300"), tmp_path / "train", workers=1)
    names = [tmp_path / name / "tokenizer.json" for name in ("whole", "train")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_shards_are_closed_at_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mixed(tmp_path / "in")
    request = Request(str(tmp_path / "in"), "byte")
    prepare(request, tmp_path / "one", workers=1)
    monkeypatch.setattr(shards.ShardWriter.__init__, "__kwdefaults__", {"shard_tokens": 1000})
    manifest = prepare(request, tmp_path / "many", workers=2)
    train = manifest.split("train").shards
    assert len(train) > 5
    assert all(shard.tokens >= 1000 for shard in train[:-1])
    assert all_documents(tmp_path / "many") == all_documents(tmp_path / "one")


def test_max_tokens_stops_with_the_document_that_reaches_it(tmp_path: Path) -> None:
    texts = make_texts(100)
    write_parquet(tmp_path / "a.parquet", texts)
    out = tmp_path / "out"
    manifest = prepare(Request(str(tmp_path / "a.parquet"), "byte", max_tokens=2000), out, workers=1)
    lengths = np.cumsum([len(text.encode()) + 1 for text in texts])
    expected = int(np.searchsorted(lengths, 2000)) + 1
    assert sum(split.documents for split in manifest.splits) == expected
    assert sum(split.tokens for split in manifest.splits) == lengths[expected - 1]


def test_an_empty_text_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    manifest = prepare(Request(str(tmp_path / "a.txt"), "byte"), tmp_path / "out", workers=1)
    assert sum(split.tokens for split in manifest.splits) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_text_that_holds_the_end_of_text_is_named(tmp_path: Path, small_chunks: None, count: int) -> None:
    """A token that is not special may come out of any text."""
    texts = [text.replace("a", "o") for text in make_texts(60)]
    write_parquet(tmp_path / "in.parquet", [*texts, "with an a in it", *texts])
    request = Request(str(tmp_path / "in.parquet"), "byte", end_of_text="<0x61>")
    with pytest.raises(HeadgateError, match=r"'in.parquet', row 61: its text holds '<0x61>', the token that"):
        prepare(request, tmp_path / "out", workers=count)
    write_parquet(tmp_path / "in.parquet", texts)
    prepare(request, tmp_path / "out", workers=count)
    assert check_data(tmp_path / "out") is not None


def test_a_text_that_the_tokenizer_cannot_encode_is_named(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"good": 0}, unk_token="absent"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<eos>"])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": "worse"}\n')
    request = Request(str(tmp_path / "a.jsonl"), str(tmp_path / "tokenizer.json"))
    with pytest.raises(HeadgateError, match=r"'a.jsonl', row 2: the tokenizer cannot encode this text: "):
        prepare(request, tmp_path / "out", workers=1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_bad_row_keeps_what_came_before_and_can_be_mended(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    write_mixed(tmp_path / "in")
    request = Request(str(tmp_path / "in"), "byte")
    prepare(request, tmp_path / "expected", workers=1)
    good = (tmp_path / "in" / "a.jsonl").read_bytes()
    (tmp_path / "in" / "a.jsonl").write_bytes(good[: good.rindex(b"{")] + b"[1]\n")
    with pytest.raises(HeadgateError, match=r"'a.jsonl', line 20 holds a list"):
        prepare(request, tmp_path / "out", workers=count)
    begun = json.loads((tmp_path / "out" / "progress.json").read_text())["now"]
    assert (begun["file"], begun["row"] > 5) == (0, True)
    (tmp_path / "in" / "a.jsonl").write_bytes(good)
    (tmp_path / "in" / "d.parquet").rename(tmp_path / "elsewhere")
    (tmp_path / "in" / "d.parquet").write_bytes(b"cut short")
    with pytest.raises(HeadgateError, match=r"'d.parquet' is not a complete parquet file"):
        prepare(request, tmp_path / "out", workers=count)
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["now"]["file"] == 3
    (tmp_path / "elsewhere").replace(tmp_path / "in" / "d.parquet")
    read: list[str] = []
    documents = preparing.TextSource.documents

    def noted(self: preparing.TextSource, file: Any, *, after: int = 0) -> Any:
        read.append(file.name)
        return documents(self, file, after=after)

    monkeypatch.setattr(preparing.TextSource, "documents", noted)
    prepare(request, tmp_path / "out", workers=count)
    assert read[0] == "d.parquet"  # the files before it were not read again
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent"], "source 'absent' does not exist"),
        (["bad.jsonl"], "'bad.jsonl', line 1 is not JSON"),
        (["empty.jsonl"], "is empty"),
        (["good.jsonl", "--tokenizer", "nonsense"], "tokenizer 'nonsense' is unknown"),
        (["good.jsonl", "--tokenizer", "bpe:4096"], "found only"),
        (
            ["good.jsonl", "--splits", "1/100000/0"],
            "falls into the training split of --splits 1/",
        ),
        ([""], "the source is empty"),
        (["good.jsonl", "--text-column", "body"], "has no 'body'"),
        (["good.jsonl", "--splits", "80/20"], "splits '80/20' are not whole shares for train"),
        (["good.jsonl", "--splits", "0/1/1"], "leave nothing to train on"),
        (["good.jsonl", "--max-tokens", "0"], "max_tokens=0 is too small"),
        (["good.jsonl", "--workers", "0"], "workers=0 is too small"),
    ],
)
def test_the_command_refuses_with_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headgate: Run, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"text": "good"}\n')
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    code, _, errors = headgate("prepare", arguments[0], "out", *arguments[1:])
    assert code == 2
    last = errors.strip().splitlines()[-1]
    assert last.startswith("headgate: ")
    assert words in last
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()
    assert headgate("prepare", "good.jsonl", "out", "--tokenizer", "byte", "--workers", "1")[0] == 0


def test_the_command_prepares_and_checks(tmp_path: Path, headgate: Run) -> None:
    write_mixed(tmp_path / "in")
    out = tmp_path / "out"
    code, output, errors = headgate(
        "prepare",
        tmp_path / "in",
        out,
        "--tokenizer",
        "bpe:300",
        "--splits",
        "8/1/1",
        "--dedup",
        "--workers",
        "2",
    )
    assert code == 0
    assert "train" in output
    assert len(errors.splitlines()) < 5  # no terminal: few plain lines
    manifest = read_manifest(out)
    assert isinstance(manifest, Manifest)
    assert (manifest.request["splits"], manifest.request["dedup"]) == ([8, 1, 1], True)
    code, output, _ = headgate("prepare", "--check", out)
    assert (code, "every checksum and index is sound" in output) == (0, True)
    (out / "val" / "00000.ds").write_bytes(b"x" + (out / "val" / "00000.ds").read_bytes()[1:])
    code, _, errors = headgate("prepare", "--check", out)
    assert code == 2
    assert "val/00000.ds is damaged" in errors
    assert headgate("prepare", "somewhere")[0] == 2
    assert headgate("prepare", "stdlib", out, "--check", out)[0] == 2
    for option in (["--tokenizer", "byte"], ["--splits", "8/1/1"], ["--workers", "2"], ["--dedup"]):
        code, _, errors = headgate("prepare", "--check", out, *option)
        assert code == 2
        assert f"does not take {option[0]}" in errors


def test_help_needs_none_of_the_heavy_modules() -> None:
    import subprocess

    code = (
        "import sys; from headgate.cli import run; run(['--help']);"
        "print([m for m in ('numpy', 'torch', 'pyarrow', 'tokenizers', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "prepare" in result.stdout
    assert result.stdout.strip().endswith("[]")


def test_parse_shares() -> None:
    assert parse_shares("98/1/1") == (98, 1, 1)


def test_real_fineweb(shared: Path, tmp_path: Path) -> None:
    request = Request(
        str(shared / "fineweb_real.parquet"), str(shared / "tokenizers" / "qwen3"), max_tokens=30_000
    )
    manifest = prepare(request, tmp_path / "out", workers=2)
    assert sum(split.tokens for split in manifest.splits) >= 30_000
    assert open_split(tmp_path / "out", "train").shards[0].dtype == "<u4"
    assert all(documents_of(tmp_path / "out", "train"))
