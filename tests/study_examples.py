"""A small study: two variants beside the baseline, one with markup in its label."""

from pathlib import Path
from typing import Any

from headgate import config
from headgate.config import Config, StudyOptions

LABEL = "<b>log</b> & co"
NAMES = ["dynamic-sparse", f"sparse-geometric:gate=log,hidden=4@{LABEL}"]
SETTINGS = ["train.steps=8"]


def write_recipe(micro: Config, folder: Path) -> Path:
    path = folder / "recipe.json"
    config.save(micro, path)
    return path


def asked(out: Path, data: Path) -> tuple[Any, ...]:
    """The arguments of `run_study` for the study of the fixture."""
    recipe = str(data.parent / "recipe.json")
    options = StudyOptions(recipe=recipe, seeds=2, lengths="96", cost_seconds=0.02)
    return NAMES, data, out, SETTINGS, options
