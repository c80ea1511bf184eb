"""The suite of tasks: every variant at its best learning rate, judged on fresh seeds, and resumed."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from study_examples import SUITE_OPTIONS, SUITE_SETTINGS, TASK

from headgate import config
from headgate.cli.studies import report
from headgate.compare import suite as suite_module
from headgate.compare import suite_costs
from headgate.compare.executors.local import LocalExecutor
from headgate.compare.suite import run_suite, suite_tasks
from headgate.compare.suite_costs import measure_suite, read_suite_costs
from headgate.compare.suite_plan import SuitePlan, best_rate, judged_runs, tuning_runs, undecided_runs
from headgate.compare.suite_results import tokens_to_solve
from headgate.compare.suite_tables import solved_of, suite_markdown
from headgate.compare.variants import Variant
from headgate.config import Config
from headgate.data.answers import Level, TaskRecord
from headgate.data.tasks import TASKS
from headgate.errors import HeadgateError
from headgate.measure.costs import Speed
from headgate.options import EngineOptions, SuiteOptions
from headgate.recipes import get_recipe
from headgate.report.suite_figures import suite_figures
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
    assert [place["accuracy"] for place in run["by_pairs"]] == [place["mean"] for place in row["by_pairs"]]
    assert sum(place["tokens"] for place in row["by_distance"]) == 256 * 3
    assert row["to_solve"] == {"median": None, "reached": 0, "of": 1}
    assert task["tokens"] == 3 * 2 * 16
    trained = json.loads((suite / task["name"] / "runs").glob("*/seed-0/config.json").__next__().read_text())
    assert trained["train"]["learning_rate"] == row["rate"]
    assert trained["seed"] == 0
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


def test_it_is_published_in_files_small_enough_to_commit(suite: Path, tmp_path: Path) -> None:
    report(str(suite), publish=str(tmp_path / "small"))
    results = results_of(suite)
    figures = suite_figures(results).values()
    assert len(list((tmp_path / "small").glob("*.svg"))) == sum(len(figure.views) for figure in figures) > 2
    assert results_of(tmp_path / "small")["variants"] == results["variants"]
    before = (tmp_path / "small" / "suite.md").read_bytes()
    report(str(tmp_path / "small"))  # the page again, from this alone
    page = (tmp_path / "small" / "suite.html").read_text()
    assert "Right answers by distance" in page
    assert "How they learn" not in page
    assert (tmp_path / "small" / "suite.md").read_bytes() == before
    with pytest.raises(HeadgateError, match="--against x is for studies"):
        report(str(suite), against="x")


def test_it_resumes_without_training_or_measuring_anew(suite: Path) -> None:
    made = [*suite.rglob("summary.json"), suite / "costs.json"]
    before = {path: path.stat().st_mtime_ns for path in made}
    assert len(before) == 4
    assert run_suite(["full@<b>all</b>"], suite, SUITE_SETTINGS, SUITE_OPTIONS)
    assert {path: path.stat().st_mtime_ns for path in made} == before


def test_a_mechanism_is_added_to_a_finished_suite(finished_suite: Path, tmp_path: Path) -> None:
    """As when one is registered later: what is there stays."""
    out = tmp_path / "suite"
    shutil.copytree(finished_suite, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")}
    rows = results_of(out)["tasks"][0]["variants"]
    names = ["full@<b>all</b>", "local:window=4"]
    assert run_suite(names, out, SUITE_SETTINGS, replace(SUITE_OPTIONS, cost=False))
    after = {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")}
    assert len(after) == 2 * len(before)
    assert before.items() <= after.items()
    first, second = results_of(out)["tasks"][0]["variants"]
    assert first == rows[0]
    assert (second["label"], second["runs"][0]["state"]) == ("local:window=4", "finished")


def test_the_speed_of_a_step_is_part_of_it(suite: Path) -> None:
    costs, results = read_suite_costs(suite), results_of(suite)
    assert costs is not None
    assert (costs.task, costs.threads) == (results["tasks"][0]["name"], 1)
    assert results["variants"][0]["speed"]["ratio"] == 1.0
    assert results["variants"][0]["speed"]["seconds"] == costs.speeds[0].training.seconds > 0
    assert f"training steps on {costs.task}" in (suite / "suite.md").read_text()


def test_on_a_cluster_it_is_measured_where_the_runs_are(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process by itself, which an engine starts: here this machine stands in for one."""
    folder = tmp_path / "suite"
    shutil.copytree(suite, folder)
    (folder / "costs.json").unlink()
    monkeypatch.setattr(suite_module, "make_executor", lambda home, *_: LocalExecutor(home, 1))
    arguments = (["full@<b>all</b>"], folder, SUITE_SETTINGS, SUITE_OPTIONS)
    monkeypatch.setattr(suite_module, "measure_suite", None)
    assert run_suite(*arguments, EngineOptions(on="slurm"))
    costs = read_suite_costs(folder)
    assert costs is not None
    assert [speed.label for speed in costs.speeds] == ["<b>all</b>"]
    assert (folder / costs.task / "logs" / "costs.txt").is_file()
    assert results_of(folder)["variants"][0]["speed"]["ratio"] == 1.0
    without = results_of(folder) | {"costs": None}
    assert "Speed was not measured" in suite_markdown(without)


def test_what_has_no_speed_is_measured_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the task of the longest context, once for each variant, and only if it was trained."""
    plan = SuitePlan({"short": "", "long": ""}, (Variant.parse("full"),), (0.01,), 1, 1)
    base = get_recipe("task")
    for name, context in (("short", 16), ("long", 32)):
        task = replace(base, train=replace(base.train, context=context))
        (tmp_path / name).mkdir()
        config.save(task, tmp_path / name / "config.json")
    asked: list[list[str]] = []

    def speeds(configs: dict[str, Config], threads: int) -> dict[str, Speed]:
        assert {each.train.context for each in configs.values()} == {32}
        asked.append(list(configs))
        factor = len(asked)
        return {label: Speed(factor / n, n, n, n) for n, label in enumerate(configs, start=1)}

    monkeypatch.setattr(suite_costs, "training_speeds", speeds)

    def measured(plan: SuitePlan, trained: Sequence[str]) -> dict[str, tuple[float, float]]:
        config.save(plan, tmp_path / "plan.json")
        for run in judged_runs(plan, "long", tmp_path / "long"):
            if run.variant.label in trained:
                run.folder.mkdir(parents=True, exist_ok=True)
                (run.folder / "summary.json").touch()
        measure_suite(tmp_path, lambda words: None)
        found = read_suite_costs(tmp_path)
        return {s.label: (s.training.ratio, s.training.seconds) for s in found.speeds} if found else {}

    assert measured(plan, []) == {}
    assert measured(plan, ["full"]) == {"full": (1, 1)}
    more = replace(plan, variants=tuple(map(Variant.parse, ("full", "local", "shifted"))))
    # Seconds are the earlier ones of the first, whatever else the machine does meanwhile.
    assert measured(more, ["full", "local"]) == {"full": (1, 1), "local": (2, 0.5)}
    assert measured(more, []) == {"full": (1, 1), "local": (2, 0.5)}
    assert asked == [["full"], ["full", "local"]]
    elsewhere = read_suite_costs(tmp_path)
    assert elsewhere is not None
    config.save(replace(elsewhere, machine={"processor": "another"}), tmp_path / "costs.json")
    assert measured(more, ["shifted"]) == {"full": (1, 3), "local": (2, 1.5), "shifted": (3, 1)}


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
    assert (SuiteOptions(quick=True).judged, SuiteOptions().judged) == (2, 3)
    assert SuiteOptions(quick=True, seeds=5).judged == 5
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


def test_other_rates_are_tried_where_the_middle_one_does_not_solve_the_task(tmp_path: Path) -> None:
    variants = (Variant.parse("full"), Variant.parse("local"), Variant.parse("gated"))
    plan = SuitePlan({"t": "mqar"}, variants, (0.4, 0.1, 0.2), 1, 1)
    record = TaskRecord("mqar", 8, "accuracy", Level(1.0, 0.5), Level(0.0, 1.0), Level(0.0, 1.0))
    runs = list(tuning_runs(plan, "t", tmp_path))
    for run, accuracy in zip([run for run in runs if run.rate == 0.2], (0.996, 0.99, None), strict=True):
        run.folder.mkdir(parents=True)
        if accuracy is not None:  # the last one failed
            final = dict.fromkeys(IN_FINAL, 0) | {"answers": {"accuracy": accuracy}}
            summary = dict.fromkeys(IN_SUMMARY, 0) | {"final": final}
            (run.folder / "summary.json").write_text(json.dumps(summary))
    undecided = [(run.variant.label, run.rate) for run in undecided_runs(plan, runs, record)]
    assert undecided == [("local", 0.4), ("local", 0.1), ("gated", 0.4), ("gated", 0.1)]


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
