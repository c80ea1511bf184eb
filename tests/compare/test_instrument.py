"""The instrument, in short: a study whose every answer is known. `make instrument` has it in full."""

from pathlib import Path

import pytest
from instrument import known_study, most_claims, seed_sets, verdicts_of

FEWER = ["train.document_tokens=16384", "train.evaluate_tokens=4096"]


@pytest.mark.long
def test_a_study_gives_the_answers_that_are_known(tmp_path: Path) -> None:
    """A factor of 20 on attention's output is told apart untuned and undone by tuning; a name makes no
    difference; hiding the last 4 tokens is found, tuned or not."""
    space = "train.attention_output_rate=0.002..20"  # the trials are the recipe's 4, and 0.2
    results = known_study(tmp_path, steps=50, seeds="5", tune=2, controls=False, space=space, settings=FEWER)
    assert verdicts_of(results) == {
        "full again": ("same by construction", "same by construction"),
        "louder": ("worse", "no difference shown"),
        "blinded": ("worse", "worse"),
    }
    winners = {one["label"]: one["settings"] for one in results["tuning"]["variants"]}
    assert winners["full"] == {}
    assert winners["louder"] == {"train.attention_output_rate": 0.2}


def test_other_seeds_make_no_difference(tmp_path: Path) -> None:
    """Studies of full attention against itself, each with three seeds of its own out of ten."""
    pool = {"runs": 10, "seeds": 3, "studies": 1000}
    claimed = seed_sets(tmp_path, steps=10, **pool, settings=FEWER)
    assert 0 < claimed <= most_claims(**pool)
