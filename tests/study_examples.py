"""A small study: two variants beside the baseline, one with markup in its label."""

import json
from pathlib import Path
from typing import Any

from headgate import config
from headgate.config import Config
from headgate.options import StudyOptions, SuiteOptions

LABEL = "<b>log</b> & co"
NAMES = ["dynamic-sparse", f"sparse-geometric:gate=log,hidden=4@{LABEL}"]
SETTINGS = ["train.steps=8"]
CLAIM = {"row": "<i>Ours</i>", "variant": "sparse-geometric:gate=log,hidden=4", "metric": "loss"}
CLAIM |= {"printed": "4.90 ± 0.01", "baseline_printed": "5.00"}

TASK = "mqar:length=16,pairs=[2,4],keys=6,values=4,filler=2"
SUITE_SETTINGS = (
    "train.steps=3",
    "train.batch_size=2",
    "model.d_model=32",
    "model.head_dim=16",
    "model.d_mlp=32",
)
SUITE_OPTIONS = SuiteOptions(tasks=TASK, rates="0.01,0.02", seeds=1, jobs=2)


def write_recipe(micro: Config, folder: Path) -> Path:
    path = folder / "recipe.json"
    config.save(micro, path)
    return path


def write_claims(folder: Path) -> None:
    (folder / "claims.json").write_text(json.dumps({"paper": "mine", "claims": [CLAIM]}), encoding="utf-8")


def asked(out: Path, data: Path) -> tuple[Any, ...]:
    """The arguments of `run_study` for the study of the fixture."""
    recipe, claims = (str(data.parent / name) for name in ("recipe.json", "claims.json"))
    options = StudyOptions(
        recipe=recipe, seeds="2", lengths="96", cost_seconds=0.02, claims=claims, controls=False
    )
    return NAMES, data, out, SETTINGS, options


def asked_suite(out: Path) -> tuple[Any, ...]:
    """The arguments of `run_suite` for the suite of the fixture."""
    return ["full@<b>all</b>"], out, SUITE_SETTINGS, SUITE_OPTIONS
