"""The real files where they are, the command line run in this process, and chunks of a few texts."""

import os
import sys
from pathlib import Path

import pytest
from data_examples import Run

from headgate import cli
from headgate.data import workers

SHARED = Path(os.environ.get("HEADGATE_SHARED", Path(__file__).parents[3] / "shared"))


@pytest.fixture
def shared() -> Path:
    """The folder of real files; what needs it is not run without it."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("the shared data folder is absent (set HEADGATE_SHARED); not run")
    return folder


@pytest.fixture
def headgate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; returns its exit code, output and errors."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headgate", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHUNK_CHARACTERS", 1000)
