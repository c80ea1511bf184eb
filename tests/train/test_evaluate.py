"""Evaluation: on which tokens, how it is summed, and the command that shows it."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_runs import changed
from torch._dynamo.testing import CompileCounter

import headgate
from headgate.cli import run as command
from headgate.config import Config
from headgate.data.answers import distances, position_bins
from headgate.data.loader import IGNORED, Windows
from headgate.data.prepare import Request, prepare
from headgate.data.shards import open_split
from headgate.data.tasks import parse_task
from headgate.data.tasks.writing import prepare_task
from headgate.errors import HeadgateError
from headgate.model.decoder import Decoder
from headgate.train.evaluate import _uncompiled, evaluate, evaluate_run, read_document_losses
from headgate.train.folder import read_metrics
from headgate.train.loop import train


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    from headgate.recipes import get_recipe

    small = get_recipe("tiny")
    model = replace(small.model, vocab_size=257, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8)
    settings = replace(small.train, context=24, batch_size=4, steps=6, evaluate_every=3, evaluate_tokens=120)
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    config = replace(small, model=replace(model, d_mlp=24), train=settings)
    mechanism = headgate.build_model(config, "dynamic-sparse").config
    torch.set_num_threads(1)
    train(replace(config, model=mechanism), data, folder)
    return folder


@pytest.mark.parametrize(
    ("length", "bins"),
    [
        (1, [(0, 1)]),
        (2, [(0, 1), (1, 2)]),
        (8, [(0, 1), (1, 2), (2, 4), (4, 8)]),
        (9, [(0, 1), (1, 2), (2, 4), (4, 8), (8, 9)]),
    ],
)
def test_bins_double_and_cover_the_context(length: int, bins: list[tuple[int, int]]) -> None:
    assert position_bins(length) == bins


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_the_loss_is_the_mean_over_every_token_of_the_split(
    batch_size: int, data: Path, micro: Config
) -> None:
    decoder = headgate.build_model(micro).double()
    windows = Windows(open_split(data, "val"), 24)
    result = evaluate(decoder, windows, batch_size=batch_size)
    tokens, targets = windows.read(range(len(windows)))
    with torch.no_grad():
        losses = F.cross_entropy(decoder(tokens).mT, targets, reduction="none", ignore_index=-100)
    counted = targets != -100
    assert result.tokens == windows.split.tokens - 1 == int(counted.sum())
    assert result.loss == pytest.approx((losses.sum() / counted.sum()).item(), rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    bits = result.loss / math.log(2) * windows.split.tokens / windows.split.bytes
    assert result.bits_per_byte == pytest.approx(bits)
    for part in result.by_position:
        at = slice(part.first, part.end)
        assert part.loss == pytest.approx((losses[:, at].sum() / counted[:, at].sum()).item(), rel=1e-9)


def test_the_first_tokens_are_whole_windows(data: Path, micro: Config) -> None:
    decoder, windows = headgate.build_model(micro), Windows(open_split(data, "val"), 24)
    assert evaluate(decoder, windows, tokens=1).tokens == 24
    assert evaluate(decoder, windows, tokens=71).tokens == 48
    assert evaluate(decoder, windows, tokens=10**9).tokens == windows.split.tokens - 1
    first = evaluate(decoder, windows, tokens=48, batch_size=2)
    assert first.loss == pytest.approx(decoder(*windows.read([0, 1])).item(), rel=1e-6)


def test_gate_statistics_are_those_of_the_gates(data: Path, micro: Config) -> None:
    decoder, windows = headgate.build_model(micro), Windows(open_split(data, "val"), 24)
    with torch.no_grad():  # gates all over the range
        for layer in decoder.layers:
            layer.attention.mechanism.gate.weight.mul_(400)
    with headgate.probe(decoder) as seen:
        decoder(windows.read([0, 1])[0])
    found = evaluate(decoder, windows, tokens=48, batch_size=3).gates
    assert [gate.layer for gate in found] == [0, 1]
    for gate, values in zip(found, seen.values(), strict=True):
        assert gate.mean == pytest.approx(values[0].mean().item(), abs=1e-6)
        assert gate.spread == pytest.approx(values[0].std(correction=0).item(), abs=1e-6)
        assert gate.below_01 == pytest.approx((values[0] < 0.1).float().mean().item())
        assert gate.above_09 == pytest.approx((values[0] > 0.9).float().mean().item())
        assert gate.by_head == pytest.approx(values[0].mean((0, 1)).tolist(), abs=1e-6)
        assert gate.below_01 > 0
        assert gate.above_09 > 0
    assert evaluate(headgate.build_model(micro, "full"), windows, tokens=24).gates == ()


@pytest.mark.parametrize("name", headgate.mechanisms())
def test_every_mechanism_can_be_evaluated(name: str, data: Path, micro: Config) -> None:
    windows = Windows(open_split(data, "val"), 24)
    result = evaluate(headgate.build_model(micro, name), windows, tokens=72, batch_size=2)
    assert result.loss == pytest.approx(math.log(257), abs=0.2)
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_command_repeats_what_training_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(["evaluate", str(run), "--tokens", "120", "--json"])
    result = json.loads(capsys.readouterr().out)
    line = read_metrics(run)[-1]
    for name, value in line["validation"].items():
        assert result[name] == value, name
    assert result["gates"] == line["gates"]
    assert (result["split"], result["step"], result["tokens"]) == ("val", 6, 120)
    command(["evaluate", str(run), "--split", "test", "--checkpoint", "best"])
    shown = capsys.readouterr().out
    assert "split test" in shown
    assert "16-23" in shown
    assert "gate's mean" in shown


def test_the_whole_split_by_default(run: Path, data: Path) -> None:
    """Of masked documents, which recipe tiny has, every token but the first of each."""
    for split in ("val", "test"):
        windows = Windows(open_split(data, split), 24)
        assert evaluate_run(run, split=split)["tokens"] == windows.split.tokens - windows.documents


def test_data_may_move_or_be_another_in_the_same_tokens(run: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "moved")
    own = evaluate_run(run, tokens=24)
    assert evaluate_run(run, tokens=24, data=tmp_path / "moved") == own
    (tmp_path / "other.txt").write_text("another text altogether, long enough for a window\n" * 4)
    for tokenizer, name in (("byte", "same"), (str(run / "tokenizer.json"), "own"), ("bpe:280", "another")):
        request = Request(str(tmp_path / "other.txt"), tokenizer=tokenizer, splits=(100, 0, 0))
        prepare(request, tmp_path / name, workers=1)
    other = evaluate_run(run, split="train", data=tmp_path / "same")
    assert other == evaluate_run(run, split="train", data=tmp_path / "own")
    assert other["loss"] != own["loss"]
    with pytest.raises(HeadgateError, match=r"another' was prepared with a different tokenizer from .*run'"):
        evaluate_run(run, split="train", data=tmp_path / "another")


def test_mistakes_are_one_sentence(run: Path, tmp_path: Path, data: Path, micro: Config) -> None:
    with pytest.raises(HeadgateError, match="holds no model"):
        evaluate_run(tmp_path)
    with pytest.raises(HeadgateError, match="'vall' is not a split"):
        evaluate_run(run, split="vall")
    with pytest.raises(HeadgateError, match="tokens=0 is too small"):
        evaluate_run(run, tokens=0)
    with pytest.raises(HeadgateError, match="has no checkpoint 'first'"):
        evaluate_run(run, which="first")
    train(changed(micro, steps=1), data, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000001")
    with pytest.raises(HeadgateError, match="has no checkpoint yet"):
        evaluate_run(tmp_path / "run")


def test_answers_are_judged_by_distance(micro: Config, tmp_path: Path) -> None:
    source = "recall:context=24,pairs=3,queries=3,keys=5,values=4,noise=3,sequences=40"
    recall = parse_task(source)
    assert recall is not None
    prepare_task(recall, source, tmp_path / "data", (50, 50, 0))
    windows = Windows(open_split(tmp_path / "data", "val"), 24)
    decoder = headgate.build_model(micro, "full")
    found = evaluate(decoder, windows, batch_size=3)
    x, targets = windows.read(range(len(windows)))
    asked = targets != IGNORED
    assert found.tokens == int(asked.sum()) == 60
    right = (decoder(x).argmax(-1) == targets)[asked]
    losses = decoder(x, targets, reduction="none")[asked]
    assert found.answers is not None
    assert found.answers.accuracy == pytest.approx(right.float().mean().item())
    assert found.loss == pytest.approx(losses.mean().item(), rel=1e-5)
    far = torch.from_numpy(distances(x.numpy(), targets.numpy(), asked.numpy()))[asked]
    assert sum(place.tokens for place in found.answers.by_distance) == 60
    for place in found.answers.by_distance:
        here = (far >= place.first) & (far < place.end)
        assert place.tokens == int(here.sum())
        assert place.accuracy == pytest.approx(right[here].float().mean().item())
        assert place.loss == pytest.approx(losses[here].mean().item(), rel=1e-5)
    assert all(place.loss > 0 for place in found.by_position)  # places without answers are left out


def test_answers_of_a_task_are_judged_by_distance_and_pairs(micro: Config, tmp_path: Path) -> None:
    source = "mqar:length=[16,32],pairs=[2,4],keys=6,values=5,filler=3,samples=20,held_out=30"
    task = parse_task(source)
    assert task is not None
    prepare_task(task, source, tmp_path / "data")
    windows = Windows(open_split(tmp_path / "data", "val"), 32)
    decoder = headgate.build_model(micro, "full")
    found = evaluate(decoder, windows, batch_size=7)
    assert found.answers is not None
    x, targets = windows.read(range(len(windows)))
    asked = targets != IGNORED
    right, losses = decoder(x).argmax(-1) == targets, decoder(x, targets, reduction="none")
    far = torch.from_numpy(distances(x.numpy(), targets.numpy(), asked.numpy()))
    for count in (2, 4):  # the two kinds take turns
        rows = torch.arange(30) % 2 == (count == 4)
        mine = asked & rows[:, None]
        (row,) = (each for each in found.answers.by_pairs if each.pairs == count)
        assert row.tokens == int(mine.sum())
        assert row.accuracy == pytest.approx(right[mine].float().mean().item())
        assert row.loss == pytest.approx(losses[mine].mean().item(), rel=1e-5)
    assert sum(place.tokens for place in found.answers.by_distance) == found.tokens
    for place in found.answers.by_distance:
        here = asked & (far >= place.first) & (far < place.end)
        assert place.tokens == int(here.sum())
        assert place.loss == pytest.approx(losses[here].mean().item(), rel=1e-5)


def test_a_run_keeps_the_loss_of_every_document(data: Path, micro: Config, tmp_path: Path) -> None:
    """Of all documents, though the curve looks at 120 tokens alone; `document_tokens` looks at fewer."""
    train(micro, data, tmp_path / "run")
    kept, windows = read_document_losses(tmp_path / "run"), Windows(open_split(data, "val"), 24)
    assert kept is not None
    assert kept.document.tolist() == list(range(windows.documents))
    assert kept.tokens.sum() == windows.split.tokens - 1
    assert kept.loss.sum() / kept.tokens.sum() == pytest.approx(evaluate_run(tmp_path / "run")["loss"])
    decoder, third = headgate.load(tmp_path / "run"), kept.document == 2
    tokens, targets = windows.read(range(len(windows)))
    targets[windows.target_documents(range(len(windows))) != 2] = IGNORED
    assert kept.tokens[third] == int((targets != IGNORED).sum())
    with torch.no_grad():
        assert kept.loss[third] == pytest.approx(decoder(tokens, targets, reduction="sum").item(), rel=1e-5)
    train(changed(micro, document_tokens=48), data, tmp_path / "fewer")
    fewer = read_document_losses(tmp_path / "fewer")
    assert fewer is not None
    assert fewer.tokens.sum() == 120  # those of the curve are there anyway
    file = tmp_path / "run" / "documents.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(HeadgateError, match=r"documents.safetensors' is damaged"):
        read_document_losses(tmp_path / "run")
    file.unlink()
    assert read_document_losses(tmp_path / "run") is None


def test_documents_of_data_with_a_loss_mask(micro: Config, tmp_path: Path) -> None:
    source = "recall:context=24,pairs=3,queries=3,keys=5,values=4,noise=3,sequences=40"
    recall = parse_task(source)
    assert recall is not None
    prepare_task(recall, source, tmp_path / "data", (50, 50, 0))
    train(changed(micro, steps=1), tmp_path / "data", tmp_path / "run")
    kept = read_document_losses(tmp_path / "run")
    assert kept is not None
    assert kept.tokens.tolist() == [3] * 20


@pytest.mark.compiles
def test_the_probe_compiles_no_layer_anew_but_leaves_the_ops_compiled(micro: Config) -> None:
    """FlexAttention that is not compiled computes all pairs, so torch.compile must stay switched on."""
    decoder = Decoder(micro.model)
    counter = CompileCounter()
    for layer in decoder.layers:
        layer.compile(backend=counter)
    compiled = [layer._compiled_call_impl for layer in decoder.layers]
    op = torch.compile(lambda x: x + 1, backend=counter)
    with torch.no_grad(), _uncompiled(decoder):
        decoder(torch.zeros(1, 8, dtype=torch.int64))
        assert counter.frame_count == 0
        op(torch.zeros(3))
        assert counter.frame_count == 1
    assert [layer._compiled_call_impl for layer in decoder.layers] == compiled
