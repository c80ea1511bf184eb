"""The synthetic tasks: the same bytes everywhere, answers that can be found, chance and optimum that hold."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from data_examples import Run

from headgate.data.loader import IGNORED, Windows
from headgate.data.shards import check_data, open_split, read_manifest
from headgate.data.tasks import TASKS, DrawnTask, parse_task
from headgate.data.tasks.markov import Markov
from headgate.data.tasks.mqar import Mqar
from headgate.data.tasks.writing import prepare_task
from headgate.errors import HeadgateError

DIGESTS = {
    "mqar": "6dcae10c43f83afe",
    "mqar:zoology": "d45d9f92ff76a01b",
    "markov": "98b18abd3c908ed1",
    "markov:order=2,states=4": "88ecc52fb7d323d8",
    "noisy-recall": "94b7aeea85b723b3",
    "noisy-recall:clean": "2651fbc8e2b917dd",
    "fuzzy-recall": "0ee71bd1c1dc2594",
    "memorise": "1d3d4e26441f7802",
    "compress": "95c05bb40a606559",
    "copy": "e1e39a3830b9c960",
    "copy:mad": "78c498e57f84e3c5",
    "needle": "668a0865d1ec4f54",
}
DRAWN = sorted(DIGESTS)


def one(source: str) -> DrawnTask:
    task = parse_task(source)
    assert isinstance(task, DrawnTask)
    return task


def drawn(task: DrawnTask, first: int, count: int, split: str = "val") -> tuple[np.ndarray, ...]:
    """Tokens, marks and distances."""
    parts = [(s.tokens, task.marks(s), s.answers) for s in task.sample(split, first, count)]
    return tuple(np.concatenate(each) for each in zip(*parts, strict=True))


def test_every_task_has_a_digest() -> None:
    assert {source.partition(":")[0] for source in DIGESTS} == set(TASKS.names()) - {"recall"}


@pytest.mark.parametrize("source", DRAWN)
def test_the_same_bytes_everywhere(source: str) -> None:
    """Recorded once: another machine, or another numpy, must make the same."""
    tokens, marks, _ = drawn(one(source), 0, 50)
    digest = hashlib.sha256(tokens.astype("<u2").tobytes() + marks.tobytes()).hexdigest()
    assert digest[:16] == DIGESTS[source]


@pytest.mark.parametrize("source", DRAWN)
def test_a_sample_follows_from_seed_split_and_index(source: str) -> None:
    task = one(source)
    block = task.block
    some, _, _ = drawn(task, 0, block + 20)
    again, _, _ = drawn(task, block - 3, 7)
    assert (some[block - 3 : block + 4] == again).all()
    assert len({row.tobytes() for row in some}) == len(some)
    other_split, _, _ = drawn(task, 0, 20, "train")
    assert not ({row.tobytes() for row in other_split} & {row.tobytes() for row in some})
    other_seed, _, _ = drawn(one(f"{source}{',' if ':' in source else ':'}seed=1"), 0, 20)
    assert (other_seed != some[:20]).any(axis=1).all()


@pytest.mark.parametrize("source", [source for source in DRAWN if one(source).has_distances])
def test_every_answer_stands_where_its_distance_says(source: str) -> None:
    """At the query's key, and then the answer follows there, or at the answer itself."""
    tokens, marks, far = drawn(one(source), 0, 40)
    rows, places = np.nonzero(marks)
    back = far[rows, places]
    assert (back > 0).all()
    after_key = tokens[rows, places - back] == tokens[rows, places]
    itself = tokens[rows, places - 1 - back] == tokens[rows, places]
    assert after_key.all() or itself.all()


@pytest.mark.parametrize("source", [source for source in DRAWN if one(source).guesses < 1000])
def test_chance_is_what_guessing_gets(source: str) -> None:
    task = one(source)
    tokens, marks, _ = drawn(task, 0, 400)
    answers = tokens[marks > 0]
    counts = np.bincount(answers)
    assert np.count_nonzero(counts) == task.guesses
    # Values are drawn evenly: the most common one is right about as often as chance says.
    assert counts.max() / len(answers) == pytest.approx(task.chance.accuracy, rel=0.5)
    assert task.chance.loss == pytest.approx(-math.log(task.chance.accuracy))


@pytest.mark.parametrize(("order", "states"), [(1, 3), (2, 3)])
def test_the_optimum_of_a_markov_chain(order: int, states: int) -> None:
    """The best prediction, counted out token by token; no better one exists, and chance is far worse."""
    task = Markov(order=order, states=states, length=60)
    (samples,) = task.sample("val", 0, 30)
    loss, right = task.optimum(samples)
    mine, answers = 0.0, 0
    for row in (samples.tokens - 1).tolist():
        for place in range(order, len(row)):
            before = row[place - order : place]
            after = [row[p] for p in range(order, place) if row[p - order : p] == before]
            mine -= math.log((1 + after.count(row[place])) / (states + len(after)))
            answers += 1
    assert loss == pytest.approx(mine)
    assert mine / answers < math.log(states) - 0.05
    assert 1 / states < right / answers < 1


def test_zoology_in_distribution() -> None:
    """Its generator (2312.04927), written out again for one of its settings: where queries stand, that every
    key comes back once, and that keys and values differ within a sample."""
    rows, length, pairs = 400, 256, 16
    task = one("mqar:zoology,length=256,pairs=16,shares=1")
    assert isinstance(task, Mqar)
    assert task.vocab_size == 8192
    tokens, marks, _ = drawn(task, 0, rows)
    assert (np.count_nonzero(marks, axis=1) == pairs).all()
    random = np.random.default_rng(0)
    slots = (length - 2 * pairs) // 2
    weights = 0.01 * np.arange(1, slots + 1) ** (0.01 - 1)
    weights /= weights.sum()
    theirs = np.stack([random.choice(slots, pairs, replace=False, p=weights) for _ in range(rows)])
    ours = (np.nonzero(marks)[1].reshape(rows, pairs) - 1 - 2 * pairs) // 2
    for quantile in (0.1, 0.25, 0.5, 0.75, 0.9):
        a, b = np.quantile(ours, quantile), np.quantile(theirs, quantile)
        assert a == pytest.approx(b, rel=0.1, abs=1)
    keys, values = tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2]
    assert keys.max() <= 4095 < values.min()
    for row in range(20):
        assert len(set(keys[row])) == len(set(values[row])) == pairs
        asked = np.nonzero(marks[row])[0]
        assert sorted(tokens[row, asked - 1]) == sorted(keys[row])


def test_shorter_samples_are_filled_up() -> None:
    task = one("mqar:length=[16,32],pairs=[2,4],shares=[2,1],keys=8,values=8")
    tokens, marks, _ = drawn(task, 0, 30)
    short = np.arange(30) % 3 < 2
    assert (tokens[short, 16:] == 0).all()
    assert (tokens[~short, 16:] != 0).all()
    assert (np.count_nonzero(marks, axis=1) == np.where(short, 2, 4)).all()
    for row in (0, 2):
        groups = {task.groups[mark - 1].pairs for mark in marks[row] if mark}
        assert groups == {2 if short[row] else 4}


def test_the_command(headgate: Run, tmp_path: Path) -> None:
    source = "markov:order=2,states=3,length=32,samples=50,held_out=20"
    assert headgate("prepare", source, tmp_path / "data")[0] == 0
    assert check_data(tmp_path / "data") is not None
    manifest = read_manifest(tmp_path / "data")
    assert manifest is not None
    assert manifest.task is not None
    assert manifest.task.judged_by == "loss"
    assert 0 < manifest.task.optimum.loss < manifest.task.chance.loss == pytest.approx(math.log(3))
    assert manifest.task.score(manifest.task.optimum.loss, None) == 1
    assert [split.documents for split in manifest.splits] == [50, 20, 20]
    _, targets = Windows(open_split(tmp_path / "data", "train"), 32).read([0, 1])
    assert (targets != IGNORED).sum(1).tolist() == [30, 30]
    assert headgate("prepare", source, tmp_path / "data")[0] == 0  # there already
    code, _, errors = headgate("prepare", source.replace("states=3", "states=4"), tmp_path / "data")
    assert code == 2
    assert "states=3, not 4" in errors


def test_a_sample_is_a_window_and_a_document(tmp_path: Path) -> None:
    """So nothing changes where documents are kept from attending to each other."""
    source = "noisy-recall:length=16,samples=9,held_out=2"
    prepare_task(one(source), source, tmp_path / "data")
    windows = Windows(open_split(tmp_path / "data", "train"), 16)
    assert len(windows) == 9
    for number in range(8):  # the last one is moved back by a token, to end with the stream
        assert len(set(windows.document_ids([number])[0].tolist())) == 1


def test_more_samples_leave_the_held_out_ones(tmp_path: Path) -> None:
    for count in (10, 30):
        source = f"copy:length=24,tokens=4,samples={count},held_out=5"
        prepare_task(one(source), source, tmp_path / str(count))
    few, many = tmp_path / "10", tmp_path / "30"
    assert (few / "val/00000.ds").read_bytes() == (many / "val/00000.ds").read_bytes()
    assert (many / "train/00000.ds").read_bytes().startswith((few / "train/00000.ds").read_bytes())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mqar:pears=3"], "did you mean 'pairs'?"),
        (["mqar:length=16,pairs=8"], "length=16 does not fit pairs=8"),
        (["mqar:length=[16,32,64],pairs=[2,4]"], "do not match; give the same number of each, or one"),
        (["mqar:zoolgy"], "its presets are zoology"),
        (["mqar:pairs=x"], "mqar.pairs[0]='x' is not a whole number"),
        (["mqar:length=2000000"], "context=2000000 is too large"),
        (
            ["mqar", "--splits", "90/5/5"],
            "does not take --splits; say how many with mqar:samples=N,held_out=N",
        ),
        (["markov:order=4,states=16"], "makes a table of 1048576 entries"),
        (["markov:seed=-1"], "seed=-1 is too small"),
        (["copy:tokens=40"], "alphabet=32 is too small for tokens=40"),
        (["needle:keys=2"], "keys=2 are too few for needles=4"),
        (["noisy-recall:share=1"], "expected an even length, and a share from 0 to below 1"),
        (["fuzzy-recall:keys=2"], "make 4 keys; expected at least pairs=8"),
        (["memorise:keys=3"], "a key for every second token"),
        (["compress:tokens=0"], "tokens=0 is too small"),
    ],
)
def test_what_cannot_be_made_is_refused(
    headgate: Run, tmp_path: Path, arguments: list[str], words: str
) -> None:
    code, _, errors = headgate("prepare", arguments[0], tmp_path / "data", *arguments[1:])
    assert code == 2
    assert words in errors
    assert not (tmp_path / "data").exists()


def test_a_folder_of_that_name(headgate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy").mkdir()
    code, _, errors = headgate("prepare", "copy", "out")
    assert code == 2
    assert "write ./copy for the file, copy: for the task" in errors
    (tmp_path / "copy/a.txt").write_text("text")
    assert headgate("prepare", "./copy", "text", "--tokenizer", "byte", "--splits", "1/0/0")[0] == 0
    assert json.loads((tmp_path / "text/manifest.json").read_text())["task"] is None


def test_too_many_kinds_of_answers() -> None:
    with pytest.raises(HeadgateError, match="at most 255 fit in the loss mask"):
        Mqar(length=(1024,), pairs=tuple(range(1, 33)), keys=64)
