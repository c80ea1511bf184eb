"""What a study is said to take before it starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from headgate.compare.controls import with_controls
from headgate.compare.folder import Study
from headgate.compare.forecast import Pace, forecast, trial_budget
from headgate.compare.study import run_study
from headgate.compare.variants import parse_variants
from headgate.config import Config
from headgate.options import StudyOptions
from headgate.train.folder import DataRecord


def test_halving_eight_trials_takes_as_much_as_four_runs() -> None:
    assert trial_budget(8) == (8 + 4 + 2, 8 / 4 + 4 / 4 + 2 / 2)
    assert trial_budget(2) == (2 + 2 + 2, 2.0)
    assert trial_budget(1) == (3, 1.0)


def test_every_phase_has_its_runs_tokens_and_time(micro: Config) -> None:
    """Twelve steps of 96 tokens, three evaluations of 120; then 180 more tokens for the documents."""
    data = DataRecord("data", "0", 257, 10_000, 300)
    variants = with_controls(parse_variants(["local@other"], micro.model), micro)
    study = Study("micro", data, variants, seeds=5, looks=(3, 5), tune=4, ladder=(0.5, 1.0, 2.0))
    speeds = {variant.label: 0.01 for variant in variants} | {"other": 0.03}
    phases = {one.name: one for one in forecast(study, micro, Pace(speeds, start=2.0))}
    assert list(phases) == ["controls", "judging, untuned", "tuning", "judging, tuned", "ladder"]
    assert [one.runs for one in phases.values()] == [2 * 5, 2 * 5, 4 * 4, 4 * 5, 3 * 2]
    whole = 12 * 96
    evaluated = (3 * 120 + 180) / 3
    assert phases["controls"].tokens == 10 * whole
    assert phases["controls"].seconds == pytest.approx(10 * (0.01 * (whole + evaluated) + 2))
    assert phases["judging, untuned"].seconds == pytest.approx(5 * (0.04 * (whole + evaluated) + 4))
    starts, budget = trial_budget(4)
    per_run = 0.06 * (whole + 4 * 120 / 3)
    assert phases["tuning"].seconds == pytest.approx(budget * per_run + 4 * starts * 2)
    assert phases["ladder"].tokens == pytest.approx(3 * 2.5 * whole)
    for chosen, count in ((("other",), 2), (("all",), 4)):
        study = replace(study, ladder_variants=chosen)
        (ladder,) = (one for one in forecast(study, micro, Pace(speeds, 2.0)) if one.name == "ladder")
        assert ladder.runs == count * 3 * 2


def test_a_dry_run_prints_the_phases_and_starts_nothing(
    data: Path, micro: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headgate import config

    config.save(replace(micro, seed=0), tmp_path / "recipe.json")
    options = StudyOptions(recipe=str(tmp_path / "recipe.json"), seeds="2..4", tune=3, dry_run=True)
    assert run_study(["local"], data, tmp_path / "study", [], options)
    assert not (tmp_path / "study").exists()
    printed = capsys.readouterr().out
    for words in ("controls", "judging, untuned", "tuning", "judging, tuned", "Nothing was started"):
        assert words in printed
    assert "In all 44 runs" in printed  # 4 variants of 4 seeds, twice, and of 3 trials
    assert "planned looks may stop earlier" in printed
