"""Help fits 80 columns and says plainly what is expected; names are checked before anything heavy loads."""

import os
import subprocess
import sys

import pytest

from headgate.cli.entry import COMMANDS, overview
from headgate.cli.help import help_text
from headgate.cli.shelves import from_source, imported
from headgate.registry import MECHANISMS

PLAIN = {name: value for name, value in os.environ.items() if name != "HEADGATE_MECHANISM_FILES"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_plain_and_narrow(name: str) -> None:
    text = help_text(COMMANDS[name], name)
    assert max(map(len, text.splitlines())) <= 80
    for ugly in ("{None}", "[[", "]]", "default: None", "options options", "Args:", "VALUE"):
        assert ugly not in text


def test_the_overview_is_narrow_and_names_every_command() -> None:
    text = overview()
    assert max(map(len, text.splitlines())) <= 80
    assert set(COMMANDS) <= set(text.split())


def test_help_says_what_is_needed_and_shows_how() -> None:
    text = help_text(COMMANDS["compare"], "compare")
    assert text.startswith("usage: headgate compare [NAMES...] --data TEXT --out TEXT [options]")
    assert text.partition("examples:\n")[2].count("headgate compare") == 3
    assert "--jobs N" in text
    assert "--cost, --no-cost" in text
    assert "--budget tokens|seconds" in text


def test_the_list_is_that_of_the_registry() -> None:
    """But for those that a test has registered."""
    known = imported()
    assert from_source() == {name: known[name] for name in from_source()}
    home = MECHANISMS.package
    assert set(from_source()) == {n for n in known if MECHANISMS.get(n).__module__.startswith(f"{home}.")}


NOWHERE = ["--data", "nowhere", "--out", "nothing"]


@pytest.mark.parametrize(
    ("words", "wrong", "meant"),
    [
        (["compare", "dynamic-spars", *NOWHERE], "mechanism 'dynamic-spars'", "dynamic-sparse"),
        (["ablate", "dynamic-spars", *NOWHERE], "mechanism 'dynamic-spars'", "dynamic-sparse"),
        (["train", "tiny", "--mechanism", "local+ful", *NOWHERE], "mechanism 'ful'", "full"),
        (["mechanisms", "dynamic-spars"], "mechanism 'dynamic-spars'", "dynamic-sparse"),
        (["compare", "local", "--recipe", "tinny", *NOWHERE], "recipe 'tinny'", "tiny"),
        (["train", "tinny", *NOWHERE], "recipe 'tinny'", "tiny"),
    ],
)
def test_names_are_checked_before_data_and_torch(words: list[str], wrong: str, meant: str) -> None:
    script = (
        "import sys\nfrom headgate.cli.entry import run\n"
        f"try:\n    run({words!r})\nexcept Exception as error:\n    print(error)\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], env=PLAIN, capture_output=True, text=True, check=True
    ).stdout
    assert f"unknown {wrong}; did you mean '{meant}'?" in said
    assert said.splitlines()[-1] == "[]"


def test_a_list_waits_for_no_torch() -> None:
    script = (
        "import sys\nfrom headgate.cli.entry import run\nrun(['mechanisms'])\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], env=PLAIN, capture_output=True, text=True, check=True
    ).stdout
    assert "dynamic-sparse" in said
    assert said.splitlines()[-1] == "[]"
