"""The folder that prepare writes: which process owns it, how far it has come, and what is removed again.

One process owns a folder at a time. `progress.json` marks it as started: until a document is recorded there,
everything that prepare may have written is removed before it starts again. Nothing else in a folder is
touched.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate import config, files
from headgate.data.shards import SPLITS, WRITTEN, SplitState
from headgate.errors import HeadgateError

SMALL = ("sources.jsonl", "tokenizer.json", "manifest.json", "progress.json")
LEFTOVER = re.compile(rf"\.({'|'.join(map(re.escape, SMALL))})\.\d+\.tmp")
"""The temporary file that an interrupted write leaves."""


@dataclass(frozen=True)
class Checkpoint:
    """A place in the source, and what had been written by then."""

    file: int = 0
    row: int = 0
    repeats: int = 0
    splits: tuple[SplitState, ...] = tuple(SplitState(name) for name in SPLITS)

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self.splits)

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits)


@dataclass(frozen=True)
class PrepareState:
    """What `progress.json` holds until the work is done."""

    request: Mapping[str, Any]
    now: Checkpoint = Checkpoint()
    file_start: Checkpoint = Checkpoint()
    """Where to go back to if the file being read has changed since, for example because a bad row was
    fixed."""
    fingerprint: str = ""
    """The fingerprint of the file being read."""
    end_of_text: str = ""
    """The tokenizer's closing token, once the folder has a tokenizer."""
    finished: bool = False


def is_finished(folder: Path) -> bool:
    """Whether nothing is left to do in it, not even cleaning up."""
    left = any(os.path.exists(folder / name) for name in ("progress.json", ".lock"))
    return os.path.exists(folder / "manifest.json") and not left


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Reserve a folder for this process; it is created if missing, and removed if it ends up empty.

    A signal that asks the process to end is handled like Ctrl-C: what is done is recorded first.
    """
    try:
        with files.locked(folder, "prepared"), _signals():
            yield
    except KeyboardInterrupt:
        if os.path.exists(folder / "progress.json"):
            print(
                f"headgate: what was done is kept in {str(folder)!r}; the same command continues from there",
                file=sys.stderr,
            )
        raise
    except OSError as error:
        kept = "; what was done before is kept, and the same command continues from there"
        raise HeadgateError(
            f"{str(error.filename or folder)!r} cannot be written: {error.strerror}"
            f"{kept if os.path.exists(folder / 'progress.json') else ''}"
        ) from error


@contextmanager
def _signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP act like Ctrl-C; one that is ignored or handled already is left alone."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    ours = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def begun(folder: Path) -> PrepareState | None:
    """What an earlier call recorded here; None, with the folder emptied, if no document had been kept."""
    if (folder / "progress.json").exists():
        progress = config.load(PrepareState, folder / "progress.json")
        if progress.now.documents:
            return progress
        remove_all(folder)
    foreign = sorted(
        child.name
        for child in folder.iterdir()
        if child.name != ".lock" and not LEFTOVER.fullmatch(child.name)
    )
    if foreign:
        raise HeadgateError(
            f"{str(folder)!r} holds {foreign[0]!r} but no manifest.json; choose another folder"
        )
    remove(folder)
    return None


def remove(folder: Path, *names: str) -> None:
    """Remove these files, and any temporary files that interrupted writes left behind."""
    leftovers = [path for path in folder.glob(".*.tmp") if LEFTOVER.fullmatch(path.name)]
    for path in [*leftovers, *(folder / name for name in names)]:
        path.unlink(missing_ok=True)


def remove_all(folder: Path) -> None:
    """Empty a folder in which no document has been kept yet; the file that marks it as ours goes last."""
    for home in (folder / name for name in SPLITS):
        if home.is_symlink():
            raise HeadgateError(f"{str(home)!r} is a link; expected a real folder: remove it")
        for path in home.glob("*.ds*"):
            if WRITTEN.fullmatch(path.name):
                path.unlink()
        with suppress(OSError):
            home.rmdir()
    remove(folder, "keys.tmp", "sources.jsonl", "tokenizer.json", "progress.json")
