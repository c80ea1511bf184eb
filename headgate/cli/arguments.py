"""From a command's words to its arguments: tyro parses, and what it refuses becomes one sentence.

tyro draws a box of many lines around a mistake. Parsing is kept apart from running the command here, so that
the box can be caught and rephrased like all other errors, with the closest option.
"""

import dataclasses
import functools
import inspect
import io
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any

from headgate.errors import HeadgateError, suggestion

SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)*=")
"""A word such as train.steps=100; it may appear anywhere after the command."""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command, from its signature or from a dataclass among its parameters."""

    flag: str
    hint: Any

    @property
    def takes_value(self) -> bool:
        return self.hint is not bool

    @property
    def expected(self) -> str:
        kinds = {int: "a whole number", float: "a number"}
        inner = [hint for hint in typing.get_args(self.hint) or (self.hint,) if hint in kinds]
        return kinds[inner[0]] if inner else "another value"


def options(command: Callable[..., None]) -> dict[str, Option]:
    """Options by flag; those that are on or off appear as both --name and --no-name."""
    found = []
    hints = typing.get_type_hints(command)
    for name, parameter in inspect.signature(command).parameters.items():
        if parameter.kind == parameter.POSITIONAL_ONLY:
            continue
        if dataclasses.is_dataclass(hints[name]):
            inner = typing.get_type_hints(hints[name])
            found += [(field.name, inner[field.name]) for field in dataclasses.fields(hints[name])]
        else:
            found.append((name, hints[name]))
    flags = {}
    for name, hint in found:
        word = name.replace("_", "-")
        for flag in (f"--{word}", f"--no-{word}") if hint is bool else (f"--{word}",):
            flags[flag] = Option(flag, hint)
    return flags


def parse(command: Callable[..., None], name: str, words: Sequence[str]) -> Callable[[], None]:
    """The command with its arguments, ready to be called; raises HeadgateError for words that do not fit."""
    if {"-h", "--help"} & set(words):
        from headgate.cli.help import help_text

        print(help_text(command, name))
        sys.exit()
    import tyro

    known = options(command)
    words = _settings_last(words, known) if "--override" in known else list(words)
    _refuse_twice(words, known)

    @functools.wraps(command)
    def bind(*arguments: Any, **keywords: Any) -> Callable[[], None]:
        return functools.partial(command, *arguments, **keywords)

    said, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"  # so that no line of the box is broken
    try:
        with redirect_stderr(said):
            bound = tyro.cli(bind, prog=f"headgate {name}", args=words, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as stop:
        if not stop.code:
            raise
        parameters = inspect.signature(command).parameters.values()
        bare = [p for p in parameters if p.kind == p.POSITIONAL_ONLY and p.default is p.empty]
        needed = [parameter.name.upper() for parameter in bare]
        raise HeadgateError(_sentence(said.getvalue(), words, name, known, needed)) from None
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before
    return bound


def refuse_given(command: Callable[..., None], what: str, values: Mapping[str, Any]) -> None:
    """Raise if one of these options of a command is given where it would have no effect."""
    parameters = inspect.signature(command).parameters
    for name, value in values.items():
        if value != parameters[name].default:
            flag = f"--{name.replace('_', '-')}"
            raise HeadgateError(f"{what} does not take {flag}, but {value!r} was given; leave it out")


def _settings_last(words: Sequence[str], known: dict[str, Option]) -> list[str]:
    """The words, with any settings among them moved behind one --override, which takes any number.

    The word after an option that takes a value is its value, whatever it looks like.
    """
    rest: list[str] = []
    settings: list[str] = []
    is_value = False
    if any(word == "--override" and (not after or after.startswith("-")) for word, after in _pairs(words)):
        raise HeadgateError("--override has no value; write it as train.steps=100")
    for word in words:
        flag = _flag(word)
        if flag == "--override":
            settings += [word.partition("=")[2]] if "=" in word else []
            is_value = False
        elif SETTING.match(word) and not is_value:
            settings.append(word)
        else:
            rest.append(word)
            is_value = flag in known and known[flag].takes_value and "=" not in word
    given = [setting.partition("=")[0] for setting in settings]
    twice = next((name for name in given if given.count(name) > 1), None)
    if twice is not None:
        raise HeadgateError(f"{twice} is set twice; keep one")
    return [*rest, "--override", *settings] if settings else rest


def _flag(word: str) -> str:
    """The option that a word names; --save_every is --save-every."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else ""


def _refuse_twice(words: Sequence[str], known: dict[str, Option]) -> None:
    given = [flag for word in words if (flag := _flag(word)) in known]
    bare = [flag.replace("--no-", "--") if known[flag].hint is bool else flag for flag in given]
    twice = next((flag for flag in bare if bare.count(flag) > 1), None)
    if twice is not None:
        raise HeadgateError(f"{twice} is given twice; keep one")


def _sentence(
    box: str, words: Sequence[str], name: str, known: dict[str, Option], needed: Sequence[str]
) -> str:
    """What a box says, in one sentence; `needed` are the words that the command requires."""
    lines = [line.strip("╭╮╰╯│─ \t") for line in box.splitlines() if line.strip("╭╮╰╯│─- \t")]
    text = next((line for line in lines[1:] if line), "the words do not fit") if lines else box
    if found := re.match(r"Unrecognized options: (\S+?)(,|$)", text):
        word = found[1]
        if word.startswith("-"):
            return f"headgate {name} has no option {word!r}; {suggestion(_flag(word) or word, known)}"
        return f"headgate {name} does not take {word!r}: it is one word too many; see headgate {name} --help"
    if found := re.match(r"Missing value for argument '(\S+)'", text):
        return f"{found[1]} has no value; see headgate {name} --help"
    if found := re.match(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)", text):
        choices = re.findall(r"'([^']*)'", found[3])
        return f"{found[2]} {found[1]!r} is not a choice; {suggestion(found[1], choices)}"
    if found := re.match(r"Error parsing (\S+): (.*)", text):
        flag, reason = found[1], found[2]
        if flag in known:
            return f"{flag} {_value(words, flag)!r} does not fit; expected {known[flag].expected}"
        return reason if not flag.startswith("-") else f"{flag}: {reason}"
    if text.startswith("Missing from"):
        missing = next((line.split()[0] for line in lines[2:] if line.startswith("--")), " ".join(needed))
        return f"headgate {name} needs {missing}; see headgate {name} --help"
    return text


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Each word with the one after it."""
    return list(zip(words, [*words[1:], ""], strict=False))


def _value(words: Sequence[str], flag: str) -> str:
    """The word that was given for an option."""
    for word, after in _pairs(words):
        if _flag(word) == flag:
            return word.partition("=")[2] if "=" in word else after
    return ""
