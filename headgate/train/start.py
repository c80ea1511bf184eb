"""From command-line arguments to a run: which config, which data, which folder."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headgate import config
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.model.decoder import header_config, model_file, with_mechanism
from headgate.options import RunOptions
from headgate.recipes import named_config
from headgate.train.folder import read_config, read_data
from headgate.train.loop import train


def start(
    recipe: str | None,
    overrides: Sequence[str],
    *,
    out: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    mechanism: str | None = None,
    init: str | os.PathLike[str] | None = None,
    options: RunOptions,
) -> int | None:
    """Train as the arguments say; returns the signal that stopped the run, or None if it finished."""
    asked = _config(recipe, out)
    if init is not None:
        asked = replace(asked, model=header_config(model_file(init)))
    if mechanism is not None:
        asked = replace(asked, model=with_mechanism(asked.model, mechanism))
    asked = config.override(asked, overrides)
    if data is None:
        if not (Path(out) / "data.json").is_file():
            raise HeadgateError(
                "a new run needs data to train on; give --data FOLDER, a folder that `headgate prepare` wrote"
            )
        data = read_data(out).folder
    return train(asked, data, out, options, init=init).signal


def _config(recipe: str | None, out: str | os.PathLike[str]) -> Config:
    if recipe is None:
        if not (Path(out) / "config.json").is_file():
            raise HeadgateError(
                f"{str(out)!r} is not a run to resume; name a recipe to start one: headgate train tiny ..."
            )
        return read_config(out)
    if "=" in recipe:
        raise HeadgateError(f"{recipe!r} is in the recipe's place; write headgate train RECIPE {recipe}")
    return named_config(recipe)
