"""Runs a study: trains its variants under equal conditions, measures their cost, writes the results.

Each run is a process of its own, `headgate train` as a person would call it. A study that was stopped resumes
with the same command, and one with more variants or seeds trains only what is new.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headgate import config, files
from headgate.compare.claims import check_variants
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
        failed = run_jobs(folder, study, base, at_once, progress)
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
    folder: StudyFolder, study: Study, base: Config, at_once: int, progress: StudyProgress
) -> list[Job]:
    """Train what is not finished, several at once; a run that fails does not stop the others. Returns those
    that failed."""
    jobs = folder.jobs(study, base)
    waiting = [job for job in jobs if not job.finished]
    done = sum(job.steps for job in jobs if job.finished)
    progress.begin_runs(total=sum(job.steps for job in jobs), done=done, runs=len(jobs), left=len(waiting))
    running: dict[Job, subprocess.Popen[bytes]] = {}
    failed: list[Job] = []
    settled = done
    with _children(running):
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job] = _launch(job, folder.path, study, base)
            time.sleep(0.2)
            for job, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[job]
                settled += job.steps
                if process.returncode == 0 and job.finished:
                    progress.finished(job.name, _final_loss(job))
                else:
                    _note_exit(job, process.returncode)
                    failed.append(job)
                    progress.failed(job.name, failure(job.log))
            done = settled + sum(min(last_step(job.folder), job.steps) for job in running)
            progress.update_runs(done, [job.name for job in running])
    return failed


def _launch(job: Job, folder: Path, study: Study, base: Config) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": str(study.threads), "PYTHONUNBUFFERED": "1"}
    words = job.command(folder, study.data.folder, base)
    for folder_of_it in (job.folder.parents[1], job.folder.parent):
        files.own_folder(folder_of_it)
    with files.open_new(job.log) as log:
        # A session of its own, so that Ctrl-C reaches this process alone, which then stops the runs in order.
        return subprocess.Popen(
            [sys.executable, "-m", "headgate.compare.run_process", str(os.getpid()), *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


@contextmanager
def _children(running: Mapping[Job, subprocess.Popen[bytes]]) -> Iterator[None]:
    """However the study ends, its runs save and end first; SIGTERM acts like Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    main = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if main:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print(
            "headgate: stopping the runs, which save their state; the same command resumes them",
            file=sys.stderr,
        )
        raise
    finally:
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def _note_exit(job: Job, code: int) -> None:
    """A killed process could not log why it ended."""
    if code < 0:
        with files.open_own(job.log) as log:
            log.write(f"\nthe process was ended by {signal.Signals(-code).name}\n".encode())


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
