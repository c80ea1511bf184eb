"""A job: one run of a study, as `headgate train` is asked for it; and what carries jobs out.

A study is lists of jobs, phase after phase. What has been done stands in the run folders alone, so a list may
name jobs that are finished, and a study that was stopped makes the same lists again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headgate.compare.progress import StudyProgress
from headgate.compare.variants import Variant
from headgate.train.checkpoint import saved_steps
from headgate.train.folder import RunFolder


@dataclass(frozen=True, eq=False)
class Job:
    """A run of a variant with a seed."""

    variant: Variant
    seed: int
    folder: Path
    log: Path
    steps: int
    """Of its schedule."""
    settings: tuple[str, ...] = ()
    """Changes to the study's config, beside the mechanism and the seed."""
    until: int | None = None
    """Stop after this step, to be resumed or not."""
    purpose: str = ""
    """What it is for, if not to be judged."""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.purpose, self.variant.label, f"seed {self.seed}")))

    @property
    def end(self) -> int:
        return self.steps if self.until is None else min(self.until, self.steps)

    @property
    def finished(self) -> bool:
        if (self.folder / "summary.json").is_file():
            return True
        return self.end < self.steps and max(saved_steps(RunFolder(self.folder)), default=0) >= self.end

    def command(self, study_folder: Path, data: str) -> list[str]:
        """The words after `headgate` that train it."""
        words = ["train", str(study_folder / "config.json"), "--data", data, "--out", str(self.folder)]
        words += [f"model.mechanism={self.variant.pattern}", f"seed={self.seed}", *self.settings]
        return words if self.end == self.steps else [*words, "--until", str(self.end)]


class Executor(Protocol):
    """Carries jobs out, several at once. Everything it has to know stands in the study folder."""

    def run(self, jobs: Sequence[Job], progress: StudyProgress) -> list[Job]:
        """Train those that are not finished, in this order; one that fails does not stop the others. Returns
        those that failed."""
        ...


def failure(log: Path) -> str:
    """Why a run failed: the last line its process wrote."""
    if not log.is_file():
        return "it was not started"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it wrote nothing").removeprefix("headgate: ")
