"""The process of one run of a study: `headgate train`, ended with SIGTERM if the study's own process dies."""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Linux tells a process when its parent is gone; elsewhere an orphan trains on, which does no harm."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the request
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.argv = ["headgate", *sys.argv[2:]]
    runpy.run_module("headgate", run_name="__main__")
