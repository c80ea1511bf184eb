"""A study folder: what is compared, under which conditions, and where each part of it is.

study.json       what is compared: variants, seeds, the data, how
config.json      the recipe that all variants share
runs/V/seed-N/   a run folder for each variant and seed, as published
tuning/trial-K/V/seed-N/    tuning trials, if any
tuned/trial-K/V/seed-N/     the judged runs of each variant with the settings of trial K, which won
ladder/M/V/seed-N/          runs at M times the budget, if there is a ladder
logs/            what each run's process wrote
queue/ leases/   what each run's process was asked to do, and who carries it out
costs.json       speed, memory and decoding of each variant, measured apart from training
gates.json       the gates of each variant on a passage of held-out text
skipping.json    what skipping nearly closed gates saves and costs
claims.json      the user's own claims, if --claims gave some
results.json     all of it in numbers; results.md and papers.md as tables; report.html as a page
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from headgate import config, files
from headgate.compare.jobs import Job
from headgate.compare.space import Trial
from headgate.compare.variants import Variant
from headgate.config import Config
from headgate.errors import HeadgateError, suggestion
from headgate.measure.costs import CostPlan, Costs
from headgate.papers.paper import Paper, load_paper, shipped_papers
from headgate.train.folder import DataRecord

Budget = Literal["tokens", "seconds"]
JUDGED = "runs"
"""Where the runs are that are judged as published."""
PUBLISHED, TUNED = "published", "tuned"
"""The two kinds of judged runs."""
Winners = Mapping[str, Trial]
"""The trial that won the tuning, by label."""


def judged_seeds(base: Config, count: int) -> range:
    """The first `count` seeds that variants are judged by: the recipe's own and those after it."""
    return range(base.seed, base.seed + count)


@dataclass(frozen=True)
class Study:
    """What is compared, and under which conditions."""

    recipe: str
    """The recipe's name, or the path of its config."""
    data: DataRecord
    variants: tuple[Variant, ...]
    """The first is the baseline."""
    seeds: int
    """How many at most; every variant is trained with each, from the recipe's `seed` on."""
    looks: tuple[int, ...] = ()
    """Planned numbers of seeds to judge at, the last being `seeds`; empty for a single look at the end."""
    looked: Mapping[str, int] = field(default_factory=dict)
    """How many of those looks are done, by kind of judged runs."""
    tune: int = 0
    """Trials for each variant; 0 for none."""
    space: str = ""
    """What they are drawn from, as written; empty for the default."""
    tuning_seeds: int = 1
    """Runs of each trial."""
    ladder: tuple[float, ...] = ()
    """Multiples of the budget at which the baseline is trained, including 1; empty for none."""
    ladder_variants: tuple[str, ...] = ()
    """Labels of other variants that are trained at them too; "all" stands for all."""
    published: bool = True
    """Whether variants are also judged as published if they are tuned."""
    extended: tuple[int, ...] = ()
    """Numbers of seeds it had before more were asked for without having been planned."""
    budget: Budget = "tokens"
    """What is equal for all: the tokens of a run, or its seconds as measured before training."""
    threads: int = 1
    """Threads per run. Another number would change the last digits of the losses."""
    cost: CostPlan = field(default_factory=CostPlan)
    settings: tuple[str, ...] = ()
    """Changes to the recipe, as written on the command line."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """With a budget of seconds: how many steps each variant takes in that time."""

    def steps_of(self, variant: Variant, base: Config) -> int:
        """How many steps a variant is trained for."""
        return self.steps.get(variant.label) or variant.config(base).train.steps


def on_ladder(study: Study) -> tuple[Variant, ...]:
    """The variants that are trained at other budgets too: the baseline and those asked for."""
    asked = study.ladder_variants
    return tuple(v for n, v in enumerate(study.variants) if n == 0 or v.label in asked or "all" in asked)


class StudyFolder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = files.named(path, "the study folder")

    @property
    def begun(self) -> bool:
        return (self.path / "study.json").is_file()

    def read(self) -> tuple[Study, Config]:
        if not self.begun:
            raise HeadgateError(
                f"{str(self.path)!r} is not a study: it has no study.json; headgate compare makes one"
            )
        return config.load(Study, self.path / "study.json"), config.load(Config, self.path / "config.json")

    def write(self, study: Study, base: Config) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        files.own_folder(self.path / "logs")
        config.save(base, self.path / "config.json", seal=True)
        config.save(study, self.path / "study.json", seal=True)

    def refuse_strangers(self) -> None:
        taken = self.path.exists() and (
            not self.path.is_dir() or any(child.name != ".lock" for child in self.path.iterdir())
        )
        if taken and not self.begun:
            raise HeadgateError(f"{str(self.path)!r} is in use but has no study.json; choose another folder")

    def take(self, asked: Study, base: Config) -> Study:
        """Claim the folder for this study, or extend the study that it holds with what is new."""
        of_before = self.read()[0].variants if self.begun else ()
        labels = [variant.label for variant in (*of_before, *asked.variants)]
        for label in asked.ladder_variants:
            if label not in ("all", *labels):
                hint = suggestion(label, labels)
                raise HeadgateError(f"--ladder-variants {label!r} is no variant of the study; {hint}")
        if not self.begun:
            self.write(asked, base)
            return asked
        before, before_base = self.read()
        found = config.differences(config.to_dict(before_base), config.to_dict(base))
        for name in ("budget", "threads", "cost", "looks"):
            old, new = getattr(before, name), getattr(asked, name)
            if old != new:
                found.append(f"{name}={old}, not {new}")
        if before.data.fingerprint != asked.data.fingerprint:
            found.append(f"data from {before.data.folder!r} and not this")
        for name in ("tune", "space", "tuning_seeds", "published") if before.tune else ():
            old, new = getattr(before, name), getattr(asked, name)
            if old != new:
                found.append(f"{name}={old}, not {new}")
        known = {variant.label: variant for variant in before.variants}
        for variant in asked.variants:
            old_variant = known.get(variant.label)
            if old_variant is not None and old_variant.meaning != variant.meaning:
                found.append(f"{variant.label!r} meaning {old_variant.meaning}, not {variant.meaning}")
        if found:
            raise HeadgateError(
                f"{str(self.path)!r} is a study with {'; '.join(found)}; choose another folder"
            )
        added = tuple(variant for variant in asked.variants if variant.label not in known)
        grows = asked.seeds > before.seeds and (self.path / "results.json").is_file()
        study = replace(
            before,
            data=asked.data,
            tune=asked.tune,
            space=asked.space,
            tuning_seeds=asked.tuning_seeds,
            published=asked.published or not before.tune,
            ladder=asked.ladder or before.ladder,
            ladder_variants=tuple(dict.fromkeys(before.ladder_variants + asked.ladder_variants)),
            variants=before.variants + added,
            seeds=max(before.seeds, asked.seeds),
            extended=(*before.extended, before.seeds) if grows else before.extended,
        )
        if study != before:
            self.write(study, base)
        return study

    def job(
        self,
        study: Study,
        base: Config,
        variant: Variant,
        seed: int,
        place: str = JUDGED,
        settings: Sequence[str] = (),
        *,
        multiple: float = 1.0,
        **more: Any,
    ) -> Job:
        """A run in `place`, with its own settings and, as a multiple of the study's, another budget. If a
        setting is given twice, the last one counts."""
        own = variant.config(base).train
        steps = max(1, round(multiple * study.steps_of(variant, base)))
        every = max(1, round(own.evaluate_every * steps / own.steps))
        changed = [f"train.steps={steps}", f"train.evaluate_every={every}"]
        if (steps, every) == (base.train.steps, base.train.evaluate_every):
            changed = []
        name = "-".join([*(place.split("/") if place != JUDGED else []), variant.folder, f"seed-{seed}"])
        once = {word.partition("=")[0]: word for word in (*variant.words, *changed, *settings)}
        return Job(
            variant=variant,
            seed=seed,
            folder=self.path / place / variant.folder / f"seed-{seed}",
            log=self.path / "logs" / f"{name}.txt",
            steps=steps,
            settings=tuple(once.values()),
            **more,
        )

    def judged(self, study: Study, base: Config, variant: Variant, seed: int, winners: Winners | None) -> Job:
        """A judged run: as published, or with the settings that won the tuning, if any."""
        if winners is None or not winners[variant.label].settings:
            return self.job(study, base, variant, seed)
        trial = winners[variant.label]
        changed, settings = trial.of(variant)
        return self.job(study, base, changed, seed, f"tuned/trial-{trial.number}", settings)

    def ladder(self, study: Study, base: Config, winners: Winners | None) -> dict[float, list[Job]]:
        """Runs of the baseline and, if asked for, of all variants, by multiple of the budget: with the
        settings they are judged with."""
        chosen = on_ladder(study)
        found: dict[float, list[Job]] = {}
        for multiple in study.ladder:
            for seed in judged_seeds(base, (study.looks or (study.seeds,))[0]):
                for variant in chosen:
                    if multiple == 1:
                        job = self.judged(study, base, variant, seed, winners)
                    else:
                        trial = Trial(0) if winners is None else winners[variant.label]
                        changed, settings = trial.of(variant)
                        place = f"ladder/{multiple:g}/trial-{trial.number}"
                        purpose = f"{multiple:g} times the budget"
                        job = self.job(
                            study, base, changed, seed, place, settings, multiple=multiple, purpose=purpose
                        )
                    found.setdefault(multiple, []).append(job)
        return found

    def jobs(self, study: Study, base: Config, seeds: int, winners: Winners | None = None) -> list[Job]:
        """The judged runs, seed by seed, so that an unfinished study has whole comparisons."""
        return [
            self.judged(study, base, variant, seed, winners)
            for seed in judged_seeds(base, seeds)
            for variant in study.variants
        ]

    @property
    def costs_path(self) -> Path:
        return self.path / "costs.json"

    @property
    def skipping_path(self) -> Path:
        return self.path / "skipping.json"

    @property
    def claims_path(self) -> Path:
        return self.path / "claims.json"

    def read_costs(self) -> Costs | None:
        return None if files.is_missing(self.costs_path) else config.load(Costs, self.costs_path)

    def papers(self) -> list[Paper]:
        """Those that come with headgate, and the user's own claims."""
        own = [] if files.is_missing(self.claims_path) else [load_paper(self.claims_path)]
        return shipped_papers() + own
