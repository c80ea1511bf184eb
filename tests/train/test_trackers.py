"""Trackers: what is logged, and what is said when one is missing. And the command line of a run."""

import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import changed

from headgate import config
from headgate.cli import run as command
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.grammar import MechanismSpec
from headgate.options import RunOptions
from headgate.train.folder import read_config, read_metrics
from headgate.train.loop import train
from headgate.train.trackers import flat_values


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_is_told_every_step(
    name: str, data: Path, micro: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a stand-in with the two calls that both services have."""
    logged: list[tuple[int, Mapping[str, float]]] = []
    begun: list[dict[str, Any]] = []
    finished: list[bool] = []
    run = types.SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: finished.append(True)
    )
    module = types.ModuleType(name)
    module.init = lambda **options: begun.append(options) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    train(changed(micro, steps=4), data, tmp_path / "run", RunOptions(track=(name,)))
    assert [step for step, _ in logged] == [1, 2, 3, 4]
    assert begun[0]["config"] == config.to_dict(changed(micro, steps=4))
    assert begun[0]["name"] == "run"
    assert finished == [True]
    last = read_metrics(tmp_path / "run")[-1]
    assert logged[-1][1]["loss"] == last["loss"]
    assert logged[-1][1]["validation/loss"] == last["validation"]["loss"]
    assert logged[-1][1]["validation/by_position/16-23"] == last["validation"]["by_position"][-1]["loss"]
    assert logged[-1][1]["gates/1/mean"] == last["gates"][1]["mean"]


def test_tensorboard_holds_the_losses(data: Path, micro: Config, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra 'track'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(changed(micro, steps=4), data, tmp_path / "run", RunOptions(track=("tensorboard",)))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses, rel=1e-6)
    assert "validation/loss" in events.Tags()["scalars"]


def test_a_missing_tracker_says_what_to_install(
    data: Path, micro: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(HeadgateError, match=r"tracker 'wandb' needs .* pip install 'headgate\[track\]'"):
        train(micro, data, tmp_path / "run", RunOptions(track=("wandb",)))
    with pytest.raises(HeadgateError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        train(micro, data, tmp_path / "run", RunOptions(track=("tensorbord",)))
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_finite_are_not_told() -> None:
    line = {"step": 3, "loss": None, "gradient_norm": 1.5, "gates": [{"layer": 0, "mean": None}]}
    assert flat_values(line) == {"gradient_norm": 1.5}


def test_the_command_line_takes_settings_anywhere(data: Path, micro: Config, tmp_path: Path) -> None:
    config.save(micro, tmp_path / "given.json")
    arguments = ["train.steps=2", "--data", str(data), "--mechanism", "local:window=3", "seed=7"]
    command(["train", str(tmp_path / "given.json"), *arguments, "--out", str(tmp_path / "run")])
    expected = replace(changed(micro, steps=2), seed=7)
    expected = replace(
        expected, model=replace(micro.model, mechanism=(MechanismSpec("local", {"window": 3}),))
    )
    assert read_config(tmp_path / "run") == expected
    assert len(read_metrics(tmp_path / "run")) == 2
    command(["train", "--out", str(tmp_path / "run")])  # all it needs to go on


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tinny", "--data", "d"], "unknown recipe 'tinny'; did you mean 'tiny'"),
        (["absent.json", "--data", "d"], "'absent.json' cannot be read"),
        (["tiny"], "a new run needs data to train on; give --data"),
        ([], "is not a run to resume; name a recipe"),
        (["tiny", "--data", "absent"], "'absent' is not a folder"),
        (["tiny", "--data", "d", "train.stepz=3"], "unknown key 'train.stepz'; did you mean 'steps'"),
        (["tiny", "--data", "d", "--mechanism", "locl"], "unknown mechanism 'locl'; did you mean 'local'"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match=words):
        command(["train", *arguments, "--out", str(tmp_path / "run")])
    assert list(tmp_path.iterdir()) == []
