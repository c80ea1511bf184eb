"""What a person expects of the command line: text of any locale, other tokenizers, other data, a view of what
there is, and an end that is told."""

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attempts import assert_refused, attempt
from waiting import HANG

from headgate import config
from headgate.cli import COMMANDS, main
from headgate.cli.completion import Shell, script
from headgate.config import Config
from headgate.data.tokenizers import make_tokenizer
from headgate.recipes import get_recipe


def headgate(*words: str | Path, redirect: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, through a shell that redirects its output."""
    command = [
        "bash",
        "-c",
        f'exec "$@" {redirect}',
        "bash",
        sys.executable,
        "-m",
        "headgate",
        *map(str, words),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=os.environ | variables, timeout=HANG
    )


def test_one_process_for_each_surrounding(whole: Path, tmp_path: Path) -> None:
    words = ("generate", whole, "--prompt", "h\u00e9 \u6c34", "--max-new-tokens", "3", "--temperature", "0")
    expected = attempt(*words).out
    narrow = headgate(*words, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert narrow.returncode == 0, narrow.stderr
    assert len(narrow.stdout) >= len(expected) - 3
    for redirect in (">/dev/full", ">&-"):
        refused = headgate("mechanisms", redirect=redirect)
        assert refused.returncode == 2, (redirect, refused)
        assert refused.stderr.startswith("headgate: standard output"), refused.stderr
        assert refused.stderr.count("\n") == 1
    unknown = headgate("generate", whole, "--prompt", "a", HEADGATE_NATIVE="xyz")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1), unknown.stderr
    assert "HEADGATE_NATIVE='xyz'" in unknown.stderr


def test_a_run_whose_progress_nobody_can_read_goes_on(
    recipe: Path, data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = ["train", recipe, "--data", data, "--out", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", ["headgate", *map(str, words)])
    with contextlib.redirect_stderr(Full()):
        main()
    model = "checkpoints/step-00000003/model.safetensors"
    assert (tmp_path / "run" / model).read_bytes() == (whole / model).read_bytes()


def test_gpt2_as_it_was_published(tmp_path: Path) -> None:
    home = tmp_path / "gpt2"
    home.mkdir()
    letters = make_tokenizer("bpe:257", training_texts=lambda: ["ab"])
    vocabulary = json.loads(letters.definition)["model"]["vocab"]
    numbers = {token: number for number, token in enumerate([*vocabulary, "ab", "\u0120ab"])}
    (home / "vocab.json").write_text(json.dumps(numbers))
    (home / "merges.txt").write_text("#version: 0.2\na b\n\u0120 ab\n")
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "ab ab {n}"}}\n' for n in range(30)))
    words = ("prepare", tmp_path / "text.jsonl", tmp_path / "out", "--tokenizer", home)
    assert attempt(*words).code == 0
    assert attempt(*words).code == 0, "the same command again"
    tokenizer = make_tokenizer(str(home))
    assert tokenizer.encode(["ab ab"])[0].tolist() == [numbers["ab"], numbers["\u0120ab"]]
    assert tokenizer.decode([numbers["ab"], numbers["\u0120ab"]]) == "ab ab"
    assert attempt("prepare", "--check", tmp_path / "out").code == 0
    (home / "merges.txt").write_text("#version: 0.2\na b\n")
    assert_refused(attempt(*words), "whose contents have changed")


def test_a_separator_makes_documents(tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("\n\n".join(f"paragraph {n}" for n in range(50)) + "\n\n \n\n")
    one = attempt("prepare", text, tmp_path / "one", "--tokenizer", "byte")
    assert "is one document" in one.err
    assert "--separator" in one.err
    answer = attempt("prepare", text, tmp_path / "many", "--tokenizer", "byte", "--separator", r"\n\n")
    assert answer.code == 0
    assert "is one document" not in answer.err
    manifest = json.loads((tmp_path / "many" / "manifest.json").read_text())
    assert sum(split["documents"] for split in manifest["splits"]) == 50
    again = attempt("prepare", text, tmp_path / "many", "--tokenizer", "byte")
    assert_refused(again, "separator")


def test_training_a_tokenizer_tells_how_far_it_is(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("".join(f'{{"text": "some words, {n} of them"}}\n' for n in range(90)))
    answer = attempt("prepare", tmp_path / "t.jsonl", tmp_path / "out", "--tokenizer", "bpe:270")
    assert answer.code == 0
    assert "MB read; merging pairs into bpe:270" in answer.err


def test_other_data_in_the_same_tokens(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("".join(f'{{"text": "other text, {n} of it"}}\n' for n in range(90)))
    words = ("prepare", tmp_path / "t.jsonl", tmp_path / "other", "--tokenizer", whole / "tokenizer.json")
    assert attempt(*words).code == 0
    answer = attempt("evaluate", whole, "--data", tmp_path / "other", "--tokens", "24", "--json")
    assert answer.code == 0, answer.err
    own = attempt("evaluate", whole, "--tokens", "24", "--json")
    assert json.loads(answer.out)["loss"] != json.loads(own.out)["loss"]


def test_recipes_and_their_settings_can_be_given_back() -> None:
    assert "paper-134m" in attempt("recipes").out
    lines = attempt("recipes", "small").out.splitlines()
    assert "model.d_model=256" in lines
    assert config.override(get_recipe("tiny"), lines) == get_recipe("small")


def test_runs_below_a_folder(whole: Path, stopped: Path, recipe: Path) -> None:
    shutil.copytree(whole, stopped.parent / "a" / "finished")
    shutil.copytree(whole, stopped.parent / "a" / "odd")
    (stopped.parent / "a" / "odd" / "summary.json").write_text("{}")
    answer = attempt("runs", stopped.parent, "--json")
    found = {Path(run["run"]).name: run for run in json.loads(answer.out)}
    assert {name: run["state"].split(":")[0] for name, run in found.items()} == {
        "finished": "finished",
        "odd": "not readable",
        "run": "stopped",
    }
    steps = config.load(Config, recipe).train.steps
    assert (found["finished"]["step"], found["finished"]["steps"]) == (steps, steps)
    assert "finished" in attempt("runs", stopped.parent).out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell: Shell) -> None:
    text = script(shell)
    assert all(name in text for name in COMMANDS)
    assert "save-every" in text


def test_completion_in_bash() -> None:
    asked = 'COMP_WORDS=(headgate train --save); COMP_CWORD=2; _headgate; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", f"{script('bash')}\n{asked}"], capture_output=True, text=True)
    assert done.stdout.split() == ["--save-every", "--save-minutes"], done.stderr


def test_a_finished_run_on_a_read_only_disk(
    whole: Path, data: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a finished run is written to")

    for name in ("open_new", "open_own", "own_folder", "locked", "write_text"):
        monkeypatch.setattr(f"headgate.files.{name}", refuse)
    answer = attempt("train", recipe, "--data", data, "--out", whole)
    assert answer.code == 0
    assert "is finished" in answer.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_prepare_says_that_its_work_is_kept(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from headgate.data import prepare, workers

    # A job in the background may have been started with some of them ignored.
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, before))
    monkeypatch.setattr(workers, "CHUNK_CHARACTERS", 50)
    (tmp_path / "t.jsonl").write_text("".join(f'{{"text": "document number {n}"}}\n' for n in range(200)))
    append, calls = prepare._append, iter(range(1000))

    def strike(*arguments: object) -> int:
        if next(calls) == 5:
            os.kill(os.getpid(), number)
        return append(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(prepare, "_append", strike)
    words = ("prepare", tmp_path / "t.jsonl", tmp_path / "out", "--tokenizer", "byte")
    answer = attempt(*words)
    assert answer.code == 130
    assert "is kept" in answer.err
    assert attempt(*words).code == 0
    assert attempt("prepare", *words[1:2], tmp_path / "whole", *words[3:]).code == 0
    for path in (tmp_path / "whole").rglob("*.ds"):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "whole")).read_bytes()
