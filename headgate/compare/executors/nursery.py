"""A process that has loaded PyTorch and forks the runs of a study on this machine.

Loading takes longer than many a small run. The nursery itself never computes, so no thread exists in it that
a fork would lose, and a forked run gives the same numbers as one that starts by itself. Only Linux ends
forked processes with their parent, so only there is it used.
"""

import ctypes
import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGTERM, signal.SIGINT)


def can_fork() -> bool:
    """Whether runs on this machine are forked."""
    return sys.platform.startswith("linux")


class Nursery:
    """The nursery, as the study's process sees it: keys of tasks go in, and come out when their workers
    end."""

    def __init__(self, study: Path, threads: int) -> None:
        # In its own session, so that Ctrl-C reaches only this process, which then stops the runs.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(study), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._out.fileno(), False)
        self._running: set[str] = set()
        self._unread = b""

    def start(self, key: str) -> None:
        self._running.add(key)
        self._in.write(f"{key}\n".encode())

    def running(self) -> set[str]:
        """Keys whose workers have not ended; none if the nursery itself is gone."""
        gone = self._process.poll() is not None
        while new := self._out.read(1 << 16):
            self._unread += new
        *ended, self._unread = self._unread.split(b"\n")
        self._running -= {key.decode() for key in ended}
        if gone:
            self._running.clear()
        return set(self._running)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def news(self) -> int:
        """The descriptor that becomes readable when a worker has ended."""
        return self._out.fileno()

    def stop(self) -> None:
        """Ask the runs to save and end, and wait for it."""
        self._process.terminate()
        self._process.wait()
        self._in.close()
        self._out.close()


def fork(target: Callable[..., Any], *given: Any) -> BaseProcess:
    """A process in a session of its own that calls `target`, and is asked to end when this one does."""
    process = multiprocessing.get_context("fork").Process(target=_begin, args=(os.getpid(), target, *given))
    # A signal that comes before the child has its own handlers would meet this process's.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    return process


def _begin(parent: int, target: Callable[..., Any], *given: Any) -> None:
    os.setsid()
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    end_with_parent()
    if os.getppid() != parent:  # it died before this was asked
        sys.exit(128 + signal.SIGTERM)
    sys.exit(target(*given))


def end_with_parent() -> None:
    """Linux ends a process whose parent is gone; elsewhere an orphan trains on, and its lock keeps others
    out."""
    if can_fork():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def tend(words: Sequence[str]) -> int:
    study, parent = words
    end_with_parent()
    if os.getppid() != int(parent):
        return 128 + signal.SIGTERM
    from headgate.compare.executors.worker import work

    _load()
    asked_to_end = False

    def end(number: int, frame: object) -> None:
        nonlocal asked_to_end
        asked_to_end = True

    for number in ENDING:
        signal.signal(number, end)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a worker prints is not an answer
    workers: dict[str, BaseProcess] = {}
    unread = b""
    while not asked_to_end:
        if select.select([0], [], [], 0.05)[0]:
            new = os.read(0, 1 << 16)
            asked_to_end |= not new
            *keys, unread = (unread + new).split(b"\n")
            for key in map(bytes.decode, keys):
                workers[key] = fork(work, Path(study), key, "local")
        for key, worker in list(workers.items()):
            if worker.exitcode is not None:
                del workers[key]
                os.write(answers, f"{key}\n".encode())
    for worker in workers.values():
        worker.terminate()
    for worker in workers.values():
        worker.join()
    return 0


def _load() -> None:
    """Everything that a run loads, so that no run has to."""
    import torch._dynamo  # optimisers load it

    import headgate.train.start  # noqa: F401

    assert not torch.cuda.is_initialized(), "a fork could not use the GPU"
    gc.freeze()  # so that collecting garbage does not write to pages that all processes share


if __name__ == "__main__":
    sys.exit(tend(sys.argv[1:]))
