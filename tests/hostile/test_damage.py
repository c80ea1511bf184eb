"""Every file we write, damaged in every way: the command refuses in one sentence, or its result is exactly
that of the undamaged one. Nothing in between: no other numbers, no traceback, no hang."""

import shutil
from pathlib import Path

import pytest
from attempts import DAMAGES, Answer, as_link, assert_refused, attempt

from headgate.train.folder import WALL_CLOCK, read_metrics

CHECKPOINT = "checkpoints/step-00000003"
OF_A_RUN = (
    "config.json",
    "data.json",
    "tokenizer.json",
    "metrics.jsonl",
    f"{CHECKPOINT}/model.safetensors",
    f"{CHECKPOINT}/training.safetensors",
    f"{CHECKPOINT}/state.json",
)
OF_DATA = (
    "manifest.json",
    "tokenizer.json",
    "sources.jsonl",
    "train/00000.ds",
    "train/00000.ds.index",
    "val/00000.ds",
)


def lines(run: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in line.items() if k not in WALL_CLOCK} for line in read_metrics(run)]


def judge(answer: Answer, name: str) -> bool:
    """Whether it was refused, in one sentence that names the file."""
    if answer.code == 0:
        return False
    assert_refused(answer)
    return True


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_run_goes_on_unharmed_or_not_at_all(
    name: str, damage: str, stopped: Path, whole: Path, recipe: Path, data: Path
) -> None:
    DAMAGES[damage](stopped / name)
    answer = attempt("train", recipe, "--data", data, "--out", stopped, "--save-every", "1")
    if not judge(answer, name):
        assert lines(stopped) == lines(whole)
        last = f"{CHECKPOINT}/model.safetensors"
        assert (stopped / last).read_bytes() == (whole / last).read_bytes()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [f"{CHECKPOINT}/model.safetensors", "tokenizer.json"])
def test_a_damaged_model_is_not_used(name: str, damage: str, stopped: Path, whole: Path) -> None:
    DAMAGES[damage](stopped / name)
    words = ("--prompt", "the gate", "--max-new-tokens", "3", "--temperature", "0")
    answer = attempt("generate", stopped, *words)
    if not judge(answer, name):
        assert answer.out == attempt("generate", whole, *words).out


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["config.json", "data.json", f"{CHECKPOINT}/model.safetensors", f"{CHECKPOINT}/state.json"]
)
def test_a_damaged_run_is_not_evaluated(name: str, damage: str, stopped: Path, whole: Path) -> None:
    DAMAGES[damage](stopped / name)
    answer = attempt("evaluate", stopped, "--tokens", "24", "--json")
    if not judge(answer, name):
        expected = attempt("evaluate", whole, "--tokens", "24", "--json").out
        assert answer.out.replace(str(stopped), "") == expected.replace(str(whole), "")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OF_DATA)
def test_damaged_data_is_found_by_check_and_before_training(
    name: str, damage: str, data: Path, recipe: Path, tmp_path: Path
) -> None:
    shutil.copytree(data, tmp_path / "data")
    DAMAGES[damage](tmp_path / "data" / name)
    if (name, damage) == ("manifest.json", "missing"):
        return  # what is left is a folder as datatrove writes them
    assert_refused(attempt("prepare", "--check", tmp_path / "data"))
    if name == "sources.jsonl":
        return  # which says where the text came from; training does not depend on it
    answer = attempt("train", recipe, "--data", tmp_path / "data", "--out", tmp_path / "run")
    assert_refused(answer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_file_behind_a_link_is_read_and_not_written_to(
    name: str, stopped: Path, recipe: Path, data: Path
) -> None:
    as_link(stopped / name)
    outside = (stopped / name).resolve()
    before = outside.read_bytes()
    answer = attempt("train", recipe, "--data", data, "--out", stopped, "--save-every", "1")
    assert answer.code in (0, 2)
    if answer.code:
        assert_refused(answer)
    assert outside.read_bytes() == before


def edit(path: Path, change: dict[str, object]) -> None:
    """Change entries of a JSON file, given by dotted paths, as somebody would who knows how it is sealed."""
    import json

    from headgate.files import SEAL, sealed

    values = json.loads(path.read_text())
    was_sealed = values.pop(SEAL, None) is not None
    for dotted, value in change.items():
        node = values
        *parents, last = [int(part) if part.isdecimal() else part for part in dotted.split(".")]
        for part in parents:
            node = node[part]
        if value is None:
            del node[last]
        else:
            node[last] = value(node[last]) if callable(value) else value
    path.write_text(json.dumps(sealed(values) if was_sealed else values))


SHARD = "splits.0.shards.0"


@pytest.mark.parametrize(
    "change",
    [
        {"splits.0.shards": lambda shards: [*shards, *shards]},
        {"splits.0.shards.0.name": "../train/00000"},
        {"splits.0.shards.0.name": "/etc/passwd"},
        {"splits.0.shards.0.name": "val/00000"},
        {"splits.0.shards.0.name": "train/0"},
        {"splits.0.tokens": 5},
        {"splits.0.documents": 0},
        {"splits.0.documents": -1},
        {"splits.0.bytes": -1},
        {f"{SHARD}.tokens": 1},
        {f"{SHARD}.documents": 1},
        {f"{SHARD}.largest": 257},
        {f"{SHARD}.largest": -1},
        {f"{SHARD}.sha256": {}},
        {"splits": []},
        {"splits.0.name": "val"},
        {"tokenizer.vocab_size": -1},
        {"tokenizer.vocab_size": 0},
        {"tokenizer.vocab_size": 100},
        {"tokenizer.vocab_size": 70_000},
        {"tokenizer.end_of_text_id": 257},
        {"tokenizer.end_of_text_id": -1},
        {"tokenizer.sha256": "0" * 64},
        {"format": 2},
        {"format": None},
        {"splits": None},
        {"unknown": lambda: 0},
    ],
    ids=lambda change: " ".join(change),
)
def test_a_manifest_that_contradicts_itself_or_the_folder(
    change: dict[str, object], data: Path, recipe: Path, tmp_path: Path
) -> None:
    shutil.copytree(data, tmp_path / "data")
    if "unknown" in change:
        change = {"request": lambda request: request, "headgate": 5}
    edit(tmp_path / "data" / "manifest.json", change)
    for words in (
        ("prepare", "--check", tmp_path / "data"),
        ("train", recipe, "--data", tmp_path / "data", "--out", tmp_path / "run"),
    ):
        assert_refused(attempt(*words))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"step": 0},
        {"step": 2},
        {"step": 4},
        {"step": -3},
        {"step": None},
        {"tokens": 5},
        {"loader.samples": 0},
        {"loader.samples": None},
        {"loader": None},
        {"digests": {}},
        {"digests": {"model.safetensors": "0" * 32}},
        {"digests": {"model.safetensors": "0" * 32, "training.safetensors": "0" * 32}},
        {"metrics_bytes": 1},
        {"metrics_bytes": 10**9},
        {"metrics_digest": ""},
        {"skipped": "many"},
    ],
    ids=str,
)
def test_a_state_that_is_not_that_of_its_checkpoint(
    change: dict[str, object], stopped: Path, whole: Path, recipe: Path, data: Path
) -> None:
    """Edited by somebody who sealed it again: it must fit its folder, the weights and the metrics."""
    edit(stopped / CHECKPOINT / "state.json", change)
    answer = attempt("train", recipe, "--data", data, "--out", stopped, "--save-every", "1")
    if answer.code == 0:  # back to the checkpoint before
        assert lines(stopped) == lines(whole)
    else:
        assert_refused(answer)


def test_without_a_manifest_check_uses_the_tokenizer_beside_it(
    data: Path, recipe: Path, tmp_path: Path
) -> None:
    import numpy as np

    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "manifest.json").unlink()
    assert attempt("prepare", "--check", tmp_path / "data").code == 0
    tokens = np.fromfile(tmp_path / "data" / "train" / "00000.ds", dtype="<u2")
    tokens[5] = 999
    tokens.tofile(tmp_path / "data" / "train" / "00000.ds")
    assert_refused(attempt("prepare", "--check", tmp_path / "data"), "has the token 999", "257 entries")
    out = tmp_path / "run"
    answer = attempt("train", recipe, "--data", tmp_path / "data", "--out", out)
    assert_refused(answer, "has the token 999", "model has only 257 entries")
    assert not out.exists()
    (tmp_path / "data" / "tokenizer.json").write_text("{")
    assert_refused(attempt("prepare", "--check", tmp_path / "data"), "tokenizer.json")
