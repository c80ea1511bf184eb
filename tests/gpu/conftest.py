"""The GPU that is not there, compiled once for all workers."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def absent_gpu(share: Callable[[str, Callable[[Path], None]], Path]) -> Callable[[str], Path]:
    """Compiles the stand-in for a device, "cuda" or "mps", once."""
    if sys.platform != "linux" or shutil.which("c++") is None:
        pytest.skip("the modes on a GPU were not tested: their stand-in needs Linux and a C++ compiler")
    from absent import build

    def of(device: str) -> Path:
        return share(f"absent-{device}", lambda home: build(home, device) and None) / f"absent_{device}.so"

    return of
