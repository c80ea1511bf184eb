"""How mechanisms, options and settings are written: the same in every command, in configs and in Python."""

import dataclasses
import json
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headgate.errors import HeadgateError, suggestion
from headgate.registry import MECHANISMS

WRITTEN_MECHANISM = re.compile(r"(?:(.+?\.py):)?([^:]*)(?::(.*))?", re.DOTALL)


@dataclass(frozen=True)
class MechanismSpec:
    """A mechanism's name and the options that differ from its defaults; as text, `name:option=value,...`."""

    name: str
    """A registered mechanism; `headgate mechanisms` lists them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this mechanism; any others come from the model's shared options, then the defaults."""


class WrittenMechanism(typing.NamedTuple):
    """The parts of one mechanism as written: `file.py:name:words`."""

    file: str
    name: str
    words: str

    @property
    def without_file(self) -> str:
        return ":".join(filter(None, self[1:]))


def split_mechanisms(text: str) -> list[WrittenMechanism]:
    """Split a written mechanism, or a pattern `a+b+c` of them, into its parts."""
    found = []
    for part in re.split(r"\+(?=[A-Za-z_./~])", text):  # the + of 1e+3 is followed by a digit
        matched = WRITTEN_MECHANISM.fullmatch(part.strip())
        assert matched is not None  # it matches any text
        file, name, words = matched.groups(default="")
        if name.endswith(".py") or (file and not name):
            raise HeadgateError(f"{part!r} names a file but no mechanism in it; write FILE.py:NAME")
        found.append(WrittenMechanism(file, name.strip(), words))
    return found


def parse_mechanisms(text: str | Iterable[str], *, load_files: bool = True) -> tuple[MechanismSpec, ...]:
    """The one grammar of mechanisms, in every command and in Python:

    name                  a registered mechanism with its defaults
    name:option=value     with options, separated by commas
    name:ablation         with the options of one of its ablations; more options may follow
    a+b+c                 a pattern that repeats over the layers; each part as above
    file.py:name          a mechanism in a file that is not installed; the file is run
    """
    if not isinstance(text, str):
        return tuple(spec for part in text for spec in parse_mechanisms(part, load_files=load_files))
    specs = []
    for written in split_mechanisms(text):
        if written.file and load_files:
            MECHANISMS.require_from_file(written.file, written.name)
        elif written.file and written.name not in MECHANISMS.names():
            raise HeadgateError(
                f"a saved config names {written.file}:{written.name}, but code is run only from files that "
                f"you name; add --mechanism-file {written.file}, or call headgate.use_file in Python"
            )
        specs.append(MechanismSpec(written.name, _mechanism_options(written)))
    return tuple(specs)


def _mechanism_options(written: WrittenMechanism) -> dict[str, Any]:
    assignments, ablations = split_assignments(written.words)
    options: dict[str, Any] = {}
    for ablation in ablations:
        mechanism = MECHANISMS.get(written.name)
        if ablation in {f.name for f in dataclasses.fields(mechanism.Options)}:
            raise HeadgateError(
                f"option {ablation!r} in {written.without_file!r} has no value; write "
                f"{written.name}:{ablation}=VALUE"
            )
        if ablation not in mechanism.ablations:
            raise HeadgateError(
                f"{written.name} has no ablation {ablation!r}; {suggestion(ablation, mechanism.ablations)}"
            )
        options |= mechanism.ablations[ablation]
    for option, value in assignments:
        if option in options:
            raise HeadgateError(f"{written.without_file!r} sets {option!r} twice; keep one of them")
        options[option] = value
    return options


def split_assignments(words: str) -> tuple[list[tuple[str, Any]], list[str]]:
    """`option=value,word,...` as assignments and bare words; commas inside brackets do not separate."""
    assignments, bare = [], []
    for word in filter(None, map(str.strip, re.split(r",(?![^\[]*\])", words))):
        key, equals, value = word.partition("=")
        if equals:
            assignments.append((key.strip(), literal(value)))
        else:
            bare.append(word)
    return assignments, bare


def literal(text: str) -> Any:
    """A value as written: JSON, or else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # not JSON, a number with too many digits, or nested too deeply
        return text.strip()
