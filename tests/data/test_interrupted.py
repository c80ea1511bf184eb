"""A prepare that is killed at any moment goes on when it is run again, and ends with the same bytes."""

import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from data_examples import tree, write_mixed

from headgate.data import prepare as preparing
from headgate.data import shards, workers
from headgate.data.prepare import Request, prepare
from headgate.data.tokenizers import make_tokenizer
from headgate.errors import HeadgateError

KILLS = 9  # for each of the three requests below


class Calls:
    """Counts the calls that this thread makes, of Python and of C; at the last one the process is killed."""

    def __init__(self, last: int = -1) -> None:
        self.count, self.last = 0, last

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self) -> "Calls":
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def prepare_until(last: int, request: Request, out: Path, count: int) -> None:
    with Calls(last):
        prepare(request, out, workers=count)


@pytest.mark.parametrize(
    ("request_", "count"),
    [
        (Request("in", "bpe:300", dedup=True), 2),
        (Request("in", "byte"), 1),
        (Request("in", "byte", max_tokens=12_000), 3),
    ],
    ids=["bpe-dedup", "byte", "max_tokens"],
)
def test_killed_hard_at_random_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: Request, count: int
) -> None:
    """Moments are numbers of calls, not of seconds, so that they are spread alike on any machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "CHUNK_CHARACTERS", 1500)
    monkeypatch.setattr(preparing, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(shards.ShardWriter.__init__, "__kwdefaults__", {"shard_tokens": 3000})
    write_mixed(tmp_path / "in")
    with Calls() as whole:
        prepare(request_, "whole", workers=count)
    expected = tree(tmp_path / "whole")
    context = multiprocessing.get_context("fork")
    chance = random.Random(count)
    killed = went_on = rounds = 0
    while killed < KILLS:
        out = tmp_path / f"out{rounds}"
        rounds += 1
        while not (out / "manifest.json").exists() or (out / "progress.json").exists():
            went_on += (out / "progress.json").exists() and b'"file": 0' not in (
                out / "progress.json"
            ).read_bytes()
            last = chance.randrange(whole.count * 3 // 2)
            process = context.Process(target=prepare_until, args=(last, request_, out, count))
            process.start()
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            killed += process.exitcode != 0
        if (out / "manifest.json").exists():
            assert prepare(request_, out, workers=count) == shards.read_manifest(tmp_path / "whole")
            assert tree(out) == expected
    assert went_on > 0


def test_every_single_commit_can_be_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at random moments but right after each note of progress, and in the middle of publishing."""

    class Killed(BaseException):
        pass

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "CHUNK_CHARACTERS", 2000)
    monkeypatch.setattr(preparing, "COMMIT_SECONDS", 0.0)
    write_mixed(tmp_path / "in")
    request = Request("in", "byte", dedup=True)
    prepare(request, "whole", workers=1)
    save, sums, steps = preparing.config.save, shards.sha256, 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps in stops:
            raise Killed

    def save_and_stop(*arguments: object, **options: bool) -> None:
        save(*arguments, **options)  # type: ignore[arg-type]
        step()

    def sum_and_stop(path: Path) -> str:
        step()
        return sums(path)

    stops: set[int] = set()
    monkeypatch.setattr(preparing.config, "save", save_and_stop)
    monkeypatch.setattr(shards, "sha256", sum_and_stop)
    prepare(request, "counted", workers=1)
    assert steps > 20
    for stop in range(1, steps + 1):
        steps, stops = 0, {stop, stop + 3}
        for _ in range(3):
            try:
                prepare(request, f"out{stop}", workers=1)
            except Killed:
                continue
            break
        assert tree(tmp_path / f"out{stop}") == tree(tmp_path / "whole")


def test_the_closing_token_outlives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have come from a file beside the tokenizer, of which the folder has no copy."""
    monkeypatch.chdir(tmp_path)
    definition = make_tokenizer("byte").definition.replace("<|endoftext|>", "[END]")
    (tmp_path / "tokenizer.json").write_text(definition)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[END]"}')
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n[]\n')
    request = Request("a.jsonl", ".")
    with pytest.raises(HeadgateError, match="line 2 holds a list"):
        prepare(request, "out", workers=1)
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n')
    assert prepare(request, "out", workers=1).tokenizer.end_of_text == "[END]"


def test_an_unfinished_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text("{}")
    for use in (shards.check_data, lambda folder: shards.open_split(folder, "train")):
        with pytest.raises(HeadgateError, match="is not finished; run the same `headgate prepare` again"):
            use(tmp_path)


def test_the_keyboard_interrupts_and_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "CHUNK_CHARACTERS", 1500)
    write_mixed(tmp_path / "in")
    request = Request("in", "byte")
    prepare(request, "whole", workers=1)
    append, calls = preparing._append, 0

    def interrupted(*arguments: object) -> int:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return append(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(preparing, "_append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(request, "out", workers=2)
    assert preparing.config.load(preparing.PrepareState, "out/progress.json").now.documents > 0
    prepare(request, "out", workers=2)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
