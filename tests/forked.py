"""Python processes for tests, forked from one that has loaded PyTorch: a fresh interpreter takes seconds to.

Each worker of the suite has one such process, started when it is first asked for. It never computes, so what
it forks begins like a new interpreter that has imported the same. Some tests of each kind start a real one.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from weakref import WeakSet

from waiting import HANG

from headgate.compare.executors.nursery import Nursery, tend

LOADED = ["torch", "torch._dynamo", "torch.distributed.launcher.api", "headgate.train.start"]


class Forked:
    """A process that runs a script, or a module after "-m", with its words, as `python` would."""

    def __init__(
        self,
        words: Sequence[str | Path],
        environment: Mapping[str, str] = os.environ,
        *,
        processes: int = 0,
        restarts: int = 0,
    ) -> None:
        """Under torchrun if `processes` are asked for, which are restarted together so many times."""
        with tempfile.NamedTemporaryFile(delete=False) as said:
            self._said = Path(said.name)
        given = [str(word) for word in words]
        self._process = _fork(
            _begin, str(self._said), dict(environment), os.getcwd(), given, processes, restarts
        )
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def finish(self, timeout: float = HANG) -> tuple[int, str]:
        """Its code, and all that it said, once it has ended."""
        self._process.join(timeout)
        code = self._process.exitcode
        self.send_signal(signal.SIGKILL)
        said = self._said.read_text(encoding="utf-8")
        self._said.unlink()
        assert code is not None, f"it would not end: {said}"
        return code, said


def run(
    words: Sequence[str | Path], environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run to the end; `stdout` has all that was said."""
    code, said = Forked(words, environment).finish()
    return subprocess.CompletedProcess(list(words), code, said)


class ForkedNursery(Nursery):
    """The nursery of a study that a test runs in its own process. One with several threads is a real one,
    since PyTorch settles their number when it is loaded."""

    living: "WeakSet[ForkedNursery]" = WeakSet()

    def __init__(self, study: Path, threads: int) -> None:
        if threads != 1:
            super().__init__(study, threads)
            return
        keys, to = multiprocessing.Pipe(duplex=False)
        answers, ended = multiprocessing.Pipe(duplex=False)
        self._process = _Ending(_fork(_tend, str(study), dict(os.environ), keys, ended))  # type: ignore[assignment]
        self._in, self._out = (
            os.fdopen(os.dup(end.fileno()), mode, buffering=0) for end, mode in ((to, "wb"), (answers, "rb"))
        )
        for end in (keys, to, answers, ended):
            end.close()
        os.set_blocking(self._out.fileno(), False)
        self._running, self._unread = set(), b""
        self.living.add(self)


class _Ending:
    """The part of a Popen that a nursery uses."""

    def __init__(self, process: BaseProcess) -> None:
        self._process, self.terminate, self.wait = process, process.terminate, process.join

    def poll(self) -> int | None:
        return self._process.exitcode


def _tend(study: str, environment: dict[str, str], keys: Connection, ended: Connection) -> None:
    _have(environment)
    os.dup2(keys.fileno(), 0)
    os.dup2(ended.fileno(), 1)
    os.setsid()
    sys.exit(tend([study, str(os.getppid())]))


def _fork(target: Callable[..., None], *given: Any) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    process = context.Process(target=target, args=given)
    process.start()
    return process


def _have(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _begin(
    said: str, environment: dict[str, str], folder: str, words: list[str], processes: int, restarts: int
) -> None:
    to = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(to, 1)
    os.dup2(to, 2)
    _have(environment)
    os.chdir(folder)
    if not processes:
        return _run(words)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="test",
        max_restarts=restarts,
        start_method="fork",
    )
    elastic_launch(config, _run)(words)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
