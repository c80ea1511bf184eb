"""What a person sees of a study: one live line, and one line that stays for each phase.

A run that ends well is counted, not listed: there may be hundreds, and the answer comes last. One that fails
or diverges gets its own line.
"""

import math
import time

from headgate.progress import Progress, duration


class StudyProgress(Progress):
    _phase = ""

    def phase(self, name: str) -> None:
        """What follows belongs to this phase: controls, tuning, judging, ladder or costs."""
        self._phase = f"{name}: "

    def note(self, words: str) -> None:
        """A line of this phase that stays."""
        self.say(f"{self._phase}{words}")

    def doing(self, words: str) -> None:
        self.now(f"{self._phase}{words}")

    def begin_runs(self, *, total: int, done: int, runs: int, left: int) -> None:
        """Training starts: `left` of `runs` runs, `done` of `total` steps."""
        self._runs, self._left, self._ended, self._failed = runs, left, runs - left, 0
        self._last, self._began = "", time.monotonic()
        self.begin(total, done)
        if not left:
            self.note(f"all {runs} runs are trained")

    def finished(self, name: str, loss: float) -> None:
        self._last = f", last {name}: {loss:.4f}"
        if not math.isfinite(loss):
            self._last = ""
            self.note(f"{name}: its loss is not finite")
        self._end()

    def failed(self, name: str, reason: str) -> None:
        self._failed += 1
        self.note(f"{name}: FAILED: {reason}")
        self._end()

    def update_runs(self, done: int) -> None:
        self.update(done, f"{self._phase}{self._ended} of {self._runs} runs{self._last}")

    def _end(self) -> None:
        self._ended += 1
        if self._ended == self._runs:
            failed = f", {self._failed} failed" if self._failed else ""
            self.note(f"{self._left} runs trained in {duration(time.monotonic() - self._began)}{failed}")
