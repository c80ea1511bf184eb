"""Checkpoints: one folder per step, written under a temporary name, flushed to disk, then renamed into place.

    model.safetensors      the weights, with the model's config in the header: `headgate.load` reads it
    training.safetensors   the optimiser's two averages and its step count for every weight
    state.json             where the run stands: step, tokens, loader, best evaluation, clocks and counts

Anything under its final name is complete. Every file carries a digest, and state.json has those of the other
two and of the metrics up to its step, so damage is noticed; training then falls back to the checkpoint
before. The tensors are whole however many processes wrote them, so any number of processes can resume. The
schedule and the random state depend on the step alone and are not stored. Nothing is pickled.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from headgate import config, files
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.model.decoder import Decoder, header_of
from headgate.model.tensors import Damaged, TensorFile, write_tensors
from headgate.model.weights import PREFIX
from headgate.train.distributed import World, fill, whole
from headgate.train.folder import RunFolder
from headgate.train.optim import Optimizer

INIT_REMEDY = "leave the model's settings as they are, or change them first with headgate convert --mechanism"
MODEL, TRAINING = "model.safetensors", "training.safetensors"


@dataclass(frozen=True)
class State:
    """Where a run stands after `step` steps."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    """Steps skipped because a loss or gradient was not finite."""
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
    digests: Mapping[str, Any] = field(default_factory=dict)
    """The digests of the checkpoint's other files."""
    metrics_bytes: int | None = None
    """How long metrics.jsonl was at this step."""
    metrics_digest: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings it was trained with."""


LATER = {"digests", "metrics_bytes", "metrics_digest", "config"}
"""Fields that checkpoints of version 0.1 lack."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"  # zero-padded, so that names sort by step


def saved_steps(run: RunFolder) -> list[int]:
    """The steps of the checkpoints, oldest first."""
    names = (path.name.removeprefix("step-") for path in run.checkpoints.glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def find(run: RunFolder, which: str = "last") -> Path:
    """The folder of the checkpoint named `last`, `best`, or by its step."""
    steps = saved_steps(run)
    if not steps:
        raise HeadgateError(f"{str(run.path)!r} has no checkpoint yet")
    step: int | None = steps[-1]
    if which == "best":
        step = read_state(run.checkpoints / folder_name(steps[-1])).best_step
        step = steps[-1] if step is None else step
    elif which != "last":
        step = int(which) if which.isdecimal() and len(which) < 19 else None
    if step not in steps:
        raise HeadgateError(
            f"{str(run.path)!r} has no checkpoint {which!r}; expected last, best or one of the steps "
            f"{', '.join(map(str, steps))}"
        )
    return run.checkpoints / folder_name(step)


def read_state(folder: Path) -> State:
    """The state of a checkpoint, which must be complete and match its folder."""
    path = folder / "state.json"
    values = files.read_sealed(path)
    missing = sorted({f.name for f in fields(State)} - LATER - values.keys())
    if missing:
        raise HeadgateError(f"{str(path)!r} is damaged: it has no {missing[0]!r}")
    try:
        state = config.from_dict(State, values)
    except HeadgateError as error:
        raise HeadgateError(f"{str(path)!r} is damaged: {error}") from error
    if folder.name.startswith("step-") and folder.name != folder_name(state.step):
        raise HeadgateError(f"{str(path)!r} is damaged: it belongs to step {state.step}, not to its folder's")
    return state


def fits_settings(state: State, settings: Config) -> bool:
    return not state.config or config.from_dict(Config, state.config) == settings


def refuse_other_settings(state: State, settings: Config, run: RunFolder) -> None:
    """Raise if config.json is no longer what the checkpoint was trained with."""
    if not fits_settings(state, settings):
        raise HeadgateError(
            f"{str(run.path / 'config.json')!r} is damaged: these are not the settings of its checkpoints"
        )


def save(
    run: RunFolder,
    state: State,
    decoder: Decoder,
    optimizer: Optimizer,
    world: World,
    *,
    keep: int,
) -> None:
    """Write the checkpoint of `state.step` and delete those no longer kept; every rank must call it."""
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
        size, digest = run.sync_metrics()  # the lines a checkpoint counts on must outlast it
        files.own_folder(run.checkpoints)
        temporary.mkdir()
        digests = {
            MODEL: write_tensors(temporary / MODEL, weights, header_of(decoder.config)),
            TRAINING: write_tensors(temporary / TRAINING, averages),
        }
        record = config.to_dict(state) | {"digests": digests, "metrics_bytes": size, "metrics_digest": digest}
        files.write_sealed(temporary / "state.json", record)
        _flush(temporary)
        temporary.rename(final)
        _flush(run.checkpoints)
    except OSError as error:
        steps = saved_steps(run)
        left = (
            f"the checkpoint of step {steps[-1]} is intact, and the same command resumes from it"
            if steps
            else "there is no earlier checkpoint"
        )
        raise HeadgateError(
            f"the checkpoint of step {state.step} cannot be written to {str(run.checkpoints)!r}: "
            f"{error.strerror}; {left}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _drop(run: RunFolder, state: State, keep: int) -> None:
    steps = saved_steps(run)
    for step in steps[:-keep]:
        if step != state.best_step:
            folder = run.checkpoints / folder_name(step)
            # Renamed first, so that a kill during deletion leaves no partial checkpoint under its name.
            doomed = folder.with_name(f".{folder.name}.tmp")
            folder.rename(doomed)
            shutil.rmtree(doomed)


def restore(run: RunFolder, asked: Config, decoder: Decoder, optimizer: Optimizer, world: World) -> State:
    """Fill the weights and the optimiser from the latest intact checkpoint; every rank must call it.

    The weights are verified while they are read, so a checkpoint may turn out damaged after it was filled in:
    the one before it then overwrites it. Damaged checkpoints are set aside under another name, since their
    steps will be saved again.
    """
    targets = {MODEL: decoder.state_dict(), TRAINING: _training_tensors(decoder, optimizer)}
    damage: list[str] = []
    """One sentence per damaged checkpoint, the latest first."""
    while True:
        state, folder = world.on_first(lambda: _find_sound(run, asked, targets, damage))
        if folder is None:
            return state
        found = next(filter(None, (_fill(folder / name, targets[name], world) for name in targets)), "")
        if not found:
            break
        damage.append(found)
    if damage and world.is_first:
        for later in [step for step in saved_steps(run) if step > state.step]:
            aside = run.checkpoints / f"damaged-{later:08d}"
            _remove(aside)
            (run.checkpoints / folder_name(later)).rename(aside)
        print(f"headgate: {damage[0]}; going back to step {state.step}", file=sys.stderr)
    return state


def begin_with(file: Path | None, decoder: Decoder, world: World) -> None:
    """Fill the weights from the file that rank 0 names; every rank must call it."""
    damage = _fill(file, decoder.state_dict(), world)
    if damage:
        raise HeadgateError(damage)


def check_init(file: Path, decoder: Decoder) -> None:
    """Raise unless the file holds exactly the decoder's weights."""
    _require_fit(TensorFile(file, prefix=PREFIX), decoder.state_dict(), INIT_REMEDY)


def _find_sound(
    run: RunFolder, asked: Config, targets: Mapping[str, Mapping[str, Tensor]], damage: list[str]
) -> tuple[State, Path | None]:
    """The latest checkpoint with nothing visibly wrong short of reading its weights, and not yet listed as
    damaged; any damage found here is added to the list."""
    steps = saved_steps(run)[::-1]
    while len(damage) < len(steps):
        folder = run.checkpoints / folder_name(steps[len(damage)])
        found = files.kind(folder, follow=False)
        if found != "a folder":
            raise HeadgateError(f"{str(folder)!r} is {found}; put the checkpoint's own folder there")
        try:
            state = read_state(folder)
            if fits_settings(state, asked):
                _check(run, folder, asked, state, targets)
        except HeadgateError as error:
            if isinstance(error.__cause__, PermissionError):
                raise
            damage.append(str(error))
            continue
        refuse_other_settings(state, asked, run)
        return state, folder
    if damage:
        raise HeadgateError(
            f"{damage[0]}; there is no earlier checkpoint to go back to: restore a copy, or delete "
            f"{str(run.path)!r} and start again"
        )
    return State(), None


def _check(
    run: RunFolder, folder: Path, asked: Config, state: State, targets: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Raise unless the state, the files beside it and the metrics agree."""
    each = asked.train.batch_size * asked.train.accumulation
    samples = (state.loader or {}).get("samples")
    if (state.tokens, samples) != (state.step * each * asked.train.context, state.step * each):
        raise HeadgateError(
            f"{str(folder / 'state.json')!r} is damaged: {state.tokens} tokens and {samples} samples do "
            f"not match {state.step} steps"
        )
    if state.digests and set(state.digests) != set(targets):
        raise HeadgateError(f"{str(folder / 'state.json')!r} is damaged: it lacks a file's digest")
    for name, tensors in targets.items():
        _require_fit(TensorFile(folder / name, state.digests.get(name)), tensors, "it is damaged")
    if state.metrics_bytes is not None:
        run.check_metrics(state.metrics_bytes, state.metrics_digest)


def _require_fit(file: TensorFile, targets: Mapping[str, Tensor], remedy: str) -> None:
    for name in sorted(targets.keys() | file.entries.keys()):
        given = file.entries[name].shape if name in file.entries else "missing"
        expected = tuple(targets[name].shape) if name in targets else "nothing of that name"
        if given != expected:
            raise HeadgateError(
                f"{str(file.path)!r} does not fit the run: {name} is {given}, expected {expected}; {remedy}"
            )


def _fill(path: Path | None, targets: Mapping[str, Tensor], world: World) -> str:
    """Fill tensors from the file that rank 0 names; returns what is wrong with it, on all ranks, or ''."""
    damage = ""
    if world.is_first:
        assert path is not None
        file = TensorFile(path, prefix=PREFIX)
    names = world.on_first(lambda: list(file.entries))
    tensors = file.read(targets) if world.is_first else ((name, None) for name in names)
    try:
        for name, tensor in tensors:
            fill(targets[name], tensor, world)
    except Damaged as error:
        damage = str(error)
    return world.on_first(lambda: damage)


def _training_tensors(decoder: Decoder, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": tensor
        for name, parameter in decoder.named_parameters()
        for key, tensor in optimizer.state[parameter].items()
    }


def _remove(path: Path) -> None:
    """Remove whatever is at the path; for a link, only the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def _flush(path: Path) -> None:
    """Flush a folder's entries to disk; Windows does this by itself."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
