"""The tables of the findings are what the results beside them say."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from waiting import HANG

from headgate.data.tasks.contract import TASKS as TASK_NAMES
from headgate.files import write_sealed
from headgate.mechanisms import MECHANISMS
from headgate.report.page import page
from headgate.report.reading import read_results, read_suite

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "first"
TABLES = STUDY / "tables.py"
TASKS = ROOT / "studies" / "tasks"


def check(tables: Path) -> subprocess.CompletedProcess[str]:
    return forked.run([tables, "--check"])


@pytest.mark.parametrize("study", ["first", "second", "tasks"])
def test_the_pages_agree_with_their_results(study: str) -> None:
    assert check(ROOT / "studies" / study / "tables.py").stdout == ""


def test_a_figure_changed_by_hand_is_found(tmp_path: Path) -> None:
    docs, study = tmp_path / "docs" / "findings", tmp_path / "studies" / "first"
    docs.mkdir(parents=True)
    (study / "results").mkdir(parents=True)
    shutil.copytree(STUDY / "results" / "text", study / "results" / "text")
    copy = Path(shutil.copy(TABLES, study))
    page = "before\n<!-- table short -->\n\n| stale |\n\n<!-- end -->\nafter\n"
    (docs / "first.md").write_text(page, encoding="utf-8")
    (tmp_path / "README.md").write_text("no table\n", encoding="utf-8")
    found = check(copy)
    assert found.returncode == 1
    assert "tables of first.md are not what the results say" in found.stdout
    assert forked.run([copy]).returncode == 0
    filled = (docs / "first.md").read_text(encoding="utf-8")
    assert filled.startswith("before\n<!-- table short -->\n\n|  | loss |")
    assert filled.endswith("<!-- end -->\nafter\n")
    assert check(copy).returncode == 0


def test_the_page_is_that_of_the_results() -> None:
    """`headgate report studies/second/results/text` makes it again."""
    folder = ROOT / "studies" / "second" / "results" / "text"
    committed = (folder / "report.html").read_text(encoding="utf-8")
    for name in ("README.md", "docs/findings.md"):
        assert "studies/second/results/text/report.html)" in (ROOT / name).read_text(encoding="utf-8")
    made = page(read_results(folder), ["results.json", "results.csv", "results.md"])
    for part in (
        r"<h1>.*?</h1>",
        r'<p class="caution">.*?</p>',
        r"<table class=\"cards result\">.*?</table>",
    ):
        old, new = (re.findall(part, text, flags=re.DOTALL) for text in (committed, made))
        assert old == new != []


def test_a_suite_fills_its_tables(finished_suite: Path, tmp_path: Path) -> None:
    """Its results are taken without the runs' curves, and a stale table is found and filled."""
    study, page = tmp_path / "studies" / "tasks", tmp_path / "docs" / "findings" / "tasks.md"
    study.mkdir(parents=True)
    page.parent.mkdir(parents=True)
    tables = Path(shutil.copy(TASKS / "tables.py", study))
    page.write_text("before\n<!-- table scores -->\n\n| stale |\n\n<!-- end -->\nafter\n", encoding="utf-8")
    command = [sys.executable, str(tables), "--publish", "patterns", str(finished_suite)]
    subprocess.run(command, check=True, timeout=HANG)
    taken = study / "results" / "patterns"
    assert sorted(path.name for path in taken.iterdir()) == ["suite.json", "suite.md"]
    assert '"curve"' not in (taken / "suite.json").read_text(encoding="utf-8")
    assert '"curve"' in (finished_suite / "suite.json").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| <b>all.*$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert row in (finished_suite / "suite.md").read_text(encoding="utf-8")
    assert check(tables).returncode == 0
    page.write_text(
        page.read_text(encoding="utf-8").replace(row, row.replace("1.00x", "2.00x")), encoding="utf-8"
    )
    found = check(tables)
    assert found.returncode == 1
    assert "tables of tasks.md are not what the results say" in found.stdout


def test_parts_of_a_suite_fill_one_table(finished_suite: Path, tmp_path: Path) -> None:
    """The other part has another task, and a variant that the first was run without."""
    study, page = tmp_path / "studies" / "tasks", tmp_path / "docs" / "findings" / "tasks.md"
    study.mkdir(parents=True)
    page.parent.mkdir(parents=True)
    tables = Path(shutil.copy(TASKS / "tables.py", study))
    page.write_text("<!-- table scores -->\n\n<!-- end -->\n", encoding="utf-8")
    whole = read_suite(finished_suite)
    (task,) = whole["tasks"]
    other = {
        **whole,
        "tasks": [
            {
                **task,
                "name": "another",
                "variants": [*task["variants"], {**task["variants"][0], "label": "later"}],
            }
        ],
        "variants": [*whole["variants"], {**whole["variants"][0], "label": "later", "mean_score": 1.0}],
        "costs": None,
    }
    for part, suite in (("patterns", whole), ("added", other)):
        (study / "results" / part).mkdir(parents=True)
        write_sealed(study / "results" / part / "suite.json", suite)
    subprocess.run([sys.executable, str(tables)], check=True, timeout=HANG)
    _, _, head, _, first, *_, last, _, _ = page.read_text(encoding="utf-8").splitlines()
    assert head == f"|  | another | {task['name']} | mean | speed |"
    alone = next(line for line in (finished_suite / "suite.md").read_text().splitlines() if "1.00x" in line)
    label, score, *rest = alone.strip("| ").split(" | ")
    assert first.strip("| ").split(" | ") == [label, score, score, *rest]
    assert last.startswith(f"| later | {score} | not run |  |")
    other["seeds"] += 1
    write_sealed(study / "results" / "added" / "suite.json", other)
    assert "differ in seeds" in check(tables).stdout


def test_the_table_of_tasks_has_every_mechanism() -> None:
    ours = {n for n in MECHANISMS.names() if MECHANISMS.get(n).__module__.startswith("headgate.mechanisms.")}
    judged: dict[str, set[str]] = {name: set() for name in TASK_NAMES.names()}
    for part in ("patterns", "lookups", "mqar", "needle", "added"):
        if (TASKS / "results" / part).is_dir():
            suite = read_suite(TASKS / "results" / part)
            for task in suite["tasks"]:
                judged[task["name"]] |= {variant["mechanism"] for variant in suite["variants"]}
    assert all(mechanisms in (set(), ours) for mechanisms in judged.values())
