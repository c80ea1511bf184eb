"""From a source to a folder of token shards: split by the text itself, in parallel, and safe to interrupt.

One thread reads, the workers tokenise, and the reader appends their results in the source's order. Everything
that depends on order (repeats, limits, shards) happens there, so any number of workers writes the same bytes.
About once a second the files are flushed and `progress.json` records how far they reach; a later run cuts
them back to that record and continues. `manifest.json` comes last: a folder that has one is complete.
"""

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headgate import config, files
from headgate.data import shards
from headgate.data.folder import Checkpoint, PrepareState, begun, is_finished, remove, remove_all, writing
from headgate.data.shards import Manifest, ShardWriter
from headgate.data.sources import TextSource
from headgate.data.splits import Seen, Shares, document_key, require_training, split_of
from headgate.data.tokenizers import Tokenizer, definition_of, local_file, make_tokenizer
from headgate.data.workers import Encoded, encode_in_order, read_chunks
from headgate.errors import HeadgateError
from headgate.machine import cores
from headgate.progress import Progress
from headgate.version import __version__

COMMIT_SECONDS = 1.0
TRAINING_BYTES = 256 << 20
"""What `bpe:N` learns from: at most this much of the training split, from its beginning."""


@dataclass(frozen=True)
class Request:
    """What `prepare` is asked for: the same request of the same source writes the same bytes."""

    source: str
    tokenizer: str = "bpe:4096"
    text_column: str = "text"
    splits: Shares = (80, 10, 10)
    dedup: bool = False
    """Drop repeated texts."""
    max_tokens: int | None = None
    """Stop at the document that reaches this many, over all splits."""
    end_of_text: str | None = None
    """The token that closes each document; the tokenizer's own when None."""
    separator: str | None = None
    """The text between two documents of a text file; None makes the file one document."""

    def __post_init__(self) -> None:
        if self.separator == "":
            raise HeadgateError("--separator is empty; give the text between two documents, such as '\\n\\n'")
        config.require_at_least(self, 1, "max_tokens")
        require_training(self.splits)


def prepare(request: Request, out: str | os.PathLike[str], *, workers: int | None = None) -> Manifest:
    """Write the shards that `request` describes into `out`, or continue where an earlier call was stopped."""
    if workers is not None and workers < 1:
        raise HeadgateError(f"workers={workers} is too small; expected at least 1")
    folder = files.named(out, "the folder to write")
    source = TextSource(
        request.source, text_column=request.text_column, separator=request.separator, out=folder
    )
    if is_finished(folder):  # perhaps on a read-only disk
        return _finished(request, source, folder)
    with writing(folder):
        return _prepare(request, source, folder, workers or cores())


def _finished(request: Request, source: TextSource, folder: Path) -> Manifest:
    """The manifest of a finished folder, if it matches this request and its files are all there."""
    manifest = shards.check_data(folder, verify=False)
    assert manifest is not None
    _refuse_another(folder, request, manifest.request, source)
    return manifest


def _prepare(request: Request, source: TextSource, folder: Path, workers: int) -> Manifest:
    if (folder / "manifest.json").exists():
        manifest = _finished(request, source, folder)
        remove(folder, "keys.tmp", "progress.json")
        return manifest
    progress = _resume(folder, request, source)
    config.save(progress, folder / "progress.json", seal=True)
    try:
        with Progress(1.0) as display:
            if len(source.files) == 1 and source.files[0].whole:
                display.say(
                    f"{source.files[0].name!r} is one document, which goes into one split as a whole; "
                    "--separator '\\n\\n' would make each paragraph a document"
                )
            tokenizer = _tokenizer(folder, request, source, progress.end_of_text, display)
            progress = replace(progress, end_of_text=tokenizer.end_of_text)
            config.save(progress, folder / "progress.json", seal=True)
            listing = (json.dumps({"name": file.name, "size": file.size}) for file in source.files)
            files.write_text(folder / "sources.jsonl", "".join(f"{line}\n" for line in listing))
            if not progress.finished:
                progress = _write_shards(folder, request, source, tokenizer, progress, workers, display)
    finally:
        note = folder / "progress.json"
        if note.exists() and not config.load(PrepareState, note).now.documents:
            remove_all(folder)
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
        splits=tuple(shards.publish(folder, split, tokenizer.dtype) for split in progress.now.splits),
    )
    config.save(manifest, folder / "manifest.json", seal=True)
    remove(folder, "keys.tmp", "progress.json")
    return manifest


def _resume(folder: Path, request: Request, source: TextSource) -> PrepareState:
    """How far an earlier run came, or the start."""
    progress = begun(folder)
    if progress is None:
        return PrepareState(config.to_dict(request))
    now = progress.now
    _refuse_another(folder, request, progress.request, source, None if progress.finished else now.file)
    in_file = now.row and not progress.finished
    current = source.files[now.file] if now.file < len(source.files) else None
    if in_file and (current is None or source.fingerprint(current) != progress.fingerprint):
        return replace(progress, now=progress.file_start)
    return progress


def _refuse_another(
    folder: Path,
    request: Request,
    begun: Mapping[str, Any],
    source: TextSource,
    files_done: int | None = None,
) -> None:
    """Raise, naming the difference, unless this asks for what the folder was started with."""
    asked = config.to_dict(request)
    differences = [
        f"{name}={begun.get(name)!r}, not {'none' if value is None else repr(value)}"
        for name, value in asked.items()
        if begun.get(name) != value
    ]
    given, copy = local_file(request.tokenizer), folder / "tokenizer.json"
    if not differences and given and copy.exists() and definition_of(given) != files.read_text(copy):
        differences = [f"a different {str(given)!r}, whose contents have changed since"]
    if not differences and (folder / "sources.jsonl").exists():
        before = _listed(folder / "sources.jsonl")[:files_done]
        now = [(file.name, file.size) for file in source.files][:files_done]
        if before != now:
            name, size = next(entry for entry in [*before, *now] if (entry in before) != (entry in now))
            was = "with" if (name, size) in before else "without"
            differences = [f"a source {was} {name!r} of {size} bytes"]
    if differences:
        raise HeadgateError(
            f"{str(folder)!r} was started with {'; '.join(differences)}; choose another folder or delete it"
        )


def _listed(path: Path) -> list[tuple[str, int]]:
    """Names and sizes of the files in the source."""
    try:
        lines = files.read_text(path).splitlines()
        return [(entry["name"], entry["size"]) for entry in map(json.loads, lines)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HeadgateError(f"{path} is damaged; {shards.AGAIN}") from error


def _tokenizer(
    folder: Path, request: Request, source: TextSource, end_of_text: str, display: Progress
) -> Tokenizer:
    """The folder's tokenizer; made and kept there unless it already was, as its closing token shows."""
    path = folder / "tokenizer.json"
    if end_of_text:
        return Tokenizer.of_file(path, end_of_text=end_of_text)
    if request.tokenizer.startswith("bpe:"):
        display.say(f"training {request.tokenizer} on the training split")
    limit = min(TRAINING_BYTES, 4 * (request.max_tokens or TRAINING_BYTES))
    goal = min(limit, max(1, sum(file.size for file in source.files)))

    def training_texts() -> Iterator[str]:
        done = 0
        for text in _training_texts(source, request.splits, limit):
            done += len(text)
            display.update(min(done / goal, 1.0), f"reading text to train {request.tokenizer}", MB=done / 1e6)
            yield text
        display.say(f"{done / 1e6:,.1f} MB read; merging pairs into {request.tokenizer}")

    tokenizer = make_tokenizer(
        request.tokenizer, end_of_text=request.end_of_text, training_texts=training_texts
    )
    display.begin(1.0)
    files.write_text(path, tokenizer.definition)
    return tokenizer


def _training_texts(source: TextSource, shares: Shares, limit: int) -> Iterator[str]:
    left, found = limit, False
    for file in source.files:
        for document in source.documents(file):
            data, found = document.text.encode(), True
            if split_of(np.array([document_key(data)], dtype=np.uint64), shares)[0] == 0:
                yield document.text
                left -= len(data)
                if left <= 0:
                    return
    if left == limit and found:
        raise HeadgateError(
            f"no text of source {source.given!r} falls into the training split of --splits "
            f"{'/'.join(map(str, shares))}; give training a larger share, or add more text"
        )
    if not found:
        raise HeadgateError(f"source {source.given!r} is empty: its files hold no documents")


def _write_shards(
    folder: Path,
    request: Request,
    source: TextSource,
    tokenizer: Tokenizer,
    progress: PrepareState,
    workers: int,
    display: Progress,
) -> PrepareState:
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

        def commit(progress: PrepareState) -> None:
            for writer in writers:
                writer.flush()
            if seen:
                seen.flush()
            if progress.now.row:
                progress = replace(progress, fingerprint=source.fingerprint(source.files[progress.now.file]))
            config.save(progress, folder / "progress.json", seal=True)

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
                megabytes = sum(split.bytes for split in now.splits) / 1e6
                display.update(
                    min(max(shares), 1.0), f"{now.documents:,} documents", MB=megabytes, tokens=now.tokens
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
    """Write the wanted documents to their splits; returns how many repeats were dropped."""
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
