"""A small study: two variants beside the baseline, one with markup in its label."""

import json
from pathlib import Path
from typing import Any

from headgate import config
from headgate.config import Config, StudyOptions

LABEL = "<b>log</b> & co"
NAMES = ["dynamic-sparse", f"sparse-geometric:gate=log,hidden=4@{LABEL}"]
SETTINGS = ["train.steps=8"]
CLAIM = {"row": "<i>Ours</i>", "variant": "sparse-geometric:gate=log,hidden=4", "metric": "loss"}
CLAIM |= {"printed": "4.90 ± 0.01", "baseline_printed": "5.00"}


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
