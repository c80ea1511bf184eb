"""What `headgate evaluate` prints: an evaluation as tables or as JSON."""

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_evaluation(result: dict[str, Any], *, as_json: bool) -> None:
    """Print a result of `evaluate_run`, for a person or for a program."""
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return
    print(
        f"{result['run']}, {result['checkpoint']}: split {result['split']}, {result['tokens']:,} tokens\n"
        f"loss {_number(result['loss'])}, perplexity {_number(result['perplexity'])}, "
        f"bits per byte {_number(result['bits_per_byte'])}"
    )
    table = Table("position in the context", "loss", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for place in result["by_position"]:
        positions = f"{place['first']:,}" + (
            f"-{place['end'] - 1:,}" if place["end"] - place["first"] > 1 else ""
        )
        table.add_row(positions, _number(place["loss"]))
    console = Console()
    console.print(table)
    if result["answers"]:
        print(f"answers: {result['answers']['accuracy']:.1%} right")
        table = Table("distance", "answers", "loss", "right", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for place in result["answers"]["by_distance"]:
            cells = (f"{place['tokens']:,}", _number(place["loss"]), f"{place['accuracy']:.1%}")
            table.add_row(f"{place['first']:,}-{place['end'] - 1:,}", *cells)
        console.print(table)
    if "documents" in result:
        _print_documents(result["documents"], console)
    if result["gates"]:
        table = Table("layer", "gate's mean", "spread", "below 0.1", "above 0.9", box=None, pad_edge=False)
        for gate in result["gates"]:
            shares = (f"{gate[name]:.0%}" for name in ("below_01", "above_09"))
            table.add_row(str(gate["layer"]), _number(gate["mean"]), _number(gate["spread"]), *shares)
        console.print(table)


def _print_documents(found: dict[str, Any], console: Console) -> None:
    table = Table("documents", "number", "tokens", "loss", "begins with", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    table.columns[4].no_wrap = True
    for which in ("hardest", "easiest"):
        for n, place in enumerate(found[which]):
            begin = "unknown" if place["text"] is None else _plain(place["text"])[:48]
            cells = (f"{place['document']:,}", f"{place['tokens']:,}", _number(place["loss"]), escape(begin))
            table.add_row(which if n == 0 else "", *cells)
    console.print(f"{found['count']:,} documents")
    console.print(table)


def _plain(text: str) -> str:
    """On one line, without control characters that a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
