"""The suite of tasks: every variant at its best learning rate, judged on fresh seeds, and resumed."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from study_examples import SUITE_OPTIONS, SUITE_SETTINGS, TASK

from headgate.compare.suite import run_suite, suite_tasks
from headgate.compare.suite_plan import SuitePlan, best_rate, judged_runs, tuning_runs
from headgate.compare.suite_results import solved_of, suite_markdown, tokens_to_solve
from headgate.compare.variants import Variant
from headgate.data.tasks import TASKS
from headgate.errors import HeadgateError
from headgate.options import SuiteOptions
from headgate.report.suite_page import suite_page, write_suite_page
from headgate.train.folder import IN_FINAL, IN_SUMMARY


@pytest.fixture(scope="module")
def suite(finished_suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("suite") / "suite"
    shutil.copytree(finished_suite, out)
    return out


def results_of(folder: Path) -> dict:  # type: ignore[type-arg]
    return dict(json.loads((folder / "suite.json").read_text()))


def test_a_suite(suite: Path) -> None:
    results = results_of(suite)
    (task,) = results["tasks"]
    (row,) = task["variants"]
    assert [(trial["rate"], trial["seed"]) for trial in row["tuning"]] == [(0.01, 1000), (0.02, 1000)]
    assert row["rate"] == min(row["tuning"], key=lambda trial: trial["loss"])["rate"]
    (run,) = row["runs"]
    assert run["score"] == pytest.approx((run["accuracy"] - 0.25) / 0.75)
    assert row["score"]["mean"] == pytest.approx(run["score"])
    assert [place["pairs"] for place in row["by_pairs"]] == [2, 4]
    assert sum(place["tokens"] for place in row["by_distance"]) == 256 * 3
    assert row["to_solve"] == {"median": None, "reached": 0, "of": 1}
    assert task["tokens"] == 3 * 2 * 16
    config = json.loads((suite / task["name"] / "runs").glob("*/seed-0/config.json").__next__().read_text())
    assert config["train"]["learning_rate"] == row["rate"]
    assert config["seed"] == 0
    # Fresh samples in training: no more windows are read than there are.
    assert (
        json.loads((suite / task["name"] / "data/manifest.json").read_text())["splits"][0]["documents"] == 6
    )


def test_its_tables_and_page(suite: Path) -> None:
    text = (suite / "suite.md").read_text()
    assert "accuracy by pairs" in text
    assert "accuracy by distance" in text
    page = write_suite_page(suite).read_text()
    assert "&lt;b&gt;all&lt;/b&gt;" in page
    assert "<b>all" not in page
    command = results_of(suite)["command"]
    assert command[command.index("--tasks") + 1] == TASK
    assert command[command.index("--out") + 1] == "suite"
    assert command[-len(SUITE_SETTINGS) :] == list(SUITE_SETTINGS)


def test_it_resumes_without_training_anew(suite: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in suite.rglob("summary.json")}
    assert len(before) == 3
    assert run_suite(["full@<b>all</b>"], suite, SUITE_SETTINGS, SUITE_OPTIONS)
    assert {path: path.stat().st_mtime_ns for path in suite.rglob("summary.json")} == before


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rates": "0.01"}, r"rates=\(0.01, 0.02\), not \(0.01,\)"),
        ({"tasks": TASK.replace("keys=6", "keys=7") + " " + TASK}, None),
        ({"rates": "fast"}, "rates='fast' must be different numbers above 0"),
        ({"tasks": "mkar"}, "unknown task 'mkar'; did you mean 'mqar'?"),
        ({"tasks": f"{TASK} {TASK}"}, "is named twice"),
    ],
)
def test_what_does_not_fit_is_refused(suite: Path, changed: dict[str, str], words: str | None) -> None:
    if words is None:  # another task is another folder, and extends the suite
        assert len(suite_tasks(replace(SUITE_OPTIONS, **changed), SUITE_SETTINGS)) == 2
        return
    with pytest.raises(HeadgateError, match=words):
        run_suite(["full@<b>all</b>"], suite, SUITE_SETTINGS, replace(SUITE_OPTIONS, **changed))


def test_settings_that_differ_are_refused(suite: Path) -> None:
    with pytest.raises(HeadgateError, match=r"model\.d_mlp=32, not 64"):
        run_suite(["full@<b>all</b>"], suite, (*SUITE_SETTINGS[:-1], "model.d_mlp=64"), SUITE_OPTIONS)


def test_every_task_is_in_the_suite_and_some_in_its_short_form() -> None:
    assert set(suite_tasks(SuiteOptions(), ())) == set(TASKS.names())
    quick = suite_tasks(SuiteOptions(quick=True), ())
    assert 2 <= len(quick) < len(TASKS.names())
    for source, settings in suite_tasks(SuiteOptions(), ()).values():
        train = settings.train
        needed = train.steps * train.batch_size
        assert f"samples={needed}," in source or f"sequences={needed * 5 // 4}" in source


def test_the_best_rate_is_that_of_the_lowest_loss(tmp_path: Path) -> None:
    plan = SuitePlan({"t": "markov"}, (Variant.parse("full"),), (0.1, 0.2, 0.4), 2, 1)
    runs = list(tuning_runs(plan, "t", tmp_path))
    losses = {0.1: (3.0, 1.0), 0.2: (1.5, 1.7), 0.4: (0.1, None)}  # the last diverged once
    for run in runs:
        run.folder.mkdir(parents=True)
        loss = losses[run.rate][run.seed - 1000]
        summary = dict.fromkeys(IN_SUMMARY, 0) | {"final": dict.fromkeys(IN_FINAL, 0) | {"loss": loss}}
        (run.folder / "summary.json").write_text(json.dumps(summary))
    assert best_rate(plan, runs) == 0.2
    assert [run.rate for run in judged_runs(plan, "t", tmp_path)] == [0.2]
    for run in runs:
        (run.folder / "summary.json").unlink()
    assert best_rate(plan, runs) is None
    assert list(judged_runs(plan, "t", tmp_path)) == []
    single = replace(plan, rates=(0.1,))
    assert list(tuning_runs(single, "t", tmp_path)) == []
    assert [run.rate for run in judged_runs(single, "t", tmp_path)] == [0.1]


@pytest.mark.parametrize(
    ("solved", "middle", "text"),
    [
        ([4000, 2000, 9000], 4000, "4"),
        ([4000, None, 2000], 4000, "4"),
        ([None, 4000, None], None, "> 50 (1 of 3)"),
        ([None, None], None, "> 50"),
        ([], None, ""),
    ],
)
def test_tokens_to_solve_are_censored(solved: list[int | None], middle: float | None, text: str) -> None:
    found = tokens_to_solve(solved)
    assert found["median"] == middle
    assert solved_of({"to_solve": found}, 50_000) == text


def test_a_suite_that_has_not_run_yet_can_be_shown(suite: Path) -> None:
    """As when it was stopped: cells without runs are empty, and nothing is made up."""
    results = results_of(suite)
    (row,) = results["tasks"][0]["variants"]
    row["runs"], row["by_pairs"], row["by_distance"] = [], [], []
    row["score"] = row["accuracy"] = row["loss"] = {"mean": None, "low": None, "high": None, "n": 0}
    row["to_solve"], row["rate"] = tokens_to_solve([]), None
    assert "not run" in suite_markdown(results)
    assert math.isfinite(len(suite_page(results)))
