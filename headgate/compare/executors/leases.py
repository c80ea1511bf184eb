"""Who is carrying out a run: a lease in a file, renewed while its holder lives.

A lease is a series of generations, `1.json`, `2.json`, ..., in the run's own folder on a file system that all
machines share. The highest one counts. Its holder writes a larger `beats` into it every few seconds; whoever
finds, by its own clock, that it has not changed for a while may take over the run by making the next
generation, which only one can do. A holder that was merely asleep finds the next generation when it wakes,
and gives up. Clocks are never compared with each other.
"""

import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headgate import config
from headgate.errors import HeadgateError

BEAT = 5.0
"""Seconds between beats."""
SILENCE = 40.0
"""Seconds without a beat after which a holder counts as dead."""


@dataclass(frozen=True)
class Holder:
    """What a lease's file says."""

    identity: str
    place: str
    """The machine, its last boot, and the namespace of its processes."""
    pid: int
    host: str
    engine: str
    job: str
    """What the engine calls it; empty if it has no name for it."""
    beats: int = 0
    ended: int | None = None
    """The run's exit code, if the holder saw it end; None while it runs, or if the holder died."""

    @property
    def pulse(self) -> str:
        """Changes with every beat and every holder."""
        return f"{self.identity} {self.beats}"

    @property
    def is_gone(self) -> bool:
        """Whether it is certainly dead: it was a process on this machine, and no longer exists."""
        return self.place == _place() and not _is_alive(self.pid)


def read_holder(folder: Path) -> tuple[int, Holder | None]:
    """The latest generation of a lease and who holds it; 0 and None if nobody ever did. A file that holds
    something else counts as silent."""
    latest = max(_generations(folder), default=0)
    if not latest:
        return 0, None
    try:
        return latest, config.load(Holder, folder / f"{latest}.json")
    except (HeadgateError, OSError):
        return latest, None


class Lease:
    def __init__(self, folder: Path, generation: int, holder: Holder) -> None:
        self.folder, self.generation, self.holder = folder, generation, holder
        self._writing = threading.Lock()

    @classmethod
    def take(
        cls, folder: Path, *, engine: str, job: str = "", silent: str = "", silence: float = SILENCE
    ) -> "Lease | None":
        """The lease, as soon as it is free; None if somebody else holds it and is alive. A holder whose
        pulse is still `silent` need not be watched: somebody has already done so."""
        folder.mkdir(parents=True, exist_ok=True)
        holder = Holder(uuid.uuid4().hex, _place(), os.getpid(), platform.node(), engine, job)
        generation, last = read_holder(folder)
        if generation and not is_free(last) and (last is None or last.pulse != silent):
            watch = Watch(silence)
            while not watch.is_silent(folder):
                if watch.has_beaten:
                    return None
                time.sleep(min(1.0, silence / 4))
            generation, _ = read_holder(folder)
        lease = cls(folder, generation + 1, holder)
        return lease if lease._claim() else None

    def _claim(self) -> bool:
        """Make this generation's file, unless another has; a link is atomic on network file systems too."""
        path = self.folder / f"{self.generation}.json"
        draft = self.folder / f".{self.holder.identity}.tmp"
        config.save(self.holder, draft, seal=True)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise HeadgateError(
                f"{str(path)!r} cannot be made: {error.strerror}; leases need a file system with hard links"
            ) from error
        finally:
            draft.unlink()
        for earlier in _generations(self.folder):
            if earlier < self.generation:
                with suppress(OSError):
                    (self.folder / f"{earlier}.json").unlink()
        return True

    @property
    def is_ours(self) -> bool:
        return max(_generations(self.folder), default=0) == self.generation

    def beat(self, ended: int | None = None) -> bool:
        """Record that the holder is alive, or how the run ended, which is its last word; False if the lease
        has passed to another."""
        with self._writing:
            if not self.is_ours:
                return False
            if self.holder.ended is None:
                self.holder = replace(self.holder, beats=self.holder.beats + 1, ended=ended)
                config.save(self.holder, self.folder / f"{self.generation}.json", seal=True)
            return True

    def keep(self, lost: Callable[[], Any]) -> threading.Event:
        """Beat from a thread until the returned event is set; `lost` is called once if the lease passes to
        another."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(BEAT):
                try:
                    if not self.beat():
                        lost()
                        return
                except OSError:
                    pass  # a full or missing disk may come back; if it does not, others notice the silence

        threading.Thread(target=beat, daemon=True).start()
        return done


class Watch:
    """Looks at a lease now and then, and notices when it falls silent."""

    def __init__(self, silence: float = SILENCE) -> None:
        self._silence = silence
        self._seen: tuple[int, Holder | None] | None = None
        self._since = time.monotonic()
        self.has_beaten = False

    def is_silent(self, folder: Path) -> bool:
        """Whether nobody is at work, as far as is known: ended, gone, or long without a beat."""
        found = read_holder(folder)
        if not found[0] or is_free(found[1]):
            return True
        if found != self._seen:
            self.has_beaten |= self._seen is not None
            self._seen, self._since = found, time.monotonic()
        if time.monotonic() - self._since <= self._silence:
            return False
        _look_afresh(folder)
        return read_holder(folder) == found


def is_free(holder: Holder | None) -> bool:
    """Whether this holder has ended, or is known to be gone."""
    return holder is not None and (holder.ended is not None or holder.is_gone)


def _look_afresh(folder: Path) -> None:
    """Make a network file system forget what it remembers of a folder, which may be a minute old: it asks its
    server again after a change of its own."""
    probe = folder / f".{uuid.uuid4().hex}.tmp"
    with suppress(OSError):
        probe.touch()
        probe.unlink()


def _generations(folder: Path) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()]
    return []


def _place() -> str:
    parts = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id",):
        with suppress(OSError):
            parts.append(Path(path).read_text(encoding="ascii").strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
