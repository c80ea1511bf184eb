"""The main job: variants trained under equal conditions over several seeds, and what each of them costs.

study.json       what is compared: variants, seeds, the data, how
config.json      the recipe that all variants share
runs/V/seed-N/   a run folder for each variant and seed
logs/            what each run's process said
costs.json       speed, memory and decoding of each variant, measured apart from training
gates.json       the gates of each variant on a passage of held-out text
skipping.json    what it saves and costs not to compute what the gates nearly close
results.json     all of it in numbers; results.md and papers.md as tables; report.html as a page

Each run is a process of its own, `headgate train` as a person would call it. A study that is stopped goes on
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from headgate import config, files
from headgate.compare.progress import StudyDisplay
from headgate.compare.variants import Variant, parse_variants
from headgate.config import Config, StudyOptions
from headgate.data.shards import open_split
from headgate.errors import HeadgateError
from headgate.machine import cores
from headgate.measure.costs import CostPlan, Costs, measure_costs, step_seconds
from headgate.measure.gates import gates_on_passage
from headgate.measure.skipping import can_skip, gate_skipping
from headgate.train.folder import DataRecord, check_fit, describe_data, last_step, read_config
from headgate.train.start import named_config

Budget = Literal["tokens", "seconds"]
THRESHOLDS = (0.05, 0.1, 0.2, 0.3)
"""Gates below which heads and branches are left out, to see what that saves and costs."""


@dataclass(frozen=True)
class Study:
    """What is compared, and under which conditions."""

    recipe: str
    """The recipe's name, or where its config came from."""
    data: DataRecord
    variants: tuple[Variant, ...]
    """The first is the baseline."""
    seeds: int
    """Seeds 0 to this, each for every variant."""
    budget: Budget = "tokens"
    """What is equal for all: the tokens of a run, or its seconds as measured before training."""
    threads: int = 1
    """Of each run; another number would change the last digits."""
    cost: CostPlan = field(default_factory=CostPlan)
    settings: tuple[str, ...] = ()
    """What was changed in the recipe, as written on the command line."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """With a budget of seconds: the steps of each variant that make the same seconds."""


@dataclass(frozen=True, eq=False)
class Job:
    """One run of the study."""

    variant: Variant
    seed: int
    folder: Path
    log: Path
    steps: int
    evaluate_every: int

    @property
    def name(self) -> str:
        return f"{self.variant.label}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        return (self.folder / "summary.json").is_file()

    def command(self, study_folder: Path, data: str, base: Config) -> list[str]:
        """The words after `headgate` that train it."""
        words = ["train", str(study_folder / "config.json"), "--data", data, "--out", str(self.folder)]
        words += [f"model.mechanism={self.variant.pattern}", f"seed={self.seed}"]
        if (self.steps, self.evaluate_every) != (base.train.steps, base.train.evaluate_every):
            words += [f"train.steps={self.steps}", f"train.evaluate_every={self.evaluate_every}"]
        return words


class StudyFolder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = files.named(path, "the study folder")

    @property
    def begun(self) -> bool:
        return (self.path / "study.json").is_file()

    def read(self) -> tuple[Study, Config]:
        if not self.begun:
            raise HeadgateError(
                f"{str(self.path)!r} is no study: it has no study.json; headgate compare makes one"
            )
        return config.load(Study, self.path / "study.json"), config.load(Config, self.path / "config.json")

    def write(self, study: Study, base: Config) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        files.own_folder(self.path / "logs")
        config.save(base, self.path / "config.json")
        config.save(study, self.path / "study.json")

    def refuse_strangers(self) -> None:
        taken = self.path.exists() and (
            not self.path.is_dir() or any(child.name != ".lock" for child in self.path.iterdir())
        )
        if taken and not self.begun:
            raise HeadgateError(f"{str(self.path)!r} is taken and holds no study.json; choose another folder")

    def claim(self, asked: Study, base: Config) -> Study:
        """Make the folder this study's, or extend the study that it holds by what is new."""
        if not self.begun:
            self.write(asked, base)
            return asked
        before, before_base = self.read()
        found = config.differences(config.to_dict(before_base), config.to_dict(base))
        for name in ("budget", "threads", "cost"):
            old, new = getattr(before, name), getattr(asked, name)
            if old != new:
                found.append(f"{name}={old} and not {new}")
        if before.data.fingerprint != asked.data.fingerprint:
            found.append(f"data from {before.data.folder!r} and not this")
        known = {variant.label: variant for variant in before.variants}
        for variant in asked.variants:
            old_variant = known.get(variant.label)
            if old_variant is not None and old_variant.mechanism != variant.mechanism:
                found.append(f"{variant.label!r} meaning {old_variant.pattern} and not {variant.pattern}")
        if found:
            raise HeadgateError(
                f"{str(self.path)!r} is a study with {'; '.join(found)}; choose another folder"
            )
        added = tuple(variant for variant in asked.variants if variant.label not in known)
        study = replace(
            before,
            data=asked.data,
            variants=before.variants + added,
            seeds=max(before.seeds, asked.seeds),
        )
        if study != before:
            self.write(study, base)
        return study

    def jobs(self, study: Study, base: Config) -> list[Job]:
        """Seed by seed, so that an unfinished study has whole comparisons."""
        jobs = []
        for seed in range(study.seeds):
            for variant in study.variants:
                steps = study.steps.get(variant.label, base.train.steps)
                every = max(1, round(base.train.evaluate_every * steps / base.train.steps))
                folder = self.path / "runs" / variant.folder / f"seed-{seed}"
                log = self.path / "logs" / f"{variant.folder}-seed-{seed}.txt"
                jobs.append(Job(variant, seed, folder, log, steps, every))
        return jobs

    @property
    def costs_path(self) -> Path:
        return self.path / "costs.json"

    def read_costs(self) -> Costs | None:
        return config.load(Costs, self.costs_path) if self.costs_path.is_file() else None


def run_study(
    names: Sequence[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    overrides: Sequence[str],
    options: StudyOptions,
) -> bool:
    """Run the study that the words ask for, or what is left of it; whether every run finished."""
    base = config.override(named_config(options.recipe), overrides)
    splits = [open_split(data, name) for name in ("train", "val")]
    asked = Study(
        recipe=options.recipe,
        data=describe_data(data, *splits),
        variants=parse_variants(names, base.model),
        seeds=options.seeds,
        budget=options.budget,
        threads=options.threads,
        cost=CostPlan(tuple(int(part) for part in options.lengths.split(",") if part), options.cost_seconds),
        settings=tuple(overrides),
    )
    check_fit(base, asked.data, *splits)
    folder = StudyFolder(out)
    folder.refuse_strangers()
    with files.locked(folder.path, "compared"), StudyDisplay() as display:
        study = folder.claim(asked, base)
        at_once = options.jobs or max(1, cores() // study.threads)
        if study.budget == "seconds":
            study = _share_out_seconds(folder, study, base, display)
        failed = run_jobs(folder, study, base, at_once, display)
        if options.cost:
            before = folder.read_costs()
            costs = measure_costs(study.variants, base, study.cost, before, at_once, display.say)
            if costs != before:
                config.save(costs, folder.costs_path)
            _write_skipping(folder, study, base, display)
        _write_gates(folder, study, base, display)
    return not failed


def _share_out_seconds(folder: StudyFolder, study: Study, base: Config, display: StudyDisplay) -> Study:
    """Steps for each variant such that all train for the seconds that the baseline's steps take."""
    missing = [variant for variant in study.variants if variant.label not in study.steps]
    if not missing:
        return study
    baseline = study.variants[0]
    display.say("measuring a step of each variant, to give all the same seconds")
    seconds = step_seconds([baseline, *(v for v in missing if v != baseline)], base, study.threads)
    steps = dict(study.steps)
    for variant in missing:
        steps[variant.label] = max(
            1, round(base.train.steps * seconds[baseline.label] / seconds[variant.label])
        )
    study = replace(study, steps=steps)
    folder.write(study, base)
    return study


def run_jobs(
    folder: StudyFolder, study: Study, base: Config, at_once: int, display: StudyDisplay
) -> list[Job]:
    """Train what is not finished, several at once; returns the runs that failed, and goes on past them."""
    jobs = folder.jobs(study, base)
    waiting = [job for job in jobs if not job.finished]
    done = sum(job.steps for job in jobs if job.finished)
    display.begin(total=sum(job.steps for job in jobs), done=done, runs=len(jobs), left=len(waiting))
    running: dict[Job, subprocess.Popen[bytes]] = {}
    failed: list[Job] = []
    settled = done
    with _children(running):
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job] = _start(job, folder.path, study, base)
            time.sleep(0.2)
            for job, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[job]
                settled += job.steps
                if process.returncode == 0 and job.finished:
                    display.finished(job.name, _final_loss(job))
                else:
                    _note_exit(job, process.returncode)
                    failed.append(job)
                    display.failed(job.name, failure(job.log))
            progress = settled + sum(min(last_step(job.folder), job.steps) for job in running)
            display.update(progress, [job.name for job in running])
    return failed


def _start(job: Job, folder: Path, study: Study, base: Config) -> subprocess.Popen[bytes]:
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
    """However the study is left, its runs first save and end; SIGTERM leaves it as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    main = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if main:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print(
            "headgate: stopping the runs, which save where they are; the same command goes on from there",
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
    """A process that was killed has not said so itself."""
    if code < 0:
        with files.open_own(job.log) as log:
            log.write(f"\nthe process was ended by {signal.Signals(-code).name}\n".encode())


def failure(log: Path) -> str:
    """Why a run failed: the last line that its process wrote."""
    if not log.is_file():
        return "it was not started"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing").removeprefix("headgate: ")


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


def _write_skipping(folder: StudyFolder, study: Study, base: Config, display: StudyDisplay) -> None:
    """What it saves and costs not to compute what the gates weigh little, where they are learned."""
    path = folder.path / "skipping.json"
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for label, run in _first_runs(folder, study, base).items():
        if label in told or not can_skip(read_config(run).model):
            continue
        display.say(f"measuring what skipping closed gates saves and costs: {label}")
        found = gate_skipping(
            run,
            THRESHOLDS,
            tokens=base.train.evaluate_tokens,
            data=study.data.folder,
            seconds=study.cost.seconds * len(THRESHOLDS),
        )
        told[label] = [each.to_dict() for each in found]
        files.write_json(path, told)


def _write_gates(folder: StudyFolder, study: Study, base: Config, display: StudyDisplay) -> None:
    """The gates of each variant's first finished run on the beginning of the validation split."""
    display.say("reading the gates on a passage of held-out text")
    runs = _first_runs(folder, study, base)
    told = gates_on_passage(runs, study.data.folder, base.train.context)
    files.write_text(folder.path / "gates.json", json.dumps(told, separators=(",", ":")) + "\n")
