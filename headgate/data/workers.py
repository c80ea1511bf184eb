"""Documents in chunks, tokenised by several threads, handed back in the order in which they were read.

Threads and not processes: the tokenizers library lets go of Python's lock while it works, and threads share
one tokenizer with the words it remembers, where each process would fill a memory of its own.
"""

import ctypes
import os
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from headgate.data.sources import Source
from headgate.data.splits import document_key
from headgate.data.tokenizers import Tokenizer
from headgate.errors import HeadgateError

CHUNK_CHARACTERS = 1 << 16


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Chunk(NamedTuple):
    """Some documents, and the place in the source right after them."""

    texts: list[str]
    file: int
    row: int
    """Rows of the file that are done with; 0 at the beginning of one."""
    share: float
    """How much of the file has been read."""


class Encoded(NamedTuple):
    """The documents of a chunk, each closed by the end-of-text token."""

    tokens: np.ndarray
    """Of all documents, one after another."""
    lengths: np.ndarray
    """Tokens of each."""
    sizes: np.ndarray
    """Bytes of each text."""
    keys: np.ndarray


def read_chunks(source: Source, file: int, row: int) -> Iterator[Chunk]:
    """The documents from a place on. A chunk ends with its file, but for files of one document each."""
    texts: list[str] = []
    size = 0
    for index in range(file, len(source.files)):
        for document in source.documents(source.files[index], after=row):
            texts.append(document.text)
            size += len(document.text)
            if size >= CHUNK_CHARACTERS and not source.files[index].whole:
                yield Chunk(texts, index, document.row, document.share)
                texts, size = [], 0
        row = 0
        is_last = index + 1 == len(source.files)
        if (
            size >= CHUNK_CHARACTERS
            or is_last
            or not (source.files[index].whole and source.files[index + 1].whole)
        ):
            yield Chunk(texts, index + 1, 0, 0.0)
            texts, size = [], 0


def encode_in_order(
    chunks: Iterator[Chunk], tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Chunk, Encoded]]:
    """Each chunk with its tokens. Should reading fail, all that was read before is handed back first."""
    with _one_thread_each(), ThreadPoolExecutor(workers, "headgate-worker") as pool:
        _give_memory_back()
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
                        pending.append((chunk, pool.submit(encode, tokenizer, chunk.texts)))
                if not pending:
                    break
                chunk, future = pending.popleft()
                yield chunk, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
        if isinstance(end, HeadgateError):
            raise end


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Encoded:
    data = [text.encode() for text in texts]
    pieces = tokenizer.encode(texts)
    lengths = np.array([len(piece) + 1 for piece in pieces], dtype=np.int64)
    tokens = np.full(lengths.sum(), tokenizer.end_of_text_id, dtype=tokenizer.dtype)
    start = 0
    for piece in pieces:
        tokens[start : start + len(piece)] = piece
        start += len(piece) + 1
    sizes = np.array([len(text) for text in data], dtype=np.int64)
    keys = np.array([document_key(text) for text in data], dtype=np.uint64)
    if sizes.sum() >= 8 * CHUNK_CHARACTERS:
        _give_memory_back()
    return Encoded(tokens, lengths, sizes, keys)


def _give_memory_back() -> None:
    """Return freed memory to the system; glibc would keep what a long document or a tokenizer.json took."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep the tokenizers library from starting threads of its own beside the workers."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
