"""What a study can see: attention, reach, position; and when it says that it cannot tell."""

from dataclasses import replace
from typing import Any

import pytest

from headgate.compare.controls import find_controls, sight, with_controls
from headgate.compare.variants import parse_variants
from headgate.config import Config


def row(label: str, verdict: str = "worse", family: str = "controls") -> dict[str, Any]:
    difference = {"verdict": verdict, "mean": 0.2, "low": 0.1, "high": 0.3, "family": family}
    return {"label": label, "difference": difference | {"detectable": 0.02}}


def rows(alone: str = "worse", short: str = "worse", fall: float = -0.3) -> list[dict[str, Any]]:
    """A study of one variant with its controls, whose baseline falls by so much with position."""
    places = [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 24)]

    def run(seed: int) -> dict[str, Any]:
        losses = [5 + fall * (n / 5) + 0.001 * seed * n for n in range(6)]
        bins = [{"first": a, "end": b, "loss": x} for (a, b), x in zip(places, losses, strict=True)]
        return {"state": "finished", "by_position": bins}

    baseline = {"label": "full", "answers": None, "runs": [run(0), run(1)], "difference": None}
    controls = [row("control: no attention", alone), row("control: window of 6", short)]
    return [baseline, row("gated", "better", "named"), *controls]


def test_controls_are_added_and_marked(micro: Config) -> None:
    named = parse_variants(["gated"], micro.model)
    found = with_controls(named, micro)
    assert [v.label for v in found] == ["full", "gated", "control: no attention", "control: window of 6"]
    assert [v.control for v in found] == [False, False, True, True]
    assert found[2].mechanism[0].options == {"window": 0}
    own = with_controls(parse_variants(["local:window=0"], micro.model), micro)
    assert [v.label for v in own] == ["full", "local:window=0", "control: window of 6"]
    assert find_controls(own, micro) == {
        "no attention": "local:window=0", "short window": "control: window of 6"
    }  # fmt: skip
    longer = replace(micro, train=replace(micro.train, context=512))
    assert with_controls(named, longer)[-1].label == "control: window of 16"


@pytest.mark.parametrize(
    ("given", "missed"),
    [
        (rows(), None),
        (rows(alone="no difference shown"), "full is not shown to beat no attention (+0.2000"),
        (rows(alone="better"), "full is not shown to beat no attention"),
        (rows(short="no difference shown"), "full is not shown to beat window of 6"),
        (rows(fall=0.0), "full's loss is not shown to fall with position"),
    ],
)
def test_a_study_that_cannot_see_is_told_apart(
    given: list[dict[str, Any]], missed: str | None, micro: Config
) -> None:
    variants = with_controls(parse_variants(["gated"], micro.model), micro)
    found = sight(variants, micro, given)
    assert found["can_tell"] is (missed is None)
    assert found["detectable"] == 0.02
    words = [check["words"] for check in found["checks"] if check["passed"] is False]
    assert len(words) == (missed is not None)
    if missed is not None:
        assert missed in words[0]
        assert "train on more tokens (train.steps=48)" in found["advice"]


def test_without_controls_or_seeds_nothing_is_known(micro: Config) -> None:
    variants = parse_variants(["gated"], micro.model)
    assert sight(variants, micro, rows()[:2])["can_tell"] is None
    untested = rows(alone="not tested", short="not tested")
    untested[0]["runs"] = untested[0]["runs"][:1]
    assert sight(with_controls(variants, micro), micro, untested)["can_tell"] is None


def test_answers_stand_at_positions_of_their_own(micro: Config) -> None:
    given = rows(fall=0.0)
    given[0]["answers"] = {"accuracy": {}}
    variants = with_controls(parse_variants(["gated"], micro.model), micro)
    assert sight(variants, micro, given)["can_tell"] is True
