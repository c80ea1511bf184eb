"""Equal tuning: each variant gets the same trials, on seeds that are not judged.

Successive halving: all trials run to a quarter of their steps, the better half continues to one half, and the
better half of those to the end, where the lowest loss wins. A trial has one schedule, that of the whole run;
it is stopped at a rung and resumed from there, so nothing is trained twice. Early losses come from a learning
rate that is still high, which puts large ones at a disadvantage; so only half are dropped each time, and
never the last two.

If a winner is at the edge of a range, and staying inside would have cost it more than `EDGE_GAIN`, the
space is extended there, for all variants, at most `EXTENSIONS` times. Nothing lies beyond a list of choices.

With several tuning seeds each trial is trained once on each of them, and the mean is compared at every rung.

All of it follows from the runs in the study folder, so a study that was stopped finds the same winners.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean
from typing import Any

from headgate.compare.folder import Study, StudyFolder
from headgate.compare.jobs import Job, RunsJobs, failure
from headgate.compare.progress import StudyProgress
from headgate.compare.space import Dimension, Trial, draw_beyond, draw_trials, own_dimensions, parse_space
from headgate.compare.variants import Variant
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.options import MOST_SEEDS
from headgate.train.folder import read_metrics

RUNGS = (0.25, 0.5, 1.0)
"""Shares of a run's steps at which trials are compared."""
LEAST = 2
"""This many trials of each variant are always trained to the end."""
EDGE_GAIN = 0.01
"""Nats per token."""
EXTENSIONS = 2
TUNING_SEED = MOST_SEEDS


@dataclass(frozen=True)
class Tried:
    """What a trial reached: the loss at each rung it came to; infinite if it failed or diverged."""

    trial: Trial
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Tuned:
    """A variant's trials and the winner among them."""

    label: str
    tried: tuple[Tried, ...]
    edges: tuple[tuple[str, str], ...]
    """(setting, low or high) where the winner is at an edge and staying inside would have cost it
    something."""

    @property
    def winner(self) -> Trial:
        """The recipe as it is if every trial failed."""
        last = max(len(tried.losses) for tried in self.tried)
        final = [tried for tried in self.tried if len(tried.losses) == last]
        best = min(final, key=lambda tried: (tried.losses[-1], tried.trial.number))
        return best.trial if math.isfinite(best.losses[-1]) else Trial(0)

    def expected_best(self) -> list[float | None]:
        """The mean of the best of n trials drawn at random, for n = 1, 2, ...: losses at the first rung."""
        losses = sorted(tried.losses[0] for tried in self.tried if tried.losses)
        count = len(losses)
        found: list[float | None] = []
        for n in range(1, count + 1):
            mean = 0.0
            for rank, loss in enumerate(losses):
                weight = math.comb(count - rank - 1, n - 1) / math.comb(count, n)
                mean += weight * loss if weight else 0.0
            found.append(mean if math.isfinite(mean) else None)
        return found


@dataclass
class Tuner:
    """Tunes the variants of a study; without a runner it only reads what there is."""

    folder: StudyFolder
    study: Study
    base: Config
    runner: RunsJobs | None
    progress: StudyProgress | None
    space: tuple[Dimension, ...] = field(init=False)
    complete: bool = field(init=False, default=True)
    """Whether every trial that was due has run."""

    def __post_init__(self) -> None:
        self.space = parse_space(self.study.space, self.base)

    def tune(self) -> dict[str, Tuned]:
        """By label."""
        own = {variant.label: own_dimensions(variant) for variant in self.study.variants}
        variants = {variant.label: variant for variant in self.study.variants}
        trials = {
            label: _distinct(variants[label], draw_trials(self.space, mine, self.study.tune))
            for label, mine in own.items()
        }
        tried = self.halve(trials)
        ranges = {dimension.setting for dimension in self.space if not dimension.choices}
        for round_ in range(1, EXTENSIONS + 1):
            found_at = {edge for label in trials for edge in self.edges(tried[label])}
            edges = sorted(edge for edge in found_at if edge[0] in ranges)
            if not edges or not self.complete:
                break
            if self.progress is not None and self.runner is not None:
                named = ", ".join(f"{setting} at its {side} edge" for setting, side in edges)
                self.progress.note(f"an optimum is at an edge ({named}): the space is extended for all")
            first = max(trial.number for mine in trials.values() for trial in mine) + 1
            count = max(LEAST, self.study.tune // 2)
            more = {
                label: _distinct(
                    variants[label],
                    draw_beyond(self.space, own[label], edges, count, first, round_),
                    beside=mine,
                )
                for label, mine in trials.items()
            }
            found = self.halve(more)
            for label in trials:
                trials[label] += more[label]
                tried[label] += found[label]
            self.space = tuple(self._extended(dimension, edges) for dimension in self.space)
        return {label: Tuned(label, tuple(mine), tuple(self.edges(mine))) for label, mine in tried.items()}

    def _extended(self, dimension: Dimension, edges: Sequence[tuple[str, str]]) -> Dimension:
        for setting, side in edges:
            if setting == dimension.setting:
                past = dimension.beyond(side)
                ends = min(past.low, dimension.low), max(past.high, dimension.high)
                dimension = Dimension(setting, *ends)
        return dimension

    def halve(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, list[Tried]]:
        """Take the trials of every variant through the rungs."""
        variants = {variant.label: variant for variant in self.study.variants}
        left = {label: list(mine) for label, mine in trials.items()}
        losses: dict[tuple[str, int], list[float]] = {
            (label, trial.number): [] for label, mine in trials.items() for trial in mine
        }
        for rung in range(len(RUNGS)):
            jobs = {
                (label, trial.number): self.jobs(variants[label], trial, rung)
                for number in range(max(map(len, left.values())))
                for label, mine in left.items()
                for trial in mine[number : number + 1]
            }
            everything = [job for of_trial in jobs.values() for job in of_trial]
            if self.runner is not None and self.progress is not None:
                _refuse_if_none_ran(jobs, self.runner.run(everything, self.progress))
            elif not all(job.finished or job.failed for job in everything):
                self.complete = False
            for key, of_trial in jobs.items():
                losses[key].append(fmean(loss_at(job) for job in of_trial))
            for label, mine in left.items():
                keep = max(LEAST, math.ceil(len(mine) / 2))
                mine.sort(key=lambda trial: (losses[label, trial.number][-1], trial.number))
                left[label] = sorted(mine[:keep], key=lambda trial: trial.number)
        return {
            label: [Tried(trial, tuple(losses[label, trial.number])) for trial in mine]
            for label, mine in trials.items()
        }

    def jobs(self, variant: Variant, trial: Trial, rung: int) -> list[Job]:
        """A trial's runs up to this rung, one for each tuning seed."""
        changed, settings = trial.of(variant)
        steps = self.study.steps_of(variant, self.base)
        first = max(1, round(RUNGS[0] * steps))
        until = steps if RUNGS[rung] == 1 else min(steps, round(RUNGS[rung] / RUNGS[0]) * first)
        cheap = (f"train.evaluate_every={first}", f"train.document_tokens={self.base.train.evaluate_tokens}")
        return [
            self.folder.job(
                self.study,
                self.base,
                changed,
                self.base.seed + TUNING_SEED + seed,
                f"tuning/trial-{trial.number}",
                (*settings, *cheap),
                until=until,
                purpose=f"trial {trial.number}",
            )
            for seed in range(self.study.tuning_seeds)
        ]

    def edges(self, tried: Sequence[Tried]) -> list[tuple[str, str]]:
        """Where the winner is at the edge of the space, if that matters."""
        best = Tuned("", tuple(tried), ()).winner
        winner = next((one for one in tried if one.trial.number == best.number), None)
        if winner is None:
            return []
        found = []
        for dimension in self.space:
            as_it_stands = attrgetter(dimension.setting)(self.base)
            side = dimension.side(best.settings.get(dimension.setting, as_it_stands))
            if side is None:
                continue
            costs = []
            for one in tried:
                value = one.trial.settings.get(dimension.setting, as_it_stands)
                if dimension.side(value) != side:
                    rung = min(len(one.losses), len(winner.losses)) - 1
                    costs.append(one.losses[rung] - winner.losses[rung])
            if costs and min(costs) > EDGE_GAIN:
                found.append((dimension.setting, side))
        return found


def _distinct(variant: Variant, drawn: Sequence[Trial], beside: Sequence[Trial] = ()) -> list[Trial]:
    """The trials without what the variant sets itself, each once: what is alike would train alike."""
    found = list(beside)
    for trial in drawn:
        mine = trial.for_variant(variant)
        if all(mine.settings != other.settings for other in found):
            found.append(mine)
    return found[len(beside) :]


def _refuse_if_none_ran(jobs: Mapping[tuple[str, int], Sequence[Job]], failed: Sequence[Job]) -> None:
    """A variant whose every trial ended in an error is not tuned, so nothing could be said of it."""
    lost = {job.folder for job in failed}
    for label in dict.fromkeys(label for label, _ in jobs):
        mine = [job for (of, _), of_trial in jobs.items() if of == label for job in of_trial]
        if lost.issuperset(job.folder for job in mine):
            raise HeadgateError(
                f"every trial of {label!r} failed: {failure(mine[0].log)}; mend the cause and run the "
                "command again, or leave out --tune"
            )


def loss_at(job: Job) -> float:
    """The validation loss at the step that a job goes to; infinite if it did not get there."""
    lines = (line for line in read_metrics(job.folder) if line["step"] == job.end and "validation" in line)
    loss = next((line["validation"]["loss"] for line in lines), None)
    return math.inf if loss is None else float(loss)


def tuning_results(tuner: Tuner, tuned: Mapping[str, Tuned]) -> dict[str, Any]:
    """For results.json."""
    return {
        "trials": tuner.study.tune,
        "seeds": tuner.study.tuning_seeds,
        "rungs": list(RUNGS),
        "space": [dimension.written() for dimension in tuner.space],
        "complete": tuner.complete,
        "variants": [
            {
                "label": one.label,
                "winner": one.winner.number,
                "settings": dict(one.winner.settings),
                "edges": [f"{setting} at its {side} edge" for setting, side in one.edges],
                "expected_best": one.expected_best(),
                "trials": [
                    {
                        "number": tried.trial.number,
                        "round": tried.trial.round,
                        "settings": dict(tried.trial.settings),
                        "losses": list(tried.losses),
                    }
                    for tried in one.tried
                ],
            }
            for one in tuned.values()
        ],
    }
