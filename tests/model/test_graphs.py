"""CUDA graphs of a decoding step, with a recording of our own in their place: what is replayed, where its
tensors stand, and that tokens are those without graphs. That CUDA records the parts is not shown."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import headgate
from headgate.config import ModelConfig
from headgate.errors import HeadgateError
from headgate.model import graphs

CONFIG = ModelConfig(
    vocab_size=61, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, d_mlp=48,
    shared_options={"window": 8, "max_window": 12, "dense_prefix": 4, "block": 4, "stride": 4},
)  # fmt: skip
replays: list[int] = []


def recorded(run: graphs.Run, inputs: Sequence[Tensor]) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
    """As CUDA does it: a replay reads the inputs where they were, and writes the outputs where they were."""
    outputs = run(*inputs)
    places = [t.data_ptr() for t in inputs]

    def replay() -> None:
        assert [t.data_ptr() for t in inputs] == places
        for to, t in zip(outputs, run(*(t.clone() for t in inputs)), strict=True):
            to.copy_(t)
        replays.append(1)

    return replay, outputs


@pytest.fixture
def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "record", recorded)
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graphs, "PATIENCE", 2)
    replays.clear()


@pytest.mark.usefixtures("graphs_on_cpu")
@pytest.mark.parametrize("mechanism", headgate.mechanisms())
def test_tokens_are_those_without_graphs(mechanism: str) -> None:
    """Rows of two lengths, of which one ends early: the batch changes, and is recorded anew."""
    decoder = headgate.build_model(CONFIG, mechanism)
    prompts = [list(range(1, 12)), [5, 6, 7], list(range(20, 31))]
    options = {"seed": 3, "top_p": 0.9}
    plain = decoder.generate(prompts, 24, **options)
    stop = plain[1].tokens[9]
    plain = decoder.generate(prompts, 24, stop=stop, **options)
    graphed = decoder.generate(prompts, 24, stop=stop, graphs=True, **options)
    assert [done.tokens for done in graphed] == [done.tokens for done in plain]
    assert len(replays) > 3 * 8


@pytest.mark.usefixtures("graphs_on_cpu")
def test_what_a_mechanism_hands_on_is_not_overwritten() -> None:
    kept = torch.zeros(2, 3)
    carried = {"own": torch.ones(2), "view": kept[:1]}
    graphs._own(carried, [kept])
    kept.fill_(7)
    assert carried["view"].tolist() == [[0, 0, 0]]


def test_without_a_gpu_graphs_are_refused() -> None:
    decoder = headgate.build_model(CONFIG)
    with pytest.raises(HeadgateError, match="graphs=True needs a GPU that records CUDA graphs"):
        decoder.generate([[1]], 2, graphs=True)
    assert torch.is_grad_enabled()
