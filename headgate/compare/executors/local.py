"""Runs on this machine: separate processes, a few at a time, which end with the study's process."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from headgate.compare.executors.worker import Task


class LocalExecutor:
    interval = 0.2

    def __init__(self, study: Path, at_once: int) -> None:
        self.study, self.at_once = study, at_once
        self._waiting: list[Task] = []
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, tasks: Sequence[Task]) -> None:
        self._waiting += tasks
        self._launch()

    def active(self) -> set[str]:
        for key, process in list(self._running.items()):
            if process.poll() is not None:
                del self._running[key]
        self._launch()
        return {*self._running, *(task.key for task in self._waiting)}

    def stop(self) -> None:
        if self.active():
            print(
                "headgate: stopping the runs, which save their state; the same command resumes them",
                file=sys.stderr,
            )
        self._waiting.clear()
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait()

    def cancel(self) -> None:
        self.stop()

    def _launch(self) -> None:
        while self._waiting and len(self._running) < self.at_once:
            task = self._waiting.pop(0)
            words = ["-m", "headgate.compare.executors.worker", str(self.study), task.key, str(os.getpid())]
            # In its own session, so that Ctrl-C reaches only this process, which then stops the runs.
            self._running[task.key] = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.DEVNULL, start_new_session=True
            )
