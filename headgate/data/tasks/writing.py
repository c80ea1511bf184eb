"""Writes a task as a prepared folder: token shards with the answers in their loss mask, and a manifest."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from headgate import config, files
from headgate.data import shards
from headgate.data.answers import Level
from headgate.data.folder import PrepareState, begun, is_finished, remove, remove_all, writing
from headgate.data.shards import SPLITS, Manifest, ShardWriter, SplitState
from headgate.data.splits import Shares, require_training
from headgate.data.tasks.contract import DrawnTask, SyntheticTask
from headgate.data.tokenizers import END_OF_TEXT, Tokenizer
from headgate.errors import HeadgateError
from headgate.version import __version__

DEFAULT_SHARES = (80, 10, 10)


def prepare_task(task: SyntheticTask, source: str, out: Path, shares: Shares = DEFAULT_SHARES) -> Manifest:
    """Write the folder, whole or not at all; one that exists already must be the same."""
    if isinstance(task, DrawnTask) and shares != DEFAULT_SHARES:
        raise HeadgateError(
            f"source {source!r} does not take --splits; say how many with {task.name}:samples=N,held_out=N"
        )
    require_training(shares)
    out = files.named(out, "the folder to write")
    request = {"source": source, "tokenizer": task.name, **task.request}
    if not isinstance(task, DrawnTask):
        request["splits"] = list(shares)
    if is_finished(out):
        return _finished(out, request)
    with writing(out):
        if not (out / "manifest.json").exists():
            progress = begun(out)
            if progress is not None:
                _refuse_another(out, progress.request, request)
            config.save(PrepareState(request), out / "progress.json", seal=True)
            try:
                _write(task, request, shares, out)
            finally:
                if not (out / "manifest.json").exists():
                    remove_all(out)
        manifest = _finished(out, request)
        remove(out, "progress.json")
    return manifest


def _finished(out: Path, request: dict[str, object]) -> Manifest:
    manifest = shards.check_data(out, verify=False)
    assert manifest is not None
    _refuse_another(out, manifest.request, request)
    return manifest


def _refuse_another(out: Path, made: Mapping[str, object], request: dict[str, object]) -> None:
    found = config.differences(made, request)
    if found:
        raise HeadgateError(f"{str(out)!r} was made with {'; '.join(found)}; choose another folder")


def _write(task: SyntheticTask, request: dict[str, object], shares: Shares, folder: Path) -> None:
    tokenizer = Tokenizer(tokenizer_definition(task))
    files.write_text(folder / "tokenizer.json", tokenizer.definition)
    files.write_text(folder / "sources.jsonl", "")
    writers = {name: ShardWriter(folder, SplitState(name), tokenizer.dtype) for name in SPLITS}
    best = {split: np.zeros(3) for split in SPLITS}  # loss, right, answers
    for split, samples in task.parts(shares):
        marks = task.marks(samples)
        lengths = np.full(len(samples.tokens), task.context)
        writers[split].append(samples.tokens.ravel(), lengths, text_bytes=0, counted=marks.ravel())
        if split != "train":
            best[split] += np.array([*task.optimum(samples), np.count_nonzero(marks)])
    records = []
    for writer in writers.values():
        writer.flush()
        writer.close()
        records.append(shards.publish(folder, writer.state, tokenizer.dtype))
    manifest = Manifest(
        format=shards.FORMAT,
        headgate=__version__,
        request=request,
        sources=shards.SourcesRecord(files=0, bytes=0, sha256=shards.sha256(folder / "sources.jsonl")),
        tokenizer=shards.TokenizerRecord(
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            end_of_text_id=tokenizer.end_of_text_id,
            sha256=shards.sha256(folder / "tokenizer.json"),
        ),
        repeats_dropped=0,
        splits=tuple(records),
        task=task.record(_level(best["val"]), _level(best["test"])),
    )
    config.save(manifest, folder / "manifest.json", seal=True)


def _level(sums: np.ndarray) -> Level:
    """Rounded, because logarithms may differ in the last digit between machines."""
    loss, right, answers = map(float, sums)
    return Level(round(loss / answers, 6), round(right / answers, 6)) if answers else Level(0.0, 1.0)


def tokenizer_definition(task: SyntheticTask) -> str:
    """A tokenizer.json whose words are the tokens: the end of a text, then the task's own."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [END_OF_TEXT, *task.words]
    unknown = "n0" if "n0" in words else words[-1]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return str(tokenizer.to_str())
