"""What a training step of each variant costs, measured once the runs of a suite are through.

Steps of all variants are taken in turn on one thread, as in the runs, on the config of one task. A speed is
the median over the rounds of the first variant's time divided by the variant's in the same round, so other
programs on the machine disturb it little. The speed of the runs themselves, which share the machine, says
nothing.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headgate import config, files
from headgate.compare.suite_plan import SuitePlan, judged_runs, read_plan
from headgate.compare.variants import Variant
from headgate.config import Config
from headgate.machine import describe
from headgate.measure.costs import Speed, device, training_speeds

THREADS = 1
"""Per run of a suite."""


@dataclass(frozen=True)
class VariantSpeed:
    label: str
    training: Speed
    """A step, relative to the first variant's."""


@dataclass(frozen=True)
class SuiteCosts:
    """What costs.json holds."""

    task: str
    """The task on whose config steps were taken."""
    threads: int
    speeds: tuple[VariantSpeed, ...]
    machine: Mapping[str, str | None]

    def of(self, label: str) -> Speed | None:
        return next((speed.training for speed in self.speeds if speed.label == label), None)


def read_suite_costs(folder: Path) -> SuiteCosts | None:
    path = folder / "costs.json"
    return None if files.is_missing(path) else config.load(SuiteCosts, path)


def costs_task(folder: Path, plan: SuitePlan) -> str:
    """The task to measure on: that of an earlier measurement, otherwise the first of the longest context."""
    before = read_suite_costs(folder)
    if before is not None:
        return before.task
    contexts = {
        name: config.load(Config, folder / name / "config.json").train.context
        for name in plan.tasks
        if not files.is_missing(folder / name / "config.json")
    }
    return max(contexts, key=lambda name: contexts[name])


def unmeasured(folder: Path, plan: SuitePlan) -> list[Variant]:
    """Variants that have learnt the task to measure on, but have no speed yet; none if the first is not
    there to compare them with."""
    task, costs = costs_task(folder, plan), read_suite_costs(folder)
    finished = {run.variant.label for run in judged_runs(plan, task, folder / task) if run.finished}
    if plan.variants[0].label not in finished:
        return []
    trained = [variant for variant in plan.variants if variant.label in finished]
    return [variant for variant in trained if costs is None or costs.of(variant.label) is None]


def measure_suite(folder: Path, say: Callable[[str], None]) -> None:
    """Measure what is left and keep it in costs.json. What another machine has measured is measured again
    with what is new, so that one machine has measured all."""
    plan, before, here = read_plan(folder), read_suite_costs(folder), describe(device())
    left = unmeasured(folder, plan)
    if not left:
        return
    task, baseline = costs_task(folder, plan), plan.variants[0]
    if before is not None and before.machine != here:
        left = [v for v in plan.variants if v in left or before.of(v.label) is not None]
        before = None
    say(f"measuring a training step of each variant on {task}")
    base = config.load(Config, folder / task / "config.json")
    chosen = [baseline, *(variant for variant in left if variant != baseline)]
    found = training_speeds({variant.label: variant.config(base) for variant in chosen}, THREADS)
    speeds = tuple(VariantSpeed(label, speed) for label, speed in found.items())
    if before is not None:
        seconds = before.speeds[0].training.seconds
        added = [replace(s, training=replace(s.training, seconds=seconds / s.training.ratio)) for s in speeds]
        speeds = (*before.speeds, *added[1:])
    config.save(SuiteCosts(task, THREADS, speeds, here), folder / "costs.json", seal=True)


if __name__ == "__main__":  # on a cluster, which is given the folder of a task
    measure_suite(Path(sys.argv[1]).parent, print)
