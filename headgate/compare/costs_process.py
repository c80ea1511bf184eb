"""Measures a study's costs or steps in a separate process, which a cluster puts on a machine by itself."""

import sys
from collections.abc import Sequence

from headgate.compare.folder import StudyFolder
from headgate.compare.jobs import Job
from headgate.compare.progress import StudyProgress
from headgate.compare.study import Phases
from headgate.machine import cores


class NoRuns:
    """Stands in for an engine: nothing is trained here."""

    def run(self, jobs: Sequence[Job], progress: StudyProgress) -> list[Job]:
        raise AssertionError("measuring trains nothing")


def measure_study(folder: str, what: str) -> None:
    """`costs`, or `steps`: how many of them each variant gets if all get the same seconds."""
    study_folder = StudyFolder(folder)
    study, base = study_folder.read()
    with StudyProgress() as progress:
        phases = Phases(study_folder, study, base, NoRuns(), progress)
        if what == "costs":
            phases.costs(cores())
        else:
            phases.share_out_seconds()


if __name__ == "__main__":
    measure_study(*sys.argv[1:])
