"""A study folder: what is compared, under which conditions, and where each part of it lies.

study.json       what is compared: variants, seeds, the data, how
config.json      the recipe that all variants share
runs/V/seed-N/   a run folder for each variant and seed
logs/            what each run's process wrote
queue/ leases/   what each run's process was asked to do, and who carries it out
costs.json       speed, memory and decoding of each variant, measured apart from training
gates.json       the gates of each variant on a passage of held-out text
skipping.json    what skipping nearly closed gates saves and costs
claims.json      the user's own claims, if --claims gave some
results.json     all of it in numbers; results.md and papers.md as tables; report.html as a page
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from headgate import config, files
from headgate.compare.executors.worker import Task
from headgate.compare.variants import Variant
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.measure.costs import CostPlan, Costs
from headgate.papers.paper import Paper, load_paper, shipped_papers
from headgate.train.folder import DataRecord

Budget = Literal["tokens", "seconds"]


@dataclass(frozen=True)
class Study:
    """What is compared, and under which conditions."""

    recipe: str
    """The recipe's name, or the path of its config."""
    data: DataRecord
    variants: tuple[Variant, ...]
    """The first is the baseline."""
    seeds: int
    """How many; every variant is trained with each of 0, 1, 2, ..."""
    budget: Budget = "tokens"
    """What is equal for all: the tokens of a run, or its seconds as measured before training."""
    threads: int = 1
    """Of each run. Another number would change the last digits of the losses."""
    cost: CostPlan = field(default_factory=CostPlan)
    settings: tuple[str, ...] = ()
    """Changes to the recipe, as written on the command line."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """With a budget of seconds: how many steps each variant makes in that time."""


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

    @property
    def key(self) -> str:
        """A file name of its own within the study."""
        return self.log.stem

    def task(self, study_folder: Path, study: Study, base: Config) -> Task:
        """For an engine to carry out."""
        words = tuple(self.command(study_folder, study.data.folder, base))
        return Task(self.key, self.name, words, str(self.folder), str(self.log), study.threads)

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

    def take(self, asked: Study, base: Config) -> Study:
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

    @property
    def claims_path(self) -> Path:
        return self.path / "claims.json"

    def read_costs(self) -> Costs | None:
        return config.load(Costs, self.costs_path) if self.costs_path.is_file() else None

    def papers(self) -> list[Paper]:
        """Those that come with headgate, and the user's own claims."""
        return shipped_papers() + ([load_paper(self.claims_path)] if self.claims_path.is_file() else [])


def failure(log: Path) -> str:
    """Why a run failed: the last line its process wrote."""
    if not log.is_file():
        return "it was not started"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it wrote nothing").removeprefix("headgate: ")
