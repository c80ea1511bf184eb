"""Which split a document belongs to, and whether its text has been seen before: both follow from its key."""

import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headgate import files
from headgate.errors import HeadgateError

Shares = tuple[int, int, int]
"""Shares of train, val and test."""


def parse_shares(text: str) -> Shares:
    parts = text.split("/")
    if len(parts) != 3 or not all(part.strip().isdecimal() and len(part) < 16 for part in parts):
        raise HeadgateError(f"splits {text!r} are not whole shares for train, val and test, such as 80/10/10")
    train, val, test = map(int, parts)
    return train, val, test


def require_training(shares: Shares) -> None:
    if shares[0] < 1 or min(shares) < 0:
        raise HeadgateError(f"splits={shares} leave nothing to train on; try (80, 10, 10)")


def document_key(text: bytes) -> int:
    """A number for each text: 64 bits of its SHA-256."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def split_of(keys: np.ndarray, shares: Sequence[int]) -> np.ndarray:
    """The index in `shares` of each key: the same on every machine, whatever surrounds the document."""
    total = sum(shares)
    # A bound is the last key of its split, so that 2**64 itself, the end of the last split, is never needed.
    lasts = [((part << 64) // total) - 1 for part in itertools.accumulate(shares[:-1])]
    result = np.zeros(len(keys), dtype=np.intp)
    for last in lasts:
        result += keys > np.uint64(last) if last >= 0 else 1
    return result


class Seen:
    """The keys of all documents kept so far, eight bytes each in memory and in a file that survives a crash.

    They are kept in a few sorted runs, each more than twice as long as the next, so that a lookup takes a few
    binary searches and a key is moved only as often as its run doubles.
    """

    def __init__(self, path: Path, count: int) -> None:
        """Read the first `count` keys of the file, and discard what was written after them."""
        self._runs: list[np.ndarray] = []
        self._file = files.open_own(path)
        self._file.truncate(8 * count)
        self._file.seek(0)
        known = np.frombuffer(self._file.read(), dtype="<u8")
        if len(known) < count:
            raise HeadgateError(f"{path} is shorter than when it was left; delete the folder and start again")
        self._insert(np.sort(known))

    def first_time(self, keys: np.ndarray) -> np.ndarray:
        """Which of `keys` are neither known already nor earlier in `keys`."""
        fresh = np.zeros(len(keys), dtype=bool)
        fresh[np.unique(keys, return_index=True)[1]] = True
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            fresh &= run[place] != keys
        return fresh

    def add(self, keys: np.ndarray) -> None:
        files.write_all(self._file, keys.astype("<u8").tobytes())
        self._insert(np.sort(keys))

    def _insert(self, run: np.ndarray) -> None:
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")
        if len(run):
            self._runs.append(run)

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
