"""Simulated studies: what a verdict, an interval and a detectable difference promise, they keep.

`python benchmarks/simulated_studies.py` does the same with more studies and in more worlds.
"""

import pytest
from scipy import stats
from simulated_studies import WORLDS, World, coverage, false_verdicts, shown

STUDIES = 500
BOTH = next(world for world in WORLDS if world.name == "both")
SEEDS_ALONE = next(world for world in WORLDS if world.name == "seeds alone")


@pytest.mark.parametrize("looks", [(3,), (4, 8, 12)])
@pytest.mark.parametrize("world", [BOTH, SEEDS_ALONE], ids=lambda world: world.name)
def test_at_most_one_study_in_twenty_without_a_difference_claims_one(
    world: World, looks: tuple[int, ...]
) -> None:
    claimed = round(STUDIES * false_verdicts(world, STUDIES, looks=looks))
    assert claimed > 0
    assert stats.binomtest(claimed, STUDIES, 0.05, alternative="greater").pvalue > 0.01


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    assert 0.93 <= coverage(BOTH, STUDIES, seeds=5) <= 0.97
    # Over the seeds alone it would not: other documents would give another answer.
    assert coverage(BOTH, STUDIES, seeds=5, with_documents=False) < 0.9


@pytest.mark.parametrize("looks", [(5,), (4, 8, 12)])
def test_power_is_as_predicted(looks: tuple[int, ...]) -> None:
    reached, predicted = shown(BOTH, STUDIES, looks=looks)
    assert predicted == pytest.approx(0.8)
    assert reached == pytest.approx(predicted, abs=0.05)
