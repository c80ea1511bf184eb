"""A run: what it tells, that it learns, and that it goes on exactly where it was stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import changed, repeatable_metrics
from torch import Tensor

import headgate
from headgate.config import Config
from headgate.data.loader import Loader
from headgate.data.prepare import Request, prepare
from headgate.data.shards import open_split
from headgate.errors import HeadgateError
from headgate.grammar import MechanismSpec
from headgate.mechanisms import Past
from headgate.mechanisms.contract import MECHANISMS
from headgate.mechanisms.full import Full
from headgate.options import RunOptions
from headgate.train import checkpoint
from headgate.train.evaluate import rounded_products
from headgate.train.folder import RunFolder, read_config, read_metrics
from headgate.train.loop import train
from headgate.train.trackers import TRACKERS


@pytest.fixture
def stop_at() -> Iterator[dict[str, Any]]:
    """A tracker `stopper` that sends this process a signal when step["at"] is told."""
    order = {"at": 0, "signal": signal.SIGTERM}

    class Stopper:
        def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None: ...

        def log(self, step: int, values: Mapping[str, float]) -> None:
            if step == order["at"]:
                os.kill(os.getpid(), order["signal"])

        def close(self) -> None: ...

    TRACKERS.register("os")(Stopper)  # a tracker's name is that of the package it needs
    yield order
    TRACKERS.unregister("os")


def weights(run: Path, which: str = "last") -> dict[str, Tensor]:
    return headgate.load(checkpoint.find(RunFolder(run), which)).state_dict()


def assert_same_run(one: Path, other: Path) -> None:
    assert repeatable_metrics(one) == repeatable_metrics(other)
    ours, theirs = weights(one), weights(other)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_run_learns_and_tells_all_it_should(data: Path, micro: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(changed(micro, steps=60), data, run).signal is None
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert [line["tokens"] for line in lines] == [96 * n for n in range(1, 61)]
    fields = {
        "step", "tokens", "seconds", "loss", "learning_rate", "gradient_norm", "tokens_per_second",
        "memory_peak", "skipped",
    }  # fmt: skip
    for line in lines:
        evaluated = line["step"] % 4 == 0
        assert set(line) == fields | ({"validation", "gates"} if evaluated else set())
    assert lines[0]["loss"] == pytest.approx(5.55, abs=0.1)  # log 257
    assert lines[-1]["loss"] < 3.5
    assert lines[-1]["seconds"] > lines[0]["seconds"] > 0
    assert lines[-1]["memory_peak"] > 50e6
    gates = lines[-1]["gates"]
    assert [gate["layer"] for gate in gates] == [0, 1]
    for gate in gates:
        assert 0 < gate["mean"] < 1
        assert gate["spread"] > 0
        assert 0 <= gate["below_01"] + gate["above_09"] <= 1
    validation = lines[-1]["validation"]
    assert validation["tokens"] == 120
    assert [(b["first"], b["end"]) for b in validation["by_position"]] == [
        (0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 24)
    ]  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    assert summary["final"]["loss"] == validation["loss"]
    assert summary["best"]["loss"] == min(li["validation"]["loss"] for li in lines if "validation" in li)
    assert summary["parameters"] == headgate.build_model(micro).parameter_count()
    assert summary["mechanism_parameters"] == 2 * (16 * 2 + 2)
    assert summary["kernel_paths"]
    assert all(":" in path for path in summary["kernel_paths"])
    assert 0 < summary["sparsity"]["mean"] < 1
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["tokens_per_second"] > 0
    assert read_config(run) == changed(micro, steps=60)
    assert sorted(p.name for p in run.iterdir()) == [
        "checkpoints", "config.json", "data.json", "documents.safetensors", "metrics.jsonl", "summary.json",
        "tokenizer.json",
    ]  # fmt: skip


def test_the_first_step_is_adamw_on_the_mean_loss_of_the_batch(
    data: Path, micro: Config, tmp_path: Path
) -> None:
    config = changed(micro, steps=1, warmup_steps=0, clip=0.05, weight_decay=0.3)
    train(config, data, tmp_path / "run")
    decoder = headgate.build_model(config)
    tokens, targets = next(Loader(open_split(data, "train"), length=24, batch_size=4, seed=0))
    loss = decoder(tokens, targets)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), 0.05)
    line = read_metrics(tmp_path / "run")[0]
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert line["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)
    trained = weights(tmp_path / "run")
    rate = line["learning_rate"]
    for name, parameter in decoder.named_parameters():
        decay = 0.3 if parameter.ndim > 1 else 0.0
        # AdamW's first step, its averages being the gradient itself and its square
        moved = parameter.grad / (parameter.grad.abs() + 1e-8)
        expected = parameter.detach() * (1 - rate * decay) - rate * moved
        assert torch.allclose(trained[name], expected, rtol=1e-4, atol=2e-5), name


def test_sequences_grow_in_equal_shares_of_the_steps(data: Path, micro: Config, tmp_path: Path) -> None:
    config = changed(micro, steps=7, first_context=6)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(config, data, whole)
    lines = read_metrics(whole)
    assert [line["context"] for line in lines] == [6, 6, 6, 12, 12, 24, 24]
    assert {line["tokens"] - 96 * line["step"] for line in lines} == {0}
    decoder = headgate.build_model(config)
    tokens, targets = next(Loader(open_split(data, "train"), length=24, batch_size=4, seed=0))
    loss = decoder(tokens.view(16, 6), targets.view(16, 6))
    assert lines[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    train(config, data, resumed, RunOptions(until=4))
    train(config, data, resumed)
    assert_same_run(whole, resumed)
    alone = tmp_path / "masked"
    train(replace(config, train=replace(config.train, documents="mask")), data, alone)
    assert read_metrics(alone)[-1]["loss"] is not None


@pytest.mark.parametrize("first", [5, 48])
def test_sequences_that_cannot_grow_to_the_context_are_refused(micro: Config, first: int) -> None:
    with pytest.raises(
        HeadgateError, match=f"first_context={first} cannot be doubled until it is context=24"
    ):
        changed(micro, first_context=first)


def test_products_of_rounded_factors_change_little_and_nothing_else(
    data: Path, micro: Config, tmp_path: Path
) -> None:
    before = torch.get_float32_matmul_precision()
    runs = {name: tmp_path / name for name in ("fp32", "rounded", "resumed")}
    rounded = changed(micro, precision="bf16-products")
    train(micro, data, runs["fp32"])
    train(rounded, data, runs["rounded"])
    train(rounded, data, runs["resumed"], RunOptions(until=2))
    train(rounded, data, runs["resumed"])
    assert torch.get_float32_matmul_precision() == before
    assert_same_run(runs["rounded"], runs["resumed"])
    pairs = zip(read_metrics(runs["fp32"]), read_metrics(runs["rounded"]), strict=True)
    assert all(one["loss"] == pytest.approx(other["loss"], abs=0.02) for one, other in pairs)
    assert weights(runs["rounded"]).keys() == weights(runs["fp32"]).keys()
    with rounded_products("bf16-products"):
        assert torch.get_float32_matmul_precision() == "medium"


def test_accumulation_only_changes_how_a_batch_is_computed(data: Path, micro: Config, tmp_path: Path) -> None:
    train(changed(micro, steps=5), data, tmp_path / "whole")
    train(changed(micro, steps=5, batch_size=1, accumulation=4), data, tmp_path / "parts")
    whole, parts = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "parts")
    for one, other in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["tokens"] == other["tokens"]


@pytest.mark.parametrize("options", [RunOptions(recompute=True), RunOptions(log_every=3, keep=1)])
def test_how_a_run_is_carried_out_does_not_change_it(
    options: RunOptions, data: Path, micro: Config, tmp_path: Path
) -> None:
    train(micro, data, tmp_path / "plain")
    train(micro, data, tmp_path / "other", options)
    lines = repeatable_metrics(tmp_path / "plain")
    kept = [line for line in lines if line["step"] % options.log_every == 0 or "validation" in line]
    assert repeatable_metrics(tmp_path / "other") == kept
    for name, tensor in weights(tmp_path / "plain").items():
        assert torch.equal(tensor, weights(tmp_path / "other")[name]), name


OTHERWISE: dict[str, Any] = {
    "betas": (0.85, 0.98), "warmup_steps": 0, "warmup_share": 0.5, "schedule": "linear",
    "attention_output_rate": 3.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("at", "settings"), [(1, {}), (4, OTHERWISE), (6, OTHERWISE | {"optimizer": "muon"}), (11, {})]
)
def test_a_run_stopped_and_resumed_is_the_run_never_stopped(
    at: int, settings: dict[str, Any], data: Path, micro: Config, tmp_path: Path, stop_at: dict[str, Any]
) -> None:
    micro = changed(micro, **settings)
    train(micro, data, tmp_path / "whole")
    stop_at["at"] = at
    outcome = train(micro, data, tmp_path / "halved", RunOptions(track=("os",)))
    # The signal comes when the step is told; the next one is on its way and is finished.
    assert (outcome.step, outcome.signal) == ((at + 1, signal.SIGTERM) if at < 11 else (12, None))
    assert len(repeatable_metrics(tmp_path / "halved")) == at + 1
    outcome = train(micro, data, tmp_path / "halved")
    assert (outcome.step, outcome.signal) == (12, None)
    assert_same_run(tmp_path / "whole", tmp_path / "halved")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "halved")]
    for name in ("steps", "tokens", "final", "best", "gates", "kernel_paths", "sparsity"):
        assert summaries[0][name] == summaries[1][name], name


def test_random_numbers_resume_too(
    data: Path, micro: Config, tmp_path: Path, stop_at: dict[str, Any]
) -> None:
    drawn: list[float] = []

    class Dropout(Full):
        def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
            if self.training:
                drawn.append(torch.rand(()).item())
            return torch.nn.functional.dropout(super().attend(x, q, k, v, past), 0.2, self.training)

    MECHANISMS.register("dropout-test")(Dropout)
    try:
        config = replace(micro, model=replace(micro.model, mechanism=(MechanismSpec("dropout-test"),)))
        train(config, data, tmp_path / "whole")
        assert len(set(drawn)) == len(drawn) > config.train.steps
        stop_at["at"] = 5
        train(config, data, tmp_path / "halved", RunOptions(track=("os",)))
        train(config, data, tmp_path / "halved")
        assert_same_run(tmp_path / "whole", tmp_path / "halved")
        train(replace(config, seed=1), data, tmp_path / "other")
        assert repeatable_metrics(tmp_path / "other") != repeatable_metrics(tmp_path / "whole")
    finally:
        MECHANISMS.unregister("dropout-test")


def test_the_last_checkpoints_and_the_best_are_kept(data: Path, micro: Config, tmp_path: Path) -> None:
    # A learning rate that explodes after a few steps makes an early evaluation the best one.
    config = changed(
        micro, steps=20, learning_rate=3.0, warmup_steps=15, evaluate_every=2, schedule="constant"
    )
    train(config, data, tmp_path / "run", RunOptions(save_every=1, keep=3))
    run = RunFolder(tmp_path / "run")
    evaluated = {li["step"]: li["validation"]["loss"] for li in read_metrics(run.path) if "validation" in li}
    best = min(evaluated, key=evaluated.__getitem__)
    assert best < 17
    assert checkpoint.saved_steps(run) == [best, 18, 19, 20]
    assert checkpoint.find(run, "best").name == f"step-{best:08d}"
    assert checkpoint.find(run).name == "step-00000020"
    assert checkpoint.find(run, "19").name == "step-00000019"
    with pytest.raises(
        HeadgateError, match=r"has no checkpoint '7'; expected last, best or one of the steps"
    ):
        checkpoint.find(run, "7")
    last = headgate.load(run.path).state_dict()
    assert all(torch.equal(last[name], tensor) for name, tensor in weights(run.path).items())
    assert not torch.equal(last["embedding.weight"], weights(run.path, "best")["embedding.weight"])


def test_a_finished_run_is_left_alone(
    data: Path, micro: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(micro, data, tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*.json*")}
    assert train(micro, data, tmp_path / "run").step == 12
    assert "is finished" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_another_configuration_is_refused_with_the_difference(
    data: Path, micro: Config, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(changed(micro, steps=2), data, run)
    before = repeatable_metrics(run)
    other = replace(changed(micro, steps=3), seed=4)
    with pytest.raises(HeadgateError) as caught:
        train(other, data, run)
    message = str(caught.value)
    assert "train.steps=2, not 3" in message
    assert "seed=0, not 4" in message
    assert f"headgate train --out {run}" in message
    assert "\n" not in message
    with pytest.raises(HeadgateError, match=r"model\.mechanism="):
        train(replace(micro, model=replace(micro.model, mechanism=(MechanismSpec("full"),))), data, run)
    assert repeatable_metrics(run) == before


def test_other_data_is_refused(data: Path, micro: Config, tmp_path: Path) -> None:
    train(changed(micro, steps=2), data, tmp_path / "run")
    shutil.copytree(data, tmp_path / "moved")
    train(changed(micro, steps=2), tmp_path / "moved", tmp_path / "run")  # the same tokens elsewhere
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": f"{n} is a number " * 9}) + "\n" for n in range(60)))
    prepare(Request(str(source), tokenizer="byte"), tmp_path / "shards", workers=1)
    with pytest.raises(HeadgateError, match=r"data.fingerprint=.*, not .*data.train_tokens"):
        train(changed(micro, steps=2), tmp_path / "shards", tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model": {"vocab_size": 200}},
            r"model.vocab_size=200 is too small .* 257 entries; add model.vocab",
        ),
        ({"train": {"context": 100_000}}, "too few for a window of 100000"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_written(
    change: dict[str, Any], words: str, data: Path, micro: Config, tmp_path: Path
) -> None:
    for part, values in change.items():
        micro = replace(micro, **{part: replace(getattr(micro, part), **values)})
    with pytest.raises(HeadgateError, match=words):
        train(micro, data, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(data: Path, micro: Config, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(HeadgateError, match=r"holds 'thesis.tex' but no config.json, so it is not a run"):
        train(micro, data, tmp_path)
    with pytest.raises(HeadgateError, match="is a file; expected a folder"):
        train(micro, data, tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_only_one_process_trains_a_folder(data: Path, micro: Config, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom headgate.files import locked\n"
        "with locked(Path(sys.argv[1]), 'trained'):\n    print('locked', flush=True)\n    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(HeadgateError, match="is being trained by another process"):
        train(micro, data, tmp_path / "run")
    other.communicate()
    train(changed(micro, steps=1), data, tmp_path / "run")


def test_shard_needs_torchrun(data: Path, micro: Config, tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="there is only one; start it with torchrun"):
        train(micro, data, tmp_path / "run", RunOptions(shard=True))
    with pytest.raises(HeadgateError, match="device='gpu' is not a device"):
        train(micro, data, tmp_path / "run", RunOptions(device="gpu"))


def test_bf16_is_honoured_on_the_cpu(data: Path, micro: Config, tmp_path: Path) -> None:
    train(changed(micro, steps=2), data, tmp_path / "fp32")
    train(changed(micro, steps=2, precision="bf16"), data, tmp_path / "bf16")
    exact, rounded = (read_metrics(tmp_path / name)[-1]["loss"] for name in ("fp32", "bf16"))
    assert exact != rounded
    assert exact == pytest.approx(rounded, abs=0.05)
    assert headgate.load(tmp_path / "bf16").embedding.weight.dtype == torch.float32


def test_a_sequence_of_32768_tokens_trains_in_6_gb(tmp_path: Path) -> None:
    """As in the papers: `tiny` with dynamic-sparse, in a process of its own, whose peak is the measure."""
    prepare(
        Request("stdlib", tokenizer="byte", splits=(50, 50, 0), max_tokens=400_000),
        tmp_path / "data",
        workers=1,
    )
    words = ["train.context=32768", "train.batch_size=1", "train.steps=1", "train.documents=stream"]
    words += ["train.document_tokens=65536", "--recompute"]
    words += [
        "--data",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "run"),
        "--mechanism",
        "dynamic-sparse",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "headgate", "train", "tiny", *words], check=True, env=environment)
    (line,) = read_metrics(tmp_path / "run")
    assert line["tokens"] == 32_768
    assert line["memory_peak"] < 6e9
    assert line["validation"]["by_position"][-1]["first"] == 16_384
