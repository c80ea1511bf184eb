"""Training with documents kept apart: settings, exact resumes, evaluation over whole documents."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from small_runs import changed, repeatable_metrics

import headgate
from headgate.cli import run as command
from headgate.config import Config, TrainConfig, from_dict, override, to_dict
from headgate.data.loader import IGNORED, PackedDocuments, Windows
from headgate.data.shards import open_split
from headgate.errors import HeadgateError
from headgate.options import RunOptions
from headgate.recipes import get_recipe
from headgate.train import checkpoint
from headgate.train.evaluate import evaluate, read_document_losses
from headgate.train.folder import RunFolder
from headgate.train.loop import train
from headgate.train.summary import pairs_per_token


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_a_killed_run_goes_on_bit_for_bit(packing: str, data: Path, micro: Config, tmp_path: Path) -> None:
    asked = changed(micro, documents="mask", packing=packing, context=100)
    train(asked, data, tmp_path / "run", RunOptions(save_every=5, keep=9))
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    again = RunFolder(tmp_path / "again")
    for step in checkpoint.saved_steps(again):
        if step > 5:
            shutil.rmtree(again.checkpoints / checkpoint.folder_name(step))
    again.summary.unlink()
    (again.path / "documents.safetensors").unlink()
    train(asked, data, tmp_path / "again")
    assert repeatable_metrics(tmp_path / "again") == repeatable_metrics(tmp_path / "run")
    for name in ("documents.safetensors", "checkpoints/step-00000012/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (again.path / name).read_bytes()


def test_evaluation_is_over_whole_documents(data: Path, micro: Config, tmp_path: Path) -> None:
    """Losses of a run, by document and by position in it, are those of each document by itself."""
    asked = changed(micro, documents="mask", context=1000, steps=3)
    train(asked, data, tmp_path / "run")
    kept, split = read_document_losses(tmp_path / "run"), open_split(data, "val")
    assert kept is not None
    decoder, ends = headgate.load(tmp_path / "run"), [0, *split.shards[0].load_ends().tolist()]
    stream = torch.from_numpy(split.shards[0].load_tokens().astype("int64"))
    firsts = torch.zeros(2, dtype=torch.float64)
    assert kept.document.tolist() == list(range(len(ends) - 1))
    for n, (begin, end) in enumerate(pairwise(ends)):
        document = stream[begin:end][None]
        with torch.no_grad():
            losses = decoder(document[:, :-1], document[:, 1:], reduction="none")
        assert kept.tokens[n] == end - begin - 1
        assert kept.loss[n] == pytest.approx(losses.sum().item(), rel=1e-5)
        firsts += torch.tensor([losses[0, 0].item(), 1])
    found = evaluate(decoder, PackedDocuments(split, 1000), batch_size=2)
    assert found.tokens == split.tokens - len(ends) + 1
    assert found.by_position[0].loss == pytest.approx((firsts[0] / firsts[1]).item(), rel=1e-5)


def test_boundaries_and_positions_can_be_chosen(data: Path, micro: Config, tmp_path: Path) -> None:
    asked = changed(micro, documents="mask", steps=2)
    train(asked, data, tmp_path / "ignored")
    train(changed(asked, boundaries="count", document_positions="stream"), data, tmp_path / "counted")
    windows = Windows(open_split(data, "val"), 24, documents=True)
    ignored = int((windows.read(range(len(windows)))[1] != IGNORED).sum())
    sums = [read_document_losses(tmp_path / name) for name in ("ignored", "counted")]
    assert [kept.tokens.sum() for kept in sums if kept] == [ignored, windows.split.tokens - 1]
    with pytest.raises(HeadgateError, match="packing='whole' with documents='stream'"):
        changed(micro, packing="whole")
    with pytest.raises(HeadgateError, match="boundaries='count'"):
        changed(micro, packing="whole", documents="mask", boundaries="count")


def test_new_recipes_mask_and_saved_configs_stay_as_they_were() -> None:
    for name, documents in (("tiny", "mask"), ("small", "mask"), ("paper-134m", "stream")):
        assert get_recipe(name).train.documents == documents
    saved = to_dict(get_recipe("tiny").train)
    for name in ("documents", "document_positions", "boundaries", "packing", "document_tokens"):
        saved.pop(name)
    assert from_dict(TrainConfig, saved).documents == "stream"
    assert override(get_recipe("tiny"), ["train.packing=whole"]).train.packing == "whole"


def test_data_without_an_index_is_refused(micro: Config, tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        torch.arange(200, dtype=torch.uint8).numpy().astype("<u2").tofile(tmp_path / split / "a.ds")
        (tmp_path / split / "a.ds.metadata").write_text("byte|2\n200\n")
    with pytest.raises(HeadgateError, match=r"has no index, so documents .* train.documents=stream"):
        train(changed(micro, documents="mask"), tmp_path, tmp_path / "run")
    train(changed(micro, steps=1), tmp_path, tmp_path / "run")
    assert read_document_losses(tmp_path / "run") is None


def test_the_work_is_that_of_the_documents(data: Path, micro: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = changed(micro, documents="mask", packing="whole", context=500, steps=1)
    train(asked, data, run)
    summary = json.loads((run / "summary.json").read_text())
    packed = PackedDocuments(open_split(data, "train"), 500)
    lengths = packed.document_lengths()
    assert lengths.tokens == packed.split.tokens  # none is longer than the context, or a single token
    assert summary["document_tokens"] == pytest.approx(lengths.tokens / packed.documents)
    full = headgate.build_model(micro, "full").layers[0].attention.mechanism
    exact = sum(int(c) * full.pairs(int(n)) for n, c in zip(lengths.lengths, lengths.counts, strict=True))
    assert pairs_per_token(full, 500, lengths) == pytest.approx(exact / lengths.tokens, rel=2e-3)
    assert pairs_per_token(full, 500) == 250.5


def test_the_command_shows_the_hardest_and_the_easiest_documents(
    data: Path, micro: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(changed(micro, documents="mask"), data, tmp_path / "run")
    command(["evaluate", str(tmp_path / "run"), "--by-document", "--json"])
    found = json.loads(capsys.readouterr().out)["documents"]
    kept = read_document_losses(tmp_path / "run")
    assert kept is not None
    means = sorted(kept.loss / kept.tokens)
    assert [place["loss"] for place in found["easiest"]] == pytest.approx(means[:5])
    assert [place["loss"] for place in found["hardest"]] == pytest.approx(means[:-6:-1])
    assert found["count"] == len(means)
    command(["evaluate", str(tmp_path / "run"), "--by-document"])
    shown = capsys.readouterr().out
    assert "hardest" in shown
    assert found["hardest"][0]["text"][:12] in shown
