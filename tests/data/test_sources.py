"""Documents come in the same order from every kind of place, and a bad one is named by file and row."""

import errno
import gzip
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_examples import make_texts, write_mixed, write_parquet
from fsspec.implementations.dirfs import DirFileSystem

from headgate.data import workers
from headgate.data.prepare import Request, prepare
from headgate.data.shards import open_split
from headgate.data.sources import TextSource
from headgate.data.tokenizers import make_tokenizer
from headgate.errors import HeadgateError


def texts_of(given: str, **options: Any) -> list[str]:
    source = TextSource(given, **options)
    return [document.text for file in source.files for document in source.documents(file)]


def test_every_kind_of_file_is_read_whole_and_in_order(tmp_path: Path) -> None:
    texts = write_mixed(tmp_path / "in")
    assert texts_of(str(tmp_path / "in")) == texts
    assert [file.name for file in TextSource(str(tmp_path / "in")).files][:4] == [
        "a.jsonl",
        "b.jsonl.gz",
        "c.jsonl.zst",
        "d.parquet",
    ]


def test_file_and_glob(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    all_of_d = texts_of(str(tmp_path / "d.parquet"))
    assert len(all_of_d) == 20
    assert texts_of(str(tmp_path / "[cd].*")) == texts_of(str(tmp_path / "c.jsonl.zst")) + all_of_d
    names = [file.name for file in TextSource(f"{tmp_path}/**/*.md").files]
    assert names == [f"e_md/{number:03d}.md" for number in range(20)]


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet"])
def test_reading_can_begin_after_any_row(tmp_path: Path, name: str) -> None:
    write_mixed(tmp_path)
    source = TextSource(str(tmp_path / name))
    documents = list(source.documents(source.files[0]))
    assert [document.row for document in documents] == list(range(1, 21))
    assert 0.99 < documents[-1].share <= 1.0
    for after in range(21):
        assert list(source.documents(source.files[0], after=after)) == documents[after:]


def test_text_column(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["one", "two"], column="body")
    (tmp_path / "b.jsonl").write_text('{"body": "three", "text": 5}\n')
    assert texts_of(str(tmp_path), text_column="body") == ["one", "two", "three"]


def test_stdlib_is_python_without_its_tests() -> None:
    source = TextSource("stdlib")
    names = {file.name for file in source.files}
    assert {"abc.py", "json/decoder.py"} <= names
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    assert 5e6 < sum(file.size for file in source.files) < 20e6
    assert [file.name for file in source.files] == sorted(names)
    file = next(file for file in source.files if file.name == "json/decoder.py")
    assert [document.text for document in source.documents(file)] == [Path(json.decoder.__file__).read_text()]


LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in make_texts(500))
ZSTD_BLOCK = 1 << 17  # it is decoded whole or not at all


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "'a.jsonl', line 2 holds a list; expected a JSON object"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', "'a.jsonl', line 3 is not JSON"),
        ("a.jsonl", b'{"txt": "x"}\n', "'a.jsonl', line 1 has no 'text'; did you mean 'txt'?"),
        ("a.jsonl", b'{"text": null}\n', "line 1: 'text' holds a NoneType; expected text"),
        ("a.jsonl", b'{"text": "\xff"}\n', "'a.jsonl', line 1 is not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1 holds half a surrogate pair"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.txt", b"good\nbad \xe9\n", "'a.txt', line 2, is not UTF-8"),
        ("a.jsonl.zst", b"not zstd at all", "'a.jsonl.zst', after line 0, cannot be read"),
        ("a.parquet", b"PAR1 and no more", "'a.parquet' is not a complete parquet file"),
        ("a.parquet", b"", "'a.parquet' is not a complete parquet file"),
    ],
)
def test_a_bad_file_is_named_with_its_row(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HeadgateError) as caught:
        texts_of(str(tmp_path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_what_stands_before_a_cut_is_read(tmp_path: Path, compression: str) -> None:
    lines = 2 * LINES
    data = gzip.compress(lines) if compression == "gz" else pa.compress(lines, codec="zstd", asbytes=True)
    whole = 1000 if compression == "gz" else lines[: len(lines) // ZSTD_BLOCK * ZSTD_BLOCK].count(b"\n")
    (tmp_path / f"a.jsonl.{compression}").write_bytes(data[:-9])
    source, read = TextSource(str(tmp_path)), []
    documents = source.documents(source.files[0])
    with pytest.raises(HeadgateError, match=f"'a.jsonl.{compression}', after line {whole}, cannot be read"):
        read.extend(document.text for document in documents)
    assert read == (2 * make_texts(500))[:whole]
    assert whole > 0


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\n')
    assert texts_of(str(tmp_path)) == ["one", "two"]


def test_links_to_files_are_read_and_links_to_folders_not(tmp_path: Path) -> None:
    """A snapshot of the hub's cache is a folder of links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    (snapshot / "sub").mkdir(parents=True)
    (blobs / "0123").write_text("one")
    (snapshot / "a.txt").symlink_to(Path("..", "blobs", "0123"))
    (snapshot / "sub" / "b.txt").symlink_to(blobs / "0123")
    (snapshot / "around").symlink_to(snapshot)
    assert texts_of(str(snapshot)) == texts_of(f"{snapshot}/**/*.txt") == ["one", "one"]
    assert texts_of(str(snapshot / "a.txt")) == texts_of(f"{snapshot}/*.txt") == ["one"]
    assert TextSource(str(snapshot)).files[0].size == 3
    (blobs / "0123").unlink()
    with pytest.raises(HeadgateError, match=r"a.txt' in source .* is a link to '../blobs/0123', which"):
        TextSource(str(snapshot))


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked" / "below").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("one")
    scandir = os.scandir

    def refused(path: str) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    for given in (str(tmp_path), f"{tmp_path}/**/*.txt", f"{tmp_path}/l*/*.txt"):
        with pytest.raises(HeadgateError, match=r"cannot be read: PermissionError: .*locked'"):
            TextSource(given)
    assert texts_of(f"{tmp_path}/*.txt") == ["one"]  # nothing of it could be in there
    assert texts_of(f"{tmp_path}/[!l]*") == ["one"]


def test_a_hidden_file_is_read_when_it_is_named(tmp_path: Path) -> None:
    (tmp_path / ".a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    assert texts_of(str(tmp_path / ".a.txt")) == ["one"]
    assert texts_of(str(tmp_path)) == ["two"]


def test_bad_parquet_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None, "b"]}), path)
    with pytest.raises(HeadgateError, match=r"'a.parquet', row 2: 'text' holds a NoneType"):
        texts_of(str(path))
    pq.write_table(pa.table({"text": pa.array([b"a", b"b", b"\xff"]).view(pa.string())}), path)
    with pytest.raises(HeadgateError, match=r"'a.parquet', row 3, is not UTF-8"):
        texts_of(str(path))
    write_parquet(path, make_texts(3), column="body")
    with pytest.raises(HeadgateError, match=r"'a.parquet' has no 'text'; known are body, id .*--text-column"):
        texts_of(str(path))


def test_a_parquet_file_damaged_in_the_middle_names_where(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, make_texts(100), row_group=10)
    place = pq.ParquetFile(path).metadata.row_group(5).column(1).dictionary_page_offset
    data = bytearray(path.read_bytes())
    data[place : place + 200] = bytes(200)
    path.write_bytes(data)
    with pytest.raises(HeadgateError, match=r"'a.parquet', after row 50, cannot be read"):
        texts_of(str(path))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("absent", "source 'absent' does not exist"),
        ("empty", "source 'empty' is empty; expected files of .txt"),
        ("empty/*.txt", "source 'empty/\\*.txt' is empty"),
        ("a.csv", "source 'a.csv' is of an unsupported kind"),
        ("zzz://a", "source 'zzz://a' cannot be reached: Protocol not known"),
        ("", "the source is empty; expected 'stdlib', a file"),
        ("ftp://host.invalid/a.txt", "source 'ftp://host.invalid/a.txt' cannot be reached: "),
        ("a**/b.txt", r"source 'a\*\*/b.txt' is not a valid glob"),
    ],
)
def test_a_source_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(HeadgateError, match=words):
        TextSource(given)


class HubStandIn(DirFileSystem):  # type: ignore[misc]
    """Answers to hf:// with the files of a local folder, and counts what is read of them."""

    protocol = "hf"
    folder = ""
    bytes_read = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(path=self.folder, fs=fsspec.filesystem("file"), skip_instance_cache=True, **options)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        read = file.f.read

        class Counted:
            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *error: object) -> None:
                file.close()

            def read(self, size: int = -1) -> bytes:
                data = bytes(read(size))
                HubStandIn.bytes_read += len(data)
                return data

        return Counted()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "hub"
    folder.mkdir()
    known = dict(fsspec.registry)
    HubStandIn.folder, HubStandIn.bytes_read = str(folder), 0
    HubStandIn.clear_instance_cache()
    fsspec.register_implementation("hf", HubStandIn, clobber=True)
    yield folder
    from fsspec.registry import _registry

    _registry.clear()
    _registry.update(known)


def test_a_dataset_on_the_hub_is_streamed(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHUNK_CHARACTERS", 20_000)
    folder = hub / "datasets" / "HuggingFaceFW" / "fineweb" / "sample" / "10BT"
    folder.mkdir(parents=True)
    texts = make_texts(2000, words=200)
    write_parquet(folder / "000_00000.parquet", texts[:1500], row_group=100)
    write_parquet(folder / "001_00000.parquet", texts[1500:], row_group=100)
    name = "hf://datasets/HuggingFaceFW/fineweb/sample/10BT"
    assert texts_of(name) == texts
    whole, HubStandIn.bytes_read = HubStandIn.bytes_read, 0
    manifest = prepare(Request(name, "byte", max_tokens=200_000), tmp_path / "out", workers=2)
    tokens = sum(split.tokens for split in manifest.splits)
    assert 200_000 <= tokens < 210_000
    assert 0 < HubStandIn.bytes_read < whole / 2
    assert open_split(tmp_path / "out", "train").tokens > 100_000


def test_a_tokenizer_on_the_hub(hub: Path, tmp_path: Path) -> None:
    folder = hub / "Qwen" / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    definition = make_tokenizer("byte").definition
    (folder / "tokenizer.json").write_text(definition)
    tokenizer = make_tokenizer("Qwen/Qwen3-0.6B")
    assert tokenizer.definition == definition
    with pytest.raises(HeadgateError, match="'Qwen/absent' cannot be read: FileNotFoundError"):
        make_tokenizer("Qwen/absent")


def test_a_memory_file_system(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/books/a.jsonl", LINES)
    try:
        assert len(texts_of("memory://books")) == 500
        assert prepare(Request("memory://books", "byte"), tmp_path / "out").sources.files == 1
    finally:
        memory.rm("/books", recursive=True)


@pytest.mark.parametrize("what", ["source", "tokenizer"])
def test_without_the_hub_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    from fsspec.registry import _registry

    monkeypatch.delitem(_registry, "hf", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    use: Callable[[], object] = {
        "source": lambda: TextSource("hf://datasets/HuggingFaceFW/fineweb"),
        "tokenizer": lambda: make_tokenizer("Qwen/Qwen3-0.6B"),
    }[what]
    with pytest.raises(HeadgateError, match=r"pip install 'headgate\[hf\]'"):
        use()


def test_without_another_package_the_right_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(HeadgateError, match=r"'s3://a' needs a package that is not installed; Install s3fs"):
        TextSource("s3://a")
