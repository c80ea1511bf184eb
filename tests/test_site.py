"""The pages of docs/ build as a site, without a warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra: pip install 'headgate[dev]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        name = "" if page.stem == "index" else page.stem
        assert (tmp_path / "site" / name / "index.html").is_file(), page.name
