"""What a study will take, before anything starts: runs, tokens and hours of each phase."""

import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from headgate.compare.executors.nursery import can_fork
from headgate.compare.folder import Study, StudyFolder, on_ladder
from headgate.compare.tuning import EXTENSIONS, LEAST, RUNGS
from headgate.config import Config
from headgate.files import read_json
from headgate.progress import duration, table_console

EVALUATION = 1 / 3
"""What a token that is evaluated takes of one that is trained on: the forward pass alone."""

FORKED = 0.3
"""Seconds that a forked run takes to open its data, make its model and save at the end."""


@dataclass(frozen=True)
class Pace:
    """How fast runs go."""

    seconds: Mapping[str, float]
    """Of a token that is trained on, by label."""
    start: float
    """Seconds before a run's process begins to train."""


@dataclass(frozen=True)
class Phase:
    name: str
    runs: int
    tokens: float
    seconds: float
    """On one core, or on as many as a run has threads."""


def trial_budget(trials: int) -> tuple[int, float]:
    """How often halving starts or resumes a run, and how much it trains in units of a whole run."""
    starts, left, before, total = 0, trials, 0.0, 0.0
    for share in RUNGS:
        starts += left
        total += left * (share - before)
        before, left = share, min(left, max(LEAST, math.ceil(left / 2)))
    return starts, total


def start_seconds() -> float:
    """How long a run's process takes until it trains; most of it to load PyTorch, unless it is forked from
    one that has."""
    if can_fork():
        return FORKED
    before = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import headgate.train.loop"], check=True)
    return time.perf_counter() - before


def past_speeds(folder: StudyFolder, study: Study, base: Config) -> dict[str, float]:
    """Seconds per token of the study's own finished runs, by label."""
    found: dict[str, float] = {}
    for job in folder.jobs(study, base, study.seeds):
        if job.finished:
            found[job.variant.label] = 1 / read_json(job.folder / "summary.json")["tokens_per_second"]
    return found


def forecast(study: Study, base: Config, pace: Pace) -> list[Phase]:
    """By phase."""
    train, validation = base.train, study.data.val_tokens
    own = {variant.label: variant.config(base).train for variant in study.variants}
    evaluated = min(train.evaluate_tokens, validation)
    # The last evaluation goes on to the losses of the documents.
    documents = max(evaluated, min(train.document_tokens or validation, validation)) - evaluated

    def phase(name: str, labels: Sequence[str], each: float, runs: int, starts: int | None = None) -> Phase:
        """So many whole runs' worth of training for each of the variants; trials have `starts` beside runs,
        are evaluated at each rung and keep no documents."""
        trained = {label: each * tokens_of(label) for label in labels}
        evaluations = each * (1 / RUNGS[0] if starts else math.ceil(train.steps / train.evaluate_every))
        checked = evaluations * evaluated + (0 if starts else runs * documents)
        work = sum((trained[label] + EVALUATION * checked) * pace.seconds[label] for label in labels)
        work += (starts or runs) * len(labels) * pace.start
        return Phase(name, runs * len(labels), sum(trained.values()), work)

    def tokens_of(label: str) -> float:
        return own[label].tokens * study.steps.get(label, own[label].steps) / own[label].steps

    labels = [variant.label for variant in study.variants]
    controls = [variant.label for variant in study.variants if variant.control]
    named = [label for label in labels if label not in controls]
    found = []
    if study.published:
        found.append(phase("controls", controls, study.seeds, study.seeds))
        found.append(phase("judging, untuned", named, study.seeds, study.seeds))
    if study.tune:
        (starts, budget), seeds = trial_budget(study.tune), study.tuning_seeds
        found.append(phase("tuning", labels, seeds * budget, seeds * study.tune, seeds * starts))
        found.append(phase("judging, tuned", labels, study.seeds, study.seeds))
    others = [multiple for multiple in study.ladder if multiple != 1]
    if others:
        seeds = (study.looks or (study.seeds,))[0]
        chosen = [variant.label for variant in on_ladder(study)]
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
    words.append(f"speeds are from {source}; measuring the costs comes on top")
    if study.tune:
        most = trial_budget(max(LEAST, study.tune // 2))[1] / trial_budget(study.tune)[1]
        words.append(f"an optimum at an edge adds {most:.0%} of the tuning, at most {EXTENSIONS} times")
    if study.looks:
        words.append("planned looks may stop earlier")
    console.print("; ".join(words) + ". Nothing was started.", markup=False, soft_wrap=True)
