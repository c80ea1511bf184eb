"""How far a study has come: which of its runs are done, which are running and where, what failed and why.

Everything is read from the study's folder, so any machine that sees the folder can ask.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from headgate import config, files
from headgate.compare.executors import ray, slurm
from headgate.compare.executors.executor import cancel_mark
from headgate.compare.executors.leases import SILENCE, Holder, is_free, read_holder
from headgate.compare.executors.worker import STOPPED, Task, lease_folder
from headgate.compare.folder import StudyFolder
from headgate.compare.jobs import failure
from headgate.errors import HeadgateError
from headgate.progress import duration, table_console
from headgate.train.folder import last_step, read_metrics

State = Literal["queued", "running", "stopped", "finished", "failed"]
ORDER: tuple[State, ...] = ("running", "failed", "stopped", "queued", "finished")


@dataclass(frozen=True)
class RunStatus:
    name: str
    state: State
    step: int
    end: int
    engine: str = ""
    host: str = ""
    job: str = ""
    seconds_left: float | None = None
    """Until it ends, at its own speed so far."""
    reason: str = ""
    """Why it failed: the last line it wrote."""


@dataclass(frozen=True)
class StudyStatus:
    folder: str
    runs: tuple[RunStatus, ...]
    """The runs queued so far; later phases queue more."""

    @property
    def counts(self) -> dict[State, int]:
        return {state: sum(run.state == state for run in self.runs) for state in ORDER}

    @property
    def seconds_left(self) -> float | None:
        """Until everything queued so far is done, if as many runs as now continue at once."""
        running = [
            run for run in self.runs if run.state == "running" and run.seconds_left is not None and run.step
        ]
        if not running:
            return None
        rates = [(run.seconds_left or 0.0) / max(1, run.end - run.step) for run in running]
        left = sum(run.end - run.step for run in self.runs if run.state in ("queued", "running", "stopped"))
        return left * (sum(rates) / len(rates)) / len(running)


def study_status(folder: str | os.PathLike[str]) -> StudyStatus:
    runs = []
    for home in homes(folder):
        now = _clock(home)
        own = {slurm.jobs_path(home), ray.address_path(home)}
        keys = sorted(path.stem for path in home.glob("queue/*.json") if path not in own)
        runs += [_run(home, key, now) for key in keys]
    return StudyStatus(str(folder), tuple(runs))


def homes(folder: str | os.PathLike[str]) -> list[Path]:
    """The folders that have a queue: a study's own, or one for each task of a suite."""
    path = files.named(folder, "the study folder")
    if (path / "plan.json").is_file():
        return sorted(child for child in path.iterdir() if files.kind(child, follow=False) == "a folder")
    StudyFolder(path).read()  # raises if the folder is not a study
    return [path]


def _run(study: Path, key: str, now: float) -> RunStatus:
    task = config.load(Task, study / "queue" / f"{key}.json")
    generation, holder = read_holder(lease_folder(study, key))
    step = min(last_step(task.path(task.folder)), task.end)
    state, reason = _state(study, task, generation, holder, now), ""
    if state == "failed":
        reason = failure(task.path(task.log))
    left = _seconds_left(task, step) if state == "running" else None
    where = {} if holder is None else {"engine": holder.engine, "host": holder.host, "job": holder.job}
    return RunStatus(task.name, state, step, task.end, seconds_left=left, reason=reason, **where)


def _state(study: Path, task: Task, generation: int, holder: Holder | None, now: float) -> State:
    if (task.path(task.folder) / "summary.json").is_file():
        return "finished"  # whatever happened to the lease
    if holder is None:
        return "queued" if not generation else "stopped"
    if holder.ended is not None:
        return "finished" if holder.ended == 0 else "stopped" if holder.ended in STOPPED else "failed"
    beat = (lease_folder(study, task.key) / f"{generation}.json").stat().st_mtime
    return "stopped" if is_free(holder) or now - beat > SILENCE else "running"


def _clock(folder: Path) -> float:
    """The time by the clock that dates the folder's files, which may be another machine's."""
    probe = folder / f".clock.{os.getpid()}.tmp"
    try:
        files.open_new(probe).close()
        return probe.stat().st_mtime
    except OSError:  # a read-only folder
        return time.time()
    finally:
        probe.unlink(missing_ok=True)


def _seconds_left(task: Task, step: int) -> float | None:
    lines = read_metrics(task.path(task.folder))[-50:]
    taken = sum(line.get("seconds", 0.0) for line in lines)
    return taken / len(lines) * (task.end - step) if lines else None


def cancel_study(folder: str | os.PathLike[str], ray_address: str) -> list[str]:
    """Stop a study's runs wherever they are, and whatever waits for them; returns what was stopped."""
    running = [run for run in study_status(folder).runs if run.state in ("running", "queued")]
    for home in homes(folder):
        files.own_folder(home / "queue")
        files.write_text(cancel_mark(home), "")
        if slurm.jobs_path(home).is_file():
            slurm.cancel_slurm_jobs(home)
        if ray.address_path(home).is_file():
            ray.cancel_ray_actors(home, ray_address)
    return [run.name for run in running]


def print_status(status: StudyStatus) -> None:
    console = table_console()
    counted = ", ".join(f"{count} {state}" for state, count in status.counts.items() if count)
    left = status.seconds_left
    console.print(
        Text(f"{status.folder}: {counted or 'nothing has been queued yet'}")
        + Text(f"; about {duration(left)} left" if left is not None else "")
    )
    shown = sorted(_shown(status.runs), key=lambda run: ORDER.index(run.state))
    if not shown:
        return
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "step", "where", "left"):
        table.add_column(column, no_wrap=column != "state")
    for run in shown:
        where = " ".join(filter(None, (run.engine, run.job, run.host)))
        state = f"{run.state}: {run.reason}" if run.reason else run.state
        left_of_it = "" if run.seconds_left is None else duration(run.seconds_left)
        step = f"{run.step:,} of {run.end:,}" if run.end else ""  # measuring costs has none
        table.add_row(*map(Text, (run.name, state, step, where, left_of_it)))
    console.print(table)


def _shown(runs: Sequence[RunStatus]) -> list[RunStatus]:
    """Those that wait and those that are done are only counted; there may be hundreds."""
    return [run for run in runs if run.state not in ("queued", "finished")]


def status_dict(status: StudyStatus) -> dict[str, Any]:
    return asdict(status) | {"counts": status.counts, "seconds_left": status.seconds_left}


def watch_status(folder: str, seconds: float) -> None:
    """Print the status repeatedly until nothing is left to do."""
    if not 0 < seconds < float("inf"):
        raise HeadgateError(f"watch={seconds} is not a number of seconds; it must be above 0")
    while True:
        status = study_status(folder)
        print_status(status)
        if not any(run.state in ("queued", "running") for run in status.runs):
            return
        time.sleep(seconds)
