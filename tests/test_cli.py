"""The command line as a person meets it."""

import subprocess
import sys
from dataclasses import fields

import pytest

from headgate.cli import COMMANDS, run
from headgate.cli.catalogue import option_texts
from headgate.mechanisms import MECHANISMS


def headgate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headgate", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(arguments: tuple[str, ...]) -> None:
    done = headgate(*arguments)
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = headgate(command, "--help")
    assert done.returncode == 0
    assert f"headgate {command}" in done.stdout


def test_version() -> None:
    from headgate.version import __version__

    assert headgate("--version").stdout == f"headgate {__version__}\n"


def test_mechanisms_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    run(["mechanisms"])
    listed = capsys.readouterr().out
    shelves = ("baselines", "papers", "second shelf", "own")
    places = [listed.index(f"\n{shelf} ") for shelf in shelves]
    assert places == sorted(places)
    for name in MECHANISMS.names():
        shelf = shelves.index(MECHANISMS.get(name).shelf)
        assert places[shelf] < listed.index(f"\n  {name} ") < [*places, len(listed)][shelf + 1]


@pytest.mark.parametrize("name", MECHANISMS.names())
def test_a_mechanism_is_shown_with_its_options_and_ablations(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["mechanisms", name])
    shown = capsys.readouterr().out
    assert shown.startswith(f"{name}: ")
    for word in [*MECHANISMS.get(name).ablations, *(f.name for f in fields(MECHANISMS.get(name).Options))]:
        assert word in shown
    for text in option_texts(MECHANISMS.get(name).Options).values():
        assert text.split()[0] in shown


@pytest.mark.parametrize("name", MECHANISMS.names())
def test_every_option_is_documented(name: str) -> None:
    options = MECHANISMS.get(name).Options
    assert set(option_texts(options)) == {f.name for f in fields(options)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mechanism",), "unknown command 'mechanism'; did you mean 'mechanisms'?"),
        (("mechanisms", "fulll"), "unknown mechanism 'fulll'; did you mean 'full'?"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    done = headgate(*arguments)
    assert done.returncode == 2
    assert done.stderr == f"headgate: {words}\n"
    assert done.stdout == ""
