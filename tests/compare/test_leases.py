"""Leases: one holder at a time, the dead are replaced, and whoever merely slept gives up."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import HANG, wait_until

from headgate.compare.executors import leases
from headgate.compare.executors.executor import run_tasks, was_lost
from headgate.compare.executors.leases import Lease, Watch, read_holder
from headgate.compare.executors.worker import Task, lease_folder, read_task, write_task


def taken(folder: Path, silence: float = 0.05) -> Lease:
    lease = Lease.take(folder, engine="test", silence=silence)
    assert lease is not None
    return lease


def elsewhere(lease: Lease) -> None:
    """As if the holder were on another machine, whose processes cannot be asked after."""
    lease.holder = replace(lease.holder, place="elsewhere")
    assert lease.beat()


def test_a_silent_holder_is_replaced_and_gives_up_when_it_wakes(tmp_path: Path) -> None:
    first = taken(tmp_path)
    elsewhere(first)
    second = taken(tmp_path)
    assert not first.is_ours
    assert not first.beat()
    assert second.beat()
    assert read_holder(tmp_path)[1] == second.holder


def test_the_end_of_a_run_is_the_last_that_its_holder_says(tmp_path: Path) -> None:
    """Also while its beat is at it in another thread, and whatever that writes later."""
    lease = taken(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        beats = [threads.submit(lease.beat) for _ in range(20)]
        assert lease.beat(ended=3)
        assert all(beat.result() for beat in beats)
    assert lease.beat()
    holder = read_holder(tmp_path)[1]
    assert holder is not None
    assert holder.ended == 3


def test_a_holder_that_beats_keeps_the_run(tmp_path: Path, monkeypatch: object) -> None:
    first = taken(tmp_path)
    elsewhere(first)
    lost: list[bool] = []
    leases.BEAT, before = 0.01, leases.BEAT
    try:
        done = first.keep(lambda: lost.append(True))
        assert Lease.take(tmp_path, engine="test", silence=60.0) is None
    finally:
        leases.BEAT = before
        done.set()
    assert not lost


def test_an_ended_run_is_free_at_once(tmp_path: Path) -> None:
    first = taken(tmp_path)
    elsewhere(first)
    assert not Watch().is_silent(tmp_path)
    assert first.beat(ended=0)
    assert Watch().is_silent(tmp_path)
    assert taken(tmp_path, silence=60.0).generation == 2


def test_a_dead_process_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from headgate.compare.executors.leases import Lease; "
    script += "assert Lease.take(Path(sys.argv[1]), engine='test')"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert read_holder(tmp_path)[1].is_gone  # type: ignore[union-attr]
    assert taken(tmp_path, silence=600.0).holder.pid == os.getpid()


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    """Each wants the generation after the same dead one."""
    dead = taken(tmp_path)
    elsewhere(dead)
    rivals = [Lease(tmp_path, 2, replace(dead.holder, identity=str(n))) for n in range(20)]
    assert sum(rival._claim() for rival in rivals) == 1


def test_clocks_that_differ_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks may live in another year than the holder, whose files may be dated in a third."""
    first = taken(tmp_path)
    elsewhere(first)
    for years in (-1, 1):
        monkeypatch.setattr(time, "time", lambda years=years: 1.8e9 + years * 3e7)
        os.utime(tmp_path / "1.json", (1.8e9 - years * 3e7,) * 2)
        assert not Watch().is_silent(tmp_path)
        assert first.beat()
    watch = Watch(0.05)
    assert not watch.is_silent(tmp_path)
    time.sleep(0.1)
    assert watch.is_silent(tmp_path)


def test_a_silence_that_somebody_has_watched_is_not_watched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = taken(tmp_path)
    elsewhere(first)
    seen = first.holder.pulse
    second = Lease.take(tmp_path, engine="test", silent=seen, silence=600.0)
    assert second is not None
    assert second.generation == 2
    elsewhere(second)
    monkeypatch.setattr(leases, "BEAT", 0.01)
    done = second.keep(lambda: None)
    try:  # another holder has another pulse
        assert Lease.take(tmp_path, engine="test", silent=seen, silence=60.0) is None
    finally:
        done.set()


def test_a_run_whose_worker_fell_silent_elsewhere_is_taken_up_within_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds are counted instead of waited for."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    study, started = tmp_path / "study", []
    task = Task("one", "one", (), str(study / "one"), str(study / "log"))
    dead = taken(lease_folder(study, "one"))
    elsewhere(dead)

    class Engine:
        def start(self, tasks: Sequence[Task]) -> None:
            if not tasks or not started:
                started.append(0.0)  # the first start is the dead worker's own
                return
            queued = read_task(study, "one")
            lease = Lease.take(lease_folder(study, "one"), engine="test", silent=queued.silent)
            assert lease is not None
            assert lease.beat(ended=0)
            started.append(now[0])

        def active(self) -> set[str]:
            return set()

        def wait(self) -> None:
            time.sleep(2.0)

        def stop(self) -> None: ...

        def cancel(self) -> None: ...

    failed = run_tasks(Engine(), study, [task], lambda _: len(started) > 1, lambda *_: None, lambda _: None)
    assert not failed
    assert leases.SILENCE < started[-1] <= 60


FAILS_WHEN_STOPPED = """\
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_a_run_that_fails_because_it_was_stopped_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun does; the run is then taken up again, and not reported."""
    (tmp_path / "fails_when_stopped.py").write_text(FAILS_WHEN_STOPPED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    begun = tmp_path / "begun"
    task = Task("one", "one", (str(begun),), str(tmp_path / "run"), str(tmp_path / "log"))
    write_task(tmp_path, replace(task, module="fails_when_stopped"))
    words = ["-m", "headgate.compare.executors.worker", str(tmp_path), "one", str(os.getpid())]
    worker = subprocess.Popen([sys.executable, *words])
    wait_until(begun.exists, worker)
    worker.terminate()
    assert worker.wait(HANG) == 128 + signal.SIGTERM
    assert was_lost(tmp_path, "one")


def test_a_damaged_lease_counts_as_silent_not_as_free(tmp_path: Path) -> None:
    (tmp_path / "3.json").write_text(json.dumps({"identity": 1}))
    assert not Watch(60.0).is_silent(tmp_path)
    assert taken(tmp_path).generation == 4
