"""What a suite consists of: its plan, and the runs that follow from it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headgate import config
from headgate.compare.executors.worker import Task
from headgate.compare.variants import Variant
from headgate.data.answers import TaskRecord
from headgate.errors import HeadgateError
from headgate.train.folder import RunFolder

FIRST_TUNING_SEED = 1000
ENOUGH = 0.99
"""A learning rate with this score leaves nothing for others to win."""


@dataclass(frozen=True)
class SuitePlan:
    """What plan.json holds: what is compared, and under which conditions."""

    tasks: Mapping[str, str]
    """Each task as `headgate prepare` takes it, by the name of its folder."""
    variants: tuple[Variant, ...]
    rates: tuple[float, ...]
    tuning_seeds: int
    seeds: int
    words: Mapping[str, str] = field(default_factory=dict)
    """Each task as it was asked for, by the same name."""
    settings: tuple[str, ...] = ()
    """Changes to the recipe."""


@dataclass(frozen=True)
class SuiteRun:
    """One run; a tuning run if it has its own rate."""

    task: str
    variant: Variant
    seed: int
    rate: float
    tuning: bool
    home: Path
    """The task's folder."""

    @property
    def place(self) -> str:
        if self.tuning:
            return f"tuning/{self.variant.folder}/{self.rate:g}/seed-{self.seed}"
        return f"runs/{self.variant.folder}/seed-{self.seed}"

    @property
    def folder(self) -> Path:
        return self.home / self.place

    @property
    def log(self) -> Path:
        return self.home / "logs" / f"{self.place.replace('/', '-')}.txt"

    @property
    def finished(self) -> bool:
        return (self.folder / "summary.json").is_file()

    def queued(self, *, shard: bool = False) -> Task:
        """As a task for an engine to carry out."""
        words = ["train", str(self.home / "config.json"), "--data", str(self.home / "data"), "--out"]
        words += [str(self.folder), f"model.mechanism={self.variant.pattern}", f"seed={self.seed}"]
        words += [f"train.learning_rate={self.rate}", *["--shard"] * shard]
        name = f"{self.task}, {self.variant.label}, {f'rate {self.rate:g}, ' * self.tuning}seed {self.seed}"
        return Task(self.log.stem, name, tuple(words), str(self.folder), str(self.log))


def read_plan(folder: Path) -> SuitePlan:
    if not (folder / "plan.json").is_file():
        raise HeadgateError(f"{str(folder)!r} is not a suite: it has no plan.json; headgate suite makes one")
    return config.load(SuitePlan, folder / "plan.json")


def tuning_runs(plan: SuitePlan, task: str, home: Path) -> Iterator[SuiteRun]:
    """None if there is only one learning rate."""
    if len(plan.rates) == 1:
        return
    for seed in range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + plan.tuning_seeds):
        for variant in plan.variants:
            for rate in plan.rates:
                yield SuiteRun(task, variant, seed, rate, True, home)


def middle_rate(plan: SuitePlan) -> float:
    """The learning rate that is tried first."""
    return sorted(plan.rates)[len(plan.rates) // 2]


def undecided_runs(plan: SuitePlan, runs: Sequence[SuiteRun], record: TaskRecord) -> list[SuiteRun]:
    """Tuning runs at the other rates, of variants that have not solved the task at the middle one."""
    scores: dict[str, list[float]] = {}
    for run in runs:
        if run.rate == middle_rate(plan):
            scores.setdefault(run.variant.label, []).append(final_score(run, record))
    return [run for run in runs if run.rate != middle_rate(plan) and min(scores[run.variant.label]) < ENOUGH]


def judged_runs(plan: SuitePlan, task: str, home: Path) -> Iterator[SuiteRun]:
    """Runs at each variant's best learning rate; none for a variant whose tuning failed entirely."""
    runs = list(tuning_runs(plan, task, home))
    for seed in range(plan.seeds):
        for variant in plan.variants:
            best = best_rate(plan, [run for run in runs if run.variant.label == variant.label])
            if best is not None:
                yield SuiteRun(task, variant, seed, best, False, home)


def best_rate(plan: SuitePlan, runs: Sequence[SuiteRun]) -> float | None:
    """The rate with the lowest mean validation loss over the tuning seeds; a run that failed or diverged
    rules out its rate."""
    if len(plan.rates) == 1:
        return plan.rates[0]
    losses: dict[float, list[float]] = {}
    for run in runs:
        losses.setdefault(run.rate, []).append(final_loss(run))
    means = {rate: sum(each) / len(each) for rate, each in losses.items()}
    best = min(means, key=lambda rate: means[rate])
    return best if math.isfinite(means[best]) else None


def final_loss(run: SuiteRun) -> float:
    if not run.finished:
        return math.inf
    loss = RunFolder(run.folder).read_summary()["final"]["loss"]
    return math.inf if loss is None else float(loss)


def final_score(run: SuiteRun, record: TaskRecord) -> float:
    if not run.finished:
        return -math.inf
    final = RunFolder(run.folder).read_summary()["final"]
    score = record.score(final["loss"], final["answers"]["accuracy"])
    return -math.inf if score is None else score
