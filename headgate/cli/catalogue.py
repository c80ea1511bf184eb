"""`headgate mechanisms` and `headgate recipes`: a table of all that are known, or one of them in full."""

import ast
import dataclasses
import inspect
import textwrap
from typing import TYPE_CHECKING, get_type_hints

from headgate.cli.shelves import OWN, check_names, imported, listed
from headgate.grammar import parse_mechanisms
from headgate.registry import MECHANISMS

if TYPE_CHECKING:
    from headgate.mechanisms import MechanismOptions


def mechanisms(name: str | None = None, /) -> None:
    """List the attention mechanisms, or show one with its formula, options and ablations.

    Args:
        name: The mechanism to show, such as dynamic-sparse or ./mine.py:mine. Default: a table of all.
    """
    if name is None:
        print_all()
    else:
        check_names([name])
        from headgate.mechanisms.contract import make_options

        for spec in parse_mechanisms(name):
            make_options(spec.name, spec.options)  # invalid options are refused here as elsewhere
            print_one(spec.name)


def recipes(name: str | None = None, /) -> None:
    """List the recipes, or show one with all its settings, in the form that --override takes.

    Args:
        name: The recipe to show, such as tiny, or a config.json. Default: a table of all.
    """
    from rich.table import Table
    from rich.text import Text

    from headgate import config
    from headgate.progress import table_console
    from headgate.recipes import RECIPES, named_config

    if name is not None:
        print("\n".join(config.as_overrides(named_config(name))))
        return
    table = Table("recipe", "parameters", "what it is", box=None, pad_edge=False)
    for known in RECIPES.names():
        recipe = RECIPES.get(known)
        table.add_row(*map(Text, (known, f"{recipe.parameters:,}", recipe.summary)))
    table_console().print(table)


def option_texts(options: "type[MechanismOptions]") -> dict[str, str]:
    """The docstring that follows each field in the source, including those of the base class."""
    texts: dict[str, str] = {}
    for cls in reversed(options.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                texts[field.target.id] = inspect.cleandoc(after.value.value)
    return texts


def print_all() -> None:
    """The registry by shelf; mechanisms of your own come last."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def order(shelf: str) -> tuple[bool, str]:
        return shelf == OWN, shelf

    table = Table("mechanism", "what it is", "ablations", box=None, pad_edge=False)
    known = listed() or imported()
    for shelf in sorted({mechanism.shelf for mechanism in known.values()}, key=order):
        table.add_row(Text(shelf, style="italic"))
        for name, mechanism in sorted(known.items()):
            if mechanism.shelf == shelf:
                cells = map(Text, (mechanism.summary, ", ".join(mechanism.ablations)))
                table.add_row(Text(f"  {name}", style="bold"), *cells)
    Console().print(table)


def print_one(name: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from headgate.mechanisms.contract import description

    mechanism = MECHANISMS.get(name)
    console = Console(highlight=False)
    console.print(description(mechanism), markup=False, soft_wrap=True)
    texts, hints = option_texts(mechanism.Options), get_type_hints(mechanism.Options)
    table = Table("option", "default", "choices", "meaning", box=None, pad_edge=False, title_justify="left")
    for field in dataclasses.fields(mechanism.Options):
        hint = hints[field.name]
        choices = getattr(hint, "__name__", None) or str(hint)
        if "Literal" in str(hint):
            choices = " ".join(map(str, hint.__args__))
        table.add_row(*map(Text, (field.name, str(field.default), choices, texts.get(field.name, ""))))
    if table.row_count:
        console.print()
        console.print(table)
    if mechanism.ablations:
        table = Table("ablation", "options", box=None, pad_edge=False)
        for ablation, options in mechanism.ablations.items():
            table.add_row(Text(ablation), Text(", ".join(f"{key}={value}" for key, value in options.items())))
        console.print()
        console.print(table)
