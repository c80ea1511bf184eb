"""What the user sees of a long prepare: a live bar on a terminal, a plain line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from headgate.data.shards import Manifest

PLAIN_SECONDS = 30.0


class Display:
    """Documents, MB/s, tokens/s and the time left."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        # No thread of its own: the workers are forked beside it.
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            console=self._console, auto_refresh=False, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=1.0)
        self._started: tuple[float, float, int, int] | None = None
        self._shown = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, words: str) -> None:
        """A step that has no measure."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=words)
            self._bar.refresh()
        else:
            self._console.print(words, highlight=False)

    def update(self, *, documents: int, text_bytes: int, tokens: int, share: float) -> None:
        """Totals up to now, and the share of the work that is done."""
        now = time.monotonic()
        if self._started is None:
            self._started = (now, share, text_bytes, tokens)
            return
        begun, first_share, first_bytes, first_tokens = self._started
        if now - self._shown < (0.1 if self._console.is_terminal else PLAIN_SECONDS):
            return
        self._shown = now
        seconds = max(now - begun, 1e-9)
        left = seconds * (1 - share) / (share - first_share) if share > first_share else float("inf")
        words = (
            f"{documents:,} documents, {(text_bytes - first_bytes) / seconds / 1e6:.1f} MB/s, "
            f"{(tokens - first_tokens) / seconds:,.0f} tokens/s, {_duration(left)} left"
        )
        self._bar.update(self._task, description=words, completed=share)
        self._bar.refresh()
        if not self._console.is_terminal:
            self._console.print(f"{share:4.0%}  {words}", highlight=False)


def print_summary(manifest: Manifest, folder: str) -> None:
    table = Table("split", "documents", "MB of text", "tokens", "bytes a token", "shards")
    for column in table.columns[1:]:
        column.justify = "right"
    for split in manifest.splits:
        ratio = f"{split.bytes / split.tokens:.2f}" if split.tokens else ""
        table.add_row(
            split.name,
            f"{split.documents:,}",
            f"{split.bytes / 1e6:.2f}",
            f"{split.tokens:,}",
            ratio,
            str(len(split.shards)),
        )
    Console().print(table)
    vocabulary, repeats = manifest.tokenizer.vocab_size, manifest.repeats_dropped
    print(f"{folder}: a vocabulary of {vocabulary:,} entries; {repeats:,} repeats were dropped")


def print_checked(manifest: Manifest | None, folder: str) -> None:
    if manifest is None:
        print(f"{folder}: sizes and indexes are sound; there is no manifest, so no checksums to verify")
    else:
        print_summary(manifest, folder)
        print(f"{folder}: every checksum and index is sound")


def _duration(seconds: float) -> str:
    if seconds == float("inf"):
        return "unknown time"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
