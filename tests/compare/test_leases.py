"""Leases: one holder at a time, the dead are replaced, and whoever merely slept gives up."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from headgate.compare.executors import leases
from headgate.compare.executors.leases import Lease, Watch, read_holder


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


def test_a_damaged_lease_counts_as_silent_not_as_free(tmp_path: Path) -> None:
    (tmp_path / "3.json").write_text(json.dumps({"identity": 1}))
    assert not Watch(60.0).is_silent(tmp_path)
    assert taken(tmp_path).generation == 4
