"""Kills, signals, numbers that are not finite, full disks, torn lines."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import changed, repeatable_metrics
from waiting import HANG, wait_until

import headgate
from headgate import config
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.model.decoder import Decoder
from headgate.options import RunOptions
from headgate.train import checkpoint
from headgate.train.folder import RunFolder, read_metrics
from headgate.train.loop import train

ROOT = Path(__file__).parents[2]


def test_kill_9_loses_nothing_but_the_steps_after_the_last_checkpoint() -> None:
    """The short version of the stress script, which makes all the checks itself."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/kill.py", "--kills", "5", "--steps", "12", "--only", "train"],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("train: 5 kills")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    number: int, code: int, data: Path, micro: Config, tmp_path: Path
) -> None:
    config.save(changed(micro, steps=100_000), tmp_path / "config.json")
    run = tmp_path / "run"
    started = subprocess.Popen(
        [sys.executable, "-m", "headgate", "train", tmp_path / "config.json", "--data", data, "--out", run],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        wait_until(lambda: len(read_metrics(run)) >= 3, started)
        started.send_signal(number)
        _, words = started.communicate(timeout=HANG)
    finally:
        started.kill()
    assert started.returncode == code
    step = read_metrics(run)[-1]["step"]
    assert checkpoint.saved_steps(RunFolder(run))[-1] == step
    name = signal.Signals(number).name
    stopped, how = words.splitlines()[-1].split("; ")
    assert stopped == f"stopped by {name} after step {step:,}, which is saved"
    assert how == f"resume with: headgate train --out {run}"
    assert "Traceback" not in words


@contextmanager
def poisoned(step: int, monkeypatch: pytest.MonkeyPatch, value: float) -> Iterator[None]:
    """The forward passes of training number `step`, counted from 1, give a loss of `value`."""
    forward, calls = Decoder.forward, 0

    def poison(self: Decoder, *args: Any, reduction: str = "mean", **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        loss = forward(self, *args, reduction=reduction, **kwargs)  # type: ignore[arg-type]
        calls += torch.is_grad_enabled()
        return loss * value if torch.is_grad_enabled() and calls == step else loss

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "forward", poison)
        yield


def test_a_loss_that_is_not_finite_stops_with_step_value_and_checkpoint(
    data: Path, micro: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with poisoned(6, monkeypatch, float("nan")), pytest.raises(HeadgateError) as caught:
        train(micro, data, run)
    good = run / "checkpoints" / "step-00000004"  # step 4 was evaluated, and the best so far
    assert str(caught.value).startswith(f"at step 6 the loss is nan; the last good checkpoint is {good}")
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3, 4, 5]
    train(micro, data, run)  # the poison gone, the run goes on as if there had been none
    train(micro, data, tmp_path / "whole")
    assert repeatable_metrics(run) == repeatable_metrics(tmp_path / "whole")
    with poisoned(1, monkeypatch, float("inf")), pytest.raises(HeadgateError, match="there is no checkpoint"):
        train(micro, data, tmp_path / "first")


def test_a_gradient_that_is_not_finite_stops_too(
    data: Path, micro: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headgate.train import loop

    monkeypatch.setattr(loop, "gradient_norm", lambda *_: float("inf"))
    with pytest.raises(HeadgateError, match="at step 1 the gradient's norm is inf"):
        train(micro, data, tmp_path / "run")


def test_steps_that_are_not_finite_can_be_skipped_and_are_counted(
    data: Path, micro: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with poisoned(6, monkeypatch, float("nan")):
        train(micro, data, run, RunOptions(on_nonfinite="skip", save_every=1, keep=12))
    lines = read_metrics(run)
    assert [line["skipped"] for line in lines] == [0] * 5 + [1] * 7
    assert (lines[5]["loss"], lines[5]["gradient_norm"]) == (None, None)
    assert all(line["loss"] is not None for line in lines if line["step"] != 6)
    weights = [headgate.load(run / "checkpoints" / f"step-{n:08d}").embedding.weight for n in (5, 6, 7)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert json.loads((run / "summary.json").read_text())["skipped"] == 1


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond this: the error that a full disk gives, at a place of our choosing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [10_000, 40_000], ids=["in the model", "in the optimiser's state"])
def test_a_full_disk_leaves_the_checkpoint_before_and_says_so(
    size: int, data: Path, micro: Config, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config_of_2 = changed(micro, steps=400)
    with pytest.raises(HeadgateError, match="at step 3 "):
        _stop_at_step_3(config_of_2, data, run)
    model = run / "checkpoints" / "step-00000002" / "model.safetensors"
    assert 10_000 < model.stat().st_size < 40_000 < model.with_name("training.safetensors").stat().st_size
    before = {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}
    with largest_file(size), pytest.raises(HeadgateError) as caught:
        train(config_of_2, data, run, RunOptions(save_every=1))
    message = str(caught.value)
    assert message.startswith(f"the checkpoint of step 3 cannot be written to {str(run / 'checkpoints')!r}: ")
    assert "File too large" in message
    assert message.endswith("the checkpoint of step 2 is intact, and the same command resumes from it")
    assert {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]
    headgate.load(run)


def _stop_at_step_3(asked: Config, data: Path, run: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, poisoned(3, patch, float("nan")):
        train(asked, data, run, RunOptions(save_every=1))


def test_a_full_disk_while_logging_is_one_sentence(data: Path, micro: Config, tmp_path: Path) -> None:
    room = (data / "tokenizer.json").stat().st_size + 2000
    words = r"metrics.jsonl' cannot be written at step \d+: File too large; there is no checkpoint yet"
    with largest_file(room), pytest.raises(HeadgateError, match=words):
        train(changed(micro, evaluate_every=400, steps=400), data, tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    assert lines
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))


def test_a_full_disk_at_the_start_leaves_nothing(data: Path, micro: Config, tmp_path: Path) -> None:
    with largest_file(1000), pytest.raises(HeadgateError, match="cannot be written: File too large"):
        train(micro, data, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_torn_lines_and_leftovers_do_no_harm(data: Path, micro: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(micro, data, tmp_path / "whole")
    with pytest.raises(HeadgateError, match="at step 3 "):
        _stop_at_step_3(micro, data, run)
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole + b'{"step": 3, "lo')
    left = run / "checkpoints" / ".step-00000003.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (run / ".config.json.123.tmp").write_text("{")
    assert len(read_metrics(run)) == 2
    headgate.load(run)
    train(micro, data, run)
    assert repeatable_metrics(run) == repeatable_metrics(tmp_path / "whole")
    assert not list(run.glob(".*.tmp"))
    assert not list((run / "checkpoints").glob(".*"))


def test_from_a_damaged_checkpoint_training_goes_back_to_the_one_before(
    data: Path, micro: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(micro, data, tmp_path / "whole")
    with pytest.raises(HeadgateError, match="at step 3 "):
        _stop_at_step_3(micro, data, run)
    weights = run / "checkpoints" / "step-00000002" / "model.safetensors"
    data_of_it = bytearray(weights.read_bytes())
    data_of_it[-3] ^= 1  # the last bit of a mantissa
    weights.write_bytes(data_of_it)
    with pytest.raises(HeadgateError, match=rf"'{weights}' is damaged"):
        headgate.load(run)
    capsys.readouterr()
    train(micro, data, run)
    assert f"headgate: '{weights}' is damaged" in (said := capsys.readouterr().err)
    assert "; going back to step 1\n" in said
    assert repeatable_metrics(run) == repeatable_metrics(tmp_path / "whole")
    files = [
        path / "checkpoints" / "step-00000012" / "model.safetensors" for path in (run, tmp_path / "whole")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (run / "checkpoints" / "damaged-00000002" / "model.safetensors").read_bytes() == data_of_it
    for step in checkpoint.saved_steps(RunFolder(run)):
        (run / "checkpoints" / checkpoint.folder_name(step) / "state.json").write_text("{}")
    (run / "summary.json").unlink()
    with pytest.raises(HeadgateError, match=r"'.*-00000012/state.json' is damaged: .*; there is no earlier"):
        train(micro, data, run)


def test_a_killed_start_is_no_obstacle(data: Path, micro: Config, tmp_path: Path) -> None:
    """A process killed before its first checkpoint, or even before config.json, leaves a folder to use."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "data.json").write_text("{}")
    train(changed(micro, steps=1), data, run)
    with (
        pytest.MonkeyPatch.context() as patch,
        poisoned(1, patch, float("nan")),
        pytest.raises(HeadgateError),
    ):
        train(micro, data, tmp_path / "other")
    with pytest.raises(HeadgateError, match="holds no model"):
        headgate.load(tmp_path / "other")
    train(micro, data, tmp_path / "other")
    assert len(read_metrics(tmp_path / "other")) == 12
