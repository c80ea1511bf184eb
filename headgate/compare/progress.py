"""What the user sees of a study: one bar for all of it on a terminal, a line a run elsewhere."""

import math
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from headgate.train.progress import duration

PLAIN_SECONDS = 30.0


def output(width: int = 200) -> Console:
    """For tables: as wide as the terminal, or as `width` in a file, which has no edge to wrap at."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


class StudyDisplay:
    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            console=self._console, auto_refresh=False, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, visible=False)
        self._total = self._first = 0
        self._runs = self._settled = 0
        self._begun = self._shown = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, *, total: int, done: int, runs: int, left: int) -> None:
        """Training begins: `left` of `runs` runs, `done` of `total` steps."""
        self._total, self._first, self._runs, self._settled = total, done, runs, runs - left
        self._begun = self._shown = time.monotonic()
        self.say(f"{runs} runs, {left} to train" if left else f"all {runs} runs are trained")
        self._bar.update(self._task, total=total, completed=done, visible=left > 0)

    def say(self, words: str) -> None:
        self._console.print(words, markup=False)

    def finished(self, name: str, loss: float) -> None:
        self._settled += 1
        outcome = f"validation loss {loss:.4f}" if math.isfinite(loss) else "its loss is not finite"
        self.say(f"{self._settled} of {self._runs} {name}: {outcome}")

    def failed(self, name: str, reason: str) -> None:
        self._settled += 1
        self.say(f"{self._settled} of {self._runs} {name}: FAILED: {reason}")

    def update(self, done: int, running: list[str]) -> None:
        now = time.monotonic()
        if not self._console.is_terminal and now - self._shown < PLAIN_SECONDS:
            return
        self._shown = now
        seconds = now - self._begun
        left = "unknown time"
        if done > self._first:
            left = duration(seconds * (self._total - done) / (done - self._first))
        words = f"{', '.join(running)}: {done:,} of {self._total:,} steps, {left} left"
        if self._console.is_terminal:
            self._bar.update(self._task, description=words[-100:], completed=done)
            self._bar.refresh()
        elif running:
            self.say(words)
