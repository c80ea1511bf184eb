"""report.html: all of a study in one file that opens from disk and needs no network; see shell.py."""

import csv
import io
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headgate.files import write_text
from headgate.report.figures import figures
from headgate.report.looks import looks, shared_name
from headgate.report.painting import CROWD, PageFigure
from headgate.report.reading import read_results, results_path, source_of
from headgate.report.shell import render
from headgate.report.spread import seed_differences
from headgate.report.tradeoff import SHARE, effect
from headgate.report.verdict import answer_sentence, published_sentence
from headgate.report.words import with_real_minus, with_sign

SYMBOLS = {
    "better": "▼",
    "worse": "▲",
    "no difference shown": "≈",
    "same by construction": "=",
    "not tested": "?",
    "baseline": "·",
}
METRICS = {"loss": "loss", "speed": "speed", "memory": "memory", "convergence": "tokens to converge"}


def write_page(source: str | os.PathLike[str]) -> Path:
    """Write report.html beside the results.json of a study folder, or beside the file itself, and its table
    as results.csv."""
    results, origin = read_results(source), results_path(source)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(result_table(results))
    write_text(origin.with_name("results.csv"), table.getvalue())
    files = [
        origin.name,
        "results.csv",
        *(["results.md"] if origin.with_name("results.md").is_file() else []),
    ]
    path = origin.with_name("report.html")
    write_text(path, page(results, files))
    return path


def page(study: Mapping[str, Any], files: Sequence[str] = ("results.json",)) -> str:
    """The page as text; `files` are beside it."""
    made, variants = figures(study), study["variants"]
    first = next((name for name in ("tradeoff", "answers") if name in made), "differences")
    return render(
        "page.html.jinja",
        made,
        first,
        {
            "labels": [variant["label"] for variant in variants],
            "table": result_table(study),
            "file": "results.csv",
            "passage": study["passage"],
        },
        study=study,
        opening=first,
        numbers=files[0],
        files=files,
        variants=variants,
        baseline=variants[0],
        groups=groups(variants),
        not_run=_not_run(variants),
        seeds=[_by_seed(variant, variants[0]) for variant in variants],
        looks=looks(variants),
        share=effect(study) is SHARE,
        columns=4 + 2 * bool(study["costs"]) + ("answers" in made),
        ablations=any(variant["ablation"] for variant in variants),
        extended_trials=_extended_trials(study),
        crowded=len(variants) > CROWD,
        sections=_sections(study, made, first),
        verdict=answer_sentence(study),
        rests_on=_rests_on(study),
        source=source_of(study),
        symbols=SYMBOLS,
        metrics=METRICS,
        crossovers=_crossovers(study),
        commands=_shell_commands(study),
        config=json.dumps(study["config"], indent=2),
    )


def groups(variants: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The order of the table: the baseline, then by difference; ablations under their mechanism."""
    heads = [n for n, variant in enumerate(variants) if not variant["ablation"]]
    home: dict[str, int] = {}
    for n in heads:
        home.setdefault(shared_name(variants[n]), n)
    members: dict[int, list[int]] = {}
    for n, variant in enumerate(variants):
        if variant["ablation"]:
            members.setdefault(home.get(shared_name(variant), n), []).append(n)
    alone = [n for n in members if n not in heads]

    def order(n: int) -> tuple[bool, float]:
        difference = variants[n]["difference"]
        mean = None if difference is None else difference["mean"]
        return n > 0, math.inf if mean is None else mean

    return [
        {"head": n, "members": sorted((m for m in members.get(n, []) if m != n), key=order)}
        for n in sorted([*heads, *alone], key=order)
    ]


def result_table(study: Mapping[str, Any]) -> list[list[Any]]:
    """The table of every variant, unrounded, as rows of a CSV file."""
    names = (
        "variant",
        "mechanism",
        "ablation",
        "loss",
        "difference",
        "low",
        "high",
        "relative",
        "p",
        "verdict",
    )
    rows: list[list[Any]] = [[*names, "speed", "memory", "tokens_per_second", "parameters"]]
    for variant in study["variants"]:
        difference = variant["difference"] or {}
        rows.append(
            [
                variant["label"],
                variant["mechanism"],
                variant["ablation"] or "",
                variant["loss"]["mean"],
                *(difference.get(name) for name in ("mean", "low", "high", "relative", "p_corrected")),
                difference.get("verdict", "baseline"),
                (variant["speed"] or {}).get("ratio"),
                (variant["memory"] or {}).get("ratio"),
                variant["tokens_per_second"],
                variant["parameters"],
            ]
        )
    return [["" if cell is None else cell for cell in row] for row in rows]


def _not_run(variants: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each variant how many runs are missing, in words."""
    found = []
    for variant in variants:
        missing = sum(run["state"] == "not run" for run in variant["runs"])
        if missing:
            found.append(f"{variant['label']}, {missing} of {len(variant['runs'])} seeds")
    return found


def _by_seed(variant: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    found = {} if variant is baseline else seed_differences(variant, baseline)
    return [with_sign(difference, 3) for difference in found.values()]


def _sections(study: Mapping[str, Any], made: Mapping[str, PageFigure], first: str) -> list[tuple[str, str]]:
    """Anchors and names of the sections that this page has."""
    every = [
        ("differences-section", "Differences", "differences" in made and first != "differences"),
        ("spread-section", "Seeds and documents" if study["documents"] else "Seeds", "spread" in made),
        ("curves-section", "Learning curves", "curves" in made),
        ("tuning-section", "Tuning", bool(study["tuning"])),
        ("ladder-section", "Compute", bool(study["ladder"])),
        ("answers-section", "Answers", "answers" in made and first != "answers"),
        ("ablations-section", "Ablations", "ablations" in made),
        ("positions-section", "By position", "positions" in made),
        ("cost", "Cost", bool(study["costs"])),
        ("papers", "Papers", bool(study["claims"])),
        ("gates", "Gates", "heads" in made),
        ("mechanisms", "Formulas", True),
        ("reproduce", "Reproduce", True),
    ]
    return [(anchor, words) for anchor, words, there in every if there]


def _extended_trials(study: Mapping[str, Any]) -> int:
    """How many trials of each variant are outside the space as it was asked for."""
    variants = (study["tuning"] or {"variants": []})["variants"]
    return max((sum(trial["round"] > 0 for trial in one["trials"]) for one in variants), default=0)


def _rests_on(study: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is shown beside the answer: what the study could have seen, and what it found without tuning."""
    untuned = published_sentence(study)
    beside = [] if untuned is None else [("The same without tuning", f"{untuned[0].upper()}{untuned[1:]}.")]
    return _could_see(study) + beside


def _could_see(study: Mapping[str, Any]) -> list[tuple[str, str]]:
    sight = study.get("sight") or {}
    if sight.get("checks"):
        words = "; ".join(with_real_minus(check["words"]) for check in sight["checks"])
        if sight.get("detectable") is not None:
            words += f". Differences of {sight['detectable']:.2g} nats or more would have been seen"
        return [("What it could see", f"{words[0].upper()}{words[1:]}.")]
    halves = sorted(
        (d["high"] - d["mean"], d["relative_high"] - d["relative"] if d["relative"] is not None else None)
        for v in study["variants"]
        if (d := v["difference"]) and d["high"] is not None and d["high"] > d["low"]
    )
    found = []
    if halves:
        nats, share = halves[len(halves) // 2]
        about = f"±{nats:.3f} nats" + (f" ({share:.1%})" if share is not None and share <= 1 else "")
        found.append(
            ("What it could see", f"Corrected intervals reach about {about}: anything smaller stays hidden.")
        )
    return found


def _crossovers(study: Mapping[str, Any]) -> list[dict[str, str]]:
    """Where each variant becomes faster, in words; empty if only one length was measured."""
    lengths = {cost["length"] for cost in (study["costs"] or {"costs": []})["costs"]}
    if len(lengths) < 2:
        return []
    by_label: dict[str, dict[str, str]] = {}
    for crossover in study["costs"]["crossovers"]:
        wins_at, not_at = crossover["wins_at"], crossover["not_at"]
        if wins_at is None:
            words = f"not up to {max(lengths):,}"
        elif not_at is None:
            words = f"at every length measured, from {min(lengths):,}"
        else:
            words = f"between {not_at:,} and {wins_at:,}"
        row = by_label.setdefault(crossover["label"], {"label": crossover["label"]})
        row[crossover["kind"]] = words
    return list(by_label.values())


def _shell_commands(study: Mapping[str, Any]) -> dict[str, Any] | None:
    commands = study["commands"]
    if commands is None:
        return None
    return {
        "whole": [shlex.join(words) for words in (commands["prepare"], commands["compare"]) if words],
        "runs": [shlex.join(words) for words in commands["runs"]],
    }
