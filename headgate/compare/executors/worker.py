"""Carries out one run of a study, wherever an engine has put it.

The run itself is a child process, `headgate train` as a person would call it, under torchrun if a run has
several processes. The worker holds the run's lease while the child lives, and records how it ended. It
imports nothing heavy, so it costs next to nothing beside the child; a worker that comes from a nursery has
everything loaded, and forks its child.
"""

import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headgate import config, files
from headgate.compare.executors.leases import Lease
from headgate.compare.executors.nursery import end_with_parent, fork
from headgate.errors import HeadgateError

STOPPED = {code for number in (signal.SIGTERM, signal.SIGINT) for code in (-number, 128 + number)}
"""Exit codes of a run that was asked to stop, and saved first."""
PATIENCE = 60.0
"""Seconds that a dead worker's process is given to save and leave the run's folder."""


@dataclass(frozen=True)
class Task:
    """A run to be carried out; kept in the study's folder, where the worker finds it."""

    key: str
    """A unique file name within the study."""
    name: str
    """As people see it."""
    words: tuple[str, ...]
    """The command's words after `headgate`."""
    folder: str
    """Where the run writes; only one process at a time may."""
    log: str
    threads: int = 1
    processes: int = 1
    """Processes on each node; more than one are started by torchrun."""
    exclusive: bool = False
    """Whether nothing else may run beside it, as when costs are measured."""
    module: str = "headgate"
    """The module that Python runs with these words."""
    end: int = 0
    """The step it trains to, if it is a run."""
    silent: str = ""
    """The pulse of its last holder, if whoever queued it again has waited for another beat in vain."""
    directory: str = field(default_factory=os.getcwd)
    """The folder that relative paths above start from."""

    def path(self, name: str) -> Path:
        """One of the paths above, valid from anywhere."""
        return Path(self.directory, name)


@dataclass(frozen=True)
class Nodes:
    """Where a run on several nodes finds the others; only the first holds the lease."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0


def task_path(study: Path, key: str) -> Path:
    return study / "queue" / f"{key}.json"


def lease_folder(study: Path, key: str) -> Path:
    return study / "leases" / key


def write_task(study: Path, task: Task) -> None:
    for folder in ("queue", "leases"):
        files.own_folder(study / folder)
    config.save(task, task_path(study, task.key), seal=True)


def read_task(study: Path, key: str) -> Task:
    return config.load(Task, task_path(study, key))


def work(
    study: Path,
    key: str,
    engine: str,
    *,
    job: str = "",
    nodes: Nodes | None = None,
    failing: Callable[[], Any] = lambda: None,
) -> int:
    """Carry out a task; returns its exit code, or 0 if another worker has it. `failing` is called before it
    is noted that the run has failed by itself."""
    task, nodes = read_task(study, key), nodes or Nodes()
    os.chdir(task.directory)
    if nodes.rank:
        return _Child(task, nodes).wait()
    files.own_folder(lease_folder(study, key))
    lease = Lease.take(lease_folder(study, key), engine=engine, job=job, silent=task.silent)
    if lease is None:
        return 0
    _wait_for_folder(Path(task.folder))
    child = _Child(task, nodes)
    done = lease.keep(child.kill)  # whoever holds the run now must not find another process writing to it
    try:
        code = child.wait()
        if code not in (0, *STOPPED):
            failing()
    finally:
        done.set()
    lease.beat(ended=code)
    return code


class _Child:
    def __init__(self, task: Task, nodes: Nodes) -> None:
        alone = task.processes == nodes.count == 1
        environment = os.environ | {"OMP_NUM_THREADS": str(task.threads), "PYTHONUNBUFFERED": "1"}
        with files.open_own(task.log) if nodes.rank else files.open_new(task.log) as log:
            if alone and "headgate.train.start" in sys.modules:
                self._process: subprocess.Popen[bytes] | _Forked = _Forked(task, log.fileno())
            else:
                self._process = subprocess.Popen(
                    _command(task, nodes), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                    start_new_session=True, preexec_fn=None if sys.platform == "win32" else end_with_parent,
                )  # fmt: skip
        self._log = task.log
        self._stopped_by = 0
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        self._stopped_by = number
        self._process.terminate()

    def kill(self) -> None:
        for pid in (self._process.pid, *_descendants(self._process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self) -> int:
        code = self._process.wait()
        if code < 0:  # a killed process could not log why it ended
            with files.open_own(self._log) as log:
                files.write_all(log, f"\nthe process was ended by {signal.Signals(-code).name}\n".encode())
        # torchrun calls it a failure of its own that it was asked to stop.
        return 128 + self._stopped_by if code and self._stopped_by else code


def _command(task: Task, nodes: Nodes) -> list[str]:
    if task.processes == nodes.count == 1:
        return [sys.executable, "-m", task.module, *task.words]
    run = [
        "--nproc-per-node",
        str(task.processes),
        "--nnodes",
        str(nodes.count),
        "--node-rank",
        str(nodes.rank),
    ]
    if nodes.count == 1:
        run.append("--standalone")
    else:
        run += ["--master-addr", nodes.address, "--master-port", str(nodes.port)]
    return [sys.executable, "-m", "torch.distributed.run", *run, "-m", task.module, *task.words]


class _Forked:
    """A task's module in a fork of this process."""

    def __init__(self, task: Task, log: int) -> None:
        self._process = fork(_run_module, task, log)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _run_module(task: Task, log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(write_through=True)
    sys.argv = [task.module, *task.words]
    runpy.run_module(task.module, run_name="__main__", alter_sys=True)


def _descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have started; only Linux tells."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found[1:]


def _wait_for_folder(folder: Path) -> None:
    """Wait until a dead worker's child has saved and released the run."""
    until = time.monotonic() + PATIENCE
    while folder.is_dir() and time.monotonic() < until:
        try:
            with files.locked(folder, "trained"):
                return
        except HeadgateError:
            time.sleep(0.2)


def say_how_to_return(active: Set[str], study: Path) -> None:
    """For an engine whose runs continue when the study's process ends before them."""
    if active:
        print(
            f"headgate: the runs continue; the same command waits for them again, headgate status {study} "
            f"shows how far they have come, headgate cancel {study} stops them",
            file=sys.stderr,
        )


def main(words: Sequence[str]) -> int:
    study, key, parent = words
    end_with_parent()
    if os.getppid() != int(parent):  # it died before this was asked
        return 128 + signal.SIGTERM
    return work(Path(study), key, "local")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
