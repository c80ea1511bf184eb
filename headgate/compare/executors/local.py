"""Runs on this machine: separate processes, a few at a time, which end with the study's process."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headgate.compare.executors.nursery import Nursery, can_fork
from headgate.compare.executors.worker import Task


class Processes:
    """A new process for each worker, where runs cannot be forked."""

    is_alive = True

    def __init__(self, study: Path) -> None:
        self.study = study
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, key: str) -> None:
        words = ["-m", "headgate.compare.executors.worker", str(self.study), key, str(os.getpid())]
        # In its own session, so that Ctrl-C reaches only this process, which then stops the runs.
        self._running[key] = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def running(self) -> set[str]:
        self._running = {key: process for key, process in self._running.items() if process.poll() is None}
        return set(self._running)

    def stop(self) -> None:
        """Ask the runs to save and end, and wait for it."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait()


INTERVAL = 0.2
"""Seconds between looks at runs that do not tell when they end."""


class LocalExecutor:
    def __init__(self, study: Path, at_once: int) -> None:
        self.study, self.at_once = study, at_once
        self._waiting: list[Task] = []
        self._starters: dict[int, Nursery | Processes] = {}
        """By the number of threads that a run has."""

    def start(self, tasks: Sequence[Task]) -> None:
        self._waiting += tasks
        self._launch()

    def active(self) -> set[str]:
        running = self._launch()
        return running | {task.key for task in self._waiting}

    def wait(self) -> None:
        """A nursery tells when a run has ended, so that the next begins at once."""
        telling = [s.news for s in self._starters.values() if isinstance(s, Nursery) and s.is_alive]
        if telling:
            select.select(telling, [], [], INTERVAL)
        else:
            time.sleep(INTERVAL)

    def stop(self) -> None:
        if self.active():
            print(
                "headgate: stopping the runs, which save their state; the same command resumes them",
                file=sys.stderr,
            )
        self._waiting.clear()
        for starter in self._starters.values():
            starter.stop()
        self._starters.clear()

    def cancel(self) -> None:
        self.stop()

    def _launch(self) -> set[str]:
        """Start what there is room for; returns the keys of what is running."""
        running = {key for starter in self._starters.values() for key in starter.running()}
        while self._waiting and len(running) < self.at_once:
            task = self._waiting.pop(0)
            self._starter(task.threads).start(task.key)
            running.add(task.key)
        return running

    def _starter(self, threads: int) -> Nursery | Processes:
        starter = self._starters.get(threads)
        if starter is None or not starter.is_alive:
            starter = Nursery(self.study, threads) if can_fork() else Processes(self.study)
            self._starters[threads] = starter
        return starter
