"""Runs that begin with given weights: what they record, how they go on, what they refuse."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import changed, repeatable_metrics

import headgate
from headgate.cli import run as command
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.grammar import MechanismSpec
from headgate.model.convert import convert
from headgate.model.decoder import Decoder
from headgate.train import loop
from headgate.train.evaluate import evaluate_run
from headgate.train.folder import RunFolder
from headgate.train.loop import train


@pytest.fixture
def weights(micro: Config, tmp_path: Path) -> Path:
    """A converted model: full attention retrofitted with open gates, in bf16."""
    plain = replace(micro.model, mechanism=(MechanismSpec("full"),))
    Decoder(plain, seed=5).to(torch.bfloat16).save(tmp_path / "plain.safetensors")
    convert(tmp_path / "plain.safetensors", tmp_path / "weights", mechanism="dynamic-sparse")
    return tmp_path / "weights"


def test_a_run_begins_with_them_and_the_gates_move(
    micro: Config, data: Path, weights: Path, tmp_path: Path
) -> None:
    settings = changed(micro, learning_rate=1e-6, mechanism_rate=1e5)
    train(settings, data, tmp_path / "run", init=weights)
    before, after = headgate.load(weights), headgate.load(tmp_path / "run")
    assert {p.dtype for p in after.parameters()} == {torch.float32}
    for name, parameter in after.named_parameters():
        moved = (parameter - before.get_parameter(name).float()).abs().max()
        assert moved > 1e-3 if ".mechanism." in name else moved < 1e-4, name
    gates = [line["gates"][0]["mean"] for line in repeatable_metrics(tmp_path / "run") if "gates" in line]
    assert gates[0] > 0.99
    assert gates[-1] < gates[0] - 1e-4


def test_the_command_takes_the_model_from_the_folder(data: Path, weights: Path, tmp_path: Path) -> None:
    words = ["train", "tiny", "--data", str(data), "--out", str(tmp_path / "run"), "--init", str(weights)]
    small = ["train.steps=2", "train.context=24", "train.batch_size=2", "train.evaluate_tokens=48"]
    command([*words, *small])
    assert headgate.load(tmp_path / "run").config == headgate.load(weights).config
    command(["train", "--out", str(tmp_path / "run")])  # finished: it needs no --init


def test_a_run_that_stopped_before_its_first_checkpoint_begins_with_them_again(
    micro: Config, data: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(micro, data, tmp_path / "whole", init=weights)

    class Killed(Exception):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", killed)
        patch.setattr(RunFolder, "forget", lambda run: None)  # a process that is killed takes nothing back
        with pytest.raises(Killed):
            train(micro, data, tmp_path / "run", init=weights)
    train(micro, data, tmp_path / "run")
    assert repeatable_metrics(tmp_path / "run") == repeatable_metrics(tmp_path / "whole")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.rmtree(weights)
    with pytest.raises(HeadgateError, match="the weights it started from are no longer in"):
        train(micro, data, tmp_path / "run")


def test_other_first_weights_are_refused(micro: Config, data: Path, weights: Path, tmp_path: Path) -> None:
    train(micro, data, tmp_path / "random")
    with pytest.raises(HeadgateError, match="is a run that started from random weights, not from those of"):
        train(micro, data, tmp_path / "random", init=weights)
    train(micro, data, tmp_path / "run", init=weights)
    train(micro, data, tmp_path / "run", init=weights)  # the same command again
    Decoder(micro.model, seed=9).save(tmp_path / "other.safetensors")
    with pytest.raises(
        HeadgateError, match=r"started from the weights of '.*weights/model.safetensors', not"
    ):
        train(micro, data, tmp_path / "run", init=tmp_path / "other.safetensors")


def test_weights_that_do_not_fit_leave_nothing_behind(
    micro: Config, data: Path, weights: Path, tmp_path: Path
) -> None:
    gated = replace(micro, model=replace(micro.model, mechanism=(MechanismSpec("context-adaptive"),)))
    wide = replace(micro, model=replace(micro.model, d_mlp=25))
    for asked, words in (
        (gated, r"mechanism.gate.0.weight is missing, expected \(16,\); leave the model's settings"),
        (wide, r"layers.0.mlp.down_proj.weight is \(16, 24\), expected \(16, 25\)"),
    ):
        with pytest.raises(HeadgateError, match=words):
            train(asked, data, tmp_path / "run", init=weights)
    with pytest.raises(HeadgateError, match="holds no model"):
        train(micro, data, tmp_path / "run", init=tmp_path / "nothing")
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_no_run_can_be_evaluated(
    micro: Config, data: Path, weights: Path, tmp_path: Path
) -> None:
    result = evaluate_run(weights, data=data, context=24, tokens=480)
    assert result["loss"] == pytest.approx(5.55, abs=0.1)  # about log(257) before training
    assert result["gates"][0]["mean"] > 0.999
    train(changed(micro, steps=1), data, tmp_path / "run", init=weights)
    assert len(evaluate_run(tmp_path / "run", context=12)["by_position"]) == 5
    with pytest.raises(HeadgateError, match="is a model, not a run, so it has no data or context of its own"):
        evaluate_run(weights, data=data)
    with pytest.raises(HeadgateError, match="context=0 is too small"):
        evaluate_run(weights, data=data, context=0)
    Decoder(replace(micro.model, vocab_size=100)).save(tmp_path / "few.safetensors")
    with pytest.raises(HeadgateError, match="has 257 kinds of tokens, but the model knows 100"):
        evaluate_run(tmp_path / "few.safetensors", data=data, context=24)


def test_a_run_goes_to_transformers_with_its_tokenizer_and_context(
    micro: Config, data: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'headgate[hf]'")
    plain = replace(micro, model=replace(micro.model, mechanism=(MechanismSpec("full"),)))
    train(changed(plain, steps=2), data, tmp_path / "run")
    for source in (tmp_path / "run", next((tmp_path / "run" / "checkpoints").glob("step-*2"))):
        convert(source, tmp_path / source.name / "qwen", to="qwen")
        folder = tmp_path / source.name / "qwen"
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert (model.config.model_type, model.config.max_position_embeddings) == ("qwen3", 24)
        assert model.config.eos_token_id == tokenizer.eos_token_id == 256
        tokens = tokenizer("a gate", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            ours = headgate.load(tmp_path / "run")(tokens)
            assert torch.allclose(model(tokens).logits, ours, rtol=0, atol=1e-4)
