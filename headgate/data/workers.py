"""Documents in chunks, tokenised by several threads and returned in reading order.

Threads rather than processes: the tokenizers library releases Python's lock while it works, and threads share
one tokenizer and its cache of words, where each process would fill a cache of its own.
"""

import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from headgate.data.sources import TextSource
from headgate.data.splits import document_key
from headgate.data.tokenizers import Tokenizer
from headgate.errors import HeadgateError
from headgate.machine import give_memory_back

CHUNK_CHARACTERS = 1 << 16


class Chunk(NamedTuple):
    """Some documents, and the place in the source right after them."""

    texts: list[str]
    places: list[str]
    """Where each of them is: its file and row."""
    file: int
    row: int
    """Rows of the file that are done; 0 at its start."""
    share: float
    """How much of the file has been read."""


class Encoded(NamedTuple):
    """The documents of a chunk, each closed by the end-of-text token."""

    tokens: np.ndarray
    """The tokens of all documents, one after another."""
    lengths: np.ndarray
    """The number of tokens in each."""
    sizes: np.ndarray
    """The bytes of each text."""
    keys: np.ndarray


def read_chunks(source: TextSource, file: int, row: int) -> Iterator[Chunk]:
    """The documents from a place on. A chunk ends with its file, unless files are one document each."""
    texts: list[str] = []
    places: list[str] = []
    size = 0
    for index in range(file, len(source.files)):
        current = source.files[index]
        for document in source.documents(current, after=row):
            texts.append(document.text)
            places.append(repr(current.name) if current.whole else f"{current.name!r}, row {document.row}")
            size += len(document.text)
            if size >= CHUNK_CHARACTERS and not current.whole:
                yield Chunk(texts, places, index, document.row, document.share)
                texts, places, size = [], [], 0
        row = 0
        is_last = index + 1 == len(source.files)
        if size >= CHUNK_CHARACTERS or is_last or not (current.whole and source.files[index + 1].whole):
            yield Chunk(texts, places, index + 1, 0, 0.0)
            texts, places, size = [], [], 0


def encode_in_order(
    chunks: Iterator[Chunk], tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Chunk, Encoded]]:
    """Each chunk with its tokens. If reading fails, everything read before is returned first."""
    with _one_thread_each(), ThreadPoolExecutor(workers, "headgate-worker") as pool:
        give_memory_back()
        pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
        end: StopIteration | HeadgateError | None = None
        try:
            while True:
                while end is None and len(pending) < 4 * workers:
                    try:
                        chunk = next(chunks)
                    except (StopIteration, HeadgateError) as error:
                        end = error
                    else:
                        pending.append((chunk, pool.submit(encode, tokenizer, chunk)))
                if not pending:
                    break
                chunk, future = pending.popleft()
                yield chunk, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
        if isinstance(end, HeadgateError):
            raise end


def encode(tokenizer: Tokenizer, chunk: Chunk) -> Encoded:
    data = [text.encode() for text in chunk.texts]
    try:
        pieces = tokenizer.encode(chunk.texts)
    except HeadgateError:
        _name_the_text(tokenizer, chunk)
        raise
    lengths = np.array([len(piece) + 1 for piece in pieces], dtype=np.int64)
    tokens = np.full(lengths.sum(), tokenizer.end_of_text_id, dtype=tokenizer.dtype)
    start = 0
    for piece in pieces:
        tokens[start : start + len(piece)] = piece
        start += len(piece) + 1
    if np.count_nonzero(tokens == tokenizer.end_of_text_id) > len(pieces):
        number = next(n for n, piece in enumerate(pieces) if tokenizer.end_of_text_id in piece)
        raise HeadgateError(
            f"{chunk.places[number]}: its text holds {tokenizer.end_of_text!r}, the token that is meant to "
            "end documents and nothing else; choose another with --end-of-text"
        )
    sizes = np.array([len(text) for text in data], dtype=np.int64)
    keys = np.array([document_key(text) for text in data], dtype=np.uint64)
    if sizes.sum() >= 8 * CHUNK_CHARACTERS:
        give_memory_back()
    return Encoded(tokens, lengths, sizes, keys)


def _name_the_text(tokenizer: Tokenizer, chunk: Chunk) -> None:
    """Raise for the first text of a chunk that cannot be encoded."""
    for text, place in zip(chunk.texts, chunk.places, strict=True):
        try:
            tokenizer.encode([text])
        except HeadgateError as error:
            raise HeadgateError(f"{place}: {error}") from error


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep the tokenizers library from starting its own threads beside the workers."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
