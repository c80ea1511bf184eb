"""How fast the synthetic tasks are made, in tokens a second of processor time: drawn, and written as shards.

python benchmarks/task_throughput.py [SOURCE ...]
"""

import sys
import tempfile
import time
from pathlib import Path

from headgate.data.tasks import TASKS, parse_task
from headgate.data.tasks.writing import prepare_task

TOKENS = 4_000_000
"""About so many are made of each task."""


def measure_task(source: str) -> None:
    name, _, options = source.partition(":")
    task = parse_task(f"{name}:{options}")
    assert task is not None
    count = "sequences" if name == "recall" else "samples"
    if count not in options:
        source = f"{name}:{options}{',' * bool(options)}{count}={max(1, TOKENS // task.context)}"
        task = parse_task(source)
        assert task is not None
    begun = time.process_time()
    tokens = sum(task.marks(samples).size for _, samples in task.parts((80, 10, 10)))
    drawn = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        prepare_task(task, source, Path(folder) / "data")
    written = time.process_time()
    millions = [tokens / seconds / 1e6 for seconds in (drawn - begun, written - drawn)]
    print(f"{source:60} drawn {millions[0]:6.1f}M/s   written {millions[1]:6.1f}M/s", flush=True)


if __name__ == "__main__":
    extra = ["mqar:zoology", "markov:order=2,states=4"]
    for each in sys.argv[1:] or [*TASKS.names(), *extra]:
        measure_task(each)
