"""The folder that prepare writes: whose it is, what is kept in it, and what is never touched."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data_examples import tree, write_mixed

from headgate.data import prepare as preparing
from headgate.data.prepare import Request, prepare
from headgate.errors import HeadgateError
from headgate.files import locked


def test_run_again_it_does_nothing(tmp_path: Path) -> None:
    write_mixed(tmp_path / "in")
    request = Request(str(tmp_path / "in"), "byte")
    first = prepare(request, tmp_path / "out", workers=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert prepare(request, tmp_path / "out", workers=2) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()} == {
        path: time for path, time in before.items() if path.is_file()
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": "bpe:300"}, "was started with tokenizer='byte', not 'bpe:300'"),
        ({"splits": (8, 1, 1)}, r"splits=\[80, 10, 10\], not \[8, 1, 1\]"),
        ({"dedup": True, "max_tokens": 5}, "dedup=False, not True; max_tokens=None, not 5"),
    ],
)
def test_another_request_for_the_same_folder_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_mixed(tmp_path / "in")
    request = Request(str(tmp_path / "in"), "byte")
    prepare(request, tmp_path / "out", workers=1)
    before = tree(tmp_path / "out")
    with pytest.raises(HeadgateError, match=words):
        prepare(replace(request, **changes), tmp_path / "out", workers=1)
    assert tree(tmp_path / "out") == before


def test_a_changed_source_or_tokenizer_is_refused(tmp_path: Path) -> None:
    write_mixed(tmp_path / "in")
    prepare(Request("stdlib", "bpe:300", max_tokens=20_000), tmp_path / "other", workers=1)
    given = tmp_path / "tokenizer.json"
    given.write_bytes((tmp_path / "other" / "tokenizer.json").read_bytes())
    request = Request(str(tmp_path / "in"), str(given))
    prepare(request, tmp_path / "out", workers=1)
    (tmp_path / "in" / "z.txt").write_text("more")
    with pytest.raises(HeadgateError, match=r"started with a source without 'z.txt' of 4 bytes"):
        prepare(request, tmp_path / "out")
    (tmp_path / "in" / "z.txt").unlink()
    (tmp_path / "in" / "a.jsonl").write_text("")
    with pytest.raises(HeadgateError, match=r"started with a source with 'a.jsonl' of \d+ bytes"):
        prepare(request, tmp_path / "out")
    write_mixed(tmp_path / "in")
    given.write_text(given.read_text() + "\n")
    with pytest.raises(HeadgateError, match="whose contents have changed since"):
        prepare(request, tmp_path / "out")


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    write_mixed(tmp_path / "in")
    (tmp_path / "out" / "train").mkdir(parents=True)
    (tmp_path / "out" / "train" / "cluster.ds").write_bytes(b"precious")
    with pytest.raises(HeadgateError, match=r"holds 'train' but no manifest.json"):
        prepare(Request(str(tmp_path / "in"), "byte"), tmp_path / "out")
    assert tree(tmp_path / "out") == {"train/cluster.ds": b"precious"}
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / ".notes.tmp").write_bytes(b"precious")
    with pytest.raises(HeadgateError, match=r"holds '.notes.tmp' but no manifest.json"):
        prepare(Request(str(tmp_path / "in"), "byte"), tmp_path / "foreign")
    assert tree(tmp_path / "foreign") == {".notes.tmp": b"precious"}


def test_only_what_prepare_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "good"}\n')
    (tmp_path / "in" / "b.jsonl").write_text("[]\n")
    out, request = tmp_path / "out", Request(str(tmp_path / "in"), "byte", splits=(1, 0, 0))
    out.mkdir()
    (out / ".progress.json.123.tmp").write_text("{")
    with pytest.raises(HeadgateError, match=r"'b.jsonl', line 1 holds a list"):
        prepare(request, out, workers=1)
    foreign = [out / "train" / "x.tmp", out / "train" / "notes.ds.tmp", out / ".notes.tmp"]
    for path in foreign:
        path.write_text("precious")
    (tmp_path / "in" / "b.jsonl").write_text("")
    assert prepare(request, out, workers=1).split("train").documents == 1
    assert [path.read_text() for path in foreign] == ["precious"] * 3
    assert {path.name for path in out.iterdir() if path.is_file()} == {
        ".notes.tmp",
        "manifest.json",
        "sources.jsonl",
        "tokenizer.json",
    }


def test_the_output_may_lie_in_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_mixed(tmp_path)
    (tmp_path / "bad.jsonl").write_text("[]\n")
    request = Request(".", "byte")
    with pytest.raises(HeadgateError, match=r"'bad.jsonl', line 1 holds a list"):
        prepare(request, "data", workers=1)
    kept = json.loads((tmp_path / "data" / "progress.json").read_text())["now"]
    assert kept["file"] == 2
    (tmp_path / "bad.jsonl").write_text("")
    first = prepare(request, "data", workers=1)
    assert prepare(request, "data", workers=1) == first  # its own sources.jsonl is no source
    second = prepare(request, "other", workers=1)
    assert (second.sources, second.splits) == (first.sources, first.splits)
    (tmp_path / "data" / "notes.txt").write_text("not of the source")
    for name in (".", "**/*.jsonl", "**/*.txt"):
        assert not any("data/" in file.name for file in preparing.TextSource(name, out=Path("third")).files)
    with pytest.raises(HeadgateError, match="source 'data' is a folder of shards that prepare wrote"):
        prepare(Request("data", "byte"), "third")


def test_a_finished_folder_that_lost_a_shard_is_refused(tmp_path: Path) -> None:
    write_mixed(tmp_path / "in")
    out, request = tmp_path / "out", Request(str(tmp_path / "in"), "byte")
    prepare(request, out, workers=1)
    shard = out / "train" / "00000.ds"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    with pytest.raises(
        HeadgateError, match=r"00000.ds has .* damaged; delete the folder and prepare it again"
    ):
        prepare(request, out)
    shard.unlink()
    with pytest.raises(HeadgateError, match=r"00000.ds is missing; delete the folder and prepare it again"):
        prepare(request, out)
    shard.write_bytes(whole)
    (out / "sources.jsonl").write_text("{")
    with pytest.raises(HeadgateError, match=r"sources.jsonl is damaged"):
        prepare(request, out)


def test_a_finished_folder_need_not_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mixed(tmp_path / "in")
    request = Request(str(tmp_path / "in"), "byte")
    first = prepare(request, tmp_path / "out", workers=1)
    monkeypatch.setattr("headgate.files.locked", read_only)
    assert prepare(request, tmp_path / "out") == first


def read_only(folder: Path, doing: str) -> Any:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder / ".lock"))


def test_nothing_is_said_to_be_kept_where_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    request, out = Request(str(tmp_path / "a.txt"), "byte"), tmp_path / "out"

    def removed(*arguments: Any) -> Any:
        shutil.rmtree(out)
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_append", removed)
        with pytest.raises(HeadgateError, match=r"out' cannot be written: No such file or directory$"):
            prepare(request, out, workers=1)
    monkeypatch.setattr("headgate.files.locked", read_only)
    with pytest.raises(HeadgateError, match=r".lock' cannot be written: Read-only file system$"):
        prepare(request, out, workers=1)


def test_a_refusal_leaves_no_folder_above_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("[]\n")
    for before in (False, True):
        if before:
            (tmp_path / "p" / "q").mkdir(parents=True)
        with pytest.raises(HeadgateError, match="line 1 holds a list"):
            prepare(Request(str(tmp_path / "bad.jsonl"), "byte"), tmp_path / "p" / "q" / "r")
        assert (tmp_path / "p").exists() == before
        assert not (tmp_path / "p" / "q" / "r").exists()


def in_child(work: Callable[[], Any]) -> str:
    """Run `work` in a forked process, where it may spoil what it likes; returns its error."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        try:
            work()
            theirs.send("")
        except HeadgateError as error:
            theirs.send(str(error))

    process = context.Process(target=run)
    process.start()
    assert ours.poll(60)
    message = ours.recv()
    process.join()
    return str(message)


def test_a_full_disk_loses_nothing(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mixed(tmp_path / "in")
    request = Request(str(tmp_path / "in"), "byte")
    prepare(request, tmp_path / "expected", workers=1)
    monkeypatch.setattr(preparing, "COMMIT_SECONDS", 0.0)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))
        prepare(request, tmp_path / "out", workers=1)

    message = in_child(limited)
    assert os.strerror(errno.EFBIG) in message
    assert "the same command continues from there" in message
    kept = json.loads((tmp_path / "out" / "progress.json").read_text())["now"]
    assert sum(shard["documents"] for split in kept["splits"] for shard in split["shards"]) > 10
    prepare(request, tmp_path / "out", workers=1)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("text")
    with pytest.raises(HeadgateError, match=r"'.*in.txt' cannot be written: File exists"):
        prepare(Request(str(tmp_path / "in.txt"), "byte"), tmp_path / "in.txt")
    assert (tmp_path / "in.txt").read_text() == "text"


def test_two_at_once_are_kept_apart(tmp_path: Path) -> None:
    write_mixed(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    with locked(out, "prepared"):
        message = in_child(lambda: prepare(Request(str(tmp_path / "in"), "byte"), out, workers=1))
    assert "is being prepared by another process" in message
