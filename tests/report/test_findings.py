"""The tables of the findings are what the results beside them say."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from waiting import HANG

from headgate.report.page import page
from headgate.report.reading import read_results

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "first"
TABLES = STUDY / "tables.py"


def check(tables: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tables), "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG)


def test_the_pages_agree_with_their_results() -> None:
    assert check(TABLES).stderr == ""


def test_a_figure_changed_by_hand_is_found(tmp_path: Path) -> None:
    docs, study = tmp_path / "docs", tmp_path / "studies" / "first"
    docs.mkdir()
    (study / "results").mkdir(parents=True)
    shutil.copytree(STUDY / "results" / "text", study / "results" / "text")
    copy = Path(shutil.copy(TABLES, study))
    page = "before\n<!-- table short -->\n\n| stale |\n\n<!-- end -->\nafter\n"
    (docs / "findings.md").write_text(page, encoding="utf-8")
    (tmp_path / "README.md").write_text("no table\n", encoding="utf-8")
    found = check(copy)
    assert found.returncode == 1
    assert "tables of findings.md are not what the results say" in found.stderr
    subprocess.run([sys.executable, str(copy)], check=True, timeout=HANG)
    filled = (docs / "findings.md").read_text(encoding="utf-8")
    assert filled.startswith("before\n<!-- table short -->\n\n|  | loss |")
    assert filled.endswith("<!-- end -->\nafter\n")
    assert check(copy).returncode == 0


def test_the_page_is_that_of_the_results() -> None:
    """`headgate report studies/first/results/text` makes it again."""
    folder = STUDY / "results" / "text"
    committed = (folder / "report.html").read_text(encoding="utf-8")
    for name in ("README.md", "docs/findings.md"):
        assert "studies/first/results/text/report.html)" in (ROOT / name).read_text(encoding="utf-8")
    made = page(read_results(folder), ["results.json", "results.csv", "results.md"])
    for part in (
        r"<h1>.*?</h1>",
        r'<p class="caution">.*?</p>',
        r"<table class=\"cards result\">.*?</table>",
    ):
        old, new = (re.findall(part, text, flags=re.DOTALL) for text in (committed, made))
        assert old == new != []
