"""Tuning: the same draws for all, halving that resumes, edges, the same winner however it was interrupted."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headgate.compare.folder import Study, StudyFolder
from headgate.compare.jobs import Job
from headgate.compare.progress import StudyProgress
from headgate.compare.space import Dimension, Trial, draw_trials, own_dimensions, parse_space
from headgate.compare.tuning import RUNGS, TUNING_SEED, Tried, Tuned, Tuner, tuning_results
from headgate.compare.variants import Variant, parse_variants
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.options import StudyOptions
from headgate.train.folder import DataRecord

SPACE = "train.learning_rate=1e-3..1e-1"
Loss = Callable[[str, float, int], float]
"""Of a variant's label, its learning rate, and the step."""


class Stopped(Exception):
    """A study that is stopped."""


class Pretence:
    """Instead of training, writes what a run would have logged: the loss is a function of the settings."""

    def __init__(self, loss: Loss, most: float = math.inf) -> None:
        self.loss, self.left = loss, most
        self.steps: dict[Path, list[int]] = {}
        """Of each run: the steps from which it was started."""

    def of(self, job: Job) -> float:
        rates = [float(s.partition("=")[2]) for s in job.settings if s.startswith("train.learning_rate=")]
        return self.loss(job.variant.label, rates[-1] if rates else 0.02, job.end)

    def run(self, jobs: Sequence[Job], progress: StudyProgress) -> list[Job]:
        for job in jobs:
            if job.finished:
                continue
            if self.left <= 0:
                raise Stopped
            self.left -= 1
            loss = self.of(job)
            saved = [int(path.name[5:]) for path in job.folder.glob("checkpoints/step-*")]
            self.steps.setdefault(job.folder, []).append(max(saved, default=0))
            (job.folder / "checkpoints" / f"step-{job.end:08d}").mkdir(parents=True)
            line = {"step": job.end, "validation": {"loss": loss if math.isfinite(loss) else None}}
            with (job.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            if job.end == job.steps:
                (job.folder / "summary.json").write_text("{}")
        return []


@pytest.fixture
def tuner(micro: Config, tmp_path: Path) -> Callable[..., Tuner]:
    def make(
        executor: Pretence | None, tune: int = 8, space: str = SPACE, where: str = "study", seeds: int = 1
    ) -> Tuner:
        data = DataRecord("data", "0", 257, 1000, 1000)
        variants = parse_variants(["local"], micro.model)
        study = Study("micro", data, variants, seeds=2, tune=tune, space=space, tuning_seeds=seeds)
        base = replace(micro, train=replace(micro.train, steps=40, learning_rate=0.02))
        return Tuner(StudyFolder(tmp_path / where), study, base, executor, StudyProgress(shown=False))

    return make


def valley(label: str, rate: float, step: int) -> float:
    """Lowest at 0.01 for full and at 0.03 for local."""
    best = {"full": 0.01, "local": 0.03}[label]
    return 5 + math.log(rate / best) ** 2 - 0.01 * step


def test_trials_are_the_same_for_all_and_the_first_is_the_recipe(micro: Config) -> None:
    space = parse_space("", micro)
    assert [d.setting for d in space] == [
        "train.learning_rate", "train.attention_output_rate", "model.rope_theta"
    ]  # fmt: skip
    own = own_dimensions(Variant.parse("near-far"))
    assert [d.setting for d in own] == ["mechanism.opening"]
    assert own_dimensions(Variant.parse("near-far:half-open")) == ()  # it is set already
    plain, more = draw_trials(space, (), 16), draw_trials(space, own, 16)
    assert plain[0] == more[0] == Trial(0)
    for one, other in zip(plain[1:], more[1:], strict=True):
        assert one.settings.items() <= other.settings.items()
        changed, words = other.of(Variant.parse("near-far"))
        assert changed.mechanism[0].options == {"opening": other.settings["mechanism.opening"]}
        assert len(words) == 3
    rates = sorted(trial.settings["train.learning_rate"] for trial in plain[1:])
    assert (rates[0], rates[7], rates[-1]) == pytest.approx(  # even in the logarithm
        (0.01 / 4 * 16 ** (1 / 16), 0.01, 0.01 * 4 / 16 ** (1 / 16)), rel=1e-3
    )


def test_a_list_for_every_setting_is_a_grid(micro: Config) -> None:
    space = parse_space("train.learning_rate=[0.001,0.01],model.rope_theta=[100,10000]", micro)
    trials = draw_trials(space, (), 4)
    assert trials[2].settings == {"train.learning_rate": 0.01, "model.rope_theta": 100}
    with pytest.raises(HeadgateError, match="tune=3 does not fit the space, a grid of 4 points"):
        draw_trials(space, (), 3)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ("train.learning_rate", "has no range"),
        ("train.learning_rate=1..0.1", "is not a range above 0"),
        ("train.learning_rate=0..1", "is not a range above 0"),
        ("train.learning_rat=1e-3..1", "did you mean 'learning_rate'"),
        ("train.learning_rate=abc", "is not a range above 0"),
    ],
)
def test_a_bad_space_is_refused(space: str, message: str, micro: Config) -> None:
    with pytest.raises(HeadgateError, match=message):
        parse_space(space, micro)
    alone: tuple[dict[str, Any], ...] = ({"space": SPACE}, {"published": False}, {"tuning_seeds": 2})
    for options in (*alone, {"tune": 1}, {"tune": -1}, {"tune": 4, "tuning_seeds": 0}):
        with pytest.raises(HeadgateError):
            StudyOptions(**options)


def test_halving_resumes_and_finds_each_its_best(tuner: Callable[..., Tuner]) -> None:
    executor = Pretence(valley)
    tuned = tuner(executor).tune()
    for label, best in (("full", 0.01), ("local", 0.03)):
        tried = tuned[label].tried
        assert sorted(len(one.losses) for one in tried) == [1] * 4 + [2] * 2 + [3] * 2
        rates = {one.trial.number: one.trial.settings.get("train.learning_rate", 0.02) for one in tried}
        nearest = min(rates, key=lambda number: abs(math.log(rates[number] / best)))
        assert tuned[label].winner.number == nearest
        assert tuned[label].edges == ()
    assert sorted(executor.steps.values()) == [[0]] * 8 + [[0, 10]] * 4 + [[0, 10, 20]] * 4
    assert all(f"seed-{TUNING_SEED}" in str(folder) for folder in executor.steps)


def test_seeds_begin_with_the_recipes_own(tuner: Callable[..., Tuner]) -> None:
    executor, mine = Pretence(valley), tuner(None)
    fresh = Tuner(mine.folder, mine.study, replace(mine.base, seed=100), executor, mine.progress)
    fresh.tune()
    assert all(f"seed-{100 + TUNING_SEED}" in str(folder) for folder in executor.steps)
    judged = mine.folder.jobs(mine.study, fresh.base, 2)
    assert [job.seed for job in judged] == [100, 100, 101, 101]


@pytest.mark.parametrize("most", [1, 7, 17, 20, 24])
def test_interrupted_anywhere_it_finds_the_same_winner(tuner: Callable[..., Tuner], most: int) -> None:
    truth = tuner(Pretence(valley)).tune()
    with pytest.raises(Stopped):
        tuner(Pretence(valley, most), where="other").tune()
    reading = tuner(None, where="other")
    reading.tune()
    assert not reading.complete
    again = Pretence(valley)
    assert tuner(again, where="other").tune() == truth
    assert sum(map(len, again.steps.values())) == 8 * 2 + 4 * 2 + 2 * 2 - most
    reading = tuner(None, where="other")
    assert reading.tune() == truth
    assert reading.complete
    written: Any = tuning_results(reading, truth)
    assert written["space"] == ["train.learning_rate=0.001..0.1"]
    assert [one["winner"] for one in written["variants"]] == [one.winner.number for one in truth.values()]


def test_an_optimum_at_the_edge_extends_the_space_for_all(tuner: Callable[..., Tuner]) -> None:
    def low(label: str, rate: float, step: int) -> float:
        return 5 + math.log(rate / {"full": 0.02, "local": 0.0003}[label]) ** 2

    one = tuner(Pretence(low), tune=16)
    tuned = one.tune()
    assert (one.space[0].low, one.space[0].high) == (pytest.approx(1e-4), 0.1)
    assert tuned["local"].winner.round == 1
    assert tuned["local"].winner.settings["train.learning_rate"] == pytest.approx(0.0003, rel=0.3)
    numbers = [[tried.trial.number for tried in tuned[label].tried] for label in ("full", "local")]
    assert numbers[0] == numbers[1] == list(range(24))
    settings = [[tried.trial.settings for tried in tuned[label].tried] for label in ("full", "local")]
    assert settings[0] == settings[1]
    assert tuned["full"].winner.round == 0

    endless = tuner(Pretence(lambda label, rate, step: 5 + math.log(rate)), where="endless").tune()
    assert endless["full"].edges == (("train.learning_rate", "low"),)  # still there: flagged
    flat = tuner(Pretence(lambda label, rate, step: 5 + 1e-4 * math.log(rate)), where="flat")
    assert flat.tune()["full"].edges == ()
    assert flat.space[0].low == 0.001


def test_what_a_variant_sets_itself_is_tried_once_extended_or_not(tuner: Callable[..., Tuner]) -> None:
    one = tuner(Pretence(lambda label, rate, step: 5 + math.log(rate)))  # the best is past the low edge
    own = parse_variants(["local:train.learning_rate=0.05@own"], one.base.model)
    one.study = replace(one.study, variants=own)
    tuned = one.tune()
    assert len(tuned["full"].tried) == 8 + 4 + 4
    assert [tried.trial for tried in tuned["own"].tried] == [Trial(0)]
    assert tuned["own"].winner == Trial(0)


def test_nothing_lies_beyond_a_list_of_choices(tuner: Callable[..., Tuner]) -> None:
    def low(label: str, rate: float, step: int) -> float:
        return 5 + math.log(rate / 1e-4) ** 2

    space = "train.learning_rate=[0.001,0.003,0.009],model.rope_theta=100..1000"
    one = tuner(Pretence(low), tune=9, space=space)
    tuned = one.tune()["full"]
    assert [tried.trial.number for tried in tuned.tried] == list(range(9))
    assert tuned.winner.settings["train.learning_rate"] == 0.001
    assert tuned.edges == (("train.learning_rate", "low"),)  # still flagged


def test_several_seeds_judge_a_trial_by_their_mean(tuner: Callable[..., Tuner]) -> None:
    """On the first seed the highest rates are ahead by luck; over three, the best rate wins."""

    class Lucky(Pretence):
        def of(self, job: Job) -> float:
            high = any(float(s.partition("=")[2]) > 0.04 for s in job.settings if "learning_rate=" in s)
            return super().of(job) - (4 if high and job.seed == TUNING_SEED else 0)

    pretence = Lucky(valley)
    one, three = tuner(pretence, where="one"), tuner(pretence, where="three", seeds=3)
    assert one.tune()["full"].winner.settings["train.learning_rate"] > 0.04
    tuned = three.tune()
    winner = tuned["full"].winner
    assert winner.settings["train.learning_rate"] == pytest.approx(0.01, rel=0.2)
    jobs = three.jobs(three.study.variants[0], winner, len(RUNGS) - 1)
    assert [job.seed for job in jobs] == [TUNING_SEED + n for n in range(3)]
    (tried,) = [tried for tried in tuned["full"].tried if tried.trial == winner]
    assert tried.losses[-1] == pytest.approx(sum(map(pretence.of, jobs)) / 3)
    assert tuning_results(three, tuned)["seeds"] == 3


def test_a_recipe_at_the_edge_of_the_space_is_at_an_edge_too(tuner: Callable[..., Tuner]) -> None:
    def high(label: str, rate: float, step: int) -> float:
        return 5 + math.log(rate / 0.05) ** 2

    space = "train.learning_rate=0.001..0.021"  # the recipe has 0.02
    one = tuner(Pretence(high), tune=4, space=space)
    tuned = one.tune()["full"]
    assert one.space[0].high > 0.05
    assert tuned.winner.round == 1
    assert Dimension("train.attention_output_rate", 0.05, 20).side(0.0) == "low"


def test_trials_that_diverge_lose(tuner: Callable[..., Tuner]) -> None:
    def fragile(label: str, rate: float, step: int) -> float:
        return math.inf if rate > 0.005 else 5 + rate

    tuned = tuner(Pretence(fragile), where="fragile").tune()
    assert tuned["full"].winner.settings["train.learning_rate"] <= 0.005
    none = tuner(Pretence(lambda *_: math.inf), where="none").tune()
    assert none["full"].winner == Trial(0)


def test_a_variant_whose_every_trial_ends_in_an_error_ends_the_study(tuner: Callable[..., Tuner]) -> None:
    class Broken(Pretence):
        def run(self, jobs: Sequence[Job], progress: StudyProgress) -> list[Job]:
            local = [job for job in jobs if job.variant.label == "local"]
            for job in local:
                job.log.parent.mkdir(parents=True, exist_ok=True)
                job.log.write_text("headgate: out of memory\n", encoding="utf-8")
            return local + super().run([job for job in jobs if job not in local], progress)

    with pytest.raises(HeadgateError, match=r"every trial of 'local' failed: out of memory; mend"):
        tuner(Broken(lambda *_: 5.0)).tune()


def test_a_winner_that_is_the_recipe_is_not_trained_twice(tuner: Callable[..., Tuner]) -> None:
    tuned = tuner(None)

    def judged(winner: Trial | None) -> Job:
        variant = tuned.study.variants[1]
        winners = None if winner is None else {variant.label: winner}
        return tuned.folder.judged(tuned.study, tuned.base, variant, 0, winners)

    assert judged(Trial(0)).folder == judged(None).folder
    other = judged(Trial(3, {"train.learning_rate": 0.1}))
    assert other.folder != judged(None).folder
    assert other.settings == ("train.learning_rate=0.1",)


def test_the_expected_best_of_n_trials() -> None:
    tried = tuple(Tried(Trial(n), (loss,)) for n, loss in enumerate((3.0, 1.0, 2.0)))
    found = Tuned("v", tried, ()).expected_best()
    assert found == pytest.approx([2.0, (1 + 1 + 2) / 3, 1.0])
    assert len(RUNGS) == 3
    assert Dimension("x", 1.0, 100.0).beyond("high") == Dimension("x", 100.0, 1000.0)
