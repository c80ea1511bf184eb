"""What a person sees of a study: its phase, one bar for the runs of that, and a line for each that ends."""

import math

from headgate.progress import Progress


class StudyProgress(Progress):
    _phase = ""

    def phase(self, name: str) -> None:
        """What follows belongs to this phase: controls, tuning, judging, ladder or costs."""
        self._phase = f"{name}: "

    def note(self, words: str) -> None:
        self.say(f"{self._phase}{words}")

    def begin_runs(self, *, total: int, done: int, runs: int, left: int) -> None:
        """Training begins: `left` of `runs` runs, `done` of `total` steps."""
        self._steps, self._runs, self._ended = total, runs, runs - left
        self.begin(total, done)
        self.note(f"{runs} runs, {left} to train" if left else f"all {runs} runs are trained")

    def finished(self, name: str, loss: float) -> None:
        self._ended += 1
        outcome = f"validation loss {loss:.4f}" if math.isfinite(loss) else "its loss is not finite"
        self.note(f"{self._ended} of {self._runs} {name}: {outcome}")

    def failed(self, name: str, reason: str) -> None:
        self._ended += 1
        self.note(f"{self._ended} of {self._runs} {name}: FAILED: {reason}")

    def update_runs(self, done: int, running: list[str]) -> None:
        if running:
            self.update(done, f"{self._phase}{', '.join(running)[-60:]}: {done:,} of {self._steps:,} steps")
