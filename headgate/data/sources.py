"""Where documents come from: the standard library, a file, a folder, a glob, or the hub.

Every place is reached through fsspec, so that what works on a local folder works on `hf://` alike. Files are
listed once, in the order of their names, and read one document at a time: memory does not grow with a file.
"""

import io
import json
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import has_magic
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

from headgate.errors import HeadgateError, suggestion

WHOLE = (".txt", ".md", ".py")
"""Files that are one document each."""
LINES = {".jsonl": None, ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
"""Files of one JSON object a line, and how they are compressed."""
READABLE = (".txt", ".md", *LINES, ".parquet")
BATCH_BYTES = 1 << 20


class Document(NamedTuple):
    """A text, and where it stood."""

    text: str
    row: int
    """Its line or row, counted from 1."""
    share: float
    """How much of its file has been read with it."""


@dataclass(frozen=True)
class SourceFile:
    name: str
    """Its path below the source, which is the same on every machine."""
    path: str
    """Its path in the file system of the source."""
    size: int

    @property
    def whole(self) -> bool:
        return self.name.endswith(WHOLE)


class Source:
    """The files of a source, in the order in which they are read."""

    def __init__(self, given: str, *, text_column: str = "text") -> None:
        self.given = given
        self.text_column = text_column
        self.filesystem, self.files = _list(given)

    def fingerprint(self, file: SourceFile) -> str:
        """Changes when the file does."""
        with reading(file.name, self.filesystem):
            return str(self.filesystem.ukey(file.path))

    def documents(self, file: SourceFile, *, after: int = 0) -> Iterator[Document]:
        """The documents of `file` whose row is beyond `after`."""
        with reading(file.name, self.filesystem), self.filesystem.open(file.path, "rb") as stream:
            if file.name.endswith(".parquet"):
                yield from self._parquet(file, stream, after)
            elif file.whole:
                if after < 1:
                    yield Document(decode(stream.read(), file.name), 1, 1.0)
            else:
                yield from self._lines(file, stream, after)

    def _lines(self, file: SourceFile, stream: IO[bytes], after: int) -> Iterator[Document]:
        import pyarrow

        compression = LINES[next(suffix for suffix in LINES if file.name.endswith(suffix))]
        lines: IO[bytes] = stream
        if compression:
            native = pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), compression)
            lines = io.BufferedReader(native, BATCH_BYTES)
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
            raise HeadgateError(f"{where} is not JSON: {error}; expected one object a line") from error
        if not isinstance(record, dict):
            raise HeadgateError(f"{where} holds a {type(record).__name__}; expected a JSON object")
        if self.text_column not in record:
            raise HeadgateError(f"{where} has no {self._column_missing(record)}")
        text = self._checked(record[self.text_column], where)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise HeadgateError(
                f"{where} holds half a surrogate pair, {text[error.start]!r}, which is no character"
            ) from error
        return text

    def _parquet(self, file: SourceFile, stream: IO[bytes], after: int) -> Iterator[Document]:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            # Column chunks are streamed page by page: a row group may be larger than the memory.
            parquet = ParquetFile(stream, pre_buffer=False, buffer_size=BATCH_BYTES)
        except pyarrow.ArrowException as error:
            raise HeadgateError(
                f"{file.name!r} is not a whole parquet file, as when a copy was cut short: {_line(error)}"
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


def _list(given: str) -> tuple[Any, tuple[SourceFile, ...]]:
    """The file system that holds a source, and its files."""
    import fsspec

    if given == "stdlib":
        filesystem = fsspec.filesystem("file")
        root = filesystem._strip_protocol(sysconfig.get_path("stdlib"))
        found = {
            path: info for path, info in filesystem.find(root, detail=True).items() if _is_stdlib(path, root)
        }
        return filesystem, _files(found, root, given, "Python's own .py files")
    filesystem, root = reach(given, "source")
    with reading(given, filesystem):
        if filesystem.isfile(root):
            if not root.endswith(READABLE):
                raise HeadgateError(
                    f"source {given!r} is of a kind unknown here; known are {', '.join(READABLE)}"
                )
            return filesystem, _files({root: filesystem.info(root)}, root.rpartition("/")[0], given)
        if filesystem.isdir(root):
            found = filesystem.find(root, detail=True)
        elif has_magic(root):
            found = filesystem.glob(root, detail=True)
            root = "/".join(root.split("/")[: next(n for n, p in enumerate(root.split("/")) if has_magic(p))])
        else:
            raise HeadgateError(
                f"source {given!r} does not exist; expected 'stdlib', a file, a folder, a glob or hf://datasets/..."
            )
    return filesystem, _files({p: i for p, i in found.items() if p.endswith(READABLE)}, root, given)


def _files(
    found: dict[str, Any], root: str, given: str, expected: str = f"files of {', '.join(READABLE)}"
) -> tuple[SourceFile, ...]:
    files = [
        SourceFile(path.removeprefix(root).lstrip("/"), path, info["size"] or 0)
        for path, info in found.items()
        if info["type"] == "file"
    ]
    visible = [f for f in files if not any(part.startswith(".") for part in PurePosixPath(f.name).parts)]
    if not visible:
        raise HeadgateError(f"source {given!r} is empty; expected {expected}")
    return tuple(sorted(visible, key=lambda file: file.name))


def _is_stdlib(path: str, root: str) -> bool:
    """Not the tests, nor what is installed beside it, nor what differs between builds of one version."""
    *folders, name = path.removeprefix(root).lstrip("/").split("/")
    others = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    built = name.startswith("_sysconfigdata") or name in ("sitecustomize.py", "usercustomize.py")
    return name.endswith(".py") and not built and not any(f in others or f[:7] == "config-" for f in folders)


def decode(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise HeadgateError(
            f"{name!r}, line {line}, is not UTF-8: {error.reason} at byte {error.start}; convert it first"
        ) from error


def _located(lines: IO[bytes], name: str) -> Iterator[bytes]:
    """The lines of a file, whose failure to be read names the last one that was."""
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
    """The file system of a path or address, and the path in it."""
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:
        raise HeadgateError(
            f"{role} {url!r} needs a package that is not installed; for hf:// run: pip install 'headgate[hf]'"
        ) from error
    except ValueError as error:
        raise HeadgateError(f"{role} {url!r} cannot be reached: {_line(error)}") from error
    return filesystem, path


@contextmanager
def reading(what: str, filesystem: Any) -> Iterator[None]:
    """A failure to read becomes one sentence; far away it comes as a network library's own exception."""
    expected = (OSError,) if "file" in filesystem.protocol else (Exception,)
    try:
        yield
    except HeadgateError:
        raise
    except expected as error:
        raise HeadgateError(f"{what!r} cannot be read: {type(error).__name__}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
