"""Checkpoints: a folder a step, written beside, flushed to the disk, then renamed into place.

    model.safetensors      the weights, with the model's config in the header: `headgate.load` reads it
    training.safetensors   the optimiser's two averages and step count of every weight
    state.json             where the run stands: step, tokens, loader, best evaluation, clocks and counts

What is seen under its final name is whole. The tensors are whole ones whatever number of processes wrote
them, so any number can go on from them. The schedule and the random state are functions of the step alone and
need no place here. Nothing is pickled.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headgate import config
from headgate.config import to_dict
from headgate.errors import HeadgateError
from headgate.model.decoder import Decoder
from headgate.train.distributed import World, fill, whole
from headgate.train.folder import RunFolder
from headgate.train.optim import Optimizer

INIT_REMEDY = "leave the model's settings as they are, or change them first with headgate convert --mechanism"


@dataclass(frozen=True)
class State:
    """Where a run stands after `step` steps."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    """Steps left out because a loss or gradient was not finite."""
    loader: Mapping[str, Any] | None = None
    best_step: int | None = None
    best_loss: float | None = None
    training_seconds: float = 0.0
    evaluating_seconds: float = 0.0
    saving_seconds: float = 0.0
    memory_peak: int = 0
    paths: Mapping[str, Any] = field(default_factory=dict)
    """How often each kernel path has run."""
    threads: int = 0
    processes: int = 1


def folder_name(step: int) -> str:
    return f"step-{step:08d}"  # of one width, so that the order of names is the order of steps


def saved_steps(run: RunFolder) -> list[int]:
    """The steps of the checkpoints, the oldest first."""
    names = (path.name.removeprefix("step-") for path in run.checkpoints.glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def find(run: RunFolder, which: str = "last") -> Path:
    """The folder of the checkpoint called `last`, `best`, or by its step."""
    steps = saved_steps(run)
    if not steps:
        raise HeadgateError(f"{str(run.path)!r} has no checkpoint yet")
    step: int | None = steps[-1]
    if which == "best":
        step = read_state(run.checkpoints / folder_name(steps[-1])).best_step
        step = steps[-1] if step is None else step
    elif which != "last":
        step = int(which) if which.isdecimal() else None
    if step not in steps:
        raise HeadgateError(
            f"{str(run.path)!r} has no checkpoint {which!r}; expected last, best or one of the steps "
            f"{', '.join(map(str, steps))}"
        )
    return run.checkpoints / folder_name(step)


def read_state(folder: Path) -> State:
    return config.load(State, folder / "state.json")


def save(
    run: RunFolder,
    state: State,
    decoder: Decoder,
    optimizer: Optimizer,
    world: World,
    *,
    keep: int,
) -> None:
    """Write the checkpoint of `state.step` and drop those no longer kept; every rank must call it."""
    weights = {name: whole(tensor) for name, tensor in decoder.state_dict().items()}
    averages = {name: whole(tensor) for name, tensor in _training_tensors(decoder, optimizer).items()}
    if world.is_first:
        _write(run, state, decoder, weights, averages)
        _drop(run, state, keep)


def _write(
    run: RunFolder, state: State, decoder: Decoder, weights: dict[str, Tensor], averages: dict[str, Tensor]
) -> None:
    final = run.checkpoints / folder_name(state.step)
    temporary = run.checkpoints / f".{final.name}.tmp"
    try:
        run.sync_metrics()  # what the checkpoint takes as told must outlast it
        temporary.mkdir(parents=True)
        header = {"format": "pt", "headgate": json.dumps(to_dict(decoder.config))}
        save_file(weights, temporary / "model.safetensors", metadata=header)
        save_file(averages, temporary / "training.safetensors")
        config.save(state, temporary / "state.json")
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        temporary.rename(final)
        _flush(run.checkpoints)
    except (OSError, SafetensorError) as error:
        steps = saved_steps(run)
        left = (
            f"the checkpoint of step {steps[-1]} is intact, and the same command goes on from it"
            if steps
            else "there is no earlier checkpoint"
        )
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise HeadgateError(
            f"the checkpoint of step {state.step} cannot be written to {str(run.checkpoints)!r}: {reason}; "
            f"{left}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _drop(run: RunFolder, state: State, keep: int) -> None:
    steps = saved_steps(run)
    for step in steps[:-keep]:
        if step != state.best_step:
            folder = run.checkpoints / folder_name(step)
            # Renamed first, so that a kill in mid-deletion leaves no half of a checkpoint under its name.
            doomed = folder.with_name(f".{folder.name}.tmp")
            folder.rename(doomed)
            shutil.rmtree(doomed)


def restore(folder: Path | None, decoder: Decoder, optimizer: Optimizer, world: World) -> None:
    """Fill the weights and the optimiser from the checkpoint that rank 0 gives; every rank must call it."""
    remedy = "delete its folder to go on from the checkpoint before"
    _fill(folder and folder / "model.safetensors", decoder.state_dict(), world, remedy)
    _fill(folder and folder / "training.safetensors", _training_tensors(decoder, optimizer), world, remedy)


def begin_with(file: Path | None, decoder: Decoder, world: World) -> None:
    """Fill the weights from the file that rank 0 gives; every rank must call it."""
    _fill(file, decoder.state_dict(), world, INIT_REMEDY)


def check_init(file: Path, decoder: Decoder) -> None:
    """Raise unless the file holds the decoder's weights, all of them and no others."""
    _read(file, decoder.state_dict(), INIT_REMEDY)


def _fill(file: Path | None, targets: Mapping[str, Tensor], world: World, remedy: str) -> None:
    tensors: Mapping[str, Tensor | None] = dict.fromkeys(targets)
    if world.is_first:
        assert file is not None
        tensors = _read(file, targets, remedy)
    for key, target in targets.items():
        fill(target, tensors[key], world)


def _read(path: Path, targets: Mapping[str, Tensor], remedy: str) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise HeadgateError(f"{str(path)!r} cannot be read ({error}); {remedy}") from error
    for name in sorted(targets.keys() | tensors.keys()):
        given = tuple(tensors[name].shape) if name in tensors else "missing"
        expected = tuple(targets[name].shape) if name in targets else "nothing of that name"
        if given != expected:
            raise HeadgateError(
                f"{str(path)!r} does not fit the run: {name} is {given}, expected {expected}; {remedy}"
            )
    return tensors


def _training_tensors(decoder: Decoder, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": tensor
        for name, parameter in decoder.named_parameters()
        for key, tensor in optimizer.state[parameter].items()
    }


def _flush(path: Path) -> None:
    """Bring a file or the entries of a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
