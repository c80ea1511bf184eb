"""The recall source: what its sequences hold, that only answers count, and what their distances are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from data_examples import Run

from headgate.data.loader import IGNORED, Windows
from headgate.data.recall import Recall, distances, parse, prepare_recall, sequences
from headgate.data.shards import check, open_split
from headgate.data.tokenizers import Tokenizer
from headgate.errors import HeadgateError

SOURCE = "recall:context=64,pairs=6,queries=5,keys=12,values=9,noise=7,sequences=40"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recall") / "data"
    recall = parse(SOURCE)
    assert recall is not None
    prepare_recall(recall, SOURCE, (80, 10, 10), out)
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
    recall = parse(source)
    assert recall is not None
    prepare_recall(recall, source, (80, 10, 10), tmp_path / "data")
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
    assert check(tmp_path / "data") is not None
    assert headgate("prepare", SOURCE, tmp_path / "data")[0] == 0  # there already
    code, _, errors = headgate("prepare", SOURCE.replace("pairs=6", "pairs=7"), tmp_path / "data")
    assert code == 2
    assert "pairs=6 and not 7" in errors
    code, _, errors = headgate("prepare", "recall:pears=3", tmp_path / "other")
    assert code == 2
    assert "did you mean 'pairs'?" in errors
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 64, "pairs": 20, "queries": 20}, "context=64 is too short"),
        ({"pairs": 4, "queries": 5}, "queries=5 are more than pairs=4"),
        ({"keys": 8}, "keys=8 are too few"),
        ({"noise": 0}, "noise=0 is too small"),
    ],
)
def test_what_cannot_be_made_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(HeadgateError, match=message):
        Recall(**options)
