"""Runs that are forked from a process that has loaded PyTorch."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headgate.compare.executors import local
from headgate.compare.executors.executor import run_tasks
from headgate.compare.executors.leases import read_holder
from headgate.compare.executors.local import LocalExecutor
from headgate.compare.executors.nursery import Nursery
from headgate.compare.executors.worker import Task, lease_folder, write_task
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="runs are forked on Linux only")

Make = Callable[..., Task]
RUN = """\
import os, pathlib, signal, sys, time
torch = sys.modules["torch"]
product = torch.ones(600, 600) @ torch.ones(600, 600)
print("threads", torch.get_num_threads(), product[0, 0].item(), flush=True)
done, waits = pathlib.Path(sys.argv[1]), sys.argv[2]
pathlib.Path(f"{done}.pid").write_text(f"{os.getpid()} {os.getppid()}")

def save(number, frame):
    done.with_suffix(".saved").touch()
    sys.exit(128 + number)

signal.signal(signal.SIGTERM, save)
first = not pathlib.Path(f"{done}.begun").exists()
pathlib.Path(f"{done}.begun").touch()
if first and waits == "once" or waits == "always":
    time.sleep(600)
if waits == "fails":
    sys.exit("this did not work")
done.touch()
"""


@pytest.fixture(autouse=True)
def as_commands_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nursery itself, which studies in other tests fork."""
    monkeypatch.setattr(local, "Nursery", Nursery)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    (tmp_path / "a_run.py").write_text(RUN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    (tmp_path / "logs").mkdir()

    def task(key: str, waits: str = "not") -> Task:
        words = (str(tmp_path / f"{key}.done"), waits)
        return Task(
            key, key, words, str(tmp_path / key), str(tmp_path / "logs" / f"{key}.txt"), module="a_run"
        )

    return task


def is_done(task: Task) -> bool:
    return Path(task.words[0]).exists()


def see_through(executor: LocalExecutor, *tasks: Task) -> list[Task]:
    return run_tasks(executor, executor.study, tasks, is_done, lambda *_: None, lambda _: None)


def test_runs_are_forked_with_their_threads_and_log(tmp_path: Path, make: Make) -> None:
    tasks = [make("one"), replace(make("two"), threads=2), make("bad", "fails")]
    failed = see_through(LocalExecutor(tmp_path, at_once=2), *tasks)
    assert [task.key for task in failed] == ["bad"]
    assert (tmp_path / "logs" / "one.txt").read_text() == "threads 1 600.0\n"
    assert (tmp_path / "logs" / "two.txt").read_text() == "threads 2 600.0\n"
    assert (tmp_path / "logs" / "bad.txt").read_text() == "threads 1 600.0\nthis did not work\n"
    _, holder = read_holder(lease_folder(tmp_path, "bad"))
    assert holder is not None
    assert holder.ended == 1


def parents(pid: int) -> list[int]:
    """The processes above one, up to this one."""
    found = []
    while pid not in (os.getpid(), 0):
        found.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


@pytest.mark.parametrize("struck", ["worker", "nursery"])
def test_what_was_forked_goes_on_after_a_kill(tmp_path: Path, make: Make, struck: str) -> None:
    """The run saves and ends with its worker or the nursery, and is started again."""
    executor, task = LocalExecutor(tmp_path, at_once=1), make("one", "once")
    write_task(tmp_path, task)
    executor.start([task])
    begun = tmp_path / "one.done.pid"
    wait_until(lambda: begun.exists() and begun.read_text())
    _, worker, nursery = parents(int(begun.read_text().split()[0]))
    os.kill({"worker": worker, "nursery": nursery}[struck], signal.SIGKILL)
    wait_until((tmp_path / "one.saved").exists)
    wait_until(lambda: not executor.active())
    assert see_through(executor, task) == []


def test_a_stopped_study_leaves_no_run_behind(tmp_path: Path, make: Make) -> None:
    executor, task = LocalExecutor(tmp_path, at_once=1), make("one", "always")
    write_task(tmp_path, task)
    executor.start([task])
    begun = tmp_path / "one.done.pid"
    wait_until((tmp_path / "one.done.begun").exists)
    executor.stop()
    assert (tmp_path / "one.saved").exists()
    assert not Path(f"/proc/{begun.read_text().split()[0]}").exists()
