"""Studies on real engines give what they give here, whoever dies meanwhile; and status and cancel."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
from study_examples import write_recipe
from waiting import HANG, wait_until

from headgate import cli, config
from headgate.compare.executors.executor import make_executor
from headgate.compare.executors.leases import read_holder
from headgate.compare.results import MEASURED
from headgate.compare.status import study_status
from headgate.config import Config, EngineOptions
from headgate.errors import HeadgateError
from headgate.train.folder import last_step

WORDS = ["--seeds", "2", "--no-controls", "--no-cost", "train.steps=6"]


@pytest.fixture(scope="module")
def on_slurm() -> Iterator[dict[str, str]]:
    reason = engines.missing_slurm()
    if reason:
        pytest.skip(f"{reason}; not run")
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, engines.slurm(Path(folder)) as environment:
        yield environment


@pytest.fixture(scope="module")
def on_ray() -> Iterator[str]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; not run")
    with tempfile.TemporaryDirectory(prefix="ray") as folder, engines.ray(Path(folder)) as address:
        yield address


def compare_words(out: Path, data: Path, recipe: Path) -> list[str]:
    return ["compare", "local", "--recipe", str(recipe), "--data", str(data), "--out", str(out), *WORDS]


def run(words: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headgate", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_slurm_gives_the_same_and_outlives_the_command(
    on_slurm: dict[str, str], here: tuple[Path, Any], data: Path, tmp_path: Path
) -> None:
    recipe, expected = beside(here, tmp_path)
    out = tmp_path / "study"
    words = [*compare_words(out, data, recipe), "--on", "slurm"]
    front = subprocess.Popen([sys.executable, "-m", "headgate", *words], env=on_slurm)
    wait_until(lambda: any(out.glob("leases/*/*.json")), front)
    front.kill()
    front.wait()
    jobs = json.loads((out / "queue/slurm.json").read_text())
    run(words, on_slurm)
    assert judged(out) == expected
    assert json.loads((out / "queue/slurm.json").read_text()) == jobs  # found again, not submitted twice
    assert {run.engine for run in study_status(out).runs} == {"slurm"}


def test_a_cancelled_job_is_taken_up_again(
    on_slurm: dict[str, str], here: tuple[Path, Any], data: Path, tmp_path: Path
) -> None:
    recipe, expected = beside(here, tmp_path)
    out = tmp_path / "study"
    words = [*compare_words(out, data, recipe), "--on", "slurm"]
    front = subprocess.Popen([sys.executable, "-m", "headgate", *words], env=on_slurm)
    wait_until(lambda: any(out.glob("leases/*/*.json")), front)
    subprocess.run(["scancel", "--me"], env=on_slurm, check=True)
    assert front.wait(HANG) == 0
    assert judged(out) == expected


def test_ray_gives_the_same_though_a_worker_dies(
    on_ray: str, here: tuple[Path, Any], data: Path, tmp_path: Path
) -> None:
    recipe, expected = beside(here, tmp_path)
    out = tmp_path / "study"
    words = [*compare_words(out, data, recipe), "--on", "ray", "--ray-address", on_ray]
    front = subprocess.Popen([sys.executable, "-m", "headgate", *words])
    wait_until(lambda: any(out.glob("leases/*/*.json")), front)
    _, holder = read_holder(next(out.glob("leases/*/*.json")).parent)
    assert holder is not None
    os.kill(holder.pid, signal.SIGKILL)
    assert front.wait(HANG) == 0
    assert judged(out) == expected


def test_begun_here_and_finished_elsewhere(
    on_slurm: dict[str, str], here: tuple[Path, Any], data: Path, tmp_path: Path
) -> None:
    recipe, expected = beside(here, tmp_path)
    out = tmp_path / "study"
    words = compare_words(out, data, recipe)
    front = subprocess.Popen([sys.executable, "-m", "headgate", *words, "--jobs", "1"])
    wait_until(lambda: any(out.glob("runs/*/*/summary.json")), front)
    front.kill()
    front.wait()
    run([*words, "--on", "slurm"], on_slurm)
    assert judged(out) == expected


def test_status_and_cancel(
    micro: Config, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, recipe = tmp_path / "study", write_recipe(micro, tmp_path)
    words = [*compare_words(out, data, recipe)[:-1], "train.steps=100000", "--jobs", "1"]
    front = subprocess.Popen([sys.executable, "-m", "headgate", *words], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: last_step(out / "runs/full/seed-0") >= 2, front)
    cli.run(["status", str(out), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["counts"] == {"running": 1, "failed": 0, "stopped": 0, "queued": 3, "finished": 0}
    (running,) = [run for run in result["runs"] if run["state"] == "running"]
    assert (running["name"], running["engine"], running["end"]) == ("full, seed 0", "local", 100_000)
    assert result["seconds_left"] > 0
    cli.run(["cancel", str(out)])
    assert "stopping 4 runs" in capsys.readouterr().out
    assert front.wait(HANG) == 2
    assert "the study was cancelled; the same command resumes it" in (
        front.stderr.read() if front.stderr else ""
    )
    cli.run(["status", str(out)])
    assert "1 stopped, 3 queued" in capsys.readouterr().out


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
    with pytest.raises(HeadgateError, match="--nodes 2 needs --on slurm"):
        config.override(EngineOptions(), ["nodes=2"])
