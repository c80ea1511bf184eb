"""Shards are written as they are described, and damage of any kind is named before use."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_examples import write_mixed
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import config
from headgate.data.prepare import Request, prepare
from headgate.data.shards import (
    ShardWriter,
    SplitState,
    check_data,
    open_shard,
    open_split,
    publish,
    read_manifest,
)
from headgate.errors import HeadgateError


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Nothing here outlives the process, so nothing waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda number: None)
        yield


def write(folder: Path, batches: list[list[list[int]]], limit: int, cuts: dict[int, int]) -> Any:
    """Write documents in batches; a cut {n: m} goes back once, after n batches, to the state after m."""
    states = [SplitState("train")]
    writer = ShardWriter(folder, states[0], np.dtype("<u2"), shard_tokens=limit)
    while len(states) <= len(batches):
        batch = batches[len(states) - 1]
        tokens = np.array([token for document in batch for token in document], dtype=np.uint16)
        lengths = np.array([len(document) for document in batch], dtype=np.int64)
        writer.append(tokens, lengths, text_bytes=len(tokens), counted=tokens)
        states.append(writer.flush())
        if (back := cuts.pop(len(states) - 1, None)) is not None:
            writer.close()
            del states[back + 1 :]
            writer = ShardWriter(folder, states[-1], np.dtype("<u2"), shard_tokens=limit)
    writer.close()
    record = publish(folder, writer.state, np.dtype("<u2"))
    return record, {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=4), max_size=5),
    st.integers(1, 30),
    st.dictionaries(st.integers(1, 5), st.integers(0, 4), max_size=3),
)
def test_a_writer_goes_on_from_any_state_it_was_in(
    batches: list[list[list[int]]], limit: int, cuts: dict[int, int]
) -> None:
    results = []
    for going_back in ({}, {done: min(done, back) for done, back in cuts.items()}):
        with tempfile.TemporaryDirectory() as folder:
            results.append(write(Path(folder), batches, limit, going_back))
    assert results[0] == results[1]
    record, files = results[0]
    documents = [document for batch in batches for document in batch]
    tokens = b"".join(files[Path(f"{shard.name}.ds").name] for shard in record.shards)
    loss = b"".join(files[Path(f"{shard.name}.ds.loss").name] for shard in record.shards)
    flat = [token for document in documents for token in document]
    assert np.frombuffer(tokens, dtype="<u2").tolist() == flat
    assert np.frombuffer(loss, dtype=bool).tolist() == [bool(token) for token in flat]
    assert (record.documents, record.tokens, record.bytes) == (len(documents), len(flat), len(flat))
    for shard in record.shards[:-1]:
        assert limit <= shard.tokens < limit + 9


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_mixed(folder / "in")
    prepare(Request(str(folder / "in"), "byte"), folder / "out", workers=1)
    return folder / "out"


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut_short, flip, Path.unlink])
@pytest.mark.parametrize(
    "name", ["train/00000.ds", "train/00000.ds.index", "tokenizer.json", "sources.jsonl"]
)
def test_damage_is_named(prepared: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    shutil.copytree(prepared, tmp_path / "out")
    damage(tmp_path / "out" / name)
    with pytest.raises(HeadgateError, match=name.removesuffix(".index")):
        check_data(tmp_path / "out")
    if name.startswith("train"):
        with pytest.raises(HeadgateError, match=name.removesuffix(".index")):
            open_split(tmp_path / "out", "train")
        if damage is cut_short:
            with pytest.raises(HeadgateError, match=name.removesuffix(".index")):
                open_split(tmp_path / "out", "train", verify=False)
    elif name == "tokenizer.json":
        with pytest.raises(HeadgateError, match=name):
            open_split(tmp_path / "out", "train")
    assert open_split(tmp_path / "out", "val", verify=name != "tokenizer.json").tokens > 0


def test_damage_says_what_helps(prepared: Path, tmp_path: Path) -> None:
    for damage in (cut_short, flip, Path.unlink):
        shutil.copytree(prepared, tmp_path / "out")
        damage(tmp_path / "out" / "train/00000.ds")
        with pytest.raises(HeadgateError, match=r"; delete the folder and prepare it again$"):
            check_data(tmp_path / "out")
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("train/00000.ds", errno.EACCES),
        ("train/00000.ds.index", errno.EIO),
        ("tokenizer.json", errno.EACCES),
        ("manifest.json", errno.EACCES),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """Simulated, for the superuser may read everything."""
    opened, read = os.open, np.fromfile

    def refused(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(name):
            raise OSError(number, os.strerror(number), *([str(path)] if number == errno.EACCES else []))
        return (read if "dtype" in options else opened)(path, *arguments, **options)

    monkeypatch.setattr("os.open", refused)
    monkeypatch.setattr(np, "fromfile", refused)
    with pytest.raises(HeadgateError, match=rf"{name.removesuffix('.index')}.* cannot be read: .+"):
        check_data(prepared)
    if name.startswith("train"):
        with pytest.raises(HeadgateError, match="cannot be read"):
            open_split(prepared, "train")


def test_a_folder_in_place_of_a_file_is_one_sentence(prepared: Path, tmp_path: Path) -> None:
    for name in ("train/00000.ds.index", "train/00000.ds", "sources.jsonl", "manifest.json"):
        shutil.copytree(prepared, tmp_path / "out")
        (tmp_path / "out" / name).unlink()
        (tmp_path / "out" / name).mkdir()
        with pytest.raises(HeadgateError, match=name.removesuffix(".index")):
            check_data(tmp_path / "out")
        shutil.rmtree(tmp_path / "out")


def test_an_unreadable_folder_of_foreign_shards_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refused)
    for use in (check_data, lambda folder: open_split(folder, "train")):
        with pytest.raises(HeadgateError, match=rf"{tmp_path} cannot be read: Permission denied"):
            use(tmp_path)


def test_a_loss_mask_is_used_only_if_the_manifest_knows_it(prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(prepared, out)
    (out / "train/00000.ds.loss").write_bytes(bytes(open_split(out, "train").tokens))
    for use in (check_data, lambda folder: open_split(folder, "train", verify=False)):
        with pytest.raises(HeadgateError, match=r"00000.ds.loss is not in the manifest of its folder"):
            use(out)
    (out / "train/00000.ds.loss").unlink()
    values = config.to_dict(read_manifest(prepared))
    sums = values["splits"][0]["shards"][0]["sha256"]
    for changed, words in (
        ({**sums, ".ds.loss": "0"}, r"00000.ds.loss is missing"),
        ({".ds": sums[".ds"]}, r"00000.ds.index is not in the manifest"),
        ({".ds.index": sums[".ds.index"]}, r"00000.ds is not in the manifest"),
    ):
        values["splits"][0]["shards"][0]["sha256"] = changed
        config.save(values, out / "manifest.json")
        with pytest.raises(HeadgateError, match=words):
            open_split(out, "train")


def test_a_manifest_of_another_format_or_without_a_split(prepared: Path, tmp_path: Path) -> None:
    values = config.to_dict(read_manifest(prepared))
    config.save({**values, "format": 2}, tmp_path / "manifest.json")
    for use in (check_data, lambda folder: open_split(folder, "train")):
        with pytest.raises(HeadgateError, match=r"has format 2, but headgate .* reads format 1"):
            use(tmp_path)
    config.save({**values, "splits": values["splits"][1:]}, tmp_path / "manifest.json")
    for name in ("tokenizer.json", "sources.jsonl"):
        shutil.copy(prepared / name, tmp_path)
    for use in (check_data, lambda folder: open_split(folder, "train")):
        with pytest.raises(HeadgateError, match=r"damaged: the splits are not train, val, test"):
            use(tmp_path)


def test_a_flat_folder_is_train_without_its_other_splits(tmp_path: Path) -> None:
    for name in ("a", "more/b", "val/c", "deep/test/d"):
        path = tmp_path / f"{name}.ds"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.arange(10, dtype="<u2").tofile(path)
        np.array([10], dtype="<u8").tofile(f"{path}.index")
    assert [shard.path.name for shard in open_split(tmp_path, "train").shards] == ["a.ds", "b.ds"]
    assert [shard.path.name for shard in open_split(tmp_path, "val").shards] == ["c.ds"]


def test_check_finds_what_checksums_cannot(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "out")
    manifest = read_manifest(prepared)
    assert manifest is not None
    values = config.to_dict(manifest)
    values["tokenizer"] |= {"vocab_size": 200, "end_of_text_id": 0}
    config.save(values, tmp_path / "out" / "manifest.json")
    with pytest.raises(HeadgateError, match=r"has the token 256 in a vocabulary of 200"):
        check_data(tmp_path / "out")
    for split in values["splits"]:  # as version 0.1 wrote it
        for shard in split["shards"]:
            del shard["largest"]
    config.save(values, tmp_path / "out" / "manifest.json")
    for use in (check_data, lambda folder: open_split(folder, "train")):
        with pytest.raises(HeadgateError, match=r"train/00000.ds has the token 256; the tokenizer has"):
            use(tmp_path / "out")
    values["tokenizer"] |= {"vocab_size": 257, "end_of_text_id": 256}
    config.save(values, tmp_path / "out" / "manifest.json")
    assert check_data(tmp_path / "out") == read_manifest(tmp_path / "out") == manifest  # it is recorded now
    values = config.to_dict(manifest)
    values["splits"][1]["tokens"] += 1
    config.save(values, tmp_path / "out" / "manifest.json")
    with pytest.raises(HeadgateError, match="the counts of split 'val'"):
        check_data(tmp_path / "out")


def test_a_split_that_is_not_there(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="'dev' is not a split; known are train, val, test"):
        open_split(prepared, "dev")
    with pytest.raises(HeadgateError, match="is not a folder"):
        open_split(tmp_path / "absent", "train")
    with pytest.raises(HeadgateError, match=r"neither a manifest.json nor .ds files"):
        check_data(tmp_path)
    with pytest.raises(HeadgateError, match="has no split 'val'"):
        open_split(tmp_path, "val")
    (tmp_path / "in.txt").write_text("one document")
    prepare(Request(str(tmp_path / "in.txt"), "byte"), tmp_path / "out", workers=1)
    empty = [split.name for split in read_manifest(tmp_path / "out").splits if not split.tokens]  # type: ignore[union-attr]
    assert len(empty) == 2
    with pytest.raises(HeadgateError, match=f"split '{empty[0]}' of .* is empty"):
        open_split(tmp_path / "out", empty[0])


def test_the_width_of_a_foreign_shard(tmp_path: Path) -> None:
    path, index, metadata = (tmp_path / f"a.ds{suffix}" for suffix in ("", ".index", ".metadata"))
    for dtype in ("<u2", "<u4"):
        np.arange(10, dtype=dtype).tofile(path)
        np.array([4, 10], dtype="<u8").tofile(index)
        assert open_shard(path).dtype == dtype
        index.unlink()
        with pytest.raises(HeadgateError, match="neither an index nor metadata"):
            open_shard(path)
        metadata.write_text(f"some/name|{dtype[-1]}\n10\n10 T")
        assert open_shard(path).load_tokens().tolist() == list(range(10))
        metadata.unlink()
    metadata.write_text("name|4\n11\n")
    with pytest.raises(HeadgateError, match=r"a.ds has 40 bytes, not 11 tokens of 4 bytes as a.ds.metadata"):
        open_shard(path)
    metadata.write_text("nonsense")
    with pytest.raises(HeadgateError, match="is not datatrove's metadata"):
        open_shard(path)
    metadata.unlink()
    np.array([7, 4], dtype="<u8").tofile(index)
    with pytest.raises(HeadgateError, match="out of order"):
        open_shard(path)
    np.array([4, 10], dtype="<u8").tofile(index)
    (tmp_path / "a.ds.loss").write_bytes(bytes(9))
    with pytest.raises(HeadgateError, match=r"a.ds.loss has 9 bytes; expected one for each of 10"):
        open_shard(path)
