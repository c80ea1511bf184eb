"""Runs a study: trains its variants under equal conditions, measures their cost, writes the results.

A study goes through phases, each a list of jobs: controls, tuning, judging, ladder, costs. A study that was
stopped resumes with the same command, and one with more variants or seeds trains only what is new.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headgate import config, files
from headgate.compare.claims import check_variants
from headgate.compare.controls import with_controls
from headgate.compare.executors.executor import make_executor, run_alone
from headgate.compare.folder import PUBLISHED, TUNED, Study, StudyFolder, Winners, judged_seeds
from headgate.compare.forecast import Pace, forecast, past_speeds, print_forecast, start_seconds
from headgate.compare.jobs import Job, JobRunner, RunsJobs, failure
from headgate.compare.judging import undecided
from headgate.compare.price import parse_ladder
from headgate.compare.progress import StudyProgress
from headgate.compare.results import main_jobs, main_winners, write_results
from headgate.compare.space import draw_trials, parse_space
from headgate.compare.tuning import Tuner
from headgate.compare.variants import Variant, parse_variants
from headgate.config import Config
from headgate.data.shards import open_split
from headgate.errors import HeadgateError
from headgate.machine import cores
from headgate.measure.costs import CostPlan, device, measure_costs, refuse_lengths, step_seconds
from headgate.measure.gates import gates_on_passage
from headgate.measure.skipping import can_skip, gate_skipping
from headgate.options import EngineOptions, StudyOptions, parse_lengths, parse_seeds
from headgate.papers.paper import load_paper
from headgate.recipes import named_config
from headgate.train.distributed import World
from headgate.train.folder import check_fit, describe_data, read_config
from headgate.train.loop import refuse_too_large

THRESHOLDS = (0.05, 0.1, 0.2, 0.3)
"""Heads and branches with gates below these are skipped, to see what that saves and costs."""


def run_study(
    names: Sequence[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    overrides: Sequence[str],
    options: StudyOptions,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    *,
    runner: RunsJobs | None = None,
) -> bool:
    """Run the study that the arguments describe, or what is left of it, and write its results; returns
    whether every run finished. `runner` trains instead of processes on this machine."""
    base = config.override(named_config(options.recipe), overrides)
    splits = [open_split(data, name) for name in ("train", "val")]
    variants = parse_variants(names, base.model)
    looks = parse_seeds(options.seeds)
    asked = Study(
        recipe=options.recipe,
        data=describe_data(data, *splits),
        variants=with_controls(variants, base) if options.controls else variants,
        seeds=looks[-1],
        looks=looks if len(looks) > 1 else (),
        tune=options.tune,
        space=options.space,
        tuning_seeds=options.tuning_seeds,
        published=options.published,
        ladder=parse_ladder(options.ladder),
        ladder_variants=options.ladder_variants,
        budget=options.budget,
        threads=options.threads,
        cost=CostPlan(parse_lengths(options.lengths), options.cost_seconds),
        settings=tuple(overrides),
    )
    for own in [base, *(variant.config(base) for variant in asked.variants if variant.settings)]:
        check_fit(own, asked.data, *splits)
        World(0, engine.processes * engine.nodes, device()).share(own.train.batch_size)
    if asked.tune:
        draw_trials(parse_space(asked.space, base), (), asked.tune)  # refuses now what cannot be drawn
    claims = None if options.claims is None else load_paper(options.claims)
    if claims is not None:
        check_variants(claims, base.model)
    folder = StudyFolder(out)
    folder.refuse_strangers()
    if engine.on == "local":
        refuse_too_large(base, World(0, engine.processes, device()), shard=engine.shard)
        if options.cost and asked.cost.lengths:
            refuse_lengths(base, asked.cost.lengths)
    at_once = options.jobs or max(1, cores() // (asked.threads * engine.processes))
    if options.dry_run:
        _forecast(folder, asked, base, at_once)
        return True
    with files.locked(folder.path, "compared"), StudyProgress() as progress:
        executor = make_executor(folder.path, at_once, engine)  # a missing engine leaves nothing behind
        study = folder.take(asked, base)
        if claims is not None:
            config.save(claims, folder.claims_path, seal=True)
        if runner is None:
            runner = JobRunner(
                folder.path, study.data.folder, study.threads, executor, engine.processes, engine.shard
            )
        phases = Phases(folder, study, base, runner, progress)
        if study.budget == "seconds" and engine.on == "local":
            phases.share_out_seconds()
        elif study.budget == "seconds" and phases.without_steps:
            # Seconds of a machine that trains, not of the one that asks.
            log = run_alone(executor, folder.path, "steps", "headgate.compare.costs_process")
            if log is not None:
                raise HeadgateError(f"the seconds of a step could not be measured: {failure(Path(log))}")
            phases.study, _ = folder.read()
        failed = phases.controls()
        if study.tune:
            failed += phases.judge(phases.tune())
        if study.published:
            failed += phases.judge()
        failed += phases.ladder()
        if options.cost and engine.on == "local":
            phases.costs(at_once)
        elif options.cost and not phases.costs_known:
            progress.phase("costs")
            log = run_alone(executor, folder.path, "costs", "headgate.compare.costs_process")
            if log is not None:
                progress.note(f"the costs could not be measured: {failure(Path(log))}")
        phases.gates()
        write_results(out)
    return not failed


def _forecast(folder: StudyFolder, study: Study, base: Config, at_once: int) -> None:
    """Print what the study will take, from the speed of its own past runs or of a few steps taken now."""
    seconds, source = past_speeds(folder, study, base), "this study's finished runs"
    if any(variant.label not in seconds for variant in study.variants):
        configs = {variant.label: variant.config(base) for variant in study.variants}
        measured, source = step_seconds(configs, study.threads), "steps taken just now"
        seconds = {
            label: measured[label] * own.steps * own.accumulation / own.tokens
            for label, own in ((label, of.train) for label, of in configs.items())
        }
    print_forecast(study, forecast(study, base, Pace(seconds, start_seconds())), at_once, source)


@dataclass
class Phases:
    """The phases of a study, in the order in which they are carried out."""

    folder: StudyFolder
    study: Study
    base: Config
    runner: RunsJobs
    progress: StudyProgress

    def share_out_seconds(self) -> None:
        """Give each variant as many steps as fit into the baseline's time."""
        baseline, base = self.study.variants[0], self.base
        missing = self.without_steps
        if not missing:
            return
        self.progress.now("measuring a step of each variant, to give all the same seconds")
        configs = {variant.label: variant.config(base) for variant in [baseline, *missing]}
        seconds = step_seconds(configs, self.study.threads)
        steps = dict(self.study.steps)
        of_step = {label: seconds[label] * own.train.accumulation for label, own in configs.items()}
        for variant in missing:
            relative = of_step[baseline.label] / of_step[variant.label]
            steps[variant.label] = max(1, round(base.train.steps * relative))
        self._note(replace(self.study, steps=steps))

    @property
    def without_steps(self) -> list[Variant]:
        """With a budget of seconds: variants of which it is not known how many steps fit into theirs."""
        return [variant for variant in self.study.variants if variant.label not in self.study.steps]

    def controls(self) -> list[Job]:
        """The controls and the baseline come first, so that it is known early whether the study can tell."""
        controls = [variant for variant in self.study.variants if variant.control]
        if not controls or not self.study.published:
            return []
        self.progress.phase("controls")
        seeds = judged_seeds(self.base, (self.study.looks or (self.study.seeds,))[0])
        chosen = [self.study.variants[0], *controls]
        jobs = [self._judged(variant, seed) for seed in seeds for variant in chosen]
        return self.runner.run(jobs, self.progress)

    def tune(self) -> Winners:
        """The same trials for every variant; returns the winner of each, by label."""
        self.progress.phase("tuning")
        tuned = Tuner(self.folder, self.study, self.base, self.runner, self.progress).tune()
        return {label: one.winner for label, one in tuned.items()}

    def judge(self, winners: Winners | None = None) -> list[Job]:
        """Train what is judged, look after look, until everything is decided."""
        kind = PUBLISHED if winners is None else TUNED
        self.progress.phase(f"judging {kind}" if self.study.tune else "judging")
        looks = self.study.looks or (self.study.seeds,)
        failed: list[Job] = []
        for number, seeds in enumerate(looks):
            left = undecided(self.study, self.folder.jobs(self.study, self.base, seeds, winners), number)
            if not left:
                self.progress.note(f"decided after {looks[number - 1]} seeds")
                break
            numbers = judged_seeds(self.base, seeds)
            jobs = [self._judged(variant, seed, winners) for seed in numbers for variant in left]
            failed = self.runner.run(jobs, self.progress)
            if self.study.looked.get(kind, 0) <= number:
                self._note(replace(self.study, looked={**self.study.looked, kind: number + 1}))
        return failed

    def ladder(self) -> list[Job]:
        """Train at other budgets, with the settings that are judged."""
        if not self.study.ladder:
            return []
        self.progress.phase("ladder")
        winners = main_winners(self.folder, self.study, self.base)
        rungs = self.folder.ladder(self.study, self.base, winners)
        return self.runner.run([job for jobs in rungs.values() for job in jobs], self.progress)

    def _judged(self, variant: Variant, seed: int, winners: Winners | None = None) -> Job:
        return self.folder.judged(self.study, self.base, variant, seed, winners)

    def _note(self, study: Study) -> None:
        self.study = study
        self.folder.write(study, self.base)

    def costs(self, at_once: int) -> None:
        """Measure speed, memory and decoding of the variants, and what skipping nearly closed gates saves."""
        self.progress.phase("costs")
        before = self.folder.read_costs()
        if not self._speeds_known:
            self.progress.note("measuring speed and memory; leave the machine alone meanwhile")
        costs = measure_costs(
            {variant.label: variant.config(self.base) for variant in self.study.variants},
            self.study.cost,
            before,
            at_once,
            self.progress.doing,
        )
        if costs != before:
            config.save(costs, self.folder.costs_path, seal=True)
        self._skipping()

    @property
    def costs_known(self) -> bool:
        """Whether nothing is left to measure."""
        return self._speeds_known and not self._left_to_skip(self._read_skipping())

    @property
    def _speeds_known(self) -> bool:
        costs = self.folder.read_costs()
        return costs is not None and all(costs.of(variant.label) for variant in self.study.variants)

    def _read_skipping(self) -> dict[str, Any]:
        path = self.folder.skipping_path
        return {} if files.is_missing(path) else files.read_sealed(path)

    def _left_to_skip(self, known: Mapping[str, Any]) -> dict[str, Path]:
        """The first runs of variants with gates of which it is not known what skipping them does."""
        return {
            label: run
            for label, run in self._first_runs().items()
            if label not in known and can_skip(read_config(run).model)
        }

    def _skipping(self) -> None:
        """What skipping nearly closed gates saves and costs, for mechanisms that learn their gates."""
        by_label = self._read_skipping()
        for label, run in self._left_to_skip(by_label).items():
            self.progress.doing(f"measuring what skipping nearly closed gates saves and costs: {label}")
            by_threshold = gate_skipping(
                run,
                THRESHOLDS,
                tokens=self.base.train.evaluate_tokens,
                data=self.study.data.folder,
                seconds=self.study.cost.seconds * len(THRESHOLDS),
            )
            by_label[label] = [each.to_dict() for each in by_threshold]
            files.write_sealed(self.folder.skipping_path, by_label)

    def gates(self) -> None:
        """The gates of each variant's first finished run on the start of the validation split."""
        self.progress.now("reading the gates on a passage of held-out text")
        gates = gates_on_passage(self._first_runs(), self.study.data.folder, self.base.train.context)
        text = json.dumps(files.sealed(gates), separators=(",", ":"))
        files.write_text(self.folder.path / "gates.json", text + "\n")

    def _first_runs(self) -> dict[str, Path]:
        """The first finished run of each variant, by label."""
        runs: dict[str, Path] = {}
        for job in main_jobs(self.folder, self.study, self.base):
            if job.finished:
                runs.setdefault(job.variant.label, job.folder)
        return runs
