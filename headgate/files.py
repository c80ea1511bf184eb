"""Files that are whole or absent, and folders that one process works in at a time.

A folder may come from somebody else, with a link or a pipe where one of our files should be. So nothing is
written through a link inside such a folder: a new file replaces whatever had its name, and a file that is
appended to must be a plain one. Reading follows links, since data and models are often kept behind them, but
never waits for a pipe.
"""

import io
import json
import math
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from headgate.errors import HeadgateError

AnyPath = str | os.PathLike[str]
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)
"""Without it, opening a pipe would wait for its other end."""
KINDS = ((stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"))
SEAL = "digest"
"""The key of a sealed JSON object that holds the digest of all the others."""


def named(path: AnyPath, what: str) -> Path:
    """A path that was given for `what`; an empty one, for example from an unset variable, is refused."""
    if not os.fspath(path).strip():
        raise HeadgateError(f"{what} is empty; give a path (. is the current folder)")
    return Path(path)


def kind(path: AnyPath, *, follow: bool = True) -> str:
    """What is at a path, for a sentence of the form `path is ...`; empty for a plain file."""
    try:
        mode = (os.stat if follow else os.lstat)(path).st_mode
    except FileNotFoundError:
        return "a link that leads nowhere" if os.path.islink(path) else "missing"
    except OSError as error:
        return f"out of reach ({error.strerror})"
    return _kind(mode)


def is_missing(path: AnyPath) -> bool:
    """Whether there is nothing at all at a path; something that is not a file is refused by whoever reads
    it."""
    return not os.path.lexists(path)


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return ""
    return next((words for test, words in KINDS if test(mode)), "a device")


def open_new(path: AnyPath) -> io.BufferedWriter:
    """A new file to write; whatever had its name is removed (for a link, only the link)."""
    Path(path).unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o666), "wb")


def open_own(path: AnyPath) -> io.FileIO:
    """A file of ours to read and append to, created if missing; its contents are kept.

    A link, a pipe, or a file with a second name is refused: it may be somebody else's.
    """
    found = kind(path, follow=False)
    if found not in ("", "missing"):
        raise HeadgateError(f"{str(path)!r} is {found}; expected a plain file: remove it")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _AT_ONCE | _PLAIN, 0o666)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            words = _kind(status.st_mode) or "known under a second name (a hard link)"
            raise HeadgateError(f"{str(path)!r} is {words}; expected a file with one name: put a copy there")
        return os.fdopen(handle, "a+b", buffering=0)
    except BaseException:
        os.close(handle)
        raise


def own_folder(path: Path) -> Path:
    """A folder inside one of ours, created if missing; a link in its place is refused."""
    with suppress(FileExistsError):
        path.mkdir()
    found = kind(path, follow=False)
    if found != "a folder":
        raise HeadgateError(f"{str(path)!r} is {found or 'a file'}; expected a real folder: remove it")
    return path


def own_place(base: Path, path: Path) -> Path:
    """A place for a folder below one of ours: folders in between are created if missing, and neither they nor
    the path itself may be a link."""
    for parent in reversed(list(path.relative_to(base).parents)[:-1]):
        own_folder(base / parent)
    found = kind(path, follow=False)
    if found not in ("missing", "a folder"):
        raise HeadgateError(f"{str(path)!r} is {found or 'a file'}; expected a real folder: remove it")
    return path


def open_to_read(path: AnyPath) -> io.BufferedReader:
    """A plain file, or a link to one; anything else is refused, a pipe without waiting for it."""
    try:
        handle = os.open(path, os.O_RDONLY | _AT_ONCE | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise HeadgateError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    found = _kind(os.fstat(handle).st_mode)
    if found:
        os.close(handle)
        raise HeadgateError(f"{str(path)!r} is {found}; expected a file")
    return os.fdopen(handle, "rb")


def read_text(path: AnyPath) -> str:
    try:
        with open_to_read(path) as file:
            return file.read().decode()
    except UnicodeDecodeError as error:
        raise HeadgateError(f"{str(path)!r} is not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise HeadgateError(f"{str(path)!r} cannot be read: {error.strerror}") from error


def read_json(path: AnyPath, **hooks: Any) -> dict[str, Any]:
    """The JSON object in a file; anything else is an error that names the file."""
    text = read_text(path)
    try:
        values = json.loads(text, **hooks)
    except json.JSONDecodeError as error:
        raise HeadgateError(f"{str(path)!r} is not JSON: line {error.lineno}: {error.msg}") from error
    except HeadgateError as error:
        raise HeadgateError(f"{str(path)!r}: {error}") from error
    except RecursionError as error:
        raise HeadgateError(f"{str(path)!r} is nested too deeply to be read") from error
    except ValueError as error:  # a number with too many digits
        raise HeadgateError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise HeadgateError(f"{str(path)!r} holds a {type(values).__name__}; expected a JSON object")
    return values


def write_text(path: AnyPath, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: AnyPath, data: bytes) -> None:
    """Write a file under a temporary name, flush it to disk, then rename it into place."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        try:
            with open_new(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    """Write to an unbuffered file, which accepts only part of the data when the disk is nearly full."""
    while data:
        data = data[file.write(data) :]


def require_writable(path: AnyPath) -> None:
    """Raise, before long work, unless a file can be written at a path; nothing is left there."""
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise HeadgateError(f"{str(path)!r} is in a folder that does not exist; make it first")
    if kind(path) not in ("", "missing"):
        raise HeadgateError(f"{str(path)!r} is {kind(path)}; expected a file to write")
    probe = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        open_new(probe).close()
        probe.unlink()


def write_json(path: AnyPath, values: Any) -> None:
    """Write plain values as JSON, whole or not at all; a number that is not finite is an error."""
    write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


@contextmanager
def naming(path: AnyPath) -> Iterator[None]:
    """Make anything that fails inside name this file: a full disk does not name one."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The object with a digest of itself, which reveals damage."""
    assert SEAL not in values
    return {**values, SEAL: _digest(values)}


def unsealed(values: Mapping[str, Any], path: AnyPath) -> dict[str, Any]:
    """The object without its digest, which is verified if there is one."""
    rest = {key: value for key, value in values.items() if key != SEAL}
    if SEAL in values and values[SEAL] != _digest(rest):
        raise HeadgateError(f"{str(path)!r} is damaged: it is not what was written there")
    return rest


def write_sealed(path: AnyPath, values: Mapping[str, Any]) -> None:
    write_json(path, sealed(values))


def read_sealed(path: AnyPath, *, always: bool = False, **hooks: Any) -> dict[str, Any]:
    """A JSON object that was sealed; one without a digest is from an earlier version or written by hand, and
    counts as damaged with `always`."""
    values = read_json(path, **({"parse_constant": _refuse_constant} | hooks))
    if always and SEAL not in values:
        raise HeadgateError(f"{str(path)!r} is damaged: it has no digest")
    return unsealed(values, path)


def _refuse_constant(name: str) -> None:
    raise HeadgateError(f"it holds {name}, which is not a number")


def _digest(values: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(values))  # so that every key is text, and sorts as such
    return xxhash.xxh3_128_hexdigest(json.dumps(as_read, sort_keys=True).encode())


def finite(value: Any) -> Any:
    """For JSON, which has no NaN: plain values with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Keep every other process out of a folder while it is being `doing`.

    The folder is created if missing, and removed again if it ends up empty. The lock belongs to this process
    and ends with it, however it ends; the file that carries it means nothing by itself.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ".lock"
        while True:
            with open_own(path) as file:
                if not _lock(file):
                    raise HeadgateError(
                        f"{str(folder)!r} is being {doing} by another process; wait for it or stop it"
                    )
                try:
                    ours = os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
                except FileNotFoundError:
                    ours = False
                if not ours:
                    continue  # its last holder removed the file after it was opened here
                try:
                    yield
                finally:
                    if sys.platform != "win32":
                        path.unlink(missing_ok=True)
            if sys.platform == "win32":
                with suppress(OSError):  # Windows removes no open file, so the next holder's stays
                    path.unlink()
            return
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def is_locked(path: Path) -> bool:
    """Whether another process holds a folder's lock file, found out without writing."""
    if sys.platform == "win32":
        return True  # whoever held it last removes it
    import fcntl

    with open_to_read(path) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _lock(file: io.FileIO) -> bool:
    """Whether this process now holds the file."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
