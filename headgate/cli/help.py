"""What `headgate COMMAND --help` prints: made from the command's signature and docstring, 80 columns wide."""

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headgate.cli.catalogue import option_texts

WIDTH, INDENT = 80, 24
KINDS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
SECTION = re.compile(r"^(Args|Examples):\n", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An argument as the help shows it."""

    usage: str
    text: str


def help_text(command: Callable[..., None], name: str) -> str:
    parts = SECTION.split(inspect.getdoc(command) or "")
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    words, flags, needed = _entries(command, _arguments(sections.get("Args", "")))
    given = [entry.usage for entry in words] + [f"{flag.usage}" for flag in needed]
    lines = [_filled(f"usage: headgate {name} {' '.join([*given, '[options]'])}", " " * 8)]
    lines += ["", *(_filled(" ".join(text.split())) for text in parts[0].strip().split("\n\n"))]
    if words:
        lines += ["", *map(_shown, words)]
    lines += ["", "options:", *map(_shown, [*needed, *flags])]
    lines.append(_shown(Entry("-h, --help", "Show this and exit.")))
    if "Examples" in sections:
        lines += ["", "examples:", textwrap.indent(textwrap.dedent(sections["Examples"]).rstrip(), "  ")]
    return "\n".join(lines)


def _entries(
    command: Callable[..., None], texts: dict[str, str]
) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """A command's bare words, its options, and those options that it requires."""
    words, flags, needed = [], [], []
    hints = typing.get_type_hints(command)
    for parameter in inspect.signature(command).parameters.values():
        hint, text = hints[parameter.name], texts.get(parameter.name, "")
        if parameter.kind == parameter.POSITIONAL_ONLY:
            word = parameter.name.upper()
            several = f"{word}..." if typing.get_origin(hint) is tuple else word
            optional = parameter.default is not parameter.empty
            words.append(Entry(f"[{several}]" if optional else several, text))
        elif dataclasses.is_dataclass(hint):
            inner, said = typing.get_type_hints(hint), option_texts(typing.cast(Any, hint))
            for field in dataclasses.fields(hint):
                flags.append(_flag(field.name, inner[field.name], said.get(field.name, ""), field.default))
        elif parameter.default is parameter.empty:
            needed.append(_flag(parameter.name, hint, text, None))
        else:
            flags.append(_flag(parameter.name, hint, text, parameter.default))
    return words, flags, needed


def _flag(name: str, hint: Any, text: str, default: Any) -> Entry:
    flag = f"--{name.replace('_', '-')}"
    if hint is bool:
        return Entry(f"{flag}, --no-{flag[2:]}", f"{text} Default: on.") if default else Entry(flag, text)
    several = typing.get_origin(hint) is tuple
    if default not in (None, "", ()) and "Default:" not in text:
        text = f"{text} Default: {default}."
    return Entry(f"{flag} {_kind(hint)}{'...' * several}", text)


def _kind(hint: Any) -> str:
    """What a value looks like when it is given."""
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (types.UnionType, typing.Union, tuple):
        hint = next(one for one in typing.get_args(hint) if one not in (type(None), Ellipsis))
        return _kind(hint)
    return KINDS.get(hint, "VALUE")


def _arguments(section: str) -> dict[str, str]:
    """The texts of a docstring's Args, by argument name."""
    found: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(section).splitlines():
        if begun := re.match(r"(\w+): (.*)", line):
            name = begun[1]
            found[name] = begun[2]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found


def _shown(entry: Entry) -> str:
    start = f"  {entry.usage}"
    text = textwrap.fill(
        entry.text,
        WIDTH,
        initial_indent=" " * INDENT,
        subsequent_indent=" " * INDENT,
        break_on_hyphens=False,
    )
    return f"{start:<{INDENT}}{text[INDENT:]}" if len(start) < INDENT - 1 else f"{start}\n{text}"


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
