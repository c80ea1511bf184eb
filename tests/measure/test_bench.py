"""`headgate bench`: what it measures, prints and writes."""

import json
from pathlib import Path

import pytest
import torch

from headgate.cli import run
from headgate.config import ModelConfig
from headgate.errors import HeadgateError
from headgate.grammar import parse_mechanisms
from headgate.measure.costs import decoding_step
from headgate.measure.speed import BASELINE, Shape, extra_memory, measure, select_cases, slope
from headgate.mechanisms import MECHANISMS
from headgate.model.decoder import Decoder


def test_every_op_and_mechanism_is_measured_in_every_pass() -> None:
    shape = Shape(n_heads=2, n_kv_heads=1, head_dim=16, window=8)
    cases = select_cases(shape, None)
    measured = measure(cases, [16, 40], shape, seconds=0.0)
    names = {figure.name for figure in measured.figures}
    assert {BASELINE, "causal_attention", "window_attention", "pair_gated_attention log"} <= names
    assert set(MECHANISMS.names()) | {"context-adaptive:select=block", "sparse-geometric:gate=log"} <= names
    assert len(measured.figures) == (len(cases) + 1) * 2 * 2
    for figure in measured.figures:
        assert 0 < figure.ratio_low <= figure.ratio <= figure.ratio_high
        assert figure.gflops > 0
        if figure.name == BASELINE:
            assert figure.ratio == 1
    assert set(measured.growth) == names


def test_window_attention_counts_only_its_own_pairs() -> None:
    (case,) = select_cases(Shape(window=8), ["window_attention"])
    assert case.pairs(20) == sum(min(i, 8) + 1 for i in range(20))


def test_growth_is_the_exponent_of_a_power_law() -> None:
    assert slope([(n, 3e-6 * n**1.5) for n in (512, 1024, 4096)]) == pytest.approx(1.5)


def test_extra_memory_grows_with_what_is_held() -> None:
    """The reference holds the square of the length, a window only its length."""
    shape = Shape(n_heads=2, n_kv_heads=2, head_dim=16, window=16)
    local = extra_memory("local", [2048], shape)[2048]
    square = 2 * 2048 * 2048 * 4
    assert 0 < local < square / 2
    assert extra_memory(BASELINE, [2048], shape)[2048] < square


def test_the_command_prints_a_table_and_writes_json_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--lengths",
        "16,32",
        "--heads",
        "2",
        "--head-dim",
        "16",
        "--window",
        "8",
        "--no-peers",
        "--no-memory",
        "--seconds",
        "0.001",
    ]
    chosen = ["--mechanisms", "local", "sparse-geometric:gate=log", "window_attention"]
    run(
        [
            "bench",
            *arguments,
            *chosen,
            "--json",
            str(tmp_path / "b.json"),
            "--figure",
            str(tmp_path / "b.svg"),
        ]
    )
    printed = capsys.readouterr().out
    for word in (
        "causal SDPA",
        "local",
        "sparse-geometric:gate=log",
        "T=16",
        "T=32",
        "forward+backward",
        "T^",
    ):
        assert word in printed
    written = json.loads((tmp_path / "b.json").read_text())
    assert written["threads"] == torch.get_num_threads()
    assert len(written["figures"]) == 4 * 2 * 2
    assert "<svg" in (tmp_path / "b.svg").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.json", "b.svg"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mechanisms", "locl"], "there is nothing called 'locl' to measure; did you mean 'local'"),
        (["--mechanisms", "local:windw=3"], "local has no option 'windw'"),
        (["--lengths", "0"], "lengths='0' must be whole numbers above 0, written as 1024,4096"),
        (["--figure", "x.pdf"], "must end in .html, .png or .svg"),
        (["--json", "no/such/folder/x.json"], "is in a folder that does not exist"),
        (["--heads", "3", "--kv-heads", "2"], "n_heads=3 is not a multiple of n_kv_heads=2"),
        (["--threads", "0"], "threads=0 is too small"),
    ],
)
def test_bad_arguments_get_one_clear_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(HeadgateError) as caught:
        run(["bench", *arguments])
    assert words in str(caught.value)


@pytest.mark.parametrize("name", MECHANISMS.names())
def test_decoding_is_timed_after_a_context_that_nobody_attended_to(name: str) -> None:
    """What is kept is that of a context run in full, so that the time of the next token is."""
    model = ModelConfig(
        vocab_size=32, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, d_mlp=32,
        mechanism=parse_mechanisms(name), shared_options={"window": 8, "block": 4},
    )  # fmt: skip
    decoder = Decoder(model).eval()
    step, held = decoding_step(decoder, 40)
    cache = decoder.new_cache()
    with torch.inference_mode():
        decoder.hidden(torch.zeros(1, 40, dtype=torch.int64), cache=cache)
    assert held == cache.held_bytes
    step()


def test_steps_and_tokens_are_measured_against_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headgate.measure.steps.ALONE_AT", 48)
    words = ["--lengths", "16,32", "--decoded-after", "64,8", "--mechanisms", "local", "--no-memory"]
    run(["bench", "--steps", *words, "--seconds", "0.001", "--json", str(tmp_path / "steps.json")])
    full, local = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert (full["name"], local["name"]) == ("full", "local")
    assert full["step"] == {"16": [1, 1, 1], "32": [1, 1, 1]}
    assert list(local["decoding"]) == ["8", "64"]
    for row in (full, local):
        assert row["decoding_growth"] > 0
        assert row["sgemm_share"] > 0
    assert "64 / 8" in capsys.readouterr().out
