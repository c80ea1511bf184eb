"""What a person sees of long work: a live bar on a terminal, an occasional plain line elsewhere."""

import time
from collections import deque
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console

LIVE_SECONDS, PLAIN_SECONDS = 0.1, 30.0
"""Seconds between lines: on a terminal, and elsewhere."""
LEAST_SHARE = 0.01
"""The share of the work after which the remaining time is worth showing."""
REMEMBERED = 300
"""Seconds over which speeds are averaged."""


class Progress:
    """How far the work has come, how fast it goes and when it will end."""

    def __init__(self, total: float = 0, done: float = 0, *, shown: bool = True) -> None:
        self._console = Console(stderr=True, quiet=not shown, highlight=False, soft_wrap=True)
        # No thread of its own, which would take time from the threads that compute.
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.percentage:>3.0f}%"),
            console=self._console,
            auto_refresh=False,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self.begin(total, done)

    def begin(self, total: float, done: float = 0) -> None:
        """Start work up to `total`, of which an earlier process did `done`."""
        self._total = total
        self._shown = time.monotonic()
        self._samples: deque[tuple[float, float, dict[str, float]]] = deque(maxlen=REMEMBERED)
        self._bar.update(self._task, total=total or None, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, words: str) -> None:
        """Print a line that stays."""
        self._console.print(words, markup=False)

    def now(self, words: str) -> None:
        """What is being done when nobody knows how long it takes: on a terminal in the live line, elsewhere
        as an occasional line."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=words, total=None)
            self._bar.refresh()
        elif time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            self.say(words)

    def update(self, done: float, words: str, **counters: float) -> None:
        """How much is done, also in words; for each counter, such as tokens, the speed is shown."""
        now = time.monotonic()
        if not self._samples or now - self._samples[-1][0] >= 1:
            self._samples.append((now, done, counters))
        live = self._console.is_terminal
        if now - self._shown < (LIVE_SECONDS if live else PLAIN_SECONDS):
            return
        self._shown = now
        begun, first, before = self._samples[0]
        seconds = max(now - begun, 1e-9)
        parts = [words]
        for name, count in counters.items():
            speed = (count - before[name]) / seconds
            parts.append(f"{speed:,.{0 if speed >= 100 else 1}f} {name}/s")
        rate = (done - first) / seconds
        known = rate > 0 and done - first >= LEAST_SHARE * self._total
        parts.append(f"{duration((self._total - done) / rate)} left" if known else "unknown time left")
        if live:
            self._bar.update(self._task, description=", ".join(parts), completed=done)
            self._bar.refresh()
        else:
            self.say(f"{done / (self._total or 1):4.0%}  {', '.join(parts)}")


DAY, YEAR = 86400, 365.25 * 86400


def duration(seconds: float) -> str:
    """A time in a suitable unit: 350 ms, 12.5 s, 3.2 min, 5.1 h, 2.4 days, 68 years."""
    unit, size = _unit(seconds)
    return f"{_figures(seconds / size)} {unit}"


def duration_range(low: float, high: float) -> str:
    """Two times in the unit that suits the longer, to the two figures an estimate has: 0.3 to 1.4 s."""
    unit, size = _unit(high)
    first, last = (
        f"{seconds / size:.2g}" if seconds < 10 * size else f"{seconds / size:,.0f}"
        for seconds in (low, high)
    )
    return f"{last} {unit}" if first == last else f"{first} to {last} {unit}"


def _figures(number: float) -> str:
    """Three figures, and all before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _unit(seconds: float) -> tuple[str, float]:
    units = (("ms", 1e-3, 1), ("s", 1, 120), ("min", 60, 7200), ("h", 3600, 48 * 3600), ("days", DAY, YEAR))
    return next(((unit, size) for unit, size, below in units if seconds < below), ("years", YEAR))


def table_console(width: int = 200) -> Console:
    """For tables: as wide as the terminal, or `width` in a file, which has no edge to wrap at."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)
