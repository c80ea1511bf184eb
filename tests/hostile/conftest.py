"""A prepared folder, a run with two checkpoints and a place outside, each made once."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attempts import OUTSIDE, attempt

from headgate import config
from headgate.config import Config
from headgate.options import RunOptions
from headgate.train.loop import train


@pytest.fixture(scope="session")
def recipe(data: Path, micro: Config) -> Path:
    """Of a run that takes two steps and evaluates after each."""
    short = replace(micro, train=replace(micro.train, steps=3, evaluate_every=1, evaluate_tokens=24))
    path = data.parent / f"short-{id(short)}.json"
    config.save(short, path)
    return path


@pytest.fixture(scope="session")
def whole(recipe: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the checkpoints of its steps 2 and 3."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    torch.set_num_threads(1)
    train(config.load(Config, recipe), data, folder, RunOptions(save_every=1, keep=2))
    for step in ("1",):
        shutil.rmtree(folder / "checkpoints" / f"step-0000000{step}", ignore_errors=True)
    return folder


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run without its end: saved at its last step, and not summed up."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    return tmp_path / "run"


@pytest.fixture(scope="session")
def published(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What --publish writes of the study."""
    out = tmp_path_factory.mktemp("published") / "published"
    assert attempt("report", study, "--publish", out).code == 0
    return out


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no command has any business in."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "file").write_bytes(OUTSIDE)
    (folder / "inner").mkdir()
    for name in ("00000.ds", "00000.ds.index", "model.safetensors"):
        (folder / "inner" / name).write_bytes(OUTSIDE)
    return folder
