"""Does the instrument measure what it says? Studies whose answer is known.

    python benchmarks/instrument.py [--out FOLDER]

1. Two variants that differ only by a factor of 20 on attention's output are told apart untuned; tuned alike
   they show no difference. Full attention under another name is the same by construction. Attention that
   does not see the last 4 tokens is found to be worse, tuned or not.
2. Full attention with one set of seeds against itself with another: no difference in 95% of studies. The
   studies are drawn from one pool of runs, so their share is known only as well as the pool allows.
3. Simulated studies (simulated_studies.py), which are independent: false verdicts, coverage, power.

The text is that of Python's standard library, as bytes. Runs are trained in this process, without the start
of one for each. Ends with an error if an answer is wrong.
"""

import argparse
import json
import random
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from simulated_studies import keeps_promises, shows_difference, table

from headgate import config
from headgate.compare.jobs import Job, last_loss
from headgate.compare.judging import losses_by_label
from headgate.compare.progress import StudyProgress
from headgate.compare.statistics import Losses
from headgate.compare.study import run_study
from headgate.compare.variants import Variant
from headgate.config import Config, ModelConfig, TrainConfig
from headgate.data.prepare import Request, prepare
from headgate.errors import HeadgateError
from headgate.options import RunOptions, StudyOptions
from headgate.report.reading import read_results
from headgate.train.loop import train

MECHANISMS = Path(__file__).with_name("instrument_mechanisms.py")
NAMES = ("full", "full@full again", f"{MECHANISMS}:louder", f"{MECHANISMS}:blinded")
SPACE = "train.attention_output_rate=0.05..20"
"""Wide enough for an optimum and for a twentieth of it."""


@dataclass(frozen=True)
class HereRunner:
    """Trains jobs in this process, one after the other."""

    study_folder: Path
    data: Path

    def run(self, jobs: Sequence[Job], progress: StudyProgress) -> list[Job]:
        waiting = [job for job in jobs if not job.finished]
        progress.begin_runs(total=len(jobs), done=len(jobs) - len(waiting), runs=len(jobs), left=len(waiting))
        failed = []
        for job in waiting:
            base = config.load(Config, self.study_folder / "config.json")
            words = [f"model.mechanism={job.variant.pattern}", f"seed={job.seed}", *job.settings]
            until = None if job.end == job.steps else job.end
            try:
                train(config.override(base, words), self.data, job.folder, RunOptions(until=until, keep=1))
                progress.finished(job.name, last_loss(job))
            except HeadgateError as error:
                job.log.write_text(f"{error}\n", encoding="utf-8")
                failed.append(job)
                progress.failed(job.name, str(error))
        return failed


def small_recipe(steps: int) -> Config:
    """Two layers on bytes, from a start that suits attention, whose output matrix learns four times as fast:
    near the best for full attention. A run takes seconds."""
    return Config(
        model=ModelConfig(
            vocab_size=257, d_model=48, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=16, d_mlp=96,
            start="scaled", tied_embeddings=False, rope_theta=100.0,
        ),
        train=TrainConfig(
            context=64, batch_size=16, steps=steps, learning_rate=1e-2, schedule="linear", warmup_share=0.05,
            attention_output_rate=4.0,
            evaluate_every=max(1, steps // 4), evaluate_tokens=8192, document_tokens=131_072,
        ),
    )  # fmt: skip


def make_data(folder: Path, tokens: int = 2_000_000) -> Path:
    if not (folder / "manifest.json").is_file():
        prepare(Request("stdlib", tokenizer="byte", max_tokens=tokens), folder, workers=1)
    return folder


def known_study(
    home: Path,
    *,
    steps: int,
    seeds: str,
    tune: int,
    controls: bool,
    space: str = SPACE,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """The study of the three variants whose answers are known; its results."""
    data, recipe = make_data(home / "data"), home / "recipe.json"
    config.save(small_recipe(steps), recipe)
    options = StudyOptions(
        recipe=str(recipe), seeds=seeds, tune=tune, space=space, cost=False, controls=controls
    )
    out = home / "study"
    run_study(NAMES, data, out, settings, options, runner=HereRunner(out, data))
    results = read_results(out)
    assert isinstance(results, dict)
    return results


def verdicts_of(results: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """By label: untuned, tuned."""
    return {
        row["label"]: (row["published"]["difference"]["verdict"], row["difference"]["verdict"])
        for row in results["variants"][1:]
    }


def figures_of(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By label: the winning settings and the differences to full attention, untuned and tuned, in words."""

    def words(found: dict[str, Any]) -> str:
        if found["low"] is None:
            return str(found["verdict"])
        return f"{found['verdict']}: {found['mean']:+.5f} ({found['low']:+.5f} to {found['high']:+.5f})"

    settings = {one["label"]: one["settings"] for one in results["tuning"]["variants"]}
    return {
        row["label"]: {
            "settings": settings[row["label"]],
            "untuned": words(row["published"]["difference"]),
            "tuned": words(row["difference"]),
        }
        for row in results["variants"][1:]
    }


def seed_sets(
    home: Path, *, steps: int, runs: int, seeds: int, studies: int, settings: Sequence[str] = ()
) -> float:
    """The share of studies of full attention against itself, with seeds of its own each, that claim a
    difference; drawn from `runs` runs."""
    data = make_data(home / "data")
    jobs = []
    for seed in range(runs):
        folder = home / "seeds" / f"seed-{seed}"
        train(config.override(small_recipe(steps), [f"seed={seed}", *settings]), data, folder)
        jobs.append(Job(Variant.parse("full"), seed, folder, folder / "log.txt", steps))
    all_losses = losses_by_label(jobs)["full"]
    draw, claimed = random.Random(0), 0
    for _ in range(studies):
        chosen = draw.sample(range(runs), 2 * seeds)
        sides = [
            Losses(
                {n: all_losses.by_seed[seed] for n, seed in enumerate(half)},
                {n: all_losses.documents[seed] for n, seed in enumerate(half)},
                all_losses.tokens,
            )
            for half in (chosen[:seeds], chosen[seeds:])
        ]
        claimed += shows_difference(*sides, looks=(seeds,), variants=1)
    return claimed / studies


def most_claims(*, runs: int, seeds: int, studies: int, pools: int = 500) -> float:
    """What `seed_sets` gives for at most one pool in a hundred if the test errs in exactly 5% of studies: for
    runs that are normal, and an ordinary test of the pairs' differences."""
    draw = np.random.default_rng(0)
    chosen = np.stack([draw.permutation(runs)[: 2 * seeds] for _ in range(studies)])
    far = scipy.stats.t.ppf(0.975, seeds - 1) / seeds**0.5
    shares = []
    for losses in draw.normal(size=(pools, runs)):
        differences = losses[chosen[:, :seeds]] - losses[chosen[:, seeds:]]
        claimed = np.abs(differences.mean(1)) > far * differences.std(1, ddof=1)
        shares.append(claimed.mean())
    return float(np.quantile(shares, 0.99))


def seconds_used() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="keep what was trained here, to be resumed")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="5")
    parser.add_argument("--tune", type=int, default=8)
    parser.add_argument("--runs", type=int, default=40, help="of full attention, for the seed sets")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--studies", type=int, default=1000, help="simulated studies of each kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    home = given.out or Path(tempfile.mkdtemp())
    home.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(given).items() if k != "out"}}
    before = seconds_used()
    sizes = {"steps": given.steps, "seeds": given.seeds, "tune": given.tune}
    results = known_study(home, **sizes, controls=not given.no_controls)
    report["core minutes of the study, as far as it was run now"] = round((seconds_used() - before) / 60, 1)
    report["differences to full attention"] = figures_of(results)
    report["headline"] = results["headline"]
    found = verdicts_of(results)
    answers = {
        "a factor of 20 is told apart untuned": found["louder"][0] in ("better", "worse"),
        "a factor of 20 shows no difference tuned": found["louder"][1] == "no difference shown",
        "hiding the last 4 tokens is found": found["blinded"] == ("worse", "worse"),
        "another name is the same by construction": set(found["full again"]) == {"same by construction"},
    }
    if given.runs:
        pool = {"runs": given.runs, "seeds": 5, "studies": 10_000}
        share, most = seed_sets(home, steps=given.steps, **pool), most_claims(**pool)
        report["false verdicts over seed sets"] = {"share": share, "most by chance": round(most, 4)}
        answers["other seeds show no difference in 95% of studies"] = share <= most
    if given.studies:
        rows = table(given.studies)
        report["simulated"] = rows
        answers["simulated studies keep what they promise"] = all(
            keeps_promises(row, given.studies) for row in rows
        )
    report["answers"] = answers
    text = json.dumps(report, indent=2)
    (home / "instrument.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    wrong = [name for name, right in answers.items() if not right]
    sys.exit(f"the instrument gave a wrong answer: {'; '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
