"""Where a study was trained and measured: seconds of different devices are not compared."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from headgate import config, files
from headgate.compare.folder import StudyFolder
from headgate.compare.results import study_results
from headgate.config import Config
from headgate.measure import costs as costs_module
from headgate.measure.costs import CostPlan, measure_costs
from headgate.report.figures import curve_figure
from headgate.report.painting import Painter
from headgate.report.reading import read_results


@pytest.fixture
def spread(study: Path, tmp_path: Path) -> Path:
    """The study, with one of its runs on another processor."""
    out = tmp_path / "study"
    shutil.copytree(study, out)
    path = out / "runs/full/seed-1/summary.json"
    summary = files.read_sealed(path)
    summary["machine"]["processor"] = "Abacus, 10 cores (beads)"
    files.write_sealed(path, summary)
    return out


@pytest.mark.long
def test_seconds_of_different_devices_are_not_compared(spread: Path, study: Path) -> None:
    (spread / "costs.json").unlink()
    results = study_results(spread)
    assert "trained on different devices" in results["conditions"]
    assert "Abacus, 10 cores (beads)), whose seconds are not compared" in results["conditions"]
    for variant in results["variants"]:
        assert variant["equal_seconds"]["loss"]["mean"] is None
        assert variant["equal_seconds"]["difference"] is None or (
            variant["equal_seconds"]["difference"]["mean"] is None
        )
        assert all(point["seconds"] is None for point in variant["curve"])
        assert variant["loss"]["mean"] is not None
    for each, timed in ((results, False), (read_results(study), True)):
        figure = curve_figure(each, Painter(each["variants"]))
        assert figure is not None
        assert ("loss by seconds" in figure.views) == timed


def test_costs_name_the_device_and_count_wherever_the_runs_were(spread: Path) -> None:
    before, after = read_results(spread), study_results(spread)
    assert after["costs"]["machine"]["processor"] == after["circumstances"]["machines"][0]["processor"]
    assert "costs measured on" not in after["conditions"]  # on one that trained
    assert [v["speed"] for v in after["variants"]] == [v["speed"] for v in before["variants"]]
    assert after["variants"][1]["equal_seconds"]["loss"] == before["variants"][1]["equal_seconds"]["loss"]
    costs = StudyFolder(spread).read_costs()
    assert costs is not None
    elsewhere = {**costs.machine, "device_name": "Orrery 9000"}
    config.save(replace(costs, machine=elsewhere), spread / "costs.json", seal=True)
    assert "; costs measured on Orrery 9000" in study_results(spread)["conditions"]


def test_what_another_machine_measured_is_measured_again(
    micro: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs_module, "peak_memories", lambda cases, at_once: [1] * len(cases))
    configs, plan = {"a": micro, "b": micro}, CostPlan((24,), 0.001)
    first = measure_costs({"a": micro}, plan, None, 1, lambda _: None)
    assert measure_costs({"a": micro}, plan, replace(first, machine={}), 1, lambda _: None).machine == {}
    kept = measure_costs(configs, plan, first, 1, lambda _: None)
    assert kept.of("a") == first.of("a")
    again = measure_costs(configs, plan, replace(first, machine={"processor": "Abacus"}), 1, lambda _: None)
    assert again.of("a") != first.of("a")
    assert again.machine == first.machine
