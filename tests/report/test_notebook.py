"""A study in Python: the page's tables and figures as objects, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import headgate
from headgate.errors import HeadgateError
from headgate.report.reading import read_results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "first" / "results"


def test_a_study_as_objects() -> None:
    study = headgate.read_study(RESULTS / "text")
    assert study.headline in repr(study)
    assert len(study.table) == 29
    best = min(study.table[1:], key=lambda row: row["difference"])
    assert best["variant"] == "near-far:near-only"
    assert best["difference"] == study[best["variant"]]["difference"]["mean"]
    assert study["full"]["loss"]["mean"] == read_results(RESULTS / "text")["variants"][0]["loss"]["mean"]
    curves = study.figures["curves"]
    assert curves.views[0] == "difference by tokens"
    chart = curves["loss by tokens"].to_dict()
    assert chart["datasets"]["rows"][0]["label"] == "full"
    assert chart["width"] == 640
    assert {row["label"] for row in curves.table("loss by tokens")} == {row["variant"] for row in study.table}
    with pytest.raises(HeadgateError, match="no variant 'near'"):
        study["near"]
    with pytest.raises(HeadgateError, match="no figure 'curve'"):
        study.figures["curve"]
    with pytest.raises(HeadgateError, match="no view 'loss'"):
        curves["loss"]


def test_markup_stays_text_in_a_notebook(report: Path) -> None:
    shown = headgate.read_study(report.parent)._repr_html_()
    assert "<b>log" not in shown
    assert "&lt;b&gt;log" in shown


def test_reading_needs_no_torch() -> None:
    study = f"headgate.read_study({str(RESULTS / 'text')!r})"
    script = f"import sys, headgate; {study}.figures; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_the_example_notebook_runs(tmp_path: Path) -> None:
    """Its cells, one after the other, as Jupyter runs them; a cell's last line shows itself."""
    notebook = json.loads((ROOT / "examples" / "read_a_study.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 4
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(cells), encoding="utf-8")
    subprocess.run([sys.executable, str(script)], cwd=ROOT / "examples", check=True, capture_output=True)
