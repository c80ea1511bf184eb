"""Safetensors files in a fixed order that carry a digest of themselves.

Equal tensors and equal metadata give equal bytes, which the library does not promise: it writes metadata in
an order that changes from process to process. The digest, XXH3 of the whole file with zeros in its own place,
is an entry in the metadata; it is there to notice damage, not malice.

A file is read in one pass, piece by piece, each hashed while it is still in the processor's cache; a separate
pass would cost several times as much (benchmarks/loading.py).
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from headgate import files
from headgate.errors import HeadgateError

KEY = "xxh3"
ZEROS = "0" * 32
DTYPES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.int16: "I16",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int8: "I8", torch.bool: "BOOL",
}  # fmt: skip
"""Widest first, so that every tensor starts at a multiple of its width."""
MOST_HEADER = 100_000_000
"""Bytes; the library's own limit."""
PIECE = 1 << 18
"""Bytes read and hashed at a time: few enough for the cache, yet enough that calls cost nothing."""


class Damaged(HeadgateError):
    """A file that is not what was written."""


@dataclass(frozen=True)
class Entry:
    """What the header says about a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFile:
    """A safetensors file whose header has been read; the tensors are in the order of the file."""

    def __init__(self, path: Path, expected: str | None = None, *, prefix: str = "") -> None:
        """Raises `Damaged` unless the file is complete and, if `expected` is given, has that digest; a
        `prefix` is removed from names."""
        self.path = path
        try:
            with files.open_to_read(path) as file:
                size = os.fstat(file.fileno()).st_size - 8
                length = int.from_bytes(file.read(8), "little")
                if length > min(size, MOST_HEADER):
                    raise ValueError("its header is cut off")
                self._header = file.read(length)
            self.metadata, entries = _parse(self._header, size - length)
            self.entries = {name.removeprefix(prefix): entry for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, HeadgateError):
                raise
            raise Damaged(f"{str(path)!r} is not a complete safetensors file ({error})") from error
        except OSError as error:
            raise Damaged(f"{str(path)!r} cannot be read: {error.strerror}") from error
        self.digest = self.metadata.get(KEY)
        if expected is not None and self.digest != expected:
            raise Damaged(
                f"{str(path)!r} is damaged, or another file: its digest is {self.digest}, not {expected}"
            )

    def read(self, into: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor in turn. It is read into the tensor of that name in `into` if that has the same type
        and is in main memory; otherwise it is a new one.

        Raises `Damaged` after the last one if they are not what was written; another program's file has no
        digest, and only its structure is known to be intact.
        """
        wrong = ""
        with files.open_to_read(self.path) as file:
            if file.read(8 + len(self._header))[8:] != self._header:
                wrong = "it is being changed"
            digest = self._digest_of_header()
            for name, entry in self.entries.items():
                tensor = _place(entry, (into or {}).get(name))
                data = tensor.view(-1).view(torch.uint8).numpy().data
                for begin in range(0, len(data), PIECE):
                    piece = data[begin : begin + PIECE]
                    try:
                        if not wrong and file.readinto(piece) < len(piece):
                            wrong = "it is being cut off"
                    except OSError as error:
                        wrong = f"it cannot be read: {error.strerror}"
                    if self.digest is not None:
                        digest.update(piece)
                yield name, tensor
        self._refuse_damaged(digest, wrong)

    def verify(self) -> None:
        """Raise `Damaged` unless the file matches its digest, if it has one; no tensor is held."""
        if self.digest is None:
            return
        digest, piece, wrong = self._digest_of_header(), bytearray(PIECE), ""
        try:
            with files.open_to_read(self.path) as file:
                file.seek(8 + len(self._header))
                while length := file.readinto(piece):
                    digest.update(memoryview(piece)[:length])
        except OSError as error:
            wrong = f"it cannot be read: {error.strerror}"
        self._refuse_damaged(digest, wrong)

    def _digest_of_header(self) -> xxhash.xxh3_128:
        digest = xxhash.xxh3_128(len(self._header).to_bytes(8, "little"))
        digest.update(self._header.replace((self.digest or ZEROS).encode(), ZEROS.encode(), 1))
        return digest

    def _refuse_damaged(self, digest: xxhash.xxh3_128, wrong: str) -> None:
        if not wrong and self.digest is not None and self.digest != digest.hexdigest():
            wrong = f"its digest begins {digest.hexdigest()[:12]}, not {self.digest[:12]} as when it was"
            wrong += " written"
        if wrong:
            raise Damaged(f"{str(self.path)!r} is damaged: {wrong}")


def _parse(header: bytes, size: int) -> tuple[dict[str, str], dict[str, Entry]]:
    """Metadata and entries of a header followed by `size` bytes, all of which belong to a tensor."""
    values = json.loads(header, object_pairs_hook=_unique)
    metadata = values.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not text")
    known = {name: dtype for dtype, name in DTYPES.items()}
    entries: dict[str, Entry] = {}
    at = 0
    for name, value in sorted(values.items(), key=lambda item: item[1]["data_offsets"]):
        if value["dtype"] not in known:
            raise ValueError(f"{name} is {value['dtype']}, which headgate does not read")
        entry = Entry(known[value["dtype"]], tuple(value["shape"]))
        begin, end = value["data_offsets"]
        if not all(isinstance(n, int) and n >= 0 for n in (*entry.shape, end)):
            raise ValueError(f"{name} has no shape")
        if begin != at or end - begin != math.prod(entry.shape) * entry.dtype.itemsize:
            raise ValueError(f"{name} is not where its shape says")
        entries[name], at = entry, end
    if at != size:
        raise ValueError(f"{size} bytes follow its header but it names {at}")
    return dict(metadata), entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name appears twice in its header")
    return dict(pairs)


def _place(entry: Entry, target: Tensor | None) -> Tensor:
    """The tensor to read into."""
    if (
        type(target) in (Tensor, nn.Parameter)
        and target is not None
        and (target.dtype, target.shape, target.device.type) == (entry.dtype, entry.shape, "cpu")
        and target.is_contiguous()
    ):
        return target.detach()
    return torch.empty(entry.shape, dtype=entry.dtype)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a new file, flushed to disk; returns its digest."""
    ranks = {dtype: rank for rank, dtype in enumerate(DTYPES)}
    ordered = sorted(tensors.items(), key=lambda item: (ranks[item[1].dtype], item[0]))
    metadata = {"format": "pt", **(metadata or {}), KEY: ZEROS}
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    with files.naming(path), files.open_new(path) as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            digest.update(piece)
            file.write(piece)
        for _, tensor in ordered:
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for at in range(0, len(data), PIECE):
                digest.update(data[at : at + PIECE])
                file.write(data[at : at + PIECE])
        file.seek(8 + text.index(ZEROS.encode()))
        file.write(digest.hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())
    return str(digest.hexdigest())


def replace_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file, or take the place of an older one at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_tensors(temporary, tensors)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; only its header is read."""
    return TensorFile(path).metadata


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors in a file, whose digest is verified if it has one."""
    return dict(TensorFile(path).read())
