"""Studies with their pages, and a browser to open them in."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG

from headgate.report.page import write_page
from headgate.report.reading import read_results

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def report(study: Path) -> Path:
    return write_page(study)


@pytest.fixture(scope="session")
def crowd(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of 36 variants that answer questions, two of three of them ablations."""
    study = read_results(report.parent)
    last = study["variants"][-1]
    for number in range(36 - len(study["variants"])):
        variant = copy.deepcopy(last) | {"label": f"mechanism-{number}:gate=constant,window=1024"}
        variant |= {"mechanism": f"mechanism-{number % 4}", "ablation": "no-gate" if number % 3 else None}
        variant["gates"] = None
        study["variants"].append(variant)
        costs = [cost for cost in study["costs"]["costs"] if cost["label"] == last["label"]]
        study["costs"]["costs"] += [cost | {"label": variant["label"]} for cost in costs]
    place = {"first": 1, "end": 2, "mean": 0.9, "low": -0.1, "high": 1.14, "n": 2}
    far = place | {"first": 2, "end": 4, "low": None, "high": None}
    farther = far | {"first": 4, "end": 8}
    for variant in study["variants"]:
        variant["answers"] = {"accuracy": place, "by_distance": [place, far, farther]}
    last["difference"]["relative"] = 1029.3
    study["data"]["request"] = {"source": f"recall:{'pairs=8,' * 20}", "tokenizer": "recall"}
    folder = tmp_path_factory.mktemp("crowd")
    for name in ("results.json", "gates.json", "skipping.json", "results.md", "papers.md"):
        shutil.copy(report.parent / name, folder / name)
    (folder / "results.json").write_text(json.dumps(study), encoding="utf-8")
    write_page(folder)
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; not run")
    if CHROMIUM is None:
        pytest.skip("no chromium here (Debian: apt install chromium); the page was not opened")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=HANG * 1000
        )
        make = opened.new_context

        def patient_context(**options: Any) -> Any:
            """Waits as long as a busy machine takes; by itself it would give up after half a minute."""
            context = make(**options)
            context.set_default_timeout(HANG * 1000)
            return context

        opened.new_context = patient_context
        yield opened
        opened.close()
