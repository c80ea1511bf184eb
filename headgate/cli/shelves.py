"""The mechanisms that come with headgate, read from their source, so that lists and checks need no torch."""

import ast
import inspect
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headgate.errors import HeadgateError, suggestion
from headgate.grammar import split_mechanisms
from headgate.recipes import named_config
from headgate.registry import MECHANISMS

OWN = "own"
"""The shelf of a mechanism that names none."""


@dataclass(frozen=True)
class Listed:
    """What a list says about a mechanism."""

    summary: str
    shelf: str
    ablations: tuple[str, ...]


def listed() -> dict[str, Listed]:
    """By name; empty if all are imported already, or if there are others that only importing can find: entry
    points, or files of your own."""
    from importlib.metadata import entry_points

    assert MECHANISMS.package is not None
    if MECHANISMS.is_scanned or os.environ.get(MECHANISMS.files_variable or ""):
        return {}
    return {} if entry_points(group=MECHANISMS.package) else from_source()


@cache
def from_source() -> dict[str, Listed]:
    """The package's own mechanisms, by name."""
    found = {}
    for path in sorted((Path(__file__).parents[1] / "mechanisms").glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        for node in module.body:
            if isinstance(node, ast.ClassDef) and (name := _registered(node)):
                said = inspect.cleandoc(ast.get_docstring(module) or "").partition("\n")[0]
                ablations = tuple(_value(node, "ablations") or ())
                found[name] = Listed(said.partition(": ")[2], _value(node, "shelf") or OWN, ablations)
    return found


def imported() -> dict[str, Listed]:
    """The same for every mechanism there is, by importing them."""
    from headgate.mechanisms.contract import description

    found = {}
    for name in MECHANISMS.names():
        mechanism = MECHANISMS.get(name)
        said = description(mechanism).splitlines()[0].partition(": ")[2]
        found[name] = Listed(said, mechanism.shelf, tuple(mechanism.ablations))
    return found


def check_names(texts: Iterable[str], recipe: str | None = None) -> None:
    """Refuse an unknown mechanism or recipe before anything heavy is imported or any data is opened."""
    if recipe is not None:
        named_config(recipe)
    for text in texts:
        for written in split_mechanisms(text.partition("@")[0]):
            if not written.file and listed() and written.name not in listed():
                raise HeadgateError(
                    f"unknown mechanism {written.name!r}; {suggestion(written.name, listed())}"
                )


def _registered(node: ast.ClassDef) -> str | None:
    """The name under which a class is registered."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name):
            if decorator.func.id == "register" and isinstance(decorator.args[0], ast.Constant):
                return str(decorator.args[0].value)
    return None


def _value(node: ast.ClassDef, name: str) -> Any:
    """What a class sets an attribute to; for a dictionary, its keys."""
    for line in node.body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        if not any(isinstance(target, ast.Name) and target.id == name for target in targets):
            continue
        value = getattr(line, "value", None)
        if isinstance(value, ast.Dict):
            return [key.value for key in value.keys if isinstance(key, ast.Constant)]
        if isinstance(value, ast.Constant):
            return value.value
    return None
