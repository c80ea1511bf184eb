"""Runs a study: trains its variants under equal conditions, measures their cost, writes the results.

Each run is a process of its own, `headgate train` as a person would call it. A study that was stopped resumes
with the same command, and one with more variants or seeds trains only what is new.
"""

import json
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headgate import config, files
from headgate.compare.claims import check_variants
from headgate.compare.executors.executor import Executor, run_tasks
from headgate.compare.executors.local import LocalExecutor
from headgate.compare.executors.worker import Task
from headgate.compare.folder import Job, Study, StudyFolder, failure
from headgate.compare.progress import StudyProgress
from headgate.compare.results import write_results
from headgate.compare.variants import parse_variants
from headgate.config import Config, StudyOptions
from headgate.data.shards import open_split
from headgate.machine import cores
from headgate.measure.costs import CostPlan, measure_costs, step_seconds
from headgate.measure.gates import gates_on_passage
from headgate.measure.skipping import can_skip, gate_skipping
from headgate.papers.paper import load_paper
from headgate.train.folder import check_fit, describe_data, last_step, read_config
from headgate.train.start import named_config

THRESHOLDS = (0.05, 0.1, 0.2, 0.3)
"""Heads and branches with gates below these are skipped, to see what that saves and costs."""


def run_study(
    names: Sequence[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    overrides: Sequence[str],
    options: StudyOptions,
) -> bool:
    """Run the study that the arguments describe, or what is left of it, and write its results; whether every
    run finished."""
    base = config.override(named_config(options.recipe), overrides)
    splits = [open_split(data, name) for name in ("train", "val")]
    asked = Study(
        recipe=options.recipe,
        data=describe_data(data, *splits),
        variants=parse_variants(names, base.model),
        seeds=options.seeds,
        budget=options.budget,
        threads=options.threads,
        cost=CostPlan(config.parse_lengths(options.lengths), options.cost_seconds),
        settings=tuple(overrides),
    )
    check_fit(base, asked.data, *splits)
    claims = None if options.claims is None else load_paper(options.claims)
    if claims is not None:
        check_variants(claims, base.model)
    folder = StudyFolder(out)
    folder.refuse_strangers()
    with files.locked(folder.path, "compared"), StudyProgress() as progress:
        study = folder.take(asked, base)
        if claims is not None:
            config.save(claims, folder.claims_path)
        at_once = options.jobs or max(1, cores() // study.threads)
        if study.budget == "seconds":
            study = _share_out_seconds(folder, study, base, progress)
        failed = run_jobs(folder, study, base, LocalExecutor(folder.path, at_once), progress)
        if options.cost:
            before = folder.read_costs()
            costs = measure_costs(
                {variant.label: variant.config(base) for variant in study.variants},
                study.cost,
                before,
                at_once,
                progress.say,
            )
            if costs != before:
                config.save(costs, folder.costs_path)
            _write_skipping(folder, study, base, progress)
        _write_gates(folder, study, base, progress)
        write_results(out)
    return not failed


def _share_out_seconds(folder: StudyFolder, study: Study, base: Config, progress: StudyProgress) -> Study:
    """Give each variant as many steps as fit into the time of the baseline's."""
    missing = [variant for variant in study.variants if variant.label not in study.steps]
    if not missing:
        return study
    baseline = study.variants[0]
    progress.say("measuring a step of each variant, to give all the same seconds")
    configs = {variant.label: variant.config(base) for variant in [baseline, *missing]}
    seconds = step_seconds(configs, study.threads)
    steps = dict(study.steps)
    for variant in missing:
        steps[variant.label] = max(
            1, round(base.train.steps * seconds[baseline.label] / seconds[variant.label])
        )
    study = replace(study, steps=steps)
    folder.write(study, base)
    return study


def run_jobs(
    folder: StudyFolder, study: Study, base: Config, executor: Executor, progress: StudyProgress
) -> list[Job]:
    """Train what is not finished; a run that fails does not stop the others. Returns those that failed."""
    jobs = folder.jobs(study, base)
    waiting = {job.key: job for job in jobs if not job.finished}
    settled = sum(job.steps for job in jobs if job.finished)
    progress.begin_runs(total=sum(job.steps for job in jobs), done=settled, runs=len(jobs), left=len(waiting))
    for job in waiting.values():
        for parent in (job.folder.parents[1], job.folder.parent):
            files.own_folder(parent)

    def ended(task: Task, finished: bool) -> None:
        nonlocal settled
        job = waiting[task.key]
        settled += job.steps
        if finished:
            progress.finished(job.name, _final_loss(job))
        else:
            progress.failed(job.name, failure(job.log))

    def looked(running: Sequence[Task]) -> None:
        done = sum(min(last_step(task.folder), waiting[task.key].steps) for task in running)
        progress.update_runs(settled + done, [task.name for task in running])

    tasks = [job.task(folder.path, study, base) for job in waiting.values()]
    with _interruptible():
        failed = run_tasks(
            executor, folder.path, tasks, lambda task: waiting[task.key].finished, ended, looked
        )
    return [waiting[task.key] for task in failed]


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    main = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if main:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _final_loss(job: Job) -> float:
    loss = json.loads((job.folder / "summary.json").read_text(encoding="utf-8"))["final"]["loss"]
    return math.nan if loss is None else float(loss)


def _first_runs(folder: StudyFolder, study: Study, base: Config) -> dict[str, Path]:
    """The first finished run of each variant, by label."""
    runs: dict[str, Path] = {}
    for job in folder.jobs(study, base):
        if job.finished:
            runs.setdefault(job.variant.label, job.folder)
    return runs


def _write_skipping(folder: StudyFolder, study: Study, base: Config, progress: StudyProgress) -> None:
    """What skipping nearly closed gates saves and costs, for mechanisms that learn theirs."""
    path = folder.path / "skipping.json"
    by_label = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for label, run in _first_runs(folder, study, base).items():
        if label in by_label or not can_skip(read_config(run).model):
            continue
        progress.say(f"measuring what skipping nearly closed gates saves and costs: {label}")
        by_threshold = gate_skipping(
            run,
            THRESHOLDS,
            tokens=base.train.evaluate_tokens,
            data=study.data.folder,
            seconds=study.cost.seconds * len(THRESHOLDS),
        )
        by_label[label] = [each.to_dict() for each in by_threshold]
        files.write_json(path, by_label)


def _write_gates(folder: StudyFolder, study: Study, base: Config, progress: StudyProgress) -> None:
    """The gates of each variant's first finished run on the beginning of the validation split."""
    progress.say("reading the gates on a passage of held-out text")
    runs = _first_runs(folder, study, base)
    gates = gates_on_passage(runs, study.data.folder, base.train.context)
    files.write_text(folder.path / "gates.json", json.dumps(gates, separators=(",", ":")) + "\n")
