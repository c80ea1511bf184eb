"""What the user sees of a run: a live line on a terminal, a plain line now and then elsewhere."""

import json
import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

LIVE_SECONDS = 0.1
PLAIN_SECONDS = 10.0


class Display:
    """Loss, tokens/s and the time left."""

    def __init__(self, steps: int, first: int, *, shown: bool) -> None:
        self._console = Console(stderr=True, quiet=not shown, highlight=False, soft_wrap=True)
        # No thread of its own: it would take the time of the threads that compute.
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            console=self._console, auto_refresh=False, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._steps = steps
        self._task = self._bar.add_task("", total=steps, completed=first)
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=64)
        self._shown = time.monotonic()
        self._bar.start()

    def close(self) -> None:
        self._bar.stop()

    def say(self, words: str) -> None:
        """A line that stays."""
        self._console.print(words, markup=False)

    def update(self, step: int, tokens: int, loss: float | None) -> None:
        now = time.monotonic()
        self._recent.append((now, step, tokens))
        if now - self._shown < (LIVE_SECONDS if self._console.is_terminal else PLAIN_SECONDS):
            return
        self._shown = now
        begun, first_step, first_tokens = self._recent[0]
        seconds = max(now - begun, 1e-9)
        left = seconds * (self._steps - step) / max(step - first_step, 1)
        words = (
            f"step {step:,} of {self._steps:,}, loss {'not finite' if loss is None else f'{loss:.3f}'}, "
            f"{(tokens - first_tokens) / seconds:,.0f} tokens/s, {duration(left)} left"
        )
        if self._console.is_terminal:
            self._bar.update(self._task, description=words, completed=step)
            self._bar.refresh()
        else:
            self._console.print(words, markup=False)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def print_evaluation(result: dict[str, Any], *, as_json: bool) -> None:
    """An evaluation of `evaluate_run`, for a person or for a program."""
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return
    print(
        f"{result['run']}, {result['checkpoint']}: split {result['split']}, {result['tokens']:,} tokens\n"
        f"loss {_number(result['loss'])}, perplexity {_number(result['perplexity'])}, "
        f"bits per byte {_number(result['bits_per_byte'])}"
    )
    table = Table("position in the context", "loss", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for place in result["by_position"]:
        positions = f"{place['first']:,}" + (
            f"-{place['end'] - 1:,}" if place["end"] - place["first"] > 1 else ""
        )
        table.add_row(positions, _number(place["loss"]))
    console = Console()
    console.print(table)
    if result["answers"]:
        print(f"answers: {result['answers']['accuracy']:.1%} right")
        table = Table("distance", "answers", "loss", "right", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for place in result["answers"]["by_distance"]:
            cells = (f"{place['tokens']:,}", _number(place["loss"]), f"{place['accuracy']:.1%}")
            table.add_row(f"{place['first']:,}-{place['end'] - 1:,}", *cells)
        console.print(table)
    if result["gates"]:
        table = Table("layer", "gate's mean", "spread", "below 0.1", "above 0.9", box=None, pad_edge=False)
        for gate in result["gates"]:
            shares = (f"{gate[name]:.0%}" for name in ("below_01", "above_09"))
            table.add_row(str(gate["layer"]), _number(gate["mean"]), _number(gate["spread"]), *shares)
        console.print(table)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
