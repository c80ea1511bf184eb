"""Runs on a Slurm cluster, through submitit: an array of jobs that continue when the study's process ends.

A job that Slurm preempts, or that reaches its time limit, saves and is queued again; it resumes where it was.
queue/slurm.json records what the cluster calls each task, so that any later process finds the jobs again.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headgate import files
from headgate.compare.executors.worker import STOPPED, Nodes, Task, say_how_to_return, work
from headgate.errors import HeadgateError

ARRAY = 500
"""Jobs in one array; Slurm's own limit is 1,001 unless the cluster sets another."""
WARNING = 90
"""Seconds before its time limit at which a job is told to save."""

LEFT_BEHIND = 60
"""Seconds after the first node of a run is done at which the others are ended."""


class SlurmExecutor:
    def __init__(self, study: Path, settings: Mapping[str, str], nodes: int = 1) -> None:
        try:
            import submitit
        except ImportError:
            raise HeadgateError(
                "--on slurm needs submitit; install it with: pip install 'headgate[cluster]'"
            ) from None
        if shutil.which("sbatch") is None:
            raise HeadgateError(
                "--on slurm found no sbatch here; run the command where Slurm's jobs are submitted"
            )
        self._submitit = submitit
        self.study, self.settings, self.nodes = study.resolve(), dict(settings), nodes
        known = submitit.SlurmExecutor._valid_parameters()
        self._own = {name: value for name, value in self.settings.items() if name in known}
        self._passed_on = {name: value for name, value in self.settings.items() if name not in known}

    def start(self, tasks: Sequence[Task]) -> None:
        jobs = _read_jobs(self.study)
        for exclusive in (False, True):
            chosen = [task for task in tasks if task.exclusive == exclusive]
            for first in range(0, len(chosen), ARRAY):
                part = chosen[first : first + ARRAY]
                jobs |= dict(zip((task.key for task in part), self._submit(part, exclusive), strict=True))
                files.write_sealed(jobs_path(self.study), jobs)

    def _submit(self, tasks: Sequence[Task], exclusive: bool) -> list[str]:
        executor = self._submitit.SlurmExecutor(folder=files.own_folder(self.study / "slurm"))
        processors = max(task.threads * task.processes for task in tasks)
        asked: dict[str, Any] = {"job_name": "headgate", "time": None, "cpus_per_task": processors}
        asked |= {
            "nodes": 1 if exclusive else self.nodes,
            "ntasks_per_node": 1,
            "signal_delay_s": WARNING,
            "stderr_to_stdout": True,
            "srun_args": [f"--wait={LEFT_BEHIND}"],
        }
        asked |= self._own | {"additional_parameters": {"requeue": True, **self._passed_on}}
        executor.update_parameters(**asked, **({"exclusive": True} if exclusive else {}))
        keys = [task.key for task in tasks]
        try:
            if len(keys) == 1:
                return [executor.submit(SlurmWork(), str(self.study), keys[0]).job_id]
            return [
                job.job_id for job in executor.map_array(SlurmWork(), [str(self.study)] * len(keys), keys)
            ]
        except (self._submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
            raise HeadgateError(f"Slurm refused the runs: {_last_line(str(error))}; see --slurm") from error

    def active(self) -> set[str]:
        queued = queued_jobs()
        return {key for key, job in _read_jobs(self.study).items() if job in queued}

    def wait(self) -> None:
        time.sleep(2.0)

    def stop(self) -> None:
        say_how_to_return(self.active(), self.study)

    def cancel(self) -> None:
        cancel_slurm_jobs(self.study)


class SlurmWork:
    """What a job does; submitit carries it from here to there."""

    def __call__(self, study: str, key: str) -> int:
        import submitit

        job = submitit.JobEnvironment()
        out_of_time: list[int] = []

        def stop(number: int, frame: object) -> None:
            out_of_time.append(number)
            os.kill(os.getpid(), signal.SIGTERM)  # the run saves and ends

        signal.signal(signal.SIGUSR2, stop)
        nodes = Nodes()
        if job.num_nodes > 1:
            # The job's script, and with it srun, is on the first node; its name may mean nothing elsewhere.
            first = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or job.hostnames[0]
            port = 20_000 + int(job.raw_job_id) % 20_000
            nodes = Nodes(job.num_nodes, job.node, first, port)
        code = work(Path(study), key, engine="slurm", job=job.job_id, nodes=nodes)
        if out_of_time and code in STOPPED:
            subprocess.run(["scontrol", "requeue", job.job_id], check=True)  # noqa: S607 - Slurm's own place
        return code


def queued_jobs() -> set[str]:
    """The user's jobs that are queued or running, with each job of an array by itself."""
    asked = ["squeue", "--me", "--array", "--noheader", "--format=%i", "--states=PD,R,CF,CG,RQ,S,SI,ST,RS"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True)
    except FileNotFoundError:
        raise HeadgateError(
            "there is no squeue here; run the command where Slurm's jobs are submitted"
        ) from None
    if done.returncode:
        raise HeadgateError(
            f"Slurm does not answer: {_last_line(done.stderr)}; run the same command again later"
        )
    return set(done.stdout.split())


def cancel_slurm_jobs(study: Path) -> None:
    """End the study's jobs, whose runs save first."""
    queued = queued_jobs()
    ours = [job for job in _read_jobs(study).values() if job in queued]
    if ours:
        # What has ended meanwhile is an error to scancel.
        subprocess.run(["scancel", *ours], check=False, stderr=subprocess.DEVNULL)  # noqa: S607 - Slurm's


def jobs_path(study: Path) -> Path:
    """What the cluster calls each task."""
    return study / "queue" / "slurm.json"


def _read_jobs(study: Path) -> dict[str, str]:
    path = jobs_path(study)
    return {} if files.is_missing(path) else files.read_sealed(path, always=True)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
