"""What a person sees of a study: one bar for all of its runs, and a line for each that ends."""

import math

from headgate.progress import Progress


class StudyProgress(Progress):
    def begin_runs(self, *, total: int, done: int, runs: int, left: int) -> None:
        """Training begins: `left` of `runs` runs, `done` of `total` steps."""
        self._steps, self._runs, self._ended = total, runs, runs - left
        self.begin(total, done)
        self.say(f"{runs} runs, {left} to train" if left else f"all {runs} runs are trained")

    def finished(self, name: str, loss: float) -> None:
        self._ended += 1
        outcome = f"validation loss {loss:.4f}" if math.isfinite(loss) else "its loss is not finite"
        self.say(f"{self._ended} of {self._runs} {name}: {outcome}")

    def failed(self, name: str, reason: str) -> None:
        self._ended += 1
        self.say(f"{self._ended} of {self._runs} {name}: FAILED: {reason}")

    def update_runs(self, done: int, running: list[str]) -> None:
        if running:
            self.update(done, f"{', '.join(running)[-60:]}: {done:,} of {self._steps:,} steps")
