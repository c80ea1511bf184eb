"""Fills the tables of docs/findings/tasks.md from the results in the folder beside this file.

    python studies/tasks/tables.py                              # from the results as they are
    python studies/tasks/tables.py --publish window runs/suite  # take a suite's results first, as a part
    python studies/tasks/tables.py --check                      # code 1 if a table differs from its results

A table stands between `<!-- table NAME -->` and `<!-- end -->`. Figures are kept if the page shows them.
"""

import argparse
import functools
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from headgate.compare.suite_tables import (
    accuracy_cells,
    markdown_table,
    score_cells,
    solve_cells,
    speed_in_words,
)
from headgate.files import write_text
from headgate.report.publish import publish_suite
from headgate.report.reading import read_suite
from headgate.report.suite_page import suite_sentence

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parents[1] / "docs" / "findings" / "tasks.md"
EVERY = ("patterns", "lookups", "mqar", "needle", "added", "speed")
"""Every mechanism on every task: four parts with different tasks, and others that came later, if any, with
their speeds."""
PARTS = (*EVERY, "pairs", "layer", "window", "state")
"""Besides them: full attention on more pairs; one layer; windows of several sizes; a small state."""


class NotRunYet(LookupError):
    """A table needs results that are not here."""


@functools.cache
def suite(part: str) -> dict[str, Any]:
    if not (RESULTS / part).is_dir():
        raise NotRunYet(part)
    return read_suite(RESULTS / part)


@functools.cache
def every() -> dict[str, Any]:
    """The suites of every mechanism as one: all their tasks, by name, and the means over all of them."""
    suites = [suite(part) for part in EVERY if (RESULTS / part).is_dir()]
    if not suites:
        raise NotRunYet(", ".join(EVERY))
    for name in ("rates", "tuning_seeds", "seeds", "solved_at"):
        found = [each[name] for each in suites]
        if any(value != found[0] for value in found):
            raise ValueError(f"the suites of every mechanism differ in {name}: {found}; run them alike")
    variants: dict[str, dict[str, Any]] = {}
    tasks: dict[str, dict[str, Any]] = {}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for each in suites:
        for variant in each["variants"]:
            known = variants.setdefault(variant["label"], {**variant, "speed": None, "parameters": None})
            known["speed"] = known["speed"] or variant["speed"]
            known["parameters"] = max(known["parameters"] or 0, variant["parameters"] or 0) or None
        for task in each["tasks"]:
            if tasks.setdefault(task["name"], task)["source"] != task["source"]:
                raise ValueError(f"the suites of every mechanism differ in {task['name']}; run them alike")
            for row in task["variants"]:
                rows.setdefault((task["name"], row["label"]), row)
    merged = [
        {**task, "variants": [rows.get((name, label), not_run(label)) for label in variants]}
        for name, task in sorted(tasks.items())
    ]
    for n, variant in enumerate(variants.values()):
        scores = [task["variants"][n]["score"]["mean"] for task in merged]
        variant["mean_score"] = None if None in scores else fmean(scores)
    costs = next((each["costs"] for each in suites if each["costs"]), None)
    return {**suites[0], "tasks": merged, "variants": list(variants.values()), "costs": costs}


def not_run(label: str) -> dict[str, Any]:
    """The row of a variant that no suite has on a task."""
    return {
        "label": label,
        "runs": [],
        "failures": [],
        "score": {"mean": None, "low": None, "high": None},
        "by_distance": [],
        "by_pairs": [],
        "to_solve": {"median": None, "reached": 0, "of": 0},
    }


def named(task: str) -> Mapping[str, Any]:
    """A task that any mechanism has been judged on."""
    for found in every()["tasks"]:
        if found["name"] == task and any(row["by_distance"] for row in found["variants"]):
            return dict(found)
    raise NotRunYet(task)


def share(found: Mapping[str, Any]) -> str:
    """A share of right answers with its interval, cut off at 0 and 1."""
    if found["mean"] is None:
        return ""
    ends = "" if found["low"] is None else f" ({max(0, found['low']):.2f} to {min(1, found['high']):.2f})"
    return f"{found['mean']:.3f}{ends}"


def verdict() -> str:
    return suite_sentence(every())


def scores() -> str:
    return markdown_table(*score_cells(every()))


def solve() -> str:
    return markdown_table(*solve_cells(every()))


def mqar() -> str:
    return markdown_table(*accuracy_cells(named("mqar"), "pairs"))


def needle() -> str:
    return markdown_table(*accuracy_cells(named("needle"), "distance"))


def recall() -> str:
    return markdown_table(*accuracy_cells(named("recall"), "distance"))


def cost() -> str:
    """Seconds of a step, and the speed relative to full attention's with its quartiles."""
    rows = []
    for variant in sorted(every()["variants"], key=lambda v: -(v["speed"] or {"ratio": 0})["ratio"]):
        speed, parameters = variant["speed"], variant["parameters"]
        cells = [variant["label"], "" if parameters is None else f"{parameters:,}"]
        if speed is not None:
            cells += [f"{speed['ratio']:.2f}x ({speed['low']:.2f} to {speed['high']:.2f})"]
            cells += [f"{1000 * speed['seconds']:.0f} ms"]
        rows.append([*cells, *[""] * (4 - len(cells))])
    table = markdown_table(["", "parameters", "speed (quartiles)", "a step"], rows)
    return f"{speed_in_words(every())}\n\n{table}"


def beyond() -> str:
    """Right answers of full attention and of a window where the window's layers cannot see what is asked."""
    rows = []
    for task in every()["tasks"]:
        model = task["config"]["model"]
        reach = model["n_layers"] * model["shared_options"]["window"]
        shares = {row["label"]: right_from(reach, row["by_distance"]) for row in task["variants"]}
        if shares["full"] and shares["local"]:
            rows.append([task["name"], f"{task['chance']['accuracy']:.3f}", shares["local"], shares["full"]])
    return markdown_table(["", "chance", "local", "full"], rows)


def right_from(distance: int, by_distance: Sequence[Mapping[str, Any]]) -> str:
    """The share of right answers from this distance on; empty if there are none."""
    places = [place for place in by_distance if place["first"] >= distance and place["tokens"]]
    answers = sum(place["tokens"] for place in places)
    return f"{sum(place['mean'] * place['tokens'] for place in places) / answers:.3f}" if answers else ""


def pairs() -> str:
    """Each seed by itself: one may learn a task that another does not."""
    parts = []
    for task in suite("pairs")["tasks"]:
        ((full,), rows) = task["variants"], []
        counts = [place["pairs"] for place in full["by_pairs"]]
        for run in full["runs"]:
            shares = {place["pairs"]: f"{place['accuracy']:.4f}" for place in run.get("by_pairs", ())}
            solved = run.get("solved")
            tokens = f"> {task['tokens']:,}" if solved is None else f"{solved:,}"
            rows.append([str(run["seed"]), *(shares.get(count, run["state"]) for count in counts), tokens])
        parts.append(f"`{asked(task)}`:")
        parts.append(
            markdown_table(["seed", *(f"{count} pairs" for count in counts), "tokens to solve"], rows)
        )
    return "\n\n".join(parts)


def asked(task: Mapping[str, Any]) -> str:
    """The task as it was asked for, without how many samples it has."""
    return re.sub(r",(samples|sequences|held_out)=\d+", "", task["source"])


def layer() -> str:
    (task,) = suite("layer")["tasks"]
    rows = [
        [row["label"], share(row["accuracy"]), solve_cells(suite("layer"))[1][n][1]]
        for n, row in enumerate(task["variants"])
    ]
    return markdown_table([f"one layer, `{asked(task)}`", "right answers", "thousand tokens to solve"], rows)


def window() -> str:
    parts = []
    for task in suite("window")["tasks"]:
        judged = [row for row in task["variants"] if row["by_distance"]]
        if not judged:
            continue
        columns, by_distance = accuracy_cells(task, "distance")
        known = [n for n in range(1, len(columns)) if any(cells[n] for cells in by_distance)]
        rows = [
            [row["label"], share(row["accuracy"]), *(cells[n] for n in known)]
            for row, cells in zip(judged, by_distance, strict=True)
        ]
        parts.append(f"`{asked(task)}`, chance {task['chance']['accuracy']:.3f}, all and by distance:")
        parts.append(markdown_table(["", "right answers", *(columns[n] for n in known)], rows))
    return "\n\n".join(parts)


def state() -> str:
    (task,) = suite("state")["tasks"]
    columns, by_pairs = accuracy_cells(task, "pairs")
    shares = [share(row["accuracy"]) for row in task["variants"]]
    rows = [[label, mean, *cells] for (label, *cells), mean in zip(by_pairs, shares, strict=True)]
    heads = [
        f"one head of 16, `{asked(task)}`",
        "right answers",
        *(f"{count} pairs" for count in columns[1:]),
    ]
    return markdown_table(heads, rows)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (verdict, scores, solve, mqar, needle, recall, cost, beyond, pairs, layer, window, state)
}


def filled(page: str) -> str:
    """The page with every table as the results have it."""

    def table(match: re.Match[str]) -> str:
        try:
            text = TABLES[match[2]]()
        except NotRunYet:
            text = "Not run yet."
        return f"{match[1]}\n{text}\n\n{match[3]}"

    return re.sub(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", table, page, flags=re.DOTALL)


def take(part: str, folder: Path) -> None:
    """The results of a suite, and of its figures those that the page shows."""
    page = PAGE.read_text(encoding="utf-8")
    kept = {"suite.json", "suite.md", *re.findall(rf"results/{part}/([\w-]+\.svg)", page)}
    shutil.rmtree(RESULTS / part, ignore_errors=True)
    (RESULTS / part).mkdir(parents=True)
    with tempfile.TemporaryDirectory() as made:
        for path in publish_suite(folder, made):
            if path.name in kept:
                shutil.copy(path, RESULTS / part / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--publish", nargs=2, metavar=("PART", "SUITE"), help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.publish:
        part, folder = options.publish
        if part not in PARTS:
            parser.error(f"{part!r} is not one of {', '.join(PARTS)}")
        take(part, Path(folder))
    page = PAGE.read_text(encoding="utf-8")
    if options.check and filled(page) != page:
        sys.exit(f"tables of {PAGE.name} are not what the results say; run studies/tasks/tables.py")
    write_text(PAGE, filled(page))


if __name__ == "__main__":
    main()
