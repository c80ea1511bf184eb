"""Safetensors files in a fixed order that carry a digest of themselves.

Equal tensors and equal metadata are equal bytes, which the library does not promise: it writes metadata in an
order that changes from process to process. The digest, XXH3 of the whole file with zeros in its own place, is
an entry of the metadata; it is there to notice damage, not malice.
"""

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headgate import files
from headgate.errors import HeadgateError

KEY = "xxh3"
ZEROS = "0" * 32
DTYPES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.int16: "I16",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int8: "I8", torch.bool: "BOOL",
}  # fmt: skip
"""The widest first: so every tensor stands at a multiple of its width."""


class Damaged(HeadgateError):
    """A file that is not what was written."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a new file, flushed to the disk; returns its digest."""
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
            digest.update(data)
            file.write(data)
        file.seek(8 + text.index(ZEROS.encode()))
        file.write(digest.hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())
    return str(digest.hexdigest())


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; nothing but its header is read."""
    try:
        files.open_to_read(path).close()  # else a pipe would be waited for
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{str(path)!r} is not a whole safetensors file ({error})") from error


def read_tensors(path: Path, *, verified: bool = False) -> dict[str, Tensor]:
    """All tensors of a file, whose digest is verified if it has one and that has not been done."""
    if not verified:
        verify(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{str(path)!r} is not a whole safetensors file ({error})") from error


def verify(path: Path, expected: str | None = None) -> None:
    """Raise `Damaged` unless the file is what was written, and where `expected` is given, with that digest.

    A file of another program has no digest; only its structure can be looked at.
    """
    recorded = read_metadata(path).get(KEY)
    if expected is not None and recorded != expected:
        raise Damaged(f"{str(path)!r} is damaged, or another file: its digest is {recorded}, not {expected}")
    if recorded is None:
        return
    with files.open_to_read(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = 8 + int.from_bytes(data[:8], "little")
        digest = xxhash.xxh3_128(data[:begin].replace(recorded.encode(), ZEROS.encode(), 1))
        with memoryview(data) as view, view[begin:] as rest:
            digest.update(rest)
    if digest.hexdigest() != recorded:
        raise Damaged(
            f"{str(path)!r} is damaged: its digest begins {digest.hexdigest()[:12]}, and not {recorded[:12]} "
            "as when it was written"
        )
