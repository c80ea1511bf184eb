"""The files in examples/ do what they say."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headgate import ops

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


def test_the_ops_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    out = load("outside_block").attention_alone()
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 8, 100, 64), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)
    assert torch.allclose(out, ops.window_attention(q, k, v, 16, backend="reference"), rtol=0, atol=1e-5)
    told = capsys.readouterr().out
    assert "span_attention takes the path" in told
    assert float(told.split()[-1]) < 1e-5
