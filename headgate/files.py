"""Files that are whole or absent, and folders that one process at a time works in."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headgate.errors import HeadgateError


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file under a temporary name, flush it to the disk, then rename it into place."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], values: Any) -> None:
    """Write plain values as JSON, whole or not at all; a number that is not finite is an error."""
    write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """For JSON, which knows no NaN: plain values with None where a number is not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Keep every other process out of a folder, which is made if it is missing, while it is being `doing`.

    The lock is this process's own, so it ends with it however it ends; the file of it is then of no account.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    while True:
        with path.open("w") as file:
            try:
                import fcntl

                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:
                pass  # no such locks on this system
            except BlockingIOError:
                raise HeadgateError(
                    f"{str(folder)!r} is being {doing} by another process; wait for it or stop it"
                ) from None
            try:
                ours = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                ours = False
            if not ours:
                continue  # who held it removed the file after it was opened here
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
