"""Jobs as processes of this machine.

Each run is a process of its own, `headgate train` as a person would call it. However the study ends, its runs
save and end first.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headgate import files
from headgate.compare.jobs import Job, failure
from headgate.compare.progress import StudyProgress
from headgate.train.folder import last_step, read_metrics


@dataclass(frozen=True)
class LocalExecutor:
    study_folder: Path
    data: str
    threads: int
    """Of each run."""
    at_once: int

    def run(self, jobs: Sequence[Job], progress: StudyProgress) -> list[Job]:
        waiting = [job for job in jobs if not job.finished]
        settled = sum(job.end for job in jobs if job.finished)
        begun = sum(min(last_step(job.folder), job.end) for job in waiting)
        progress.begin_runs(
            total=sum(job.end for job in jobs), done=settled + begun, runs=len(jobs), left=len(waiting)
        )
        running: dict[Job, subprocess.Popen[bytes]] = {}
        failed: list[Job] = []
        with _children(running):
            while waiting or running:
                while waiting and len(running) < self.at_once:
                    job = waiting.pop(0)
                    running[job] = self._launch(job)
                time.sleep(0.05)
                for job, process in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[job]
                    settled += job.end
                    if process.returncode == 0 and job.finished:
                        progress.finished(job.name, last_loss(job))
                    else:
                        _note_exit(job, process.returncode)
                        failed.append(job)
                        progress.failed(job.name, failure(job.log))
                on_the_way = [*running, *waiting]
                done = settled + sum(min(last_step(job.folder), job.end) for job in on_the_way)
                progress.update_runs(done, [job.name for job in running])
        return failed

    def _launch(self, job: Job) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        words = job.command(self.study_folder, self.data)
        for parent in reversed(job.folder.relative_to(self.study_folder).parents[:-1]):
            files.own_folder(self.study_folder / parent)
        with files.open_new(job.log) as log:
            # A session of its own, so that Ctrl-C reaches this process alone, which then stops the runs in
            # order.
            return subprocess.Popen(
                [sys.executable, "-m", "headgate.compare.executors.run_process", str(os.getpid()), *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip


def last_loss(job: Job) -> float:
    """Of its last evaluation; not a number if there is none."""
    if (job.folder / "summary.json").is_file():
        loss = json.loads((job.folder / "summary.json").read_text(encoding="utf-8"))["final"]["loss"]
        return math.nan if loss is None else float(loss)
    evaluated = [line for line in read_metrics(job.folder) if "validation" in line]
    loss = evaluated[-1]["validation"]["loss"] if evaluated else None
    return math.nan if loss is None else float(loss)


@contextmanager
def _children(running: Mapping[Job, subprocess.Popen[bytes]]) -> Iterator[None]:
    """However the study ends, its runs save and end first; SIGTERM acts like Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    main = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if main:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print(
            "headgate: stopping the runs, which save their state; the same command resumes them",
            file=sys.stderr,
        )
        raise
    finally:
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def _note_exit(job: Job, code: int) -> None:
    """A killed process could not log why it ended."""
    if code < 0:
        with files.open_own(job.log) as log:
            log.write(f"\nthe process was ended by {signal.Signals(-code).name}\n".encode())
