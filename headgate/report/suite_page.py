"""suite.html: all of a suite in one file that opens from disk and needs no network; see shell.py."""

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headgate.files import write_text
from headgate.report.looks import looks
from headgate.report.painting import CROWD
from headgate.report.reading import read_suite
from headgate.report.shell import render
from headgate.report.suite_figures import suite_figures, with_family

NAMED = 4
"""The sentence at the top names at most this many variants of a kind, and counts longer lists."""


def write_suite_page(folder: str | os.PathLike[str]) -> Path:
    """Write suite.html beside suite.json."""
    path = Path(folder) / "suite.html"
    write_text(path, suite_page(read_suite(folder)))
    return path


def suite_page(suite: Mapping[str, Any]) -> str:
    variants = [with_family(variant) for variant in suite["variants"]]
    suite = {**suite, "variants": variants}
    made = suite_figures(suite)
    command = suite.get("command")
    return render(
        "suite.html.jinja",
        made,
        next(iter(made), ""),
        {
            "labels": [variant["label"] for variant in variants],
            "table": score_table(suite),
            "file": "suite.csv",
            "passage": None,
        },
        suite=suite,
        numbers="suite.json",
        variants=variants,
        order=_order(variants),
        known=[sum(not _waits(task["variants"][n]) for task in suite["tasks"]) for n in range(len(variants))],
        looks=looks(variants),
        ablations=any(variant["ablation"] for variant in variants),
        crowded=len(variants) > CROWD,
        verdict=suite_sentence(suite),
        command=None if command is None else shlex.join(command),
        shade=lambda score: 0 if score is None else round(max(0.0, min(1.0, score)) * 0.45, 3),
    )


def suite_sentence(suite: Mapping[str, Any]) -> str:
    """How many tasks the baseline solves, and who solves more, as many and fewer; of a suite that is not
    finished, as far as it is."""
    tasks = [task for task in suite["tasks"] if not _waits(task["variants"][0])]
    waiting = [_waits(row) for task in suite["tasks"] for row in task["variants"]]
    begun = ""
    if any(waiting):
        begun = f"Not finished: {len(waiting) - sum(waiting)} of {len(waiting)} scores are known. "
        if not tasks:
            return begun.strip()
    solves = [
        None if any(_waits(task["variants"][n]) for task in tasks) else _solved(suite, tasks, n)
        for n in range(len(suite["variants"]))
    ]
    baseline, *others = (
        {**variant, "solved": count}
        for variant, count in zip(suite["variants"], solves, strict=True)
        if count is not None
    )
    count = len(tasks)
    solved = baseline["solved"]
    first = f"{baseline['label'][:1].upper()}{baseline['label'][1:]} solves {solved} of {count} tasks"
    if count == 1:
        name = tasks[0]["name"]
        first = f"{first[: first.index(' solves')]} {'solves' if solved else 'does not solve'} {name}"
    parts = []
    for words, test in (
        ("More", lambda n: n > solved),
        ("As many", lambda n: n == solved),
        ("Fewer", lambda n: n < solved),
    ):
        chosen = [variant for variant in others if test(variant["solved"])]
        counted = [f"{variant['label']} ({variant['solved']})" for variant in chosen]
        if words == "As many":
            counted = [variant["label"] for variant in chosen]
        if len(counted) > NAMED:
            counted = [*counted[: NAMED - 1], f"{len(counted) - NAMED + 1} others"]
        if counted:
            parts.append(f"{words}: {', '.join(counted)}.")
    return begun + " ".join([f"{first}.", *parts])


def _waits(row: Mapping[str, Any]) -> bool:
    """Whether the score is still to come."""
    return row["score"]["mean"] is None and not row["failures"]


def _solved(suite: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]], n: int) -> int:
    scores = [task["variants"][n]["score"]["mean"] for task in tasks]
    return sum(score is not None and score >= suite["solved_at"] for score in scores)


def score_table(suite: Mapping[str, Any]) -> list[list[Any]]:
    """A row for each variant and task, unrounded, as rows of a CSV file."""
    names = ["variant", "task", "score", "low", "high", "accuracy", "loss", "rate", "tokens_to_solve"]
    rows: list[list[Any]] = [names]
    for task in suite["tasks"]:
        for row in task["variants"]:
            score = [row["score"][name] for name in ("mean", "low", "high")]
            rest = [row["accuracy"]["mean"], row["loss"]["mean"], row["rate"], row["to_solve"]["median"]]
            rows.append([row["label"], task["name"], *score, *rest])
    return [["" if cell is None else cell for cell in row] for row in rows]


def _order(variants: Sequence[Mapping[str, Any]]) -> list[int]:
    """The baseline, then by mean score; those without one last."""

    def rank(n: int) -> tuple[bool, float]:
        mean = variants[n]["mean_score"]
        return n > 0, math.inf if mean is None else -mean

    return sorted(range(len(variants)), key=rank)
