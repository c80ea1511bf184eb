"""`headgate suite`: every task for the named mechanisms, each at the best of a few learning rates.

A folder for each task holds its data, its config, and its runs:

plan.json              what is compared: tasks, variants, learning rates, seeds
TASK/data/             the task, prepared
TASK/config.json       the recipe that all variants share
TASK/tuning/V/R/seed-N runs at each learning rate, with seeds that are not judged
TASK/runs/V/seed-N     runs at the best of them, with fresh seeds, judged on the test split
TASK/logs/ queue/ leases/
costs.json             the speed of a training step of each variant, measured after the runs
suite.json             all of it in numbers; suite.md as tables; suite.html as a page

The same command resumes what was interrupted; more names or seeds extend it.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headgate import config, files
from headgate.compare.executors.executor import Executor, make_executor, run_alone, run_tasks
from headgate.compare.executors.worker import Task
from headgate.compare.jobs import failure
from headgate.compare.progress import StudyProgress
from headgate.compare.suite_costs import costs_task, measure_suite, unmeasured
from headgate.compare.suite_plan import (
    SuitePlan,
    SuiteRun,
    final_loss,
    judged_runs,
    middle_rate,
    read_plan,
    tuning_runs,
    undecided_runs,
)
from headgate.compare.suite_results import JUDGED, read_judged, write_suite
from headgate.compare.variants import parse_variants
from headgate.config import Config
from headgate.data.answers import TaskRecord
from headgate.data.shards import read_manifest
from headgate.data.tasks.contract import TASKS, DrawnTask, SyntheticTask, parse_task
from headgate.data.tasks.writing import prepare_task
from headgate.errors import HeadgateError
from headgate.machine import cores
from headgate.mechanisms.contract import MECHANISMS
from headgate.options import EngineOptions, SuiteOptions
from headgate.recipes import get_recipe
from headgate.train.evaluate import evaluate_run
from headgate.train.folder import last_step

RECIPE = "task"
EVALUATIONS = 20
"""Evaluations per run: how finely the moment is known at which it solves its task."""
EVALUATED, HELD_OUT = 96, 256
"""Samples evaluated during training, and at the end."""


def run_suite(
    names: Sequence[str],
    out: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    options: SuiteOptions | None = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
) -> bool:
    """Run the suite, or what is left of it, and write its results; returns whether every run finished."""
    options = options or SuiteOptions()
    tasks = suite_tasks(options, overrides)
    variants = parse_variants(names or MECHANISMS.names(), get_recipe(RECIPE).model)
    for own in (variant for variant in variants if variant.settings):
        raise HeadgateError(
            f"variant {own.label!r} has settings of its own, {', '.join(own.words)}; the suite trains all "
            "variants alike, so give them for all, as words without a variant"
        )
    asked = SuitePlan(
        tasks={name: source for name, (source, _) in tasks.items()},
        variants=variants,
        rates=options.learning_rates,
        tuning_seeds=options.tuning_seeds,
        seeds=options.judged,
        words={_folder(word): word for word in _task_words(options)},
        settings=tuple(overrides),
    )
    folder = files.named(out, "the folder of the suite")
    _refuse_strangers(folder)
    complete = True
    with files.locked(folder, "used by a suite"), StudyProgress() as progress:
        at_once = options.jobs or max(1, cores() // engine.processes)
        # Before anything is written: a missing engine leaves nothing behind.
        executors = {name: make_executor(folder / name, at_once, engine) for name in tasks}
        plan = _take(folder, asked)
        for name, (source, settings) in tasks.items():
            task, home = parse_task(source), folder / name
            assert task is not None
            files.own_place(folder, home / "data")
            prepare_task(task, source, home / "data")
            _keep_config(home, settings)
            progress.phase(name)
            tuning = list(tuning_runs(plan, name, home))
            first = [run for run in tuning if run.rate == middle_rate(plan)]
            complete &= _train(home, first, settings, executors[name], engine, progress)
            undecided = undecided_runs(plan, tuning, _record(home))
            complete &= _train(home, undecided, settings, executors[name], engine, progress)
            judged = list(judged_runs(plan, name, home))
            complete &= _train(home, judged, settings, executors[name], engine, progress)
            _judge(home, judged, progress)
            write_suite(folder)
        if options.cost:
            _measure(folder, plan, at_once, engine, progress)
            write_suite(folder)
    return complete


def _measure(
    folder: Path, plan: SuitePlan, at_once: int, engine: EngineOptions, progress: StudyProgress
) -> None:
    """Measure the speed of variants that have none yet; on a cluster, where the runs are."""
    if not unmeasured(folder, plan):
        return
    progress.phase("costs")
    if engine.on == "local":
        measure_suite(folder, progress.doing)
        return
    home = folder / costs_task(folder, plan)
    log = run_alone(make_executor(home, at_once, engine), home, "costs", "headgate.compare.suite_costs")
    if log is not None:
        progress.note(f"the costs could not be measured: {failure(Path(log))}")


def suite_tasks(options: SuiteOptions, overrides: Sequence[str]) -> dict[str, tuple[str, Config]]:
    """Each task with as many samples as its training takes, and its settings, by the name of its folder."""
    found: dict[str, tuple[str, Config]] = {}
    for word in _task_words(options):
        name, _, given = word.partition(":")
        cls = TASKS.get(name)
        source = f"{name}:{given or _written(cls.suite.options)}"
        task = parse_task(source)
        assert task is not None
        settings = config.override(task_config(task), overrides)
        train = settings.train
        needed = train.steps * train.batch_size * train.accumulation
        drawn = issubclass(cls, DrawnTask)
        fresh = f"samples={needed},held_out={HELD_OUT}" if drawn else f"sequences={-(-5 * needed // 4)}"
        folder = _folder(word)
        if folder in found:
            raise HeadgateError(f"task {word!r} is named twice; leave one out")
        found[folder] = (f"{source}{'' if source.endswith(':') else ','}{fresh}", settings)
    return found


def _record(home: Path) -> TaskRecord:
    manifest = read_manifest(home / "data")
    assert manifest is not None
    assert manifest.task is not None
    return manifest.task


def _task_words(options: SuiteOptions) -> list[str]:
    every = [name for name in TASKS.names() if TASKS.get(name).suite.quick or not options.quick]
    return options.tasks.split() or every


def _folder(word: str) -> str:
    """The name of a task's folder."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-")


def _written(options: Mapping[str, object]) -> str:
    return ",".join(f"{key}={json.dumps(value)}" for key, value in options.items())


def task_config(task: SyntheticTask) -> Config:
    """The suite's recipe, fitted to a task."""
    base, size = get_recipe(RECIPE), task.suite
    train = replace(
        base.train,
        context=task.context,
        steps=size.steps,
        batch_size=size.batch_size,
        evaluate_every=max(1, size.steps // EVALUATIONS),
        evaluate_tokens=EVALUATED * task.context,
        document_tokens=1,
    )
    return replace(base, model=replace(base.model, vocab_size=task.vocab_size), train=train)


def _train(
    home: Path,
    runs: Sequence[SuiteRun],
    settings: Config,
    executor: Executor,
    engine: EngineOptions,
    progress: StudyProgress,
) -> bool:
    """Train what is not finished; a run that fails does not stop the others. Returns whether all finished."""
    if not runs:
        return True
    waiting = {run.log.stem: run for run in runs if not run.finished}
    steps = settings.train.steps
    settled = steps * (len(runs) - len(waiting))
    progress.begin_runs(total=steps * len(runs), done=settled, runs=len(runs), left=len(waiting))
    files.own_folder(home / "logs")
    for run in waiting.values():
        files.own_place(home, run.folder)

    def ended(task: Task, finished: bool) -> None:
        nonlocal settled
        settled += steps
        run = waiting[task.key]
        if finished:
            progress.finished(task.name, final_loss(run))
        else:
            progress.failed(task.name, failure(run.log))

    def looked(running: Sequence[Task]) -> None:
        done = sum(min(last_step(task.folder), steps) for task in running)
        progress.update_runs(settled + done)

    tasks = [
        replace(run.queued(shard=engine.shard), processes=engine.processes, end=steps)
        for run in waiting.values()
    ]
    return not run_tasks(executor, home, tasks, lambda task: waiting[task.key].finished, ended, looked)


def _judge(home: Path, runs: Sequence[SuiteRun], progress: StudyProgress) -> None:
    """Evaluate finished runs on the test split, each once."""
    known = read_judged(home)
    todo = [run for run in runs if run.finished and run.place not in known]
    if todo:
        progress.doing(f"judging {len(todo)} runs on the test split")
    for run in todo:
        known[run.place] = evaluate_run(run.folder, split="test", data=home / "data")
        files.write_sealed(home / JUDGED, known)


def _refuse_strangers(folder: Path) -> None:
    taken = folder.exists() and (
        not folder.is_dir() or any(child.name != ".lock" for child in folder.iterdir())
    )
    if taken and not (folder / "plan.json").is_file():
        raise HeadgateError(f"{str(folder)!r} is in use but has no plan.json; choose another folder")


def _take(folder: Path, asked: SuitePlan) -> SuitePlan:
    """Claim the folder for this suite, or extend the suite that it holds with tasks, variants and seeds."""
    if not (folder / "plan.json").is_file():
        config.save(asked, folder / "plan.json", seal=True)
        return asked
    before = read_plan(folder)
    found = []
    for name in ("rates", "tuning_seeds"):
        old, new = getattr(before, name), getattr(asked, name)
        if old != new:
            found.append(f"{name}={old}, not {new}")
    for name, source in asked.tasks.items():
        if before.tasks.get(name, source) != source:
            found.append(f"{name} as {before.tasks[name]}, not {source}")
    known = {variant.label: variant for variant in before.variants}
    for variant in asked.variants:
        if variant.label in known and known[variant.label].meaning != variant.meaning:
            found.append(f"{variant.label!r} meaning {known[variant.label].meaning}, not {variant.meaning}")
    if found:
        raise HeadgateError(f"{str(folder)!r} is a suite with {'; '.join(found)}; choose another folder")
    added = tuple(variant for variant in asked.variants if variant.label not in known)
    plan = replace(
        before,
        tasks={**before.tasks, **asked.tasks},
        variants=before.variants + added,
        seeds=max(before.seeds, asked.seeds),
        words={**before.words, **asked.words},
        settings=asked.settings,
    )
    if plan != before:
        config.save(plan, folder / "plan.json", seal=True)
    return plan


def _keep_config(home: Path, settings: Config) -> None:
    path = home / "config.json"
    if not files.is_missing(path):
        found = config.differences(config.to_dict(config.load(Config, path)), config.to_dict(settings))
        if found:
            raise HeadgateError(f"{str(home)!r} was made with {'; '.join(found)}; choose another folder")
    else:
        config.save(settings, path, seal=True)
