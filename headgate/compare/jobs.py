"""A job: one run of a study, as `headgate train` is asked for it; and what carries jobs out.

A study is a series of lists of jobs, phase after phase. Only the run folders record what has been done, so a
list may name jobs that are finished, and a study that was stopped makes the same lists again.
"""

import math
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headgate import files
from headgate.compare.executors.executor import Executor, run_tasks
from headgate.compare.executors.leases import read_holder
from headgate.compare.executors.worker import STOPPED, Task, lease_folder
from headgate.compare.progress import StudyProgress
from headgate.compare.variants import Variant
from headgate.train.checkpoint import saved_steps
from headgate.train.folder import RunFolder, last_step, read_metrics

OURS = r"^headgate( \(rank \d+\))?: "
"""How a line begins that says why a command ended."""


@dataclass(frozen=True, eq=False)
class Job:
    """A run of a variant with a seed."""

    variant: Variant
    seed: int
    folder: Path
    log: Path
    steps: int
    """Steps of its schedule."""
    settings: tuple[str, ...] = ()
    """Changes to the study's config, besides the mechanism and the seed."""
    until: int | None = None
    """Stop after this step, whether it is resumed or not."""
    purpose: str = ""
    """What it is for, if it is not to be judged."""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.purpose, self.variant.label, f"seed {self.seed}")))

    @property
    def end(self) -> int:
        return self.steps if self.until is None else min(self.until, self.steps)

    @property
    def finished(self) -> bool:
        if (self.folder / "summary.json").is_file():
            return True
        return self.end < self.steps and max(saved_steps(RunFolder(self.folder)), default=0) >= self.end

    @property
    def key(self) -> str:
        """A unique file name within the study."""
        return self.log.stem

    @property
    def failed(self) -> bool:
        return has_failed(self.log)

    def command(self, study_folder: Path, data: str) -> list[str]:
        """The words after `headgate` that train it."""
        words = ["train", str(study_folder / "config.json"), "--data", data, "--out", str(self.folder)]
        words += [f"model.mechanism={self.variant.pattern}", f"seed={self.seed}", *self.settings]
        return words if self.end == self.steps else [*words, "--until", str(self.end)]


class RunsJobs(Protocol):
    def run(self, jobs: Sequence[Job], progress: StudyProgress) -> list[Job]:
        """Train those that are not finished; one that fails does not stop the others. Returns those that
        failed."""
        ...


@dataclass(frozen=True)
class JobRunner:
    """Makes an engine carry out the jobs of a study."""

    study_folder: Path
    data: str
    threads: int
    """Per run."""
    executor: Executor
    processes: int = 1
    """Per run."""
    shard: bool = False
    """Whether a run's processes each hold a part of its weights."""

    def run(self, jobs: Sequence[Job], progress: StudyProgress) -> list[Job]:
        waiting = {job.key: job for job in jobs if not job.finished}
        settled = sum(job.end for job in jobs if job.finished)
        begun = sum(min(last_step(job.folder), job.end) for job in waiting.values())
        progress.begin_runs(
            total=sum(job.end for job in jobs), done=settled + begun, runs=len(jobs), left=len(waiting)
        )
        for job in waiting.values():
            files.own_folder(job.log.parent)
            files.own_place(self.study_folder, job.folder)

        def ended(task: Task, finished: bool) -> None:
            nonlocal settled
            job = waiting[task.key]
            settled += job.end
            if finished:
                progress.finished(job.name, last_loss(job))
            else:
                progress.failed(job.name, failure(job.log))

        def looked(running: Sequence[Task]) -> None:
            done = sum(min(last_step(task.folder), waiting[task.key].end) for task in running)
            progress.update_runs(settled + done)

        tasks = [self._task(job) for job in waiting.values()]
        with _interruptible():
            failed = run_tasks(
                self.executor,
                self.study_folder,
                tasks,
                lambda task: waiting[task.key].finished,
                ended,
                looked,
            )
        return [waiting[task.key] for task in failed]

    def _task(self, job: Job) -> Task:
        words = (*job.command(self.study_folder, self.data), *["--shard"] * self.shard)
        return Task(
            job.key,
            job.name,
            words,
            str(job.folder),
            str(job.log),
            self.threads,
            self.processes,
            end=job.end,
        )


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    main = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if main:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def last_loss(job: Job) -> float:
    """The loss of its last evaluation; not a number if there is none."""
    evaluated = [line for line in read_metrics(job.folder) if "validation" in line]
    loss = evaluated[-1]["validation"]["loss"] if evaluated else None
    return math.nan if loss is None else float(loss)


def has_failed(log: Path) -> bool:
    """Whether the process that writes this log has ended by itself, and not well. A run that goes on, or was
    stopped, has not failed."""
    lease = lease_folder(log.parents[1], log.stem)
    if not lease.is_dir():  # a study from before there were leases
        return log.is_file()
    _, holder = read_holder(lease)
    return holder is not None and holder.ended not in (None, 0, *STOPPED)


def failure(log: Path) -> str:
    """Why a run failed: the last line its process wrote, or under torchrun, which frames its own account
    with =====, our last before that."""
    if not log.is_file():
        return "it was not started"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "it wrote nothing")
    if set(last) == {"="}:
        last = next((line for line in reversed(lines) if re.match(OURS, line)), last)
    return re.sub(OURS, "", last)
