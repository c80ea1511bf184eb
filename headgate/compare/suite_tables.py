"""The tables of a suite, as Markdown and for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from headgate.progress import table_console

By = Literal["pairs", "distance"]


def suite_markdown(results: Mapping[str, Any]) -> str:
    """The tables of a suite, for people."""
    rates = ", ".join(f"{rate:g}" for rate in results["rates"])
    parts = [
        "# Scores\n",
        "The share of the way from chance (0) to the optimum (1): mean over the seeds and its 95% interval, "
        f"cut off at 0 and 1. Each variant at its best of the learning rates {rates} (tuning seeds: "
        f"{results['tuning_seeds']}), judged on fresh seeds ({results['seeds']}) and the test split. "
        f"{speed_in_words(results)}\n",
        markdown_table(*score_cells(results)),
        "\n# Tokens to solve\n",
        f"Until a score of {results['solved_at']} on the validation split, in thousands; the median over the "
        "seeds. > means that it was not reached within the run.\n",
        markdown_table(*solve_cells(results)),
    ]
    whats: tuple[By, ...] = ("pairs", "distance")
    for what in whats:
        for task in results["tasks"]:
            if is_judged_by(task, what):
                parts += [
                    f"\n# {task['name']}: accuracy by {what}\n",
                    f"Chance is {task['chance']['accuracy']:.3f}.\n",
                    markdown_table(*accuracy_cells(task, what)),
                ]
    return "\n".join(parts) + "\n"


def speed_in_words(results: Mapping[str, Any]) -> str:
    costs = results["costs"]
    if costs is None:
        return "Speed was not measured; the same command without --no-cost measures it."
    threads = f"{costs['threads']} thread{'s' * (costs['threads'] > 1)}"
    return (
        f"Speed: training steps on {costs['task']}, all variants in turn on {threads}, relative to "
        f"{results['variants'][0]['label']}; above 1 is faster."
    )


Cells = tuple[list[str], list[list[str]]]
"""Columns and rows."""


def score_cells(results: Mapping[str, Any]) -> Cells:
    tasks = results["tasks"]
    rows = []
    for n, variant in enumerate(results["variants"]):
        mean = "" if variant["mean_score"] is None else f"{variant['mean_score']:.2f}"
        speed = "" if variant["speed"] is None else f"{variant['speed']['ratio']:.2f}x"
        rows.append([variant["label"], *(score_of(task["variants"][n]) for task in tasks), mean, speed])
    return ["", *(task["name"] for task in tasks), "mean", "speed"], rows


def solve_cells(results: Mapping[str, Any]) -> Cells:
    tasks = results["tasks"]
    rows = [
        [variant["label"], *(solved_of(task["variants"][n], task["tokens"]) for task in tasks)]
        for n, variant in enumerate(results["variants"])
    ]
    return ["", *(task["name"] for task in tasks)], rows


def is_judged_by(task: Mapping[str, Any], what: By) -> bool:
    """Whether anything is known of it, and it has several bins."""
    return any(len(row[f"by_{what}"]) > 1 for row in task["variants"])


def accuracy_cells(task: Mapping[str, Any], what: By) -> Cells:
    known = [row for row in task["variants"] if row[f"by_{what}"]]
    columns = [
        str(place["pairs"]) if what == "pairs" else f"{place['first']}-{place['end'] - 1}"
        for place in known[0][f"by_{what}"]
    ]
    rows = []
    for row in known:
        shares = (place["mean"] for place in row[f"by_{what}"])
        rows.append([row["label"], *("" if share is None else f"{share:.2f}" for share in shares)])
    return ["", *columns], rows


def print_suite(results: Mapping[str, Any], answer: str) -> None:
    """The score table, what failed, and the answer last, for the terminal."""
    columns, rows = score_cells(results)
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for cells in rows:
        table.add_row(*map(Text, cells))
    console = table_console()
    console.print(table)
    for task in results["tasks"]:
        for row in task["variants"]:
            for reason in row["failures"]:
                console.print(
                    f"failed: {task['name']}, {row['label']}: {reason}", markup=False, soft_wrap=True
                )
    console.print(f"\n{answer}", markup=False, soft_wrap=True)


def score_of(row: Mapping[str, Any]) -> str:
    score, missing = row["score"], [run for run in row["runs"] if run["state"] != "finished"]
    text = "" if score["mean"] is None else f"{score['mean']:.2f}"
    if score["high"] is not None:
        low, high = min(score["mean"], max(0, score["low"])), min(1, score["high"])
        text += f" ({low:.2f} to {high:.2f})"
    if row["failures"]:
        text += f"{', ' if text else ''}{len(row['failures'])} failed"
    elif text and missing:
        text += f", {len(missing)} not run"
    return text or "not run"


def solved_of(row: Mapping[str, Any], budget: int) -> str:
    found = row["to_solve"]
    if not found["of"]:
        return ""
    if found["median"] is None:
        return f"> {budget / 1000:,.0f}" + (
            f" ({found['reached']} of {found['of']})" if found["reached"] else ""
        )
    return f"{found['median'] / 1000:,.0f}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
