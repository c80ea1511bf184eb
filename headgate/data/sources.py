"""Where documents come from: the standard library, a file, a folder, a glob, or the Hub.

Every place is reached through fsspec, so that what works on a local folder works on `hf://` too. Files are
listed once, in order of name, and read one document at a time: memory does not grow with the size of a file.
"""

import io
import json
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from headgate import files
from headgate.errors import HeadgateError, suggestion

WHOLE = (".txt", ".md", ".py")
"""Files that are one document each."""
LINES = {".jsonl": None, ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
"""Files of one JSON object per line, and how they are compressed."""
READABLE = (".txt", ".md", *LINES, ".parquet")
BATCH_BYTES = 1 << 20


class Document(NamedTuple):
    """A text, and where it was found."""

    text: str
    row: int
    """Its line or row, counted from 1."""
    share: float
    """How much of its file has been read, this document included."""


@dataclass(frozen=True)
class SourceFile:
    name: str
    """Its path below the source, which is the same on every machine."""
    path: str
    """Its path in the source's file system."""
    size: int
    separated: bool = False
    """Whether a separator splits it into several documents."""

    @property
    def whole(self) -> bool:
        """Whether it is one document."""
        return self.name.endswith(WHOLE) and not self.separated


class TextSource:
    """The files of a source, in reading order."""

    def __init__(
        self, given: str, *, text_column: str = "text", separator: str | None = None, out: Path | None = None
    ) -> None:
        """Anything in the folder `out`, where the shards go, is not part of the source."""
        self.given = given
        self.text_column, self.separator = text_column, separator
        self.filesystem, self.files = _list(given, out)
        if separator is not None:
            if not any(file.whole for file in self.files):
                raise HeadgateError(
                    f"--separator {separator!r} splits {', '.join(WHOLE)} files, but source {given!r} has "
                    "none; leave it out"
                )
            self.files = tuple(replace(file, separated=file.whole) for file in self.files)

    def fingerprint(self, file: SourceFile) -> str:
        """Changes when the file does."""
        with reading(file.name, self.filesystem):
            return str(self.filesystem.ukey(file.path))

    def documents(self, file: SourceFile, *, after: int = 0) -> Iterator[Document]:
        """The documents of `file` whose row comes after `after`."""
        with reading(file.name, self.filesystem), self.filesystem.open(file.path, "rb") as stream:
            if file.name.endswith(".parquet"):
                yield from self._parquet(file, stream, after)
            elif file.whole:
                if after < 1:
                    yield Document(decode(stream.read(), file.name), 1, 1.0)
            elif file.separated:
                assert self.separator is not None
                pieces = decode(stream.read(), file.name).split(self.separator)
                for row, piece in enumerate(pieces, 1):
                    if row > after and piece.strip():
                        yield Document(piece, row, row / len(pieces))
            else:
                yield from self._lines(file, stream, after)

    def _lines(self, file: SourceFile, stream: IO[bytes], after: int) -> Iterator[Document]:
        compression = LINES[next(suffix for suffix in LINES if file.name.endswith(suffix))]
        lines: IO[bytes] = stream
        if compression:
            lines = io.BufferedReader(_Decompressed(stream, compression), BATCH_BYTES)
        for row, line in enumerate(_located(lines, file.name), 1):
            if row > after and not line.isspace():
                text = self._text(line, f"{file.name!r}, line {row}")
                yield Document(text, row, min(stream.tell() / max(file.size, 1), 1.0))

    def _text(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            raise HeadgateError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error
        except (ValueError, RecursionError) as error:
            raise HeadgateError(f"{where} is not JSON: {error}; expected one object per line") from error
        if not isinstance(record, dict):
            raise HeadgateError(f"{where} holds a {type(record).__name__}; expected a JSON object")
        if self.text_column not in record:
            raise HeadgateError(f"{where} has no {self._column_missing(record)}")
        text = self._checked(record[self.text_column], where)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise HeadgateError(
                f"{where} holds half a surrogate pair, {text[error.start]!r}, which is not a character"
            ) from error
        return text

    def _parquet(self, file: SourceFile, stream: IO[bytes], after: int) -> Iterator[Document]:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            # Column chunks are streamed page by page: a row group may be larger than memory.
            parquet = ParquetFile(stream, pre_buffer=False, buffer_size=BATCH_BYTES)
        except pyarrow.ArrowException as error:
            raise HeadgateError(
                f"{file.name!r} is not a complete parquet file, perhaps a copy cut short: {_line(error)}"
            ) from error
        if self.text_column not in parquet.schema_arrow.names:
            raise HeadgateError(f"{file.name!r} has no {self._column_missing(parquet.schema_arrow.names)}")
        row = 0
        for number in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(number)
            if row + group.num_rows <= after:
                row += group.num_rows
                continue
            per_row = group.total_byte_size // max(group.num_rows, 1)
            batches = parquet.iter_batches(
                batch_size=min(max(BATCH_BYTES // max(per_row, 1), 1), 1024),
                row_groups=[number],
                columns=[self.text_column],
                use_threads=False,
            )
            for cell in self._cells(batches, file.name, row):
                row += 1
                if row > after:
                    yield Document(cell, row, row / parquet.metadata.num_rows)

    def _cells(self, batches: Iterator[Any], name: str, row: int) -> Iterator[str]:
        import pyarrow

        try:
            for batch in batches:
                for text in _texts(batch.column(0)):
                    yield self._checked(text, f"{name!r}, row {row + 1}")
                    row += 1
        except UnicodeDecodeError as error:
            raise HeadgateError(
                f"{name!r}, row {row + 1}, is not UTF-8: {error.reason} at byte {error.start}"
            ) from error
        except (OSError, pyarrow.ArrowException) as error:
            raise HeadgateError(f"{name!r}, after row {row}, cannot be read: {_line(error)}") from error

    def _checked(self, text: Any, where: str) -> str:
        if not isinstance(text, str):
            raise HeadgateError(
                f"{where}: {self.text_column!r} holds a {type(text).__name__}; expected text "
                "(--text-column chooses another column)"
            )
        return text

    def _column_missing(self, present: Any) -> str:
        return f"{self.text_column!r}; {suggestion(self.text_column, present)} (set it with --text-column)"


def _texts(column: Any) -> Iterator[Any]:
    """The cells of a column; those before one that is not UTF-8 come out before it raises."""
    try:
        yield from column.to_pylist()
    except UnicodeDecodeError:
        yield from (cell.as_py() for cell in column)


def _list(given: str, out: Path | None) -> tuple[Any, tuple[SourceFile, ...]]:
    """The file system that holds a source, and its files."""
    import fsspec

    if given == "stdlib":
        filesystem = fsspec.filesystem("file")
        root = filesystem._strip_protocol(sysconfig.get_path("stdlib"))
        with reading(given, filesystem):
            found = _sizes(filter(_is_stdlib, _walk(root, _in_stdlib)), given)
        return filesystem, _files(found, root, given, "Python's own .py files")
    expected = "'stdlib', a file, a folder, a glob or hf://datasets/..."
    if not given:
        raise HeadgateError(f"the source is empty; expected {expected}")
    filesystem, root = reach(given, "source")
    pattern = ""
    with reading(given, filesystem):
        if filesystem.isfile(root):
            if not root.endswith(READABLE):
                raise HeadgateError(
                    f"source {given!r} is of an unsupported kind; known are {', '.join(READABLE)}"
                )
            name, size = PurePosixPath(root).name, filesystem.info(root)["size"] or 0
            return filesystem, (SourceFile(name, root, size),)
        if not filesystem.isdir(root):
            if not has_magic(root):
                there = files.kind(root) if "file" in filesystem.protocol else "missing"
                what = "does not exist" if there == "missing" else f"is {there}"
                raise HeadgateError(f"source {given!r} {what}; expected {expected}")
            pattern, parts = root, root.split("/")
            root = "/".join(parts[: next(n for n, part in enumerate(parts) if has_magic(part))])
        if "file" in filesystem.protocol:
            paths = _local(root, pattern, given, out)
            found = _sizes((path for path in paths if path.endswith(READABLE)), given)
        else:
            infos = filesystem.glob(pattern, detail=True) if pattern else filesystem.find(root, detail=True)
            found = {
                path: info["size"] or 0
                for path, info in infos.items()
                if info["type"] == "file" and path.endswith(READABLE)
            }
    return filesystem, _files(found, root, given, f"files of {', '.join(READABLE)}")


def _local(root: str, pattern: str, given: str, out: Path | None) -> Iterator[str]:
    """The files of a local folder, or those that a glob matches; leaves out what prepare wrote there."""
    from fsspec.utils import glob_translate

    if _is_prepared(root):
        raise HeadgateError(f"source {given!r} is a folder of shards that prepare wrote; expected text")
    try:
        matches = re.compile(glob_translate(pattern) if pattern else "").match
    except ValueError as error:
        raise HeadgateError(f"source {given!r} is not a valid glob: {_line(error)}") from error
    wanted = pattern.removeprefix(root).strip("/").split("/") if pattern else ["**"]
    out_path = os.path.realpath(out) if out else None

    def enter(folders: Sequence[str]) -> bool:
        path = "/".join([root, *folders])
        return _may_hold(folders, wanted) and os.path.realpath(path) != out_path and not _is_prepared(path)

    return (path for path in _walk(root, enter) if matches(path))


def _walk(root: str, enter: Callable[[Sequence[str]], bool]) -> Iterator[str]:
    """The files below a local folder that are not hidden, in the folders that `enter` admits.

    fsspec would leave out a folder that cannot be read; here it is an error. Links to folders are skipped.
    """

    def fail(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(root or "/", onerror=fail):
        below = Path(here).relative_to(root or "/").parts
        folders[:] = [name for name in folders if name[0] != "." and enter([*below, name])]
        yield from ("/".join([root, *below, name]) for name in names if name[0] != ".")


def _may_hold(folders: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether something that a glob matches, part by part, may be in a folder."""
    for name, part in zip(folders, wanted, strict=False):
        if part == "**":
            return True
        if not fnmatchcase(name, part):
            return False
    return len(folders) < len(wanted)


def _is_prepared(folder: str) -> bool:
    """Whether prepare wrote this folder, or has started to."""
    present = [os.path.exists(f"{folder}/{name}") for name in ("sources.jsonl", "tokenizer.json")]
    return all(present) and any(os.path.exists(f"{folder}/{name}.json") for name in ("manifest", "progress"))


def _sizes(paths: Iterable[str], given: str) -> dict[str, int]:
    """The sizes of those that are files; for a link, the size of the file it leads to."""
    sizes = {}
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            if not os.path.islink(path):
                raise
            raise HeadgateError(
                f"{path!r} in source {given!r} is a link to {os.readlink(path)!r}, which cannot be reached: "
                f"{error.strerror}; fix or remove it"
            ) from error
        if stat.S_ISREG(status.st_mode):
            sizes[path] = status.st_size
    return sizes


def _files(found: dict[str, int], root: str, given: str, expected: str) -> tuple[SourceFile, ...]:
    files = [SourceFile(path.removeprefix(root).lstrip("/"), path, size) for path, size in found.items()]
    visible = [f for f in files if not any(part.startswith(".") for part in PurePosixPath(f.name).parts)]
    if not visible:
        raise HeadgateError(f"source {given!r} is empty; expected {expected}")
    return tuple(sorted(visible, key=lambda file: file.name))


def _in_stdlib(folders: Sequence[str]) -> bool:
    """Leaves out the tests, and what is installed beside the library."""
    others = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    return folders[-1] not in others and not folders[-1].startswith("config-")


def _is_stdlib(path: str) -> bool:
    """Whether it is Python source that is the same in every build of one version."""
    name = PurePosixPath(path).name
    built = name.startswith("_sysconfigdata") or name in ("sitecustomize.py", "usercustomize.py")
    return name.endswith(".py") and not built


def decode(data: bytes, name: str) -> str:
    """A text without the byte order mark that some editors put in front."""
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise HeadgateError(
            f"{name!r}, line {line}, is not UTF-8: {error.reason} at byte {error.start}; convert it first"
        ) from error


class _Decompressed(io.RawIOBase):
    """The contents of a compressed file, up to the very byte where it is cut or damaged.

    The library drops what it decoded along with the failure, so that piece is read again byte by byte.
    """

    def __init__(self, stream: IO[bytes], compression: str) -> None:
        self._stream, self._compression = stream, compression
        self._place = 0
        self._failure: Exception | None = None
        self._opened: list[Any] = []  # all are held, because one that is released closes the stream
        self._begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._failure is not None:
            raise self._failure
        try:
            count = int(self._opened[-1].readinto(buffer))
        except (OSError, EOFError) as error:
            self._failure = error
            count = self._before_failure(buffer)
            if not count:
                raise
        self._place += count
        return count

    def _begin(self) -> Any:
        import pyarrow

        file = pyarrow.PythonFile(self._stream, mode="r")
        self._opened.append(pyarrow.CompressedInputStream(file, self._compression))
        return self._opened[-1]

    def _before_failure(self, buffer: Any) -> int:
        self._stream.seek(0)
        native, left, count = self._begin(), self._place, 0
        while left and (piece := native.read(min(left, BATCH_BYTES))):
            left -= len(piece)
        try:
            while count < len(buffer) and (byte := native.read(1)):
                buffer[count : count + 1] = byte
                count += 1
        except (OSError, EOFError):
            pass
        return count


def _located(lines: IO[bytes], name: str) -> Iterator[bytes]:
    """The lines of a file; a failure to read names the last line that could be read."""
    row = 0
    while True:
        try:
            line = lines.readline()
        except (OSError, EOFError) as error:
            raise HeadgateError(f"{name!r}, after line {row}, cannot be read: {_line(error)}") from error
        if not line:
            return
        row += 1
        yield line


def reach(url: str, role: str) -> tuple[Any, str]:
    """The file system of a path or URL, and the path in it."""
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:
        what = "run: pip install 'headgate[hf]'" if url.startswith("hf://") else _line(error)
        raise HeadgateError(f"{role} {url!r} needs a package that is not installed; {what}") from error
    except (OSError, ValueError) as error:
        raise HeadgateError(f"{role} {url!r} cannot be reached: {_line(error)}") from error
    return filesystem, path


@contextmanager
def reading(what: str, filesystem: Any) -> Iterator[None]:
    """Turn a failure to read into one sentence; remote ones arrive as a network library's own exception."""
    expected = (OSError,) if "file" in filesystem.protocol else (Exception,)
    try:
        yield
    except HeadgateError:
        raise
    except expected as error:
        raise HeadgateError(f"{what!r} cannot be read: {type(error).__name__}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
