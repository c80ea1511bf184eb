"""How a command ends: anything the user can act on is one sentence and exit code 2.

Exit code 130 follows Ctrl-C, 128 + N another signal that stopped a run. Anything else, with a traceback, is a
bug.
"""

import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from headgate.errors import HeadgateError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors that only writing can meet."""


@contextmanager
def exit_codes() -> Iterator[None]:
    """Run a command inside: its errors become sentences, and its output is flushed before it ends."""
    _usable_streams()
    try:
        try:
            yield
        finally:
            with _naming_output():
                sys.stdout.flush()
    except HeadgateError as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        # The reader has left, as `| head` does; nothing is wrong, and nothing more can be written.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        what = "standard output" if error.filename is None else repr(str(error.filename))
        done = "written" if error.errno in NO_ROOM else "written or read"
        _refuse(f"{what} cannot be {done}: {error.strerror or error}")
    except MemoryError:
        _refuse("there is not enough memory for this; use a smaller model, batch or context")
    except RecursionError:
        _refuse("the input is nested too deeply")
    except RuntimeError as error:
        # PyTorch has no exception class for main memory that cannot be allocated.
        if "out of memory" not in str(error).lower() and "can't allocate memory" not in str(error):
            raise
        _refuse("there is not enough memory for this; use a smaller model, batch or context")


def _usable_streams() -> None:
    """Output goes somewhere, and a character that its encoding lacks is replaced instead of raising."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by our parent process; no file of ours may take its number
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it is kept open
            setattr(sys, name, _Closed() if name == "stdout" else nowhere)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace" if name == "stderr" else "replace")
    if not isinstance(sys.stderr, _Heedless):
        sys.stderr = _Heedless(sys.stderr)


class _Heedless(io.TextIOBase):
    """Standard error, or nothing where that is full or its reader has left."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


class _Closed(io.TextIOBase):
    """A closed standard output: a command with nothing to print works, and others say why they cannot."""

    def write(self, text: str, /) -> int:
        raise HeadgateError("standard output is closed; send it to a file, or to /dev/null")


@contextmanager
def _naming_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError):  # buffered output would fail again at the very end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        number = error.errno or errno.EIO
        raise HeadgateError(f"standard output cannot be written: {os.strerror(number)}") from error


def _refuse(sentence: str) -> None:
    _say(sentence)
    sys.exit(2)


def _say(sentence: str) -> None:
    sentence = re.sub(r"\S{500,}", lambda word: f"{word[0][:100]}...", sentence)  # what was given is long
    rank = os.environ.get("RANK", "0")  # under torchrun every process usually meets the same error
    with suppress(OSError):
        print(f"headgate{'' if rank == '0' else f' (rank {rank})'}: {sentence}", file=sys.stderr)
