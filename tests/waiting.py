"""Waiting for another process. A busy machine may take its time: the limits only end a test that hangs."""

import subprocess
import time
from collections.abc import Callable
from typing import Any

HANG = 1200.0  # seconds


def wait_until(happened: Callable[[], Any], process: "subprocess.Popen[str] | None" = None) -> None:
    """Return once it has happened; fail if the process that should bring it about ends before."""
    last = time.monotonic() + HANG
    while not happened():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < last, "this will not happen any more"
        time.sleep(0.02)
