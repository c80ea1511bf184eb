"""Several processes: the same losses, checkpoints that any number resumes, and workers that die.

The runs are the real command under torchrun, with gloo on the CPU; each is a few seconds of starting Python.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import changed, repeatable_metrics
from waiting import HANG, wait_until

import headgate
from headgate import config
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.options import RunOptions
from headgate.train import checkpoint
from headgate.train.distributed import World
from headgate.train.evaluate import read_document_losses
from headgate.train.folder import RunFolder, read_metrics
from headgate.train.loop import train

ROOT = Path(__file__).parents[2]


@pytest.fixture
def twelve(micro: Config) -> Config:
    """Twelve steps, with accumulation, evaluation at uneven counts, a vector of odd size to share out, and
    nothing about the optimiser left as it usually is."""
    micro = changed(micro, steps=12, batch_size=4, accumulation=2, evaluate_every=6, evaluate_tokens=130)
    micro = changed(micro, betas=(0.85, 0.98), warmup_steps=0, warmup_share=0.15, schedule="linear")
    micro = changed(micro, attention_output_rate=3.0, clip=0.7)
    return replace(micro, model=replace(micro.model, d_mlp=25))


def torchrun(processes: int, *command: str | Path, restarts: int = 0) -> "subprocess.Popen[str]":
    """The command of headgate, or the script, in so many processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a free port
    launch += ["--max-restarts", str(restarts)]
    launch += [] if str(command[0]).endswith(".py") else ["-m", "headgate", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*launch, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(started: "subprocess.Popen[str]") -> str:
    out, err = started.communicate(timeout=HANG)
    assert started.returncode == 0, out + err
    return err


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run)]


def assert_same_losses(one: Path, other: Path) -> None:
    assert losses(one) == pytest.approx(losses(other), abs=1e-4)
    for ours, theirs in zip(repeatable_metrics(one), repeatable_metrics(other), strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], abs=1e-4)
        if "validation" in ours:
            assert ours["validation"]["loss"] == pytest.approx(theirs["validation"]["loss"], abs=1e-4)
            assert ours["validation"]["tokens"] == theirs["validation"]["tokens"]
            for gate, other_gate in zip(ours["gates"], theirs["gates"], strict=True):
                assert gate.pop("by_head") == pytest.approx(other_gate.pop("by_head"), abs=1e-4)
                assert gate == pytest.approx(other_gate, abs=1e-4)


@pytest.mark.long
def test_the_number_of_processes_changes_nothing(twelve: Config, data: Path, tmp_path: Path) -> None:
    """1, 2 and 4 processes, DDP and FSDP2, AdamW and Muon, in pairs; then 1 goes on from a checkpoint
    of 4, and 4 from one of 1. Muon computes in bf16, which shows differences in the gradient's last digits
    sooner."""
    config.save(twelve, tmp_path / "config.json")
    options = RunOptions(save_every=5, keep=9)
    train(twelve, data, tmp_path / "one", options)
    train(changed(twelve, optimizer="muon"), data, tmp_path / "one-muon", options)
    train(changed(twelve, optimizer="muon", precision="bf16"), data, tmp_path / "one-bf16")
    before = {}
    for name in ("one", "one-muon"):
        rewind(tmp_path / name, 5, tmp_path / f"{name}-then-four")
        before[name] = losses(tmp_path / f"{name}-then-four")
    common = [Path(__file__).with_name("several_runs.py"), tmp_path / "config.json", data]

    def started(processes: int, *runs: str) -> "subprocess.Popen[str]":
        return torchrun(processes, *common, *(f"{tmp_path}/{run}" for run in runs))

    two = started(
        2, "two", "two-muon:muon", "two-sharded-muon:shard:muon", "two-sharded-bf16:shard:bf16:muon"
    )
    then_four = ("one-then-four:shard", "one-muon-then-four:shard:muon")
    words = finish(started(4, "four", "four-sharded:shard", *then_four))
    finish(two)
    assert words.count("resuming from step 5") == 2
    assert "it was saved with 1 threads in each of 1 processes" in words
    for name, first in before.items():
        assert losses(tmp_path / f"{name}-then-four")[: len(first)] == first
    for name in ("four", "four-sharded"):
        rewind(tmp_path / name, 5, tmp_path / f"{name}-then-one")
        train(twelve, data, tmp_path / f"{name}-then-one")

    runs = [run for run in tmp_path.iterdir() if run.is_dir()]
    assert len(runs) == 13
    for run in runs:
        if "bf16" in run.name:
            assert losses(run) == pytest.approx(losses(tmp_path / "one-bf16"), abs=0.02)
        elif "muon" in run.name:
            assert losses(run) == pytest.approx(losses(tmp_path / "one-muon"), abs=2e-4)
        else:
            assert_same_run(tmp_path / "one", run)
    assert any(line["gradient_norm"] > twelve.train.clip for line in read_metrics(tmp_path / "one"))

    # Gradients are summed in fp32, once a step for each layer and for the rest, however many passes it has.
    groups = twelve.model.n_layers + 1
    whole, half = (collectives(tmp_path / name) for name in ("two-sharded-muon", "two-sharded-bf16"))
    assert whole["reduce_scatter float32"] == half["reduce_scatter float32"] == twelve.train.steps * groups
    assert half["allgather bfloat16"] > twelve.train.steps * groups
    assert sum(half.values()) == sum(whole.values()), "in bf16 something is gathered twice"


def assert_same_run(one: Path, other: Path) -> None:
    """The same metrics, weights and losses of the documents."""
    assert_same_losses(one, other)
    whole = headgate.load(one).state_dict()
    for key, tensor in headgate.load(other).state_dict().items():
        assert torch.allclose(tensor, whole[key], atol=1e-3), (other.name, key)
    ours, theirs = map(read_document_losses, (one, other))
    assert ours is not None
    assert theirs is not None
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-3)


def collectives(run: Path) -> dict[str, int]:
    """How many of its collectives there were, by kind and type."""
    found: dict[str, int] = json.loads(Path(f"{run}.collectives.json").read_text())
    return found


def rewind(run: Path, step: int, copy: Path) -> None:
    """A copy of the run as it was when it had saved this step."""
    shutil.copytree(run, copy)
    for saved in checkpoint.saved_steps(RunFolder(copy)):
        if saved > step:
            shutil.rmtree(copy / "checkpoints" / checkpoint.folder_name(saved))
    (copy / "summary.json").unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:step]))


def test_a_dead_worker_ends_the_job_and_restarts_bring_it_back(
    micro: Config, data: Path, tmp_path: Path
) -> None:
    config.save(changed(micro, steps=60, evaluate_every=30), tmp_path / "config.json")
    run = tmp_path / "run"
    script = [Path(__file__).with_name("dying_run.py"), tmp_path / "config.json", data, run, "25"]
    job = torchrun(2, *script, tmp_path / "first")
    job.communicate(timeout=HANG / 4)  # half of the 10 minutes for which gloo would wait for the dead
    assert job.returncode != 0
    assert (tmp_path / "first").exists()
    assert checkpoint.saved_steps(RunFolder(run)) == [20]
    assert [line["step"] for line in read_metrics(run)][:20] == list(range(1, 21))
    headgate.load(run)

    words = finish(torchrun(2, *script, tmp_path / "second", restarts=1))
    assert (tmp_path / "second").exists()
    assert [f"resuming from step {step}" in words for step in (20, 40)] == [True, True]
    assert [line["step"] for line in read_metrics(run)] == list(range(1, 61))


def test_a_signal_stops_every_process_at_one_step(micro: Config, data: Path, tmp_path: Path) -> None:
    config.save(changed(micro, steps=100_000, evaluate_every=1000), tmp_path / "config.json")
    run = tmp_path / "run"
    job = torchrun(2, tmp_path / "config.json", "--data", data, "--out", run)
    wait_until(lambda: len(read_metrics(run)) >= 3, job)
    job.send_signal(signal.SIGTERM)
    _, words = job.communicate(timeout=HANG)
    step = read_metrics(run)[-1]["step"]
    assert f"stopped by SIGTERM after step {step:,}, which is saved" in words
    assert checkpoint.saved_steps(RunFolder(run)) == [step]


def test_a_refusal_of_the_first_process_reaches_all(micro: Config, data: Path, tmp_path: Path) -> None:
    train(changed(micro, steps=1), data, tmp_path / "run")
    config.save(changed(micro, steps=2), tmp_path / "config.json")
    job = torchrun(2, tmp_path / "config.json", "--data", data, "--out", tmp_path / "run")
    _, words = job.communicate(timeout=HANG)
    assert job.returncode != 0
    assert "headgate: " in words
    assert "headgate (rank 1): " in words  # nobody waits in vain
    assert words.count("train.steps=1, not 2") == 2


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    assert World(0, 4, torch.device("cpu")).share(8) == 2
    with pytest.raises(HeadgateError, match="batch_size=3 cannot be shared evenly among 2 processes"):
        World(0, 2, torch.device("cpu")).share(3)
