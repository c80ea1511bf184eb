"""Trackers: further places for metrics besides metrics.jsonl. Each needs its own package, and says which."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from headgate import files
from headgate.errors import HeadgateError
from headgate.registry import Registry


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class MakeTracker(Protocol):
    def __call__(self, run: Path, settings: Mapping[str, Any], step: int) -> Tracker:
        """A tracker for the run folder `run`, of which `step` steps are done."""


TRACKERS: Registry[MakeTracker] = Registry("tracker")


def make_trackers(names: tuple[str, ...], run: Path, settings: Mapping[str, Any], step: int) -> list[Tracker]:
    return [TRACKERS.get(name)(run, settings, step) for name in names]


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise for a tracker that is unknown or not installed, before any work is done."""
    for name in names:
        TRACKERS.get(name)
        _package(name)


@TRACKERS.register("tensorboard")
class TensorBoard:
    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        _package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(files.own_folder(run / "tensorboard")), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Service:
    """wandb, and trackio, which has the same interface."""

    package: str

    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        options: dict[str, Any] = {"project": "headgate", "name": run.resolve().name, "resume": "allow"}
        self._run = _package(self.package).init(config=dict(settings), **options, **self.own_options(run))

    def own_options(self, run: Path) -> dict[str, Any]:
        return {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


@TRACKERS.register("wandb")
class WandB(_Service):
    package = "wandb"

    def own_options(self, run: Path) -> dict[str, Any]:
        files.own_folder(run / "wandb")
        return {"dir": str(run), "id": run.resolve().name}


@TRACKERS.register("trackio")
class Trackio(_Service):
    package = "trackio"


def flat_values(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a metrics line under names such as `validation/loss` and `gates/0/mean`."""
    flat = {
        name: float(value)
        for name, value in line.items()
        if isinstance(value, (int, float)) and name != "step"
    }
    validation = line.get("validation") or {}
    flat |= {f"validation/{k}": v for k, v in validation.items() if isinstance(v, (int, float))}
    for bin_ in validation.get("by_position", ()):
        if bin_["loss"] is not None:
            flat[f"validation/by_position/{bin_['first']}-{bin_['end'] - 1}"] = bin_["loss"]
    if validation.get("answers"):
        flat["validation/accuracy"] = validation["answers"]["accuracy"]
    for gate in line.get("gates", ()):
        flat |= {f"gates/{gate['layer']}/{k}": v for k, v in gate.items() if isinstance(v, float)}
    return flat


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise HeadgateError(
            f"tracker {name!r} needs the package {name}, which is not installed; install it with "
            "pip install 'headgate[track]'"
        ) from None
