"""From a source to a folder of token shards: split by the text itself, in parallel, and safe to interrupt.

One thread reads, the workers tokenise, and the reader appends their results in the order of the source. All
that depends on order (repeats, limits, shards) happens there, so any number of workers writes the same bytes.
Every second or so the files are flushed and `progress.json` notes how far they reach; a later run cuts them
back to that note and goes on. `manifest.json` comes last: a folder that has one is whole.
"""

import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headgate import config
from headgate.data import shards
from headgate.data.progress import Display
from headgate.data.shards import SPLITS, Manifest, ShardWriter, SplitState
from headgate.data.sources import Source
from headgate.data.splits import Seen, Shares, document_key, split_of
from headgate.data.tokenizers import Tokenizer, local_file, make_tokenizer
from headgate.data.workers import Encoded, cores, encode_in_order, read_chunks
from headgate.errors import HeadgateError
from headgate.version import __version__

COMMIT_SECONDS = 1.0
TRAINING_BYTES = 256 << 20
"""What `bpe:N` learns from: at most so much of the training split, from its beginning."""


@dataclass(frozen=True)
class Request:
    """What is asked of `prepare`: the same request of the same source writes the same bytes."""

    source: str
    tokenizer: str = "bpe:4096"
    text_column: str = "text"
    splits: Shares = (80, 10, 10)
    dedup: bool = False
    """Drop the repeats of a text."""
    max_tokens: int | None = None
    """Stop with the document that reaches this many, over all splits."""
    end_of_text: str | None = None
    """The token that closes each document; the tokenizer's own when None."""

    def __post_init__(self) -> None:
        config.require_at_least(self, 1, "max_tokens")
        if self.splits[0] < 1 or min(self.splits) < 0:
            raise HeadgateError(f"splits={self.splits} leave nothing to train on; try (80, 10, 10)")


@dataclass(frozen=True)
class Checkpoint:
    """A place in the source, and what had been written when it was reached."""

    file: int = 0
    row: int = 0
    repeats: int = 0
    splits: tuple[SplitState, ...] = tuple(SplitState(name) for name in SPLITS)

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self.splits)

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits)


@dataclass(frozen=True)
class Progress:
    """What `progress.json` holds while the work is not done."""

    request: Mapping[str, Any]
    now: Checkpoint = Checkpoint()
    file_start: Checkpoint = Checkpoint()
    """Where to go back to if the file being read has changed meanwhile, as when a bad row was mended."""
    fingerprint: str = ""
    """Of the file being read."""
    end_of_text: str = ""
    """The tokenizer's closing token, once the folder has a tokenizer."""
    finished: bool = False


def prepare(request: Request, out: str | os.PathLike[str], *, workers: int | None = None) -> Manifest:
    """Write the shards that `request` describes into `out`, or continue where an earlier call was stopped."""
    if workers is not None and workers < 1:
        raise HeadgateError(f"workers={workers} is too small; expected at least 1")
    source = Source(request.source, text_column=request.text_column)
    folder = Path(out)
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadgateError(f"folder {str(folder)!r} cannot be made: {error.strerror}") from error
    try:
        with config.locked(folder, "prepared"):
            return _prepare(request, source, folder, workers or cores())
    except OSError as error:
        raise HeadgateError(
            f"{str(error.filename or folder)!r} cannot be written: {error.strerror}; what was done "
            "before is kept, and the same command continues from there"
        ) from error
    finally:
        if not existed and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _prepare(request: Request, source: Source, folder: Path, workers: int) -> Manifest:
    if (folder / "manifest.json").exists():
        manifest = config.load(Manifest, folder / "manifest.json")
        _refuse_another(folder, request, manifest.request, source)
        _remove(folder, "keys.tmp", "progress.json")
        return manifest
    progress = _resume(folder, request, source)
    config.save(progress, folder / "progress.json")
    try:
        with Display() as display:
            tokenizer = _tokenizer(folder, request, source, progress.end_of_text, display)
            progress = replace(progress, end_of_text=tokenizer.end_of_text)
            config.save(progress, folder / "progress.json")
            listing = (json.dumps({"name": file.name, "size": file.size}) for file in source.files)
            config.write_text(folder / "sources.jsonl", "".join(f"{line}\n" for line in listing))
            if not progress.finished:
                progress = _write_shards(folder, request, source, tokenizer, progress, workers, display)
    finally:
        if not config.load(Progress, folder / "progress.json").now.documents:
            _remove_all(folder)
    manifest = Manifest(
        format=shards.FORMAT,
        headgate=__version__,
        request=config.to_dict(request),
        sources=shards.SourcesRecord(
            files=len(source.files),
            bytes=sum(file.size for file in source.files),
            sha256=shards.sha256(folder / "sources.jsonl"),
        ),
        tokenizer=shards.TokenizerRecord(
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            end_of_text_id=tokenizer.end_of_text_id,
            sha256=shards.sha256(folder / "tokenizer.json"),
        ),
        repeats_dropped=progress.now.repeats,
        splits=tuple(shards.publish(folder, split) for split in progress.now.splits),
    )
    config.save(manifest, folder / "manifest.json")
    _remove(folder, "keys.tmp", "progress.json")
    return manifest


def _resume(folder: Path, request: Request, source: Source) -> Progress:
    """How far an earlier run came, or the beginning."""
    path = folder / "progress.json"
    if path.exists():
        progress = config.load(Progress, path)
        if progress.now.documents:
            now = progress.now
            _refuse_another(
                folder, request, progress.request, source, None if progress.finished else now.file
            )
            in_file = now.row and not progress.finished
            current = source.files[now.file] if now.file < len(source.files) else None
            if in_file and (current is None or source.fingerprint(current) != progress.fingerprint):
                return replace(progress, now=progress.file_start)
            return progress
        _remove_all(folder)
    _remove(folder)
    foreign = sorted(child.name for child in folder.iterdir() if child.name != ".lock")
    if foreign:
        raise HeadgateError(
            f"{str(folder)!r} holds {foreign[0]!r}, which is not of a prepare; choose another folder"
        )
    return Progress(config.to_dict(request))


def _refuse_another(
    folder: Path, request: Request, begun: Mapping[str, Any], source: Source, files_done: int | None = None
) -> None:
    """Raise, with the difference, unless this asks for what the folder was begun with."""
    asked = config.to_dict(request)
    differences = [
        f"{name}={begun.get(name)!r} and not {value!r}"
        for name, value in asked.items()
        if begun.get(name) != value
    ]
    given, copy = local_file(request.tokenizer), folder / "tokenizer.json"
    if not differences and given and copy.exists() and shards.sha256(given) != shards.sha256(copy):
        differences = [f"another {str(given)!r}, whose contents have changed since"]
    if not differences and (folder / "sources.jsonl").exists():
        lines = (folder / "sources.jsonl").read_text(encoding="utf-8").splitlines()
        before = [(entry["name"], entry["size"]) for entry in map(json.loads, lines)][:files_done]
        now = [(file.name, file.size) for file in source.files][:files_done]
        if before != now:
            name, size = next(entry for entry in [*before, *now] if (entry in before) != (entry in now))
            was = "with" if (name, size) in before else "without"
            differences = [f"a source {was} {name!r} of {size} bytes"]
    if differences:
        raise HeadgateError(
            f"{str(folder)!r} was begun with {', '.join(differences)}; choose another folder or delete it"
        )


def _tokenizer(
    folder: Path, request: Request, source: Source, end_of_text: str, display: Display
) -> Tokenizer:
    """The tokenizer of the folder; made, and kept there, unless it was before, as its closing token tells."""
    path = folder / "tokenizer.json"
    if end_of_text:
        return Tokenizer(path.read_text(encoding="utf-8"), end_of_text=end_of_text)
    if request.tokenizer.startswith("bpe:"):
        display.say(f"training {request.tokenizer} on the training split")
    limit = min(TRAINING_BYTES, 4 * (request.max_tokens or TRAINING_BYTES))
    tokenizer = make_tokenizer(
        request.tokenizer,
        end_of_text=request.end_of_text,
        training_texts=lambda: _training_texts(source, request.splits, limit),
    )
    config.write_text(path, tokenizer.definition)
    return tokenizer


def _training_texts(source: Source, shares: Shares, limit: int) -> Iterator[str]:
    left = limit
    for file in source.files:
        for document in source.documents(file):
            data = document.text.encode()
            if split_of(np.array([document_key(data)], dtype=np.uint64), shares)[0] == 0:
                yield document.text
                left -= len(data)
                if left <= 0:
                    return
    if left == limit:
        raise HeadgateError(f"source {source.given!r} is empty: it has no text for the training split")


def _write_shards(
    folder: Path,
    request: Request,
    source: Source,
    tokenizer: Tokenizer,
    progress: Progress,
    workers: int,
    display: Display,
) -> Progress:
    sizes = [file.size for file in source.files]
    starts = list(itertools.accumulate(sizes, initial=0))
    with ExitStack() as stack:
        writers = [
            stack.enter_context(closing(ShardWriter(folder, split, tokenizer.dtype)))
            for split in progress.now.splits
        ]
        seen = None
        if request.dedup:
            seen = stack.enter_context(closing(Seen(folder / "keys.tmp", progress.now.documents)))

        def commit(progress: Progress) -> None:
            for writer in writers:
                writer.flush()
            if seen:
                seen.flush()
            if progress.now.row:
                progress = replace(progress, fingerprint=source.fingerprint(source.files[progress.now.file]))
            config.save(progress, folder / "progress.json")

        display.say(f"tokenising {len(sizes):,} files, {starts[-1] / 1e6:,.1f} MB; workers: {workers}")
        chunks = read_chunks(source, progress.now.file, progress.now.row)
        results = stack.enter_context(closing(encode_in_order(chunks, tokenizer, workers)))
        committed = time.monotonic()
        try:
            for chunk, encoded in results:
                repeats = _append(encoded, request, progress.now.tokens, writers, seen)
                now = Checkpoint(
                    file=chunk.file,
                    row=chunk.row,
                    repeats=progress.now.repeats + repeats,
                    splits=tuple(writer.state for writer in writers),
                )
                progress = replace(progress, now=now, file_start=progress.file_start if chunk.row else now)
                in_file = chunk.share * sizes[chunk.file] if chunk.row else 0
                shares = [(starts[chunk.file] + in_file) / max(starts[-1], 1)]
                if request.max_tokens:
                    shares.append(now.tokens / request.max_tokens)
                display.update(
                    documents=now.documents,
                    text_bytes=sum(split.bytes for split in now.splits),
                    tokens=now.tokens,
                    share=min(max(shares), 1.0),
                )
                if request.max_tokens and now.tokens >= request.max_tokens:
                    break
                if time.monotonic() - committed >= COMMIT_SECONDS:
                    commit(progress)
                    committed = time.monotonic()
        except (HeadgateError, KeyboardInterrupt):
            commit(progress)
            raise
        if not progress.now.documents:
            raise HeadgateError(f"source {request.source!r} is empty: its files hold no documents")
        progress = replace(progress, finished=True)
        commit(progress)
    return progress


def _append(
    encoded: Encoded, request: Request, tokens: int, writers: list[ShardWriter], seen: Seen | None
) -> int:
    """Write the documents that are wanted to their splits; returns how many repeats were dropped."""
    keep = np.ones(len(encoded.keys), dtype=bool) if seen is None else seen.first_time(encoded.keys)
    repeats = ~keep
    if request.max_tokens is not None:
        before = tokens + np.cumsum(encoded.lengths * keep) - encoded.lengths * keep
        wanted = before < request.max_tokens
        keep, repeats = keep & wanted, repeats & wanted
    if seen is not None:
        seen.add(encoded.keys[keep])
    split = split_of(encoded.keys, request.splits)
    for number, writer in enumerate(writers):
        mine = keep & (split == number)
        writer.append(
            encoded.tokens[np.repeat(mine, encoded.lengths)],
            encoded.lengths[mine],
            text_bytes=int(encoded.sizes[mine].sum()),
        )
    return int(repeats.sum())


def _remove(folder: Path, *names: str) -> None:
    """Remove these files, and what an interrupted write of a small file left under its temporary name."""
    for path in [*folder.glob(".*.tmp"), *(folder / name for name in names)]:
        path.unlink(missing_ok=True)


def _remove_all(folder: Path) -> None:
    """Empty a folder in which no document has been kept yet; its mark of ownership goes last."""
    for name in SPLITS:
        shutil.rmtree(folder / name, ignore_errors=True)
    _remove(folder, "keys.tmp", "sources.jsonl", "tokenizer.json", "progress.json")
