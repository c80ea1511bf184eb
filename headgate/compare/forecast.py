"""What a study will take, before anything starts: runs, tokens and hours of each phase."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from headgate.compare.folder import Study, StudyFolder
from headgate.compare.tuning import EXTENSIONS, LEAST, RUNGS
from headgate.config import Config
from headgate.files import read_json
from headgate.progress import duration, table_console


@dataclass(frozen=True)
class Phase:
    name: str
    runs: int
    tokens: float
    seconds: float
    """On one core, or on as many as a run has threads."""


def trial_budget(trials: int) -> tuple[int, float]:
    """How many runs halving starts, and how much it trains in units of a whole run."""
    left, before, total = trials, 0.0, 0.0
    for share in RUNGS:
        total += left * (share - before)
        before, left = share, min(left, max(LEAST, math.ceil(left / 2)))
    return trials, total


def past_speeds(folder: StudyFolder, study: Study, base: Config) -> dict[str, float]:
    """Seconds per token of the study's own finished runs, by label."""
    found: dict[str, float] = {}
    for job in folder.jobs(study, base, study.seeds):
        if job.finished:
            found[job.variant.label] = 1 / read_json(job.folder / "summary.json")["tokens_per_second"]
    return found


def forecast(study: Study, base: Config, seconds: Mapping[str, float]) -> list[Phase]:
    """By phase; `seconds` are per token, by label."""

    def phase(name: str, labels: Sequence[str], each: float, runs: int) -> Phase:
        """This many whole runs' worth of training for each of the variants."""
        tokens = {label: each * tokens_of(label) for label in labels}
        work = sum(tokens[label] * seconds[label] for label in labels)
        return Phase(name, runs * len(labels), sum(tokens.values()), work)

    def tokens_of(label: str) -> float:
        return base.train.tokens * study.steps.get(label, base.train.steps) / base.train.steps

    labels = [variant.label for variant in study.variants]
    controls = [variant.label for variant in study.variants if variant.control]
    named = [label for label in labels if label not in controls]
    found = []
    if study.published:
        found.append(phase("controls", controls, study.seeds, study.seeds))
        found.append(phase("judging, untuned", named, study.seeds, study.seeds))
    if study.tune:
        runs, budget = trial_budget(study.tune)
        found.append(phase("tuning", labels, budget, runs))
        found.append(phase("judging, tuned", labels, study.seeds, study.seeds))
    others = [multiple for multiple in study.ladder if multiple != 1]
    if others:
        seeds = (study.looks or (study.seeds,))[0]
        chosen = labels if study.ladder_variants else labels[:1]
        found.append(phase("ladder", chosen, seeds * sum(others), seeds * len(others)))
    return [one for one in found if one.runs]


def print_forecast(study: Study, phases: Sequence[Phase], at_once: int, source: str) -> None:
    console = table_console()
    table = Table("phase", "runs", "tokens", "core time", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for one in phases:
        table.add_row(*map(Text, [one.name, f"{one.runs:,}", f"{one.tokens:,.0f}", duration(one.seconds)]))
    total = sum(one.seconds for one in phases)
    console.print(table)
    runs = sum(one.runs for one in phases)
    words = [f"In all {runs:,} runs, about {duration(total / at_once)} with {at_once} at once"]
    words.append(f"speeds are from {source}; evaluations and measuring the costs come on top")
    if study.tune:
        most = trial_budget(max(LEAST, study.tune // 2))[1] / trial_budget(study.tune)[1]
        words.append(f"an optimum at an edge adds {most:.0%} of the tuning, at most {EXTENSIONS} times")
    if study.looks:
        words.append("planned looks may stop earlier")
    console.print("; ".join(words) + ". Nothing was started.", markup=False, soft_wrap=True)
