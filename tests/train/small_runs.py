"""What the tests of training share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from headgate.config import Config
from headgate.train.folder import WALL_CLOCK, read_metrics


def changed(config: Config, **train: Any) -> Config:
    return replace(config, train=replace(config.train, **train))


def repeatable_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without what the machine decides."""
    return [{k: v for k, v in line.items() if k not in WALL_CLOCK} for line in read_metrics(run)]
