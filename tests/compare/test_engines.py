"""Studies on real engines give what they give here, whoever dies meanwhile; and status and cancel."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import forked
import pytest
from study_examples import write_recipe
from waiting import HANG, wait_until

from headgate import cli, config
from headgate.compare.executors.executor import make_executor, run_tasks
from headgate.compare.executors.leases import read_holder
from headgate.compare.executors.worker import Task
from headgate.compare.results import MEASURED
from headgate.compare.status import study_status
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.options import EngineOptions
from headgate.train.folder import last_step

pytestmark = pytest.mark.long
WORDS = ["--seeds", "1", "--no-controls", "--no-cost", "train.steps=6"]


@pytest.fixture(scope="module")
def on_slurm() -> Iterator[dict[str, str]]:
    reason = engines.missing_slurm()
    if reason:
        pytest.skip(f"{reason}; not run")
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        engines.slurm_cluster(Path(folder)) as environment,
    ):
        yield environment


@pytest.fixture(scope="module")
def on_ray() -> Iterator[Any]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; not run")
    with tempfile.TemporaryDirectory(prefix="ray") as folder, engines.ray_cluster(Path(folder)) as cluster:
        yield cluster


def compare_words(out: Path, data: Path, recipe: Path) -> list[str]:
    return ["compare", "local", "--recipe", str(recipe), "--data", str(data), "--out", str(out), *WORDS]


def run(words: list[str], environment: Mapping[str, str] = os.environ) -> None:
    done = forked.run(["-m", "headgate", *words], environment)
    assert done.returncode == 0, done.stdout


def judged(folder: Path) -> Any:
    """results.json without what the machine decides, and whatever folder the study lies in."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: strip(item)
                for key, item in value.items()
                if key not in (*MEASURED, "machines", "digest")
            }
        return [strip(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(strip(json.loads((folder / "results.json").read_text())))
    return json.loads(text.replace(str(folder.parent), "HERE"))


@pytest.fixture(scope="module")
def here(data: Path, micro: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The recipe, and what the study gives on this machine."""
    folder = tmp_path_factory.mktemp("here")
    recipe = write_recipe(micro, folder)
    run(compare_words(folder / "study", data, recipe))
    return recipe, judged(folder / "study")


def beside(here: tuple[Path, Any], folder: Path) -> tuple[Path, Any]:
    """The same with the recipe in `folder`, so that commands from there name it alike."""
    return Path(shutil.copy(here[0], folder)), here[1]


def start(words: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headgate", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_begun_here_and_finished_on_slurm_though_jobs_and_commands_die(
    on_slurm: dict[str, str], here: tuple[Path, Any], data: Path, tmp_path: Path
) -> None:
    recipe, expected = beside(here, tmp_path)
    out = tmp_path / "study"
    words = compare_words(out, data, recipe)
    front = start([*words, "--jobs", "1"])
    wait_until(lambda: any(out.glob("runs/*/*/summary.json")), front)
    front.kill()
    front.wait()
    (left,) = {"full", "local"} - {path.parts[-3] for path in out.glob("runs/*/*/summary.json")}
    lease = out / "leases" / f"{left}-seed-0"
    before, _ = read_holder(lease)  # it may have been begun, too
    words += ["--on", "slurm"]
    front = start(words, on_slurm)
    wait_until(lambda: read_holder(lease)[0] > before, front)
    subprocess.run(["scancel", "--me"], env=on_slurm, check=True)
    wait_until(lambda: read_holder(lease)[0] > before + 1 or front.poll() is not None)
    front.send_signal(signal.SIGINT)
    said = front.communicate(timeout=HANG)[1]
    jobs = json.loads((out / "queue/slurm.json").read_text())
    assert front.returncode == 0 or (front.returncode == 130 and f"headgate cancel {out} stops them" in said)
    run(words, on_slurm)
    assert judged(out) == expected
    assert json.loads((out / "queue/slurm.json").read_text()) == jobs  # found again, not submitted twice
    engine_of = {run.name: run.engine for run in study_status(out).runs}
    assert engine_of[f"{left}, seed 0"] == "slurm"


def test_ray_gives_the_same_though_a_worker_and_a_node_die(
    on_ray: Any, here: tuple[Path, Any], data: Path, tmp_path: Path
) -> None:
    recipe, expected = beside(here, tmp_path)
    out = tmp_path / "study"
    words = [*compare_words(out, data, recipe), "--on", "ray", "--ray-address", on_ray.address]
    front = start(words)
    wait_until(lambda: any(out.glob("leases/*/*.json")), front)
    _, holder = read_holder(next(out.glob("leases/*/*.json")).parent)
    assert holder is not None
    os.kill(holder.pid, signal.SIGKILL)
    on_ray.remove_node(next(iter(on_ray.worker_nodes)), allow_graceful=False)
    on_ray.add_node(num_cpus=1)
    assert front.wait(HANG) == 0
    assert judged(out) == expected


def test_a_run_of_two_slurm_nodes_is_one(
    on_slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", on_slurm["SLURM_CONF"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "ranks").mkdir()
    task = Task("run", "run", (str(tmp_path / "ranks"),), str(tmp_path / "run"), str(tmp_path / "log.txt"))
    task = replace(task, module="ranks")
    carry_out(task, tmp_path, EngineOptions(on="slurm", nodes=2))
    found = {path.name: path.read_text() for path in (tmp_path / "ranks").iterdir()}
    assert found == {"0": "0 1 of 2", "1": "0 1 of 2"}, (tmp_path / "log.txt").read_text()


def carry_out(task: Task, study: Path, options: EngineOptions) -> None:
    executor = make_executor(study, 1, options)
    run_tasks(executor, study, [task], lambda task: True, lambda *_: None, lambda _: None)


def test_a_run_of_two_ray_nodes_shares_its_weights_out(
    on_ray: Any, here: tuple[Path, Any], data: Path, tmp_path: Path
) -> None:
    alone = json.loads((here[0].parent / "study/runs/full/seed-0/summary.json").read_text())
    words = ["train", str(here[0]), "--data", str(data), "--out", str(tmp_path / "run"), "--shard"]
    words += ["train.steps=6", "model.mechanism=full"]
    task = Task("run", "run", tuple(words), str(tmp_path / "run"), str(tmp_path / "log.txt"))
    summary = tmp_path / "run/summary.json"
    carry_out(task, tmp_path, EngineOptions(on="ray", ray_address=on_ray.address, nodes=2))
    assert summary.exists(), (tmp_path / "log.txt").read_text()
    together = json.loads(summary.read_text())
    assert together["machine"]["processes"] == 2
    assert together["final"]["loss"] == pytest.approx(alone["final"]["loss"], abs=1e-4)


def test_status_and_cancel(
    micro: Config, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, recipe = tmp_path / "study", write_recipe(micro, tmp_path)
    words = [*compare_words(out, data, recipe)[:-1], "train.steps=100000", "--jobs", "1"]
    front = subprocess.Popen([sys.executable, "-m", "headgate", *words], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: last_step(out / "runs/full/seed-0") >= 2, front)
    cli.run(["status", str(out), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["counts"] == {"running": 1, "failed": 0, "stopped": 0, "queued": 1, "finished": 0}
    (running,) = [run for run in result["runs"] if run["state"] == "running"]
    assert (running["name"], running["engine"], running["end"]) == ("full, seed 0", "local", 100_000)
    assert result["seconds_left"] > 0
    cli.run(["cancel", str(out)])
    assert "stopping 2 runs" in capsys.readouterr().out
    assert front.wait(HANG) == 2
    assert "the study was cancelled; the same command resumes it" in (
        front.stderr.read() if front.stderr else ""
    )
    cli.run(["status", str(out)])
    assert "1 stopped, 1 queued" in capsys.readouterr().out


def test_an_engine_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HeadgateError, match="found no sbatch here"):
        make_executor(tmp_path, 1, EngineOptions(on="slurm"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HeadgateError, match="--on ray needs Ray; install it with: pip install"):
        make_executor(tmp_path, 1, EngineOptions(on="ray"))
    with pytest.raises(HeadgateError, match=r"--slurm 'time=5' is for --on slurm, but --on is local"):
        EngineOptions(slurm="time=5")
    with pytest.raises(HeadgateError, match="has 'gpu' without a value"):
        EngineOptions(on="slurm", slurm="gpu")
    with pytest.raises(HeadgateError, match="--nodes 2 needs --on slurm or --on ray"):
        config.override(EngineOptions(), ["nodes=2"])
    with pytest.raises(HeadgateError, match="--shard splits the weights across processes; give"):
        EngineOptions(shard=True)
