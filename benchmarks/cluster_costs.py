"""How quickly a cluster is given its runs, and what it adds to each of them.

    python benchmarks/cluster_costs.py

On a real Slurm and a real Ray cluster of this machine (tests/compare/engines.py), with tasks that do nothing:
seconds until 200 of them are queued, and seconds from start to end of one, which is what the engine adds to a
run. Those on this machine without a cluster stand beside them.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "compare")]
NOTHING = "platform"
"""A module of Python's own that prints a line and ends."""


def main() -> int:
    import engines

    from headgate.compare.executors.executor import Executor, make_executor, run_tasks
    from headgate.compare.executors.leases import read_holder
    from headgate.compare.executors.worker import Task, lease_folder, write_task
    from headgate.options import EngineOptions

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    def tasks(study: Path, count: int, first: int = 0) -> list[Task]:
        (study / "logs").mkdir(parents=True, exist_ok=True)
        keys = [f"task-{first + n}" for n in range(count)]
        return [
            Task(key, key, (), str(study / key), str(study / "logs" / key), module=NOTHING) for key in keys
        ]

    def seconds_of_one(executor: Executor, study: Path, number: int) -> float:
        (task,) = tasks(study, 1, number)

        def is_finished(task: Task) -> bool:
            _, holder = read_holder(lease_folder(study, task.key))
            return holder is not None and holder.ended == 0

        begun = time.monotonic()
        failed = run_tasks(executor, study, [task], is_finished, lambda *_: None, lambda _: None)
        assert not failed, Path(task.log).read_text()
        return time.monotonic() - begun

    def seconds_to_queue(executor: Executor, study: Path) -> float:
        chosen = tasks(study, options.jobs, options.rounds)
        begun = time.monotonic()
        for task in chosen:
            write_task(study, task)
        executor.start(chosen)
        taken = time.monotonic() - begun
        executor.cancel()
        return taken

    with tempfile.TemporaryDirectory(prefix="costs") as name, ExitStack() as stack:
        home = Path(name)
        os.environ["SLURM_CONF"] = stack.enter_context(engines.slurm_cluster(home / "s"))["SLURM_CONF"]
        cluster = stack.enter_context(engines.ray_cluster(home / "r"))
        for engine in (
            EngineOptions(),
            EngineOptions(on="slurm"),
            EngineOptions(on="ray", ray_address=cluster.address),
        ):
            study = home / engine.on
            executor = make_executor(study, 1, engine)
            times = [seconds_of_one(executor, study, number) for number in range(options.rounds)]
            words = f"{engine.on}: a run that does nothing takes {statistics.median(times):.1f} s"
            words += f" ({min(times):.1f} to {max(times):.1f})"
            if engine.on != "local":
                words += f"; {options.jobs} are queued in {seconds_to_queue(executor, study):.1f} s"
            print(words, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
