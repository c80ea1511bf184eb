"""Commands run in this process as a hostile user would run them, and what every answer must be."""

import contextlib
import hashlib
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from waiting import HANG

from headgate import cli

OUTSIDE = b"precious\n" * 40


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The last line, which is the error where there is one."""
        return (self.err.strip().splitlines() or [""])[-1]


def attempt(*words: str | Path) -> Answer:
    """Run a command line; a hang and an exception that reaches the user are failures."""

    def hang(number: int, frame: object) -> None:
        pytest.fail(f"it hangs: headgate {' '.join(map(str, words))[:200]}")

    out, err = io.StringIO(), io.StringIO()
    before, handler = sys.argv, signal.signal(signal.SIGALRM, hang)
    sys.argv = ["headgate", *map(str, words)]
    signal.alarm(int(HANG))
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        sys.argv = before
    return Answer(code, out.getvalue(), err.getvalue())


def assert_refused(answer: Answer, *fragments: str) -> None:
    """One sentence on standard error and exit code 2."""
    assert answer.code == 2, (answer.code, answer.out[-500:], answer.err[-2000:])
    assert answer.sentence.startswith("headgate: "), answer.err[-2000:]
    assert answer.err.count("headgate: ") == 1, answer.err[-2000:]
    assert "Traceback" not in answer.err
    for mark in ("None;", ": None", "<class", "\u2500", "{None}"):
        assert mark not in answer.sentence, answer.sentence
    for fragment in fragments:
        assert fragment in answer.sentence, answer.sentence


def flip(path: Path, share: float, bit: int = 2) -> None:
    """Turn one bit over, at this share of the file."""
    data = bytearray(path.read_bytes())
    if data:
        data[min(int(share * len(data)), len(data) - 1)] ^= 1 << bit
        path.write_bytes(data)


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def replaced(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def as_link(path: Path) -> None:
    """To a file outside, which is as the file was."""
    outside = path.parents[1] / f"outside-{hashlib.md5(str(path).encode()).hexdigest()[:6]}"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)


def as_pipe(path: Path) -> None:
    replaced(path)
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    replaced(path)
    path.mkdir()


def writing(text: str | bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"flip-{n}": partial(flip, share=n / 8 + 0.01, bit=n % 7) for n in range(8)},
    "cut-half": lambda path: cut(path, 0.5),
    "cut-end": lambda path: cut(path, 0.99),
    "empty": writing(b""),
    "not-utf8": writing(b"\xff\xfe{}"),
    "not-json": writing("{"),
    "list": writing("[]"),
    "object": writing("{}"),
    "deep": writing("[" * 200_000),
    "nan": writing('{"step": NaN}'),
    "missing": Path.unlink,
    "pipe": as_pipe,
    "folder": as_folder,
}


def tree(folder: Path) -> dict[str, str]:
    """What lies below a folder, links not followed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "other"
    return found


@contextlib.contextmanager
def untouched(folder: Path) -> Iterator[None]:
    before = tree(folder)
    yield
    assert tree(folder) == before, "something outside was changed"
