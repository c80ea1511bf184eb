"""The files in examples/ do what they say."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import forked
import pytest
import torch
from study_examples import write_recipe

import headgate
from headgate import ops
from headgate.config import Config
from headgate.mechanisms import MECHANISMS

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        ("full", {}),
        ("head-gated", {"window": 8}),
        ("dynamic-sparse", {"window": 8, "dense_prefix": 16}),
        ("context-adaptive", {"window": 8, "max_window": 16, "select": "block", "block": 8}),
    ],
)
def test_a_mechanism_in_somebody_elses_block(mechanism: str, options: dict[str, object]) -> None:
    first, last, difference = load("outside_block").train_and_decode(mechanism, **options)
    assert last < 0.8 * first
    assert difference < 1e-4


def test_a_mechanism_of_your_own_trains_and_decodes() -> None:
    """One file with a state per key and a look back: whole and token by token agree, and it learns."""
    file = EXAMPLES / "own_mechanism.py"
    try:
        decoder = headgate.build_model("tiny", mechanism=f"{file}:surprise+{file}:surprise:last-key", seed=1)
        tokens = torch.randint(4096, (2, 33), generator=torch.Generator().manual_seed(0))
        optimiser, losses, cache = torch.optim.AdamW(decoder.parameters(), lr=1e-3), [], decoder.new_cache()
        for _ in range(4):
            loss = decoder(tokens[:, :-1], tokens[:, 1:])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        with torch.no_grad():
            steps = torch.cat([decoder(tokens[:, t : t + 1], cache=cache) for t in range(33)], 1)
            assert torch.allclose(steps, decoder(tokens), atol=1e-4)
        assert losses[-1] < losses[0] - 0.3
        assert decoder.layers[0].attention.mechanism.weight.grad.abs().max() > 0
    finally:
        MECHANISMS.unregister("surprise")


def test_it_is_compared_by_its_file(data: Path, micro: Config, tmp_path: Path) -> None:
    words = ["compare", f"{EXAMPLES / 'own_mechanism.py'}:surprise", "--out", str(tmp_path / "study")]
    words += ["--recipe", str(write_recipe(micro, tmp_path)), "--data", str(data), "--seeds", "1"]
    words += ["--jobs", "1", "--no-cost", "--no-controls", "train.steps=2"]
    done = forked.run(["-m", "headgate", *words])
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "study/results.json").read_text())
    assert [v["runs"][0]["state"] for v in results["variants"]] == ["finished", "finished"]
    assert "surprise" in results["variants"][1]["label"]


def test_the_ops_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    out = load("outside_block").attention_alone()
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 8, 100, 64), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)
    assert torch.allclose(out, ops.window_attention(q, k, v, 16, backend="reference"), rtol=0, atol=1e-5)
    printed = capsys.readouterr().out
    assert "span_attention takes the path" in printed
    assert float(printed.split()[-1]) < 1e-5
