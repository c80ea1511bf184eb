"""Folders of gated models in the hands of transformers' Auto classes, and back in ours."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import headgate
from headgate.cli import run
from headgate.config import ModelConfig
from headgate.data.tokenizers import make_tokenizer
from headgate.model.convert import convert
from headgate.model.decoder import Decoder, with_mechanism

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'headgate[hf]'")

from headgate.model.hf import HeadgateForCausalLM, use  # noqa: E402

MICRO = ModelConfig(257, 24, 2, 4, 2, 8, 40, shared_options={"window": 5, "dense_prefix": 7})
ROOT = str(Path(headgate.__file__).parents[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `headgate convert` writes it, with a tokenizer."""
    home = tmp_path_factory.mktemp("auto")
    decoder = Decoder(with_mechanism(MICRO, "dynamic-sparse"), seed=3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    decoder.save(home / "model.safetensors")
    (home / "tokenizer.json").write_text(make_tokenizer("byte").definition)
    convert(home, home / "out")
    return home / "out"


def tokens(rows: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(1, 250, (rows, length), generator=torch.Generator().manual_seed(0))


def in_a_new_process(script: str, *arguments: Any, home: Path, without: bool = False) -> Any:
    hide = "import sys; sys.modules['headgate'] = None\n" if without else ""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", hide + script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


REMOTE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
torch.save(model(torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])).logits.detach(), sys.argv[2])
model.save_pretrained(sys.argv[3])
"""


def test_trust_remote_code_loads_what_convert_wrote(folder: Path, tmp_path: Path) -> None:
    """In a process that knows nothing of headgate; and what that saves is a folder like it."""
    saved = tmp_path / "saved"
    done = in_a_new_process(REMOTE, folder, tmp_path / "logits", saved, home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = headgate.load(folder)(torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]]))
    assert torch.equal(torch.load(tmp_path / "logits"), expected)
    names = ["config.json", "generation_config.json", "model.safetensors", "modeling_headgate.py"]
    assert sorted(path.name for path in saved.iterdir()) == names
    assert (saved / "modeling_headgate.py").read_text() == (folder / "modeling_headgate.py").read_text()
    assert type(transformers.AutoModelForCausalLM.from_pretrained(saved)) is HeadgateForCausalLM


def test_a_model_of_another_family_with_a_mechanism_is_loaded_likewise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    use(model, "dynamic-sparse", window=3, dense_prefix=0).save_pretrained(tmp_path / "gated")
    arguments = tmp_path / "gated", tmp_path / "logits", tmp_path / "again"
    done = in_a_new_process(REMOTE, *arguments, home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])).logits
    assert torch.equal(torch.load(tmp_path / "logits"), expected)
    assert (tmp_path / "again" / "modeling_headgate.py").is_file()
    headgate.model.hf.take_out(model).save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "modeling_headgate.py").exists()


def test_where_headgate_is_missing_it_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    arguments = folder, tmp_path / "logits", tmp_path / "saved"
    done = in_a_new_process(REMOTE, *arguments, home=tmp_path / "home", without=True)
    assert done.returncode != 0
    assert "this model needs headgate: pip install --upgrade 'headgate[hf]'" in done.stderr


@pytest.mark.parametrize("size", ["1GB", "8KB"])
def test_headgate_reads_what_save_pretrained_wrote(folder: Path, size: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "saved", max_shard_size=size)
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (size == "8KB")
    decoder = headgate.load(tmp_path / "saved")
    assert decoder.config == headgate.load(folder).config
    for name, parameter in headgate.load(folder).named_parameters():
        assert torch.equal(decoder.get_parameter(name), parameter), name


def test_the_commands_take_it_too(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    words = ["--max-new-tokens", "8", "--temperature", "0"]
    run(["generate", str(folder), "--prompt", "a gate", *words])
    expected = capsys.readouterr().out
    run(["generate", str(tmp_path / "saved"), "--prompt", "a gate", *words])
    assert capsys.readouterr().out == expected


def test_the_model_without_a_head(folder: Path) -> None:
    model = transformers.AutoModel.from_pretrained(folder)
    decoder = headgate.load(folder)
    with torch.no_grad():
        states = model(tokens()).last_hidden_state
        torch.testing.assert_close(states, decoder.hidden(tokens()))
        padded = F.pad(tokens(), (6, 0), value=7)
        mask = F.pad(torch.ones_like(tokens()), (6, 0))
        found = model(padded, attention_mask=mask).last_hidden_state[:, 6:]
    torch.testing.assert_close(found, states)


def test_rows_are_classified_by_their_last_token(folder: Path, tmp_path: Path) -> None:
    """Whatever the padding; trained by Trainer, saved and loaded again."""
    pytest.importorskip("accelerate", reason="Trainer needs it: pip install 'headgate[hf]'")
    auto = transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    model = auto.from_pretrained(folder, num_labels=3, pad_token_id=0)
    assert 0 < model.score.weight.std() < 0.1
    batch = torch.zeros(2, 20, dtype=torch.long)
    rows = tokens()
    batch[0], batch[1, :11] = rows[0], rows[1, :11]
    with torch.no_grad():
        alone = torch.cat([model(rows[:1]).logits, model(rows[1:, :11]).logits])
        assert torch.allclose(model(batch).logits, alone, atol=1e-6)
        left = torch.cat([F.pad(rows[:1], (4, 0)), F.pad(rows[1:, :11], (13, 0))])
        assert torch.allclose(model(left, attention_mask=(left != 0).long()).logits, alone, atol=1e-6)
    data = [{"input_ids": row, "labels": n % 3} for n, row in enumerate(tokens(24, 12))]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=12, per_device_train_batch_size=12,
            learning_rate=1e-2, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=data,
    )  # fmt: skip
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0] - 0.1
    model.eval().save_pretrained(tmp_path / "saved")
    again = auto.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(rows).logits, model(rows).logits)
