"""A suite in numbers: scores, accuracy by distance and pairs, tokens to solve, from what its folder holds."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table
from rich.text import Text

from headgate import config, files
from headgate.compare import statistics
from headgate.compare.commands import suite_command
from headgate.compare.jobs import failure, has_failed
from headgate.compare.suite_plan import (
    SuitePlan,
    SuiteRun,
    best_rate,
    final_loss,
    judged_runs,
    read_plan,
    tuning_runs,
)
from headgate.compare.variants import Variant
from headgate.config import Config
from headgate.data.answers import TaskRecord
from headgate.data.shards import read_manifest
from headgate.progress import table_console
from headgate.train.folder import RunFolder, read_metrics
from headgate.version import __version__

JUDGED = "judged.json"
SOLVED = 0.9
"""A task is solved at this share of the way from chance to the optimum."""


def write_suite(out: str | os.PathLike[str]) -> dict[str, Any]:
    """Write suite.json, and its tables as suite.md."""
    results, folder = suite_results(out), Path(out)
    files.write_sealed(folder / "suite.json", results)
    files.write_text(folder / "suite.md", suite_markdown(results))
    return results


def suite_results(out: str | os.PathLike[str]) -> dict[str, Any]:
    """Leaves out tasks that are not prepared yet."""
    folder = Path(out)
    plan = read_plan(folder)
    tasks = []
    for name, source in plan.tasks.items():
        home = folder / name
        manifest = read_manifest(home / "data") if (home / "data").is_dir() else None
        if manifest is None or manifest.task is None or files.is_missing(home / "config.json"):
            continue
        base = config.load(Config, home / "config.json")
        judged = read_judged(home)
        rows = [_row(plan, name, home, variant, manifest.task, judged) for variant in plan.variants]
        tasks.append(
            {
                "name": name,
                "source": source,
                "judged_by": manifest.task.judged_by,
                "chance": asdict(manifest.task.chance),
                "optimum": asdict(manifest.task.test_optimum),
                "tokens": base.train.tokens,
                "config": config.to_dict(base),
                "variants": rows,
            }
        )
    results = {
        "headgate": __version__,
        "solved_at": SOLVED,
        "rates": list(plan.rates),
        "tuning_seeds": plan.tuning_seeds,
        "seeds": plan.seeds,
        "tasks": tasks,
        "variants": [_overall(variant, n, tasks) for n, variant in enumerate(plan.variants)],
        "command": suite_command(folder, plan),
    }
    collected: dict[str, Any] = files.finite(results)
    return collected


def read_judged(home: Path) -> dict[str, Any]:
    """What each judged run of a task reached on the test split, by place."""
    path = home / JUDGED
    return {} if files.is_missing(path) else files.read_sealed(path, always=True)


def _row(
    plan: SuitePlan,
    name: str,
    home: Path,
    variant: Variant,
    record: TaskRecord,
    judged: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    tuning = [run for run in tuning_runs(plan, name, home) if run.variant.label == variant.label]
    rate = best_rate(plan, tuning)
    runs = [run for run in judged_runs(plan, name, home) if run.variant.label == variant.label]
    found = [_judged_run(run, record, judged.get(run.place)) for run in runs]
    done = [run for run in found if run["state"] == "finished"]
    answers = [judged[run.place]["answers"] for run in runs if run.place in judged]
    return {
        "label": variant.label,
        "rate": rate,
        "at_the_edge": rate in (min(plan.rates), max(plan.rates)) if len(plan.rates) > 2 else None,
        "tuning": [{"rate": run.rate, "seed": run.seed, "loss": final_loss(run)} for run in tuning],
        "runs": found,
        "failures": [
            failure(run.log) for run in [*tuning, *runs] if not run.finished and has_failed(run.log)
        ],
        "score": asdict(statistics.interval([run["score"] for run in done])),
        "accuracy": asdict(statistics.interval([run["accuracy"] for run in done])),
        "loss": asdict(statistics.interval([run["loss"] for run in done])),
        "by_distance": _mean_by(answers, "by_distance", ("first", "end")),
        "by_pairs": _mean_by(answers, "by_pairs", ("pairs",)),
        "to_solve": tokens_to_solve([run["solved"] for run in done]),
        "tokens_per_second": median([run["tokens_per_second"] for run in done]) if done else None,
    }


def _judged_run(run: SuiteRun, record: TaskRecord, judged: Mapping[str, Any] | None) -> dict[str, Any]:
    if not run.finished or judged is None:
        return {"seed": run.seed, "state": "failed" if has_failed(run.log) else "not run"}
    loss, accuracy = judged["loss"], judged["answers"]["accuracy"]
    summary = RunFolder(run.folder).read_summary()
    curve = []
    for line in read_metrics(run.folder):
        if "validation" in line:
            seen = line["validation"]
            curve.append(
                {"tokens": line["tokens"], "score": record.score(seen["loss"], seen["answers"]["accuracy"])}
            )
    return {
        "seed": run.seed,
        "state": "finished",
        "loss": math.inf if loss is None else loss,
        "accuracy": accuracy,
        "score": -math.inf if loss is None else record.score(loss, accuracy, "test"),
        "solved": next((point["tokens"] for point in curve if (point["score"] or 0) >= SOLVED), None),
        "curve": curve,
        "tokens_per_second": summary["tokens_per_second"],
        "parameters": summary["parameters"],
    }


def tokens_to_solve(solved: Sequence[int | None]) -> dict[str, Any]:
    """The median over runs, where those that never solved the task count as longer than any other; None if
    the median itself never did."""
    times = sorted(math.inf if tokens is None else tokens for tokens in solved)
    middle = median(times) if times else math.inf
    reached = sum(tokens is not None for tokens in solved)
    return {"median": middle if math.isfinite(middle) else None, "reached": reached, "of": len(solved)}


def _mean_by(answers: Sequence[Mapping[str, Any]], key: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Accuracy over the seeds in each bin; all runs are judged on the same answers."""
    rows = []
    for bins in zip(*(each[key] for each in answers), strict=True):
        shares = statistics.interval([place["accuracy"] for place in bins])
        place = {name: bins[0][name] for name in names}
        rows.append({**place, "tokens": bins[0]["tokens"], **asdict(shares)})
    return rows


def _overall(variant: Variant, number: int, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A variant over all tasks: its mean score if it has one for each, and its speed relative to the first
    variant, the median over the tasks."""
    rows = [task["variants"][number] for task in tasks]
    scores = [row["score"]["mean"] for row in rows]
    speeds = [
        row["tokens_per_second"] / task["variants"][0]["tokens_per_second"]
        for row, task in zip(rows, tasks, strict=True)
        if row["tokens_per_second"] and task["variants"][0]["tokens_per_second"]
    ]
    known = scores and all(score is not None for score in scores)
    parameters = [run["parameters"] for row in rows for run in row["runs"] if run["state"] == "finished"]
    return {
        "label": variant.label,
        "mechanism": "+".join(spec.name for spec in variant.mechanism),
        "ablation": variant.ablation,
        "mean_score": fmean(scores) if known else None,
        "solved": sum(score is not None and score >= SOLVED for score in scores),
        "speed": median(speeds) if speeds else None,
        "parameters": max(parameters, default=None),
    }


def suite_markdown(results: Mapping[str, Any]) -> str:
    """The tables of a suite, for people."""
    tasks, labels = results["tasks"], [variant["label"] for variant in results["variants"]]
    names = [task["name"] for task in tasks]
    scores = [
        [
            variant["label"],
            *(score_of(task["variants"][n]) for task in tasks),
            "" if variant["mean_score"] is None else f"{variant['mean_score']:.2f}",
            "" if variant["speed"] is None else f"{variant['speed']:.2f}x",
        ]
        for n, variant in enumerate(results["variants"])
    ]
    solved = [
        [label, *(solved_of(task["variants"][n], task["tokens"]) for task in tasks)]
        for n, label in enumerate(labels)
    ]
    rates = ", ".join(f"{rate:g}" for rate in results["rates"])
    parts = [
        "# Scores\n",
        "The share of the way from chance (0) to the optimum (1): mean over the seeds ± half its 95% "
        f"interval. Each variant at its best of the learning rates {rates} (tuning seeds: "
        f"{results['tuning_seeds']}), judged on fresh seeds ({results['seeds']}) and the test split. Speed: "
        "tokens per second of the runs, which share the machine, relative to the first row.\n",
        _table(["", *names, "mean", "speed"], scores),
        "\n# Tokens to solve\n",
        f"Until a score of {results['solved_at']} on the validation split, in thousands; the median over the "
        "seeds. > means that it was not reached within the run.\n",
        _table(["", *names], solved),
    ]
    for key, what in (("by_pairs", "pairs"), ("by_distance", "distance")):
        for task in tasks:
            rows = [row for row in task["variants"] if row[key]]
            if not rows or len(rows[0][key]) < 2:
                continue
            heads = [
                str(place["pairs"]) if key == "by_pairs" else f"{place['first']}-{place['end'] - 1}"
                for place in rows[0][key]
            ]
            cells = [
                [row["label"], *("" if p["mean"] is None else f"{p['mean']:.2f}" for p in row[key])]
                for row in rows
            ]
            parts += [
                f"\n# {task['name']}: accuracy by {what}\n",
                f"Chance is {task['chance']['accuracy']:.3f}.\n",
                _table(["", *heads], cells),
            ]
    return "\n".join(parts) + "\n"


def print_suite(results: Mapping[str, Any], answer: str) -> None:
    """The score table, what failed, and the answer last, for the terminal."""
    names = [task["name"] for task in results["tasks"]]
    table = Table("", *names, "mean", "speed", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for n, variant in enumerate(results["variants"]):
        mean = "" if variant["mean_score"] is None else f"{variant['mean_score']:.2f}"
        speed = "" if variant["speed"] is None else f"{variant['speed']:.2f}x"
        cells = [variant["label"], *(score_of(task["variants"][n]) for task in results["tasks"]), mean, speed]
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
        text += f" ± {score['high'] - score['mean']:.2f}"
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


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
