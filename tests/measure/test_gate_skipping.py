"""What following the gate is worth, measured on a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headgate
from headgate.cli import run as command
from headgate.config import Config, ModelConfig, TrainConfig
from headgate.data.prepare import Request, prepare
from headgate.errors import HeadgateError
from headgate.grammar import MechanismSpec
from headgate.measure.skipping import gate_skipping
from headgate.train.evaluate import evaluate_run
from headgate.train.loop import train

SETTINGS = Config(
    model=ModelConfig(
        vocab_size=257, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_mlp=24,
        mechanism=(MechanismSpec("dynamic-sparse"), MechanismSpec("full")),
        shared_options={"window": 6, "dense_prefix": 8},
    ),
    train=TrainConfig(
        context=24, batch_size=4, steps=2, learning_rate=1e-3, warmup_steps=1, evaluate_every=2,
        evaluate_tokens=48,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and another whose gates are spread from closed to open."""
    home = tmp_path_factory.mktemp("skipping")
    (home / "text.jsonl").write_text(
        "\n".join(
            json.dumps({"text": f"the gate number {n} sets how much water goes down"}) for n in range(90)
        )
    )
    prepare(Request(str(home / "text.jsonl"), tokenizer="byte"), home / "data", workers=1)
    train(SETTINGS, home / "data", home / "run")
    decoder = headgate.load(home / "run")
    with torch.no_grad():
        decoder.layers[0].attention.mechanism.gate.weight.mul_(60)
        decoder.layers[0].attention.mechanism.gate.bias[0] = -1.0
        decoder.layers[0].attention.o_proj.weight.mul_(30)
    (checkpoint,) = (home / "run" / "checkpoints").iterdir()
    decoder.save(checkpoint / "model.safetensors")
    return home


def test_more_is_skipped_at_higher_thresholds_and_the_loss_is_that_of_the_rounded_gates(home: Path) -> None:
    found = gate_skipping(home / "run", [1e-9, 0.1, 0.4, 0.5], tokens=48, seconds=0.1)
    assert [f.skip_below for f in found] == [1e-9, 0.1, 0.4, 0.5]
    shares = [f.skipped for f in found]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert 0.1 < shares[1] < shares[3] < 1
    assert all(f.skipped_by_layer == (f.skipped,) for f in found)  # of two layers one has a gate
    assert all(0 < f.time_low <= f.time <= f.time_high for f in found)
    plain = evaluate_run(home / "run", tokens=48)["loss"]
    assert found[0].loss == plain
    assert found[0].loss_cost == 0
    for f in found[1:]:
        assert f.loss != plain
        assert f.loss_cost == f.loss - plain
    assert json.loads(json.dumps(found[1].to_dict()))["skipped_by_layer"] == [shares[1]]


def test_evaluate_shows_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(["evaluate", str(home / "run"), "--tokens", "48", "--skip-below", "0.1", "0.3", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [row["skip_below"] for row in result["skipping"]] == [0.1, 0.3]
    assert result["skipping"][1]["loss_cost"] == result["skipping"][1]["loss"] - result["loss"]
    command(["evaluate", str(home / "run"), "--tokens", "48", "--skip-below", "0.1"])
    shown = capsys.readouterr().out
    assert "time per decoded token" in shown
    assert "added loss" in shown


def test_bad_thresholds_are_refused_before_anything_is_measured(home: Path) -> None:
    with pytest.raises(HeadgateError, match=r"skip_below=0.7 is out of range"):
        gate_skipping(home / "run", [0.1, 0.7])
    with pytest.raises(HeadgateError, match="there are no thresholds to measure"):
        gate_skipping(home / "run", [])
    plain = replace(SETTINGS, model=replace(SETTINGS.model, mechanism=(MechanismSpec("full"),)))
    train(plain, home / "data", home / "full")
    with pytest.raises(HeadgateError, match="no mechanism in this model has a learned gate to follow"):
        gate_skipping(home / "full", [0.1])
