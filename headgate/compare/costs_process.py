"""Measures a study's costs in a separate process, which a cluster puts on a machine by itself."""

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


def measure_study(folder: str) -> None:
    study_folder = StudyFolder(folder)
    study, base = study_folder.read()
    with StudyProgress() as progress:
        Phases(study_folder, study, base, NoRuns(), progress).costs(cores())


if __name__ == "__main__":
    measure_study(sys.argv[1])
