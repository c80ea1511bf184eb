"""A suite in numbers: scores, accuracy by distance and pairs, tokens to solve, speed, from what its folder
holds."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from headgate import config, files
from headgate.compare import statistics
from headgate.compare.commands import suite_command
from headgate.compare.jobs import failure, has_failed
from headgate.compare.suite_costs import SuiteCosts, read_suite_costs
from headgate.compare.suite_plan import (
    SuitePlan,
    SuiteRun,
    best_rate,
    final_loss,
    judged_runs,
    read_plan,
    tuning_runs,
)
from headgate.compare.suite_tables import suite_markdown
from headgate.compare.variants import Variant
from headgate.config import Config
from headgate.data.answers import TaskRecord
from headgate.data.shards import read_manifest
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
    plan, costs = read_plan(folder), read_suite_costs(folder)
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
        "variants": [_overall(variant, n, tasks, costs) for n, variant in enumerate(plan.variants)],
        "costs": costs and {"task": costs.task, "threads": costs.threads, "machine": dict(costs.machine)},
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
        "tuning": [
            {"rate": run.rate, "seed": run.seed, "loss": final_loss(run)}
            for run in tuning
            if run.finished or has_failed(run.log)
        ],
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
        "by_pairs": [
            {name: place[name] for name in ("pairs", "tokens", "accuracy")}
            for place in judged["answers"]["by_pairs"]
        ],
        "solved": next((point["tokens"] for point in curve if (point["score"] or 0) >= SOLVED), None),
        "curve": curve,
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


def _overall(
    variant: Variant, number: int, tasks: Sequence[Mapping[str, Any]], costs: SuiteCosts | None
) -> dict[str, Any]:
    """A variant over all tasks: its mean score if it has one for each, and its speed relative to the first
    variant's."""
    rows = [task["variants"][number] for task in tasks]
    scores = [row["score"]["mean"] for row in rows]
    known = scores and all(score is not None for score in scores)
    parameters = [run["parameters"] for row in rows for run in row["runs"] if run["state"] == "finished"]
    speed = costs and costs.of(variant.label)
    return {
        "label": variant.label,
        "mechanism": "+".join(spec.name for spec in variant.mechanism),
        "ablation": variant.ablation,
        "mean_score": fmean(scores) if known else None,
        "solved": sum(score is not None and score >= SOLVED for score in scores),
        "speed": speed and asdict(speed),
        "parameters": max(parameters, default=None),
    }
