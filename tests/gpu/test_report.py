"""`make test-gpu` itself, on the CPU: cases are isolated, written one by one, and end in one page."""

import importlib.util
import json
import queue
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from waiting import HANG, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def command() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHILD = """
import json, os, subprocess, sys, time
for case in sys.argv[1:]:
    if case == "dies":
        print("a sticky error", file=sys.stderr, flush=True)
        os.abort()
    if case == "hangs":
        below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.environ["MARKER"] + ".new", "w") as file:
            file.write(str(below.pid))
        os.rename(file.name, os.environ["MARKER"])
        time.sleep(600)
    print("something else", flush=True)
    print(json.dumps({"case": case, "passed": True, "process": os.getpid()}), flush=True)
"""


def has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def test_a_case_that_dies_or_hangs_costs_no_other(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those after it go on in another process, and what it said last is kept."""
    marker = tmp_path / "hanging"
    monkeypatch.setenv("MARKER", str(marker))
    answer = command.Child.answer
    started: list[int] = []

    def patient(child: Any, patience: float) -> Any:
        """Waits as long as the machine takes, but for the case that will never answer."""
        while True:
            try:
                return answer(child, 0.1)
            except queue.Empty:
                if marker.exists():
                    started.append(int(marker.read_text()))
                    marker.unlink()
                    raise

    monkeypatch.setattr(command.Child, "answer", patient)
    cases = ["one", "dies", "two", "hangs", "three"]
    outcomes = list(command.carried_out(cases, [sys.executable, "-c", CHILD], seconds=HANG, patience=3))
    assert [outcome["case"] for outcome in outcomes] == cases
    assert [outcome["passed"] for outcome in outcomes] == [True, False, True, False, True]
    assert "a sticky error" in outcomes[1]["error"]
    assert "no answer in 3 s" in outcomes[3]["error"]
    assert len({outcomes[n]["process"] for n in (0, 2, 4)}) == 3
    wait_until(lambda: has_ended(started[0]))  # what the hanging case had started


def test_what_is_left_when_time_is_up_is_named(command: ModuleType) -> None:
    outcomes = list(command.carried_out(["one", "two"], [sys.executable, "-c", CHILD], seconds=0))
    assert [outcome["passed"] for outcome in outcomes] == [None, None]
    assert outcomes[0]["error"] == "not run: time was up"


def test_the_cases_cover_every_mechanism_and_mode_within_ten_minutes(command: ModuleType) -> None:
    import headgate
    from headgate.mechanisms import MECHANISMS

    cases = command.all_cases(thorough=False)
    for name in headgate.mechanisms():
        assert {f"train:{name}", f"time:{name}:64:4096"} <= set(cases)
    kinds = {case.split(":")[0] for case in cases}
    assert kinds == set(command.ESTIMATES)
    assert {"run:sparse-geometric:--compile", "time:full:128:8192", "generate:full", "decode:full"} <= set(
        cases
    )
    other_tests = {n for n in MECHANISMS.names() if not MECHANISMS.get(n).__module__.startswith("headgate.")}
    ours = [case for case in cases if not other_tests & set(case.split(":"))]
    assert sum(command.ESTIMATES[case.split(":")[0]] for case in ours) <= 600


def test_the_page_is_written_from_a_run(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    only = ["train:sinks", "generate:local", "decode:local", "time:local:128", "time:flash"]
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(out), "--only", *only],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(out.read_text())
    assert [o["passed"] for o in report["cases"]] == [True, True, True, True, None]
    assert report["cases"][3]["both"]["tflops"] > 0
    page = out.with_suffix(".md").read_text()
    assert "| local | 128 | 128 |" in page
    assert "Please send this page" in page
    assert len(page.splitlines()) < 60


def test_the_notebook_runs_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, without the installation; the command stands in for itself."""
    notebook = json.loads((ROOT / "benchmarks" / "gpu.ipynb").read_text(encoding="utf-8"))
    setup, run = ("".join(cell["source"]) for cell in notebook["cells"] if cell["id"] in ("setup", "run"))
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: started.append(command))
    monkeypatch.chdir(ROOT / "benchmarks")
    names: dict[str, Any] = {}
    exec(setup, names)  # noqa: S102 - our own
    assert names["root"] == ROOT
    assert started == [[sys.executable, "-m", "pip", "install", "--quiet", str(ROOT), "pytest"]]
    assert "benchmarks/gpu.py" in run
    compile(run, "run", "exec")
