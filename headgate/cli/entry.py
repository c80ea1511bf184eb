"""From the command line's words to a command, and the overview of all commands."""

import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence

from headgate.cli.arguments import parse
from headgate.cli.catalogue import mechanisms, recipes
from headgate.cli.completion import completion
from headgate.cli.costs import bench, plan
from headgate.cli.data import prepare
from headgate.cli.exits import exit_codes
from headgate.cli.runs import convert, evaluate, generate, runs, train
from headgate.cli.studies import ablate, cancel, compare, report, status, suite
from headgate.errors import HeadgateError, suggestion
from headgate.registry import use_file
from headgate.version import __version__

FILE_OPTION = "--mechanism-file"
COMMANDS: dict[str, Callable[..., None]] = {
    "mechanisms": mechanisms,
    "recipes": recipes,
    "prepare": prepare,
    "train": train,
    "runs": runs,
    "evaluate": evaluate,
    "generate": generate,
    "convert": convert,
    "compare": compare,
    "ablate": ablate,
    "suite": suite,
    "status": status,
    "cancel": cancel,
    "report": report,
    "bench": bench,
    "plan": plan,
    "completion": completion,
}


def overview() -> str:
    """What `headgate --help` prints, made from the commands' docstrings without importing a parser."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: headgate COMMAND [OPTIONS]",
        "",
        "Does this attention mechanism beat plain attention, by how much, at what cost?",
        "",
        "commands:",
        *(_summary(name, run, width) for name, run in COMMANDS.items()),
        "",
        "A mechanism is written the same everywhere:",
        "  local                   by name",
        "  local:window=64         with options, separated by commas",
        "  dynamic-sparse:no-gate  one of its ablations; options may follow",
        "  local+local+full        a pattern that repeats over the layers",
        "  ./mine.py:mine          from a Python file that is not installed",
        "",
        "headgate COMMAND --help lists a command's options. Every command also takes",
        f"{FILE_OPTION} FILE, which loads the file of a mechanism that a saved run",
        "uses.",
    ]
    return "\n".join(lines)


def _summary(name: str, run: Callable[..., None], width: int) -> str:
    said = (inspect.getdoc(run) or "").splitlines()[0]
    start, indent = f"  {name:<{width}}  ", " " * (width + 4)
    return textwrap.fill(said, 80, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)


def run(arguments: Sequence[str]) -> None:
    """Run one command, given as the words after `headgate`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return
    if arguments[0] == "--version":
        print(f"headgate {__version__}")
        return
    name, *words = arguments
    if name not in COMMANDS:
        raise HeadgateError(f"unknown command {name!r}; {suggestion(name, COMMANDS)}")
    words = _use_files(words)
    parse(COMMANDS[name], name, words)()


def _use_files(words: Sequence[str]) -> list[str]:
    """Load the files given with --mechanism-file; returns the other words."""
    rest, ahead = [], iter(words)
    for word in ahead:
        option, equals, path = word.partition("=")
        if option != FILE_OPTION:
            rest.append(word)
            continue
        path = path if equals else next(ahead, "")
        if not path:
            raise HeadgateError(f"{FILE_OPTION} needs a file; write {FILE_OPTION} FILE.py")
        use_file(path)
    return rest


def main() -> None:
    """The entry point: errors become one sentence and exit code 2."""
    with exit_codes():
        run(sys.argv[1:])
