"""The run folder: whose it is, what was asked for, and the metrics as they happen.

config.json      what decides the result, as `headgate.config.Config`
data.json        which tokens it was trained on
init.json        which weights it began with, where it was told to begin with some
tokenizer.json   a copy, so that the model can be used without the data
metrics.jsonl    one JSON object a step
checkpoints/     step-N, the latest ones and the best
summary.json     at the end
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from headgate import config, files
from headgate.config import Config
from headgate.data.loader import Windows
from headgate.data.shards import Split, read_manifest
from headgate.errors import HeadgateError
from headgate.mechanisms.contract import require_registered
from headgate.model.decoder import model_file

WALL_CLOCK = ("seconds", "tokens_per_second", "memory_peak")
"""The fields of a metrics line that the machine decides; all others come out the same in every run."""


@dataclass(frozen=True)
class DataRecord:
    """Which tokens a run is trained on."""

    folder: str
    """Where they were; they may move."""
    fingerprint: str
    """Of the shards' checksums, or of their names and sizes where there are none."""
    vocab_size: int | None
    """Entries of the tokenizer; unknown without a manifest."""
    train_tokens: int
    val_tokens: int


@dataclass(frozen=True)
class InitRecord:
    """Which weights a run begins with, instead of random ones."""

    file: str
    """Where they were; needed again only if the run stops before its first checkpoint."""
    sha256: str


def describe_init(path: str | os.PathLike[str]) -> InitRecord:
    file = model_file(path).resolve()
    with file.open("rb") as opened:
        return InitRecord(str(file), hashlib.file_digest(opened, "sha256").hexdigest())


def describe_data(folder: str | os.PathLike[str], train: Split, val: Split) -> DataRecord:
    manifest = read_manifest(folder)
    told: list[Any]
    if manifest is None:
        told = [[shard.path.name, shard.tokens] for split in (train, val) for shard in split.shards]
    else:
        shards = (shard for split in manifest.splits for shard in split.shards)
        told = [[manifest.tokenizer.sha256], *([*sorted(shard.sha256.items())] for shard in shards)]
    return DataRecord(
        folder=str(Path(folder).resolve()),
        fingerprint=hashlib.sha256(json.dumps(told).encode()).hexdigest(),
        vocab_size=None if manifest is None else manifest.tokenizer.vocab_size,
        train_tokens=train.tokens,
        val_tokens=val.tokens,
    )


def check_fit(asked: Config, record: DataRecord, *splits: Split) -> None:
    """Raise, before anything is written, if the model has too few entries or a split too few tokens."""
    if record.vocab_size is not None and asked.model.vocab_size < record.vocab_size:
        raise HeadgateError(
            f"model.vocab_size={asked.model.vocab_size} is too small for the data, whose tokenizer has "
            f"{record.vocab_size} entries; add model.vocab_size={record.vocab_size}"
        )
    for split in splits:
        Windows(split, asked.train.context)


class RunFolder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.json"
        self._metrics: IO[bytes] | None = None

    def refuse_strangers(self) -> None:
        """Raise if the path is taken by something that is no run; nothing is touched."""
        if self.path.exists() and not self.path.is_dir():
            raise HeadgateError(f"{str(self.path)!r} is a file; expected a folder to write the run to")
        if not self.path.is_dir() or (self.path / "config.json").is_file():
            return
        ours = {
            "data.json",
            "init.json",
            "tokenizer.json",
            "checkpoints",
        }  # of a run that was killed as it began
        strangers = sorted(p.name for p in self.path.iterdir() if p.name[0] != "." and p.name not in ours)
        if strangers:
            raise HeadgateError(
                f"{str(self.path)!r} holds {strangers[0]!r} and no config.json, so it is no run; "
                "choose another folder"
            )

    def claim(self, asked: Config, data: DataRecord, init: InitRecord | None = None) -> None:
        """Make the folder this run's own, or refuse when it is another's."""
        if (self.path / "config.json").is_file():
            self._refuse_another(asked, data)
            self._refuse_another_init(init)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        tokenizer = Path(data.folder) / "tokenizer.json"
        if tokenizer.is_file():
            files.write_text(self.path / "tokenizer.json", tokenizer.read_text(encoding="utf-8"))
        config.save(data, self.path / "data.json")
        if init is not None:
            config.save(init, self.path / "init.json")
        config.save(asked, self.path / "config.json")  # last: a folder that has it is whole

    def _refuse_another(self, asked: Config, data: DataRecord) -> None:
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
                f"{str(self.path)!r} is a run with {'; '.join(found)}; choose another folder, or go on with "
                f"its own settings: headgate train --out {self.path}"
            )

    def _refuse_another_init(self, init: InitRecord | None) -> None:
        """A run that is gone on with may leave its first weights unsaid, but not name others."""
        begun = self.init()
        if init is not None and (begun is None or begun.sha256 != init.sha256):
            what = "random weights" if begun is None else f"the weights of {begun.file!r}"
            raise HeadgateError(
                f"{str(self.path)!r} is a run that began with {what}, and not with those of {init.file!r}; "
                "choose another folder, or leave --init out"
            )

    def init(self) -> InitRecord | None:
        path = self.path / "init.json"
        return config.load(InitRecord, path) if path.is_file() else None

    def open_metrics(self, step: int) -> None:
        """Go on with the metrics after `step`: what is told of later steps, and a torn line, is cut off."""
        path = self.path / "metrics.jsonl"
        file = path.open("a+b")
        file.seek(0)
        end = 0
        for line in file:
            told = _parse(line)
            if told is None or told["step"] > step:
                break
            end += len(line)
        file.truncate(end)
        file.close()
        # Without a buffer: a line is out when it is told, and none is left to fail again on closing.
        self._metrics = path.open("ab", buffering=0)

    def log(self, line: Mapping[str, Any]) -> None:
        assert self._metrics is not None
        self._metrics.write((json.dumps(line, allow_nan=False) + "\n").encode())

    def sync_metrics(self) -> None:
        assert self._metrics is not None
        os.fsync(self._metrics.fileno())

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def sweep(self) -> None:
        """Remove what a killed process was writing."""
        for left in [*self.checkpoints.glob(".*.tmp"), *self.path.glob(".*.tmp")]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def read_config(run: str | os.PathLike[str]) -> Config:
    path = Path(run) / "config.json"
    for needed in (path, path.with_name("data.json")):  # a converted model has a config.json too
        if not needed.is_file():
            raise HeadgateError(f"{str(run)!r} is no run folder: it has no {needed.name}")
    found = config.load(Config, path)
    require_registered(found.model, run)
    return found


def read_data(run: str | os.PathLike[str]) -> DataRecord:
    return config.load(DataRecord, Path(run) / "data.json")


def read_metrics(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's metrics; a line that is being written just now is left out."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = []
    with path.open("rb") as file:
        for line in file:
            told = _parse(line)
            if told is None:
                break
            lines.append(told)
    return lines


def last_step(run: str | os.PathLike[str]) -> int:
    """The step of the last whole line of a run's metrics, 0 if there is none; reads no more than the end."""
    try:
        with (Path(run) / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65_536))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return 0
    found = (told for line in reversed(lines) if (told := _parse(line)) is not None)
    return int(next(found, {"step": 0})["step"])


def _parse(line: bytes) -> dict[str, Any] | None:
    """A whole line of metrics, or None if it is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) and isinstance(told.get("step"), int) else None
