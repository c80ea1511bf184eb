"""Token shards: what a prepared folder holds, how it is written, and how it is checked before use.

A shard has datatrove's format: `NAME.ds` holds the tokens, little-endian, two or four bytes each;
`NAME.ds.index` where each document ends, in tokens, as uint64; an optional `NAME.ds.loss` one byte per token,
nonzero where the token counts in the loss; for a task it is the number of its group of answers
(`data/answers.py`). `manifest.json` says what is in the folder, with a checksum of every file; a folder that
datatrove wrote has none, and can be read all the same.
"""

import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from headgate import config, files
from headgate.data.answers import TaskRecord
from headgate.errors import HeadgateError
from headgate.version import __version__

FORMAT = 1
SPLITS = ("train", "val", "test")
SHARD_TOKENS = 1 << 27
"""A shard that reaches this many tokens is followed by another."""
PARTS = (".ds", ".ds.index", ".ds.loss")
WRITTEN = re.compile(r"(\d{5,})\.ds(\.index|\.loss)?(\.tmp)?")
"""What the files of a split are called, finished or not."""
AGAIN = "delete the folder and prepare it again"


@dataclass(frozen=True)
class ShardRecord:
    name: str
    """Its path in the folder, without the suffix."""
    documents: int
    tokens: int
    sha256: Mapping[str, str]
    """The checksum of each of its files, by suffix."""
    largest: int | None = None
    """The largest token; unknown in a folder that version 0.1 wrote until it is checked."""


@dataclass(frozen=True)
class SplitRecord:
    name: str
    documents: int
    bytes: int
    """Size of the documents' texts in UTF-8; with `tokens`, this turns a loss into bits per byte."""
    tokens: int
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True)
class SourcesRecord:
    files: int
    bytes: int
    sha256: str
    """The checksum of sources.jsonl, which lists the files."""


@dataclass(frozen=True)
class TokenizerRecord:
    vocab_size: int
    end_of_text: str
    end_of_text_id: int
    sha256: str
    """Of tokenizer.json."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says about a prepared folder."""

    format: int
    headgate: str
    """The version that wrote it."""
    request: Mapping[str, Any]
    """What was asked for."""
    sources: SourcesRecord
    tokenizer: TokenizerRecord
    repeats_dropped: int
    splits: tuple[SplitRecord, ...]
    task: TaskRecord | None = None
    """For a synthetic task: chance, optimum, and what the marks of its answers mean."""

    def split(self, name: str) -> SplitRecord:
        for split in self.splits:
            if split.name == name:
                return split
        raise HeadgateError(f"the manifest has no split {name!r}: it is damaged; {AGAIN}")

    def refuse_nonsense(self, path: Path) -> None:
        """Raise if it contradicts itself, or names files that do not belong to its splits."""
        words, wrong = self.tokenizer, ""
        shards = [(split, shard) for split in self.splits for shard in split.shards]
        if not 0 <= words.end_of_text_id < words.vocab_size:
            wrong = f"a vocabulary of {words.vocab_size} has no token {words.end_of_text_id} to end a text"
        elif sorted(split.name for split in self.splits) != sorted(SPLITS):
            wrong = f"the splits are not {', '.join(SPLITS)}"
        elif len({shard.name for _, shard in shards}) < len(shards):
            wrong = "a shard is listed twice"
        for split, shard in shards:
            if not re.fullmatch(rf"{split.name}/\d{{5,}}", shard.name):
                wrong = f"the shard {shard.name!r} is not a file of split {split.name!r}"
            elif not 0 < shard.documents <= shard.tokens:
                wrong = f"the shard {shard.name!r} has {shard.tokens} tokens in {shard.documents} documents"
            elif shard.largest is not None and not 0 <= shard.largest < words.vocab_size:
                wrong = f"{shard.name!r} has the token {shard.largest} in a vocabulary of {words.vocab_size}"
        for split in self.splits:
            counts = [(shard.documents, shard.tokens) for shard in split.shards]
            if (split.documents, split.tokens) != tuple(map(sum, zip((0, 0), *counts, strict=True))):
                wrong = f"the counts of split {split.name!r} do not add up"
            elif split.bytes < 0:
                wrong = f"split {split.name!r} has {split.bytes} bytes"
        if wrong:
            raise HeadgateError(f"{path} is damaged: {wrong}; {AGAIN}")


def read_manifest(folder: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of a prepared folder; None for one that datatrove wrote."""
    folder = files.named(folder, "the data folder")
    path = folder / "manifest.json"
    if not os.path.isdir(folder):
        raise HeadgateError(f"{str(folder)!r} is not a folder; expected one that `headgate prepare` wrote")
    with _reading(path):
        finished = path.exists()
    if finished:
        manifest = config.load(Manifest, path)
        if manifest.format != FORMAT:
            raise HeadgateError(
                f"{path} has format {manifest.format}, but headgate {__version__} reads format {FORMAT}; "
                f"use headgate {manifest.headgate}, which wrote it, or prepare the data again"
            )
        manifest.refuse_nonsense(path)
        return manifest
    if (folder / "progress.json").is_file():
        raise HeadgateError(
            f"{str(folder)!r} is not finished; run the same `headgate prepare` again to continue"
        )
    return None


@dataclass(frozen=True)
class Shard:
    """A shard on disk whose size and index have been checked."""

    path: Path
    """The file of its tokens; the others are beside it."""
    tokens: int
    dtype: str
    has_index: bool
    has_loss: bool
    largest: int | None = None
    """The largest token, if known."""

    def load_tokens(self) -> np.ndarray:
        return _map(self.path, self.dtype)

    def load_ends(self) -> np.ndarray:
        """Where each document ends, in tokens."""
        return _map(beside(self.path, ".index"), "<u8")

    def load_loss(self) -> np.ndarray:
        """Nonzero where the token counts in the loss."""
        return _map(beside(self.path, ".loss"), "u1")


@dataclass(frozen=True)
class Split:
    """The shards of one split, in order: together they are one stream of tokens."""

    name: str
    shards: tuple[Shard, ...]
    bytes: int | None = None
    """Size of the documents' texts; unknown in a folder that datatrove wrote."""
    task: TaskRecord | None = None
    """What the manifest says about the task, if it is one."""

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


def open_split(folder: str | os.PathLike[str], name: str, *, verify: bool = True) -> Split:
    """Open a split of a prepared folder, or of one that datatrove wrote.

    Without a manifest, the split is the folder of its name, or for `train` the folder itself. Sizes and
    indexes are always checked; with `verify`, checksums and the largest token are too: damage is reported
    here, not in the middle of training.
    """
    folder = files.named(folder, "the data folder")
    manifest = read_manifest(folder)
    if manifest is None:
        home = folder / name if name != "train" or (folder / name).is_dir() else folder
        paths = _find(home) if home.is_dir() else []
        if home == folder:
            paths = [path for path in paths if not set(path.relative_to(home).parts[:-1]) & set(SPLITS)]
        if not paths:
            raise HeadgateError(
                f"{str(folder)!r} has no split {name!r}: there are no .ds files in {str(home)!r}"
            )
        shards = tuple(shard for shard in map(open_shard, paths) if shard.tokens)
        if verify:
            shards = tuple(replace(shard, largest=_largest(shard.path, shard.dtype)) for shard in shards)
        return Split(name, shards)
    if name not in SPLITS:
        raise HeadgateError(f"{name!r} is not a split; known are {', '.join(SPLITS)}")
    record = manifest.split(name)
    if not record.tokens:
        raise HeadgateError(
            f"split {name!r} of {str(folder)!r} is empty; prepare more text or other --splits"
        )
    if verify:
        _verify(folder / "tokenizer.json", manifest.tokenizer.sha256)
    found = tuple(_recorded(folder, shard, manifest, verify) for shard in record.shards)
    return Split(name, found, record.bytes, manifest.task)


def check_range(vocab_size: int, *splits: Split) -> None:
    """Raise if a model with this many entries would meet a token that it does not know."""
    for split in splits:
        for shard in split.shards:
            if shard.largest is not None and shard.largest >= vocab_size:
                raise HeadgateError(
                    f"{shard.path} has the token {shard.largest}, but the model has only {vocab_size} "
                    f"entries; set model.vocab_size to at least {shard.largest + 1}"
                )


def open_shard(path: Path, *, dtype: str | None = None) -> Shard:
    """Check a shard's size against its index, and infer its token width from them or datatrove's metadata."""
    with _reading(path):
        return _open_shard(path, dtype)


def _open_shard(path: Path, dtype: str | None) -> Shard:
    files.open_to_read(path).close()  # refuses a pipe or a folder of that name
    size = path.stat().st_size
    index, loss, metadata = beside(path, ".index"), beside(path, ".loss"), beside(path, ".metadata")
    counts: dict[Path, int] = {}
    if metadata.is_file():
        width, counts[metadata] = _read_metadata(metadata)
        dtype = dtype or f"<u{width}"
    if index.is_file():
        if index.stat().st_size % 8:
            raise HeadgateError(
                f"{index} has {index.stat().st_size} bytes; expected a multiple of 8: it is damaged"
            )
        ends = np.fromfile(index, dtype="<u8")
        if (ends[1:] < ends[:-1]).any():
            raise HeadgateError(f"{index} has document ends that are out of order: it is damaged")
        counts[index] = int(ends[-1]) if len(ends) else 0
    if dtype is None and index in counts:
        dtype = next((f"<u{width}" for width in (2, 4) if width * counts[index] == size), "<u2")
    if dtype is None:
        raise HeadgateError(
            f"{path} has neither an index nor metadata beside it, so its tokens may take 2 bytes or 4"
        )
    tokens, rest = divmod(size, np.dtype(dtype).itemsize)
    for claimed_by, count in counts.items():
        if rest or count != tokens:
            raise HeadgateError(
                f"{path} has {size} bytes, not {count} tokens of {np.dtype(dtype).itemsize} bytes "
                f"as {claimed_by.name} says: one of them is damaged"
            )
    if loss.is_file() and loss.stat().st_size != tokens:
        raise HeadgateError(
            f"{loss} has {loss.stat().st_size} bytes; expected one for each of {tokens} tokens: it is damaged"
        )
    return Shard(path, tokens, dtype, index.is_file(), loss.is_file())


def check_data(folder: str | os.PathLike[str], *, verify: bool = True) -> Manifest | None:
    """Verify everything a folder says about itself: checksums, indexes, counts and the range of the tokens.

    Without `verify` the tokens are not read: only sizes, indexes and counts are checked, in a moment.
    """
    folder = files.named(folder, "the data folder")
    manifest = read_manifest(folder)
    if manifest is None:
        paths = _find(folder)
        if not paths:
            raise HeadgateError(
                f"{str(folder)!r} has neither a manifest.json nor .ds files; nothing to check"
            )
        vocab_size = _vocabulary_beside(folder)
        for shard in map(open_shard, paths):
            if verify and vocab_size is not None and shard.tokens:
                _check_range(shard.path, _largest(shard.path, shard.dtype), vocab_size)
        return None
    for name, expected in (
        ("tokenizer.json", manifest.tokenizer.sha256),
        ("sources.jsonl", manifest.sources.sha256),
    ):
        _verify(folder / name, expected)
    checked = []
    for split in map(manifest.split, SPLITS):
        records = []
        for record in split.shards:
            shard = _recorded(folder, record, manifest, verify)
            largest = _largest(shard.path, shard.dtype) if verify else record.largest
            if record.largest not in (None, largest):
                raise HeadgateError(f"{shard.path} has the token {largest}, not {record.largest}; {AGAIN}")
            records.append(replace(record, largest=largest))
        checked.append(replace(split, shards=tuple(records)))
    known = replace(manifest, splits=tuple(checked))
    if known != manifest:  # written by version 0.1, which did not record the largest tokens
        with suppress(OSError):
            config.save(known, folder / "manifest.json", seal=True)
    return known


def _vocabulary_beside(folder: Path) -> int | None:
    """The entries of the tokenizer.json in a folder, if there is one."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    from headgate.data.tokenizers import Tokenizer

    return Tokenizer.of_file(path).vocab_size


def _largest(path: Path, dtype: str | np.dtype[Any]) -> int:
    with _reading(path):
        return int(_map(path, dtype).max())


def _check_range(path: Path, largest: int, vocab_size: int) -> None:
    if largest >= vocab_size:
        raise HeadgateError(f"{path} has the token {largest}; the tokenizer has only {vocab_size} entries")


@dataclass(frozen=True)
class ShardSize:
    documents: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class SplitState:
    """How far a split has been written: enough to cut its files back to this point and continue from it."""

    name: str
    bytes: int = 0
    shards: tuple[ShardSize, ...] = field(default=())

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


class ShardWriter:
    """Appends documents to the shards of one split, under temporary names until `publish`.

    Whatever was written after `state` was last flushed is cut off when a writer is made from that state, so a
    process that dies at any moment leaves nothing that a later one does not know about.
    """

    def __init__(
        self, folder: Path, state: SplitState, dtype: np.dtype[Any], *, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self.state = state
        self._folder = folder
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._files: dict[str, IO[bytes]] = {}
        for leftover in (folder / state.name).glob("*.tmp"):
            ours = WRITTEN.fullmatch(leftover.name)
            if ours and int(ours[1]) >= len(state.shards):
                leftover.unlink()
        if state.shards:
            self._open()

    def append(
        self, tokens: np.ndarray, lengths: np.ndarray, *, text_bytes: int, counted: np.ndarray | None = None
    ) -> None:
        """Write whole documents: their tokens one after another, their lengths, and which tokens count."""
        self.state = replace(self.state, bytes=self.state.bytes + text_bytes)
        while len(lengths):
            if not self.state.shards or self.state.shards[-1].tokens >= self._shard_tokens:
                self.flush()
                self.close()
                self.state = replace(self.state, shards=(*self.state.shards, ShardSize()))
                self._open()
            last = self.state.shards[-1]
            ends = last.tokens + np.cumsum(lengths, dtype=np.uint64)
            fits = int(np.searchsorted(ends - lengths.astype(np.uint64), self._shard_tokens))
            stop = int(ends[fits - 1]) - last.tokens
            self._files[".ds"].write(np.ascontiguousarray(tokens[:stop], dtype=self._dtype).data)
            self._files[".ds.index"].write(ends[:fits].astype("<u8").data)
            if counted is not None:
                self._part(".ds.loss").write(counted[:stop].astype(np.uint8).data)
                counted = counted[stop:]
            size = ShardSize(last.documents + fits, last.tokens + stop)
            self.state = replace(self.state, shards=(*self.state.shards[:-1], size))
            tokens, lengths = tokens[stop:], lengths[fits:]

    def flush(self) -> SplitState:
        """Flush everything to disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return self.state

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self) -> None:
        files.own_folder(self._folder / self.state.name)
        for suffix in (".ds", ".ds.index"):
            self._part(suffix)
        if _temporary(self._folder, self.state, len(self.state.shards) - 1, ".ds.loss").exists():
            self._part(".ds.loss")

    def _part(self, suffix: str) -> IO[bytes]:
        """The last shard's file with this suffix, cut to what the state knows and ready to append to."""
        if suffix not in self._files:
            last = self.state.shards[-1]
            bytes_each = {".ds": self._dtype.itemsize, ".ds.index": 8, ".ds.loss": 1}[suffix]
            size = bytes_each * (last.documents if suffix == ".ds.index" else last.tokens)
            path = _temporary(self._folder, self.state, len(self.state.shards) - 1, suffix)
            file = files.open_own(path)
            if os.fstat(file.fileno()).st_size < size:
                file.close()
                raise HeadgateError(
                    f"{path} is shorter than when it was left; delete the folder and start again"
                )
            file.truncate(size)
            self._files[suffix] = io.BufferedWriter(file)
        return self._files[suffix]


def publish(folder: Path, state: SplitState, dtype: np.dtype[Any]) -> SplitRecord:
    """Give the files of a split their final names and total them up; doing it twice does no harm."""
    records = []
    for number, size in enumerate(state.shards):
        name = f"{state.name}/{number:05d}"
        sums = {}
        for suffix in PARTS:
            final, temporary = folder / f"{name}{suffix}", _temporary(folder, state, number, suffix)
            if temporary.exists():
                temporary.replace(final)
            if final.exists():
                sums[suffix] = sha256(final)
        largest = _largest(folder / f"{name}.ds", dtype)
        records.append(ShardRecord(name, size.documents, size.tokens, sums, largest))
    return SplitRecord(state.name, state.documents, state.bytes, state.tokens, tuple(records))


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def sha256(path: Path) -> str:
    with _reading(path), files.open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _map(path: Path, dtype: str | np.dtype[Any]) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))  # a plain array: slicing it is far cheaper


def _temporary(folder: Path, state: SplitState, number: int, suffix: str) -> Path:
    return folder / state.name / f"{number:05d}{suffix}.tmp"


def _recorded(folder: Path, record: ShardRecord, manifest: Manifest, verify: bool) -> Shard:
    """A shard, checked against what the manifest says about it."""
    for suffix in PARTS:
        path = folder / f"{record.name}{suffix}"
        with _reading(path):
            present = path.exists()
        if suffix not in record.sha256 and (present or suffix != ".ds.loss"):
            raise HeadgateError(f"{path} is not in the manifest of its folder, which is damaged; {AGAIN}")
        if suffix in record.sha256 and not present:
            raise HeadgateError(f"{path} is missing; {AGAIN}")
    path = folder / f"{record.name}.ds"
    with _reading(path):
        try:
            shard = _open_shard(path, "<u2" if manifest.tokenizer.vocab_size <= 1 << 16 else "<u4")
            documents = beside(path, ".index").stat().st_size // 8
            if (shard.tokens, documents) != (record.tokens, record.documents):
                raise HeadgateError(
                    f"{path} has {shard.tokens} tokens in {documents} documents; its manifest says "
                    f"{record.tokens} in {record.documents}: it is damaged"
                )
        except HeadgateError as error:
            raise HeadgateError(f"{error}; {AGAIN}") from error
    if verify:
        for suffix, expected in record.sha256.items():
            _verify(folder / f"{record.name}{suffix}", expected)
    largest = record.largest
    if largest is None and verify:
        largest = _largest(path, shard.dtype)
        _check_range(path, largest, manifest.tokenizer.vocab_size)
    return replace(shard, largest=largest)


def _verify(path: Path, expected: str) -> None:
    found = sha256(path)
    if found != expected:
        raise HeadgateError(
            f"{path} is damaged: its sha256 begins {found[:12]}, not {expected[:12]} as it did when written; "
            f"{AGAIN}"
        )


def _find(folder: Path) -> list[Path]:
    """The token files below a folder, in the order of their names."""

    def fail(error: OSError) -> None:
        raise error

    with _reading(folder):
        walked = os.walk(folder, onerror=fail)
        return sorted(Path(here, name) for here, _, names in walked for name in names if name.endswith(".ds"))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn a failure to read into one sentence."""
    try:
        yield
    except OSError as error:
        raise HeadgateError(f"{error.filename or path} cannot be read: {error.strerror}") from error


def _read_metadata(path: Path) -> tuple[int, int]:
    """The bytes per token and the number of tokens that datatrove recorded."""
    try:
        first, second = files.read_text(path).splitlines()[:2]
        width, count = int(first.rpartition("|")[2]), int(second)
    except (ValueError, UnicodeDecodeError) as error:
        raise HeadgateError(
            f"{path} is not datatrove's metadata (tokenizer|bytes per token, then a count)"
        ) from error
    if width not in (2, 4):
        raise HeadgateError(f"{path} says {width} bytes per token; expected 2 or 4")
    return width, count
