"""What an engine must offer, and the loop that sees a study's runs through on any of them.

The study's folder is the only truth: a run is done when its folder says so, and under way while its lease is
renewed. Engines are asked only which of their tasks are still queued or running.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from headgate.compare.executors.leases import Watch, read_holder
from headgate.compare.executors.worker import STOPPED, Task, lease_folder, write_task
from headgate.errors import HeadgateError
from headgate.options import EngineOptions, engine_settings

TRIES = 4
"""How often a run is given again to an engine that loses it: its machine died, or somebody cancelled it."""


class Executor(Protocol):
    def start(self, tasks: Sequence[Task]) -> None:
        """Queue these; they have been written to the study's folder."""

    def active(self) -> set[str]:
        """Keys of the tasks that are queued or running, including those that an earlier process started."""

    def wait(self) -> None:
        """Until there may be news of the runs."""

    def stop(self) -> None:
        """Leave: runs on this machine save and end; those on a cluster continue."""

    def cancel(self) -> None:
        """End the runs, which save first, and take back what is queued."""


def run_tasks(
    executor: Executor,
    study: Path,
    tasks: Sequence[Task],
    is_finished: Callable[[Task], bool],
    ended: Callable[[Task, bool], None],
    looked: Callable[[Sequence[Task]], None],
) -> list[Task]:
    """See the tasks through; a run that fails does not stop the others. Returns those that failed.

    `ended(task, finished)` is called for each as it ends, `looked(running)` after every look.
    """
    waiting = {task.key: task for task in tasks}
    for task in tasks:
        write_task(study, task)
    watches = {key: Watch() for key in waiting}
    left = dict.fromkeys(waiting, TRIES - 1)
    failed: list[Task] = []
    leave = executor.stop
    try:
        before = executor.active()
        executor.start([task for key, task in waiting.items() if key not in before])
        while waiting:
            executor.wait()
            if cancel_mark(study).exists():
                leave = executor.cancel
                raise HeadgateError("the study was cancelled; the same command resumes it")
            active = executor.active()
            for key, task in list(waiting.items()):
                if key in active or not watches[key].is_silent(lease_folder(study, key)):
                    continue
                finished = is_finished(task)
                if not finished and left[key] and was_lost(study, key):
                    left[key] -= 1
                    _, holder = read_holder(lease_folder(study, key))
                    write_task(study, replace(task, silent="" if holder is None else holder.pulse))
                    executor.start([task])
                    continue
                del waiting[key]
                if not finished:
                    failed.append(task)
                ended(task, finished)
            looked([task for key, task in waiting.items() if is_running(study, key)])
    finally:
        leave()
    return failed


def run_alone(executor: Executor, study: Path, name: str, module: str) -> str | None:
    """Run a module with the study's folder and this name, alone on a machine of the engine's; returns the log
    to read if it failed."""
    home = study.resolve()
    log = home / "logs" / f"{name}.txt"
    task = Task(name, name, (str(home), name), str(home / name), str(log), exclusive=True, module=module)

    def is_finished(task: Task) -> bool:
        _, holder = read_holder(lease_folder(study, name))
        return holder is not None and holder.ended == 0

    failed = run_tasks(executor, study, [task], is_finished, lambda *_: None, lambda _: None)
    return str(log) if failed else None


def cancel_mark(study: Path) -> Path:
    """Whatever waits for the runs cancels them when this file appears; the next command removes it."""
    return study / "queue" / "cancelled"


def make_executor(study: Path, at_once: int, options: EngineOptions) -> Executor:
    """The engine that was asked for; raises if it is missing."""
    cancel_mark(study).unlink(missing_ok=True)
    if options.on == "slurm":
        from headgate.compare.executors.slurm import SlurmExecutor

        return SlurmExecutor(study, engine_settings(options.slurm, "--slurm"), options.nodes)
    if options.on == "ray":
        from headgate.compare.executors.ray import RayExecutor

        return RayExecutor(study, options.ray_address, engine_settings(options.ray, "--ray"), options.nodes)
    from headgate.compare.executors.local import LocalExecutor

    return LocalExecutor(study, at_once)


def was_lost(study: Path, key: str) -> bool:
    """Whether the run was stopped from outside, or its worker vanished; a worker whose run failed has
    recorded that."""
    _, holder = read_holder(lease_folder(study, key))
    return holder is None or holder.ended is None or holder.ended in STOPPED


def is_running(study: Path, key: str) -> bool:
    _, holder = read_holder(lease_folder(study, key))
    return holder is not None and holder.ended is None
