"""The run folder: which run owns it, its settings, and the metrics as they are written.

config.json      the settings that decide the result, as `headgate.config.Config`
data.json        which tokens it was trained on
init.json        which weights it started from, if any were given
tokenizer.json   a copy, so that the model can be used without the data
metrics.jsonl    one JSON object per step
checkpoints/     step-N: the latest ones and the best
documents.safetensors   the last evaluation's loss of each validation document
summary.json     written at the end
"""

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from headgate import config, files
from headgate.config import Config
from headgate.data.loader import Windows
from headgate.data.shards import Split, check_range, read_manifest
from headgate.errors import HeadgateError
from headgate.mechanisms.contract import require_registered
from headgate.model.decoder import model_file

WALL_CLOCK = ("seconds", "tokens_per_second", "memory_peak")
"""The fields of a metrics line that depend on the machine; all others come out the same in every run."""
SMALL = ("config.json", "data.json", "init.json", "tokenizer.json")
"""What a run writes when it starts."""
IN_SUMMARY = ("tokens", "tokens_per_second", "memory_peak", "skipped", "versions", "machine")
IN_FINAL = ("loss", "bits_per_byte", "by_position", "answers")
"""The parts of summary.json that are read back."""
LEFTOVER = re.compile(r"\.(step-\d{8}|[a-z]+\.(json|safetensors)\.\d+)\.tmp")
"""Files that a killed process was still writing."""


@dataclass(frozen=True)
class DataRecord:
    """Which tokens a run is trained on."""

    folder: str
    """Where they were; they may have moved."""
    fingerprint: str
    """A digest of the shards' checksums, or of their names and sizes if there are none."""
    vocab_size: int | None
    """Entries in the tokenizer; unknown without a manifest."""
    train_tokens: int
    val_tokens: int


@dataclass(frozen=True)
class InitRecord:
    """Which weights a run starts from, instead of random ones."""

    file: str
    """Where they were; needed again only if the run stops before its first checkpoint."""
    sha256: str


def describe_init(path: str | os.PathLike[str]) -> InitRecord:
    file = model_file(path).resolve()
    with file.open("rb") as opened:
        return InitRecord(str(file), hashlib.file_digest(opened, "sha256").hexdigest())


def describe_data(folder: str | os.PathLike[str], train: Split, val: Split) -> DataRecord:
    manifest = read_manifest(folder)
    facts: list[Any]
    if manifest is None:
        facts = [[shard.path.name, shard.tokens] for split in (train, val) for shard in split.shards]
    else:
        shards = (shard for split in manifest.splits for shard in split.shards)
        facts = [[manifest.tokenizer.sha256], *([*sorted(shard.sha256.items())] for shard in shards)]
    return DataRecord(
        folder=str(Path(folder).resolve()),
        fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        vocab_size=None if manifest is None else manifest.tokenizer.vocab_size,
        train_tokens=train.tokens,
        val_tokens=val.tokens,
    )


def check_fit(asked: Config, record: DataRecord, *splits: Split) -> None:
    """Raise, before anything is written, if the model has too few entries or a split has too few tokens."""
    if record.vocab_size is not None and asked.model.vocab_size < record.vocab_size:
        raise HeadgateError(
            f"model.vocab_size={asked.model.vocab_size} is too small for the data, whose tokenizer has "
            f"{record.vocab_size} entries; add model.vocab_size={record.vocab_size}"
        )
    check_range(asked.model.vocab_size, *splits)
    for split in splits:
        Windows(split, asked.train.context, documents=asked.train.documents == "mask")


class RunFolder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = files.named(path, "the run folder")
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.json"
        self._metrics: io.FileIO | None = None
        self._metrics_bytes, self._metrics_digest = 0, xxhash.xxh3_128()

    @property
    def begun(self) -> bool:
        return (self.path / "config.json").is_file()

    def refuse_strangers(self) -> None:
        """Raise if the path is taken by something other than a run; nothing is touched."""
        found = files.kind(self.path)
        if found not in ("missing", "a folder"):
            raise HeadgateError(
                f"{str(self.path)!r} is {found or 'a file'}; expected a folder to write the run to"
            )
        if found == "missing" or self.begun:
            return
        ours = {*SMALL, "checkpoints", "metrics.jsonl"}  # left by a run that was killed as it started
        strangers = sorted(p.name for p in self.path.iterdir() if p.name[0] != "." and p.name not in ours)
        if strangers:
            raise HeadgateError(
                f"{str(self.path)!r} holds {strangers[0]!r} but no config.json, so it is not a run; "
                "choose another folder"
            )

    def claim(self, asked: Config, data: DataRecord, init: InitRecord | None = None) -> None:
        """Make the folder this run's own, or refuse if it is another's."""
        if self.begun:
            self.refuse_another(asked, data, init)
            files.own_folder(self.checkpoints)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        files.own_folder(self.checkpoints)
        tokenizer = Path(data.folder) / "tokenizer.json"
        if tokenizer.is_file():
            files.write_text(self.path / "tokenizer.json", files.read_text(tokenizer))
        config.save(data, self.path / "data.json")
        if init is not None:
            config.save(init, self.path / "init.json", seal=True)
        config.save(asked, self.path / "config.json")  # last: a folder that has it is complete

    def forget(self) -> None:
        """Remove what `claim` wrote, for a run that could not start."""
        self.close()
        for name in (*SMALL, "metrics.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.checkpoints.rmdir()

    def refuse_another(self, asked: Config, data: DataRecord, init: InitRecord | None) -> None:
        """Raise if the folder holds a run with other settings, data or first weights; nothing is touched."""
        begun, of = read_config(self.path), read_data(self.path)
        found = config.differences(config.to_dict(begun), config.to_dict(asked))
        before, now = config.to_dict(of), config.to_dict(data)
        found += config.differences(
            {k: v for k, v in before.items() if k != "folder"},
            {k: v for k, v in now.items() if k != "folder"},
            "data",
        )
        if found:
            raise HeadgateError(
                f"{str(self.path)!r} is a run with {'; '.join(found)}; choose another folder, or resume it "
                f"with its own settings: headgate train --out {self.path}"
            )
        self._refuse_another_init(init)

    def _refuse_another_init(self, init: InitRecord | None) -> None:
        """A resumed run need not repeat --init, but may not name other weights."""
        begun = self.init()
        if init is not None and (begun is None or begun.sha256 != init.sha256):
            what = "random weights" if begun is None else f"the weights of {begun.file!r}"
            raise HeadgateError(
                f"{str(self.path)!r} is a run that started from {what}, not from those of {init.file!r}; "
                "choose another folder, or drop --init"
            )

    def init(self) -> InitRecord | None:
        path = self.path / "init.json"
        return None if files.is_missing(path) else config.load(InitRecord, path)

    def check_metrics(self, size: int, digest: str) -> None:
        """Raise unless metrics.jsonl still begins with the bytes it had at a checkpoint."""
        path, found = self.path / "metrics.jsonl", xxhash.xxh3_128()
        with files.open_to_read(path) as file:
            while size and (piece := file.read(min(size, 1 << 20))):
                found.update(piece)
                size -= len(piece)
        if size or found.hexdigest() != digest:
            raise HeadgateError(f"{str(path)!r} has lost or changed lines of completed steps")

    def open_metrics(self, step: int) -> None:
        """Continue the metrics after `step`: lines of later steps, and any torn line, are cut off."""
        # Unbuffered: a line is written when it is logged, and none is left to fail again on closing.
        self._metrics = files.open_own(self.path / "metrics.jsonl")
        self._metrics.seek(0)
        self._metrics_bytes, self._metrics_digest = 0, xxhash.xxh3_128()
        lines = io.BufferedReader(self._metrics)
        for line in lines:
            values = _parse(line)
            if values is None or values["step"] > step:
                break
            self._count(line)
        lines.detach()
        self._metrics.truncate(self._metrics_bytes)

    def log(self, values: Mapping[str, Any]) -> None:
        assert self._metrics is not None
        line = (json.dumps(values, allow_nan=False) + "\n").encode()
        files.write_all(self._metrics, line)
        self._count(line)

    def _count(self, line: bytes) -> None:
        self._metrics_bytes += len(line)
        self._metrics_digest.update(line)

    def sync_metrics(self) -> tuple[int, str]:
        """Flush the metrics to disk; returns their length and digest."""
        assert self._metrics is not None
        os.fsync(self._metrics.fileno())
        return self._metrics_bytes, self._metrics_digest.hexdigest()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the end of the run, sealed, with the state of the metrics at that point."""
        size, digest = self.sync_metrics()
        whole = {**summary, "metrics_bytes": size, "metrics_digest": digest}
        files.write_sealed(self.summary, whole)

    def read_summary(self) -> dict[str, Any]:
        """The summary of a finished run; raises if it, or the metrics behind it, are no longer what was
        written."""
        again = "delete it, and the command that trained the run will write it again"
        try:
            summary = files.read_sealed(self.summary)
        except HeadgateError as error:
            raise HeadgateError(f"{error}; {again}") from error
        final = summary.get("final")
        missing = [name for name in IN_SUMMARY if name not in summary]
        missing += [name for name in IN_FINAL if not isinstance(final, dict) or name not in final]
        if missing:
            raise HeadgateError(f"{str(self.summary)!r} is damaged: it has no {missing[0]!r}; {again}")
        if "metrics_digest" in summary:
            try:
                self.check_metrics(summary["metrics_bytes"], summary["metrics_digest"])
            except HeadgateError as error:
                raise HeadgateError(
                    f"{error}; restore a copy, or delete {str(self.path)!r} and train it again"
                ) from error
        return summary

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def sweep(self) -> None:
        """Remove what a killed process was writing."""
        for left in [*self.checkpoints.glob(".*.tmp"), *self.path.glob(".*.tmp")]:
            if LEFTOVER.fullmatch(left.name):
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def read_config(run: str | os.PathLike[str]) -> Config:
    path = files.named(run, "the run folder") / "config.json"
    for needed in (path, path.with_name("data.json")):  # a converted model has a config.json too
        what = files.kind(needed)
        if what:
            raise HeadgateError(f"{str(run)!r} is not a run folder: {needed.name} in it is {what}")
    found = config.load(Config, path)
    require_registered(found.model, run)
    return found


def read_data(run: str | os.PathLike[str]) -> DataRecord:
    return config.load(DataRecord, Path(run) / "data.json")


def read_evaluations(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's metrics that hold an evaluation."""
    lines = [line for line in read_metrics(run) if "validation" in line]
    for line in lines:
        validation = line["validation"]
        if not {"tokens", "seconds", "gates"} <= line.keys() or "loss" not in (validation or ()):
            path = Path(run) / "metrics.jsonl"
            raise HeadgateError(f"{str(path)!r} is damaged at step {line['step']}: restore a copy of it")
    return lines


def read_metrics(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's metrics, leaving out one that is still being written."""
    path = Path(run) / "metrics.jsonl"
    if files.kind(path):
        return []
    lines = []
    with files.open_to_read(path) as file:
        for line in file:
            entry = _parse(line)
            if entry is None:
                break
            lines.append(entry)
    return lines


def last_step(run: str | os.PathLike[str]) -> int:
    """The step of the last complete line of a run's metrics, 0 if there is none; reads only the end."""
    try:
        with files.open_to_read(Path(run) / "metrics.jsonl") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65_536))
            lines = file.read().splitlines(keepends=True)
    except (OSError, HeadgateError):
        return 0
    found = (entry for line in reversed(lines) if (entry := _parse(line)) is not None)
    return int(next(found, {"step": 0})["step"])


def _parse(line: bytes) -> dict[str, Any] | None:
    """A complete line of metrics, or None if it is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None
