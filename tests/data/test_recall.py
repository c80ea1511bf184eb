"""The recall source: what its sequences hold, that only answers count, and what their distances are."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_examples import Run, tree

from headgate.data import shards
from headgate.data.answers import distances
from headgate.data.loader import IGNORED, Windows
from headgate.data.shards import check_data, open_split
from headgate.data.tasks import parse_task
from headgate.data.tasks import writing as making
from headgate.data.tasks.recall import Recall, sequences
from headgate.data.tasks.writing import prepare_task
from headgate.data.tokenizers import Tokenizer
from headgate.errors import HeadgateError

SOURCE = "recall:context=64,pairs=6,queries=5,keys=12,values=9,noise=7,sequences=40"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recall") / "data"
    recall = parse_task(SOURCE)
    assert recall is not None
    prepare_task(recall, SOURCE, out)
    return out


def test_every_answer_can_be_found(folder: Path) -> None:
    """A query's key stands once before, among the pairs, followed by the value that is asked for."""
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text())
    split = open_split(folder, "train")
    assert split.tokens == 32 * 64
    windows = Windows(split, 64)
    for number in range(31):  # the last one is moved back by a token, to end with the stream
        tokens, targets = windows.read([number])
        words = tokenizer.decode(tokens[0].tolist()).split()
        assert words[-1] == tokenizer.end_of_text
        assert [word[0] for word in words[:12]] == ["k", "v"] * 6
        asked = torch.nonzero(targets[0] != IGNORED).flatten().tolist()
        assert len(asked) == 5
        for place in asked:
            assert place >= 12
            assert words[place][0] == "k"
            assert words[:place].count(words[place]) == 1
            first = words.index(words[place])
            assert first < 12
            assert words[first + 1] == tokenizer.decode([int(targets[0, place])]) == words[place + 1]
        far = distances(tokens.numpy(), targets.numpy(), (targets != IGNORED).numpy())
        assert far[0, asked].tolist() == [place - words.index(words[place]) for place in asked]
        assert (far > 0).sum() == 5


def test_sequences_differ_and_repeat_with_their_seed() -> None:
    recall = Recall(context=128, pairs=8, queries=8)
    one, again, other = (sequences(recall, 20, np.random.default_rng(seed))[0] for seed in (0, 0, 1))
    assert (one == again).all()
    assert (one != other).any()
    assert len({row.tobytes() for row in one[:, :16]}) == 20


@pytest.mark.parametrize("joined", [False, True])
def test_distances_reach_over_the_context_evenly_in_doublings(joined: bool) -> None:
    recall = Recall(context=1024, pairs=16, queries=16, joined=joined)
    tokens, counted = sequences(recall, 200, np.random.default_rng(0))
    # A query stands before its answer.
    far = distances(tokens, np.roll(tokens, -1, axis=1), np.roll(counted, -1, axis=1))
    far = far[far > 0]
    assert len(far) == counted.sum()
    assert far.max() > 950
    counts = [((far >= low) & (far < 2 * low)).sum() for low in (64, 128, 256, 512)]
    assert max(counts) < 2 * min(counts)


def test_a_joined_pair_is_its_own_answer(tmp_path: Path) -> None:
    source = "recall:context=64,pairs=6,queries=5,keys=12,values=9,noise=7,sequences=40,joined=true"
    recall = parse_task(source)
    assert recall is not None
    prepare_task(recall, source, tmp_path / "data")
    tokenizer = Tokenizer((tmp_path / "data/tokenizer.json").read_text())
    assert tokenizer.vocab_size == recall.vocab_size == 1 + 12 + 12 * 9 + 7
    tokens, targets = Windows(open_split(tmp_path / "data", "train"), 64).read([0])
    words = [tokenizer.decode([token]) for token in tokens[0].tolist()]
    assert all(word[0] == "k" and "=v" in word for word in words[:6])
    assert not any("=" in word for word in words[6:] if word[0] == "n")
    far = distances(tokens.numpy(), targets.numpy(), (targets != IGNORED).numpy())[0]
    asked = torch.nonzero(targets[0] != IGNORED).flatten().tolist()
    assert len(asked) == 5
    for place in asked:
        answer = words[place + 1]
        assert answer.split("=")[0] == words[place]
        assert words[:6].count(answer) == 1
        assert far[place] == place - words.index(answer)


def test_the_command(headgate: Run, tmp_path: Path) -> None:
    code, out, _ = headgate("prepare", SOURCE, tmp_path / "data")
    assert code == 0
    assert "2,048" in out
    assert check_data(tmp_path / "data") is not None
    assert headgate("prepare", SOURCE, tmp_path / "data")[0] == 0  # there already
    code, _, errors = headgate("prepare", SOURCE.replace("pairs=6", "pairs=7"), tmp_path / "data")
    assert code == 2
    assert "pairs=6, not 7" in errors
    code, _, errors = headgate("prepare", "recall:pears=3", tmp_path / "other")
    assert code == 2
    assert "did you mean 'pairs'?" in errors
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([SOURCE, "--splits", "0/0/0"], "splits=(0, 0, 0) leave nothing to train on"),
        ([SOURCE, "--splits", "0/1/1"], "splits=(0, 1, 1) leave nothing to train on"),
        ([f"{SOURCE},sequences=20"], "option 'sequences' is given twice"),
        ([SOURCE, "--tokenizer", "byte"], "does not take --tokenizer, but 'byte' was given; leave it out"),
        ([SOURCE, "--max-tokens", "5"], "does not take --max-tokens"),
        ([SOURCE, "--dedup"], "does not take --dedup"),
        ([SOURCE, "--workers", "1"], "does not take --workers"),
        ([SOURCE, "--text-column", "body"], "does not take --text-column"),
        ([SOURCE, "--end-of-text", "<eos>"], "does not take --end-of-text"),
    ],
)
def test_what_recall_cannot_honour_is_refused(
    headgate: Run, tmp_path: Path, arguments: list[str], words: str
) -> None:
    code, _, errors = headgate("prepare", arguments[0], tmp_path / "data", *arguments[1:])
    assert code == 2
    assert words in errors
    assert not (tmp_path / "data").exists()


def test_in_the_current_folder(
    headgate: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert headgate("prepare", SOURCE, ".")[0] == 0
    assert tree(tmp_path) == tree(folder)
    monkeypatch.chdir(tmp_path / "val")
    code, _, errors = headgate("prepare", SOURCE, ".")
    assert code == 2
    assert "holds '00000.ds' but no manifest.json; choose another folder" in errors


def test_two_at_once_are_kept_apart(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recall, out = parse_task(SOURCE), tmp_path / "data"
    assert recall is not None
    write, context = making._write, multiprocessing.get_context("fork")

    def meanwhile(*arguments: Any) -> None:
        process = context.Process(target=prepare_task, args=(recall, SOURCE, out))
        process.start()
        process.join()
        assert process.exitcode == 1
        write(*arguments)

    monkeypatch.setattr(making, "_write", meanwhile)
    prepare_task(recall, SOURCE, out)
    assert tree(out) == tree(folder)


def test_an_interrupted_one_begins_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recall, out = parse_task(SOURCE), tmp_path / "data"
    assert recall is not None
    context = multiprocessing.get_context("fork")
    with monkeypatch.context() as patch:
        patch.setattr(shards, "publish", lambda *arguments: os._exit(9))
        process = context.Process(target=prepare_task, args=(recall, SOURCE, out))
        process.start()
        process.join()
    assert process.exitcode == 9
    with pytest.raises(HeadgateError, match="is not finished"):
        open_split(out, "train")
    prepare_task(recall, SOURCE, out)
    assert tree(out) == tree(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 64, "pairs": 20, "queries": 20}, "context=64 is too short"),
        ({"pairs": 4, "queries": 5}, "queries=5 are more than pairs=4"),
        ({"keys": 8}, "keys=8 are too few"),
        ({"noise": 0}, "noise=0 is too small"),
        ({"seed": -1}, "seed=-1 is too small"),
        ({"context": 10**12}, "context=1000000000000 is too large; it must be at most 1048576"),
        ({"keys": 2000, "values": 2000, "joined": True}, "vocab_size=4002065 is too large"),
    ],
)
def test_what_cannot_be_made_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(HeadgateError, match=message):
        Recall(**options)
