"""The one display of progress, and how durations are written."""

import pytest

from headgate.compare.progress import StudyProgress
from headgate.progress import Progress, duration


def test_the_plain_line_shows_speeds_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = 0.0
    monkeypatch.setattr("headgate.progress.time.monotonic", lambda: seconds)
    with Progress(1.0, 0.1) as progress:
        # What an earlier call had done counts in the totals, not in the speed.
        progress.update(0.1, "500 documents", MB=10, tokens=3_000_000)
        seconds = 20.0
        progress.update(0.2, "1,000 documents", MB=60, tokens=9_000_000)
        assert capsys.readouterr().err == ""  # not more often than every 30 seconds
        seconds = 40.0
        progress.update(0.3, "2,500 documents", MB=110, tokens=15_000_000)
        seconds = 80.0
        progress.update(0.1, "2,500 documents", MB=110, tokens=15_000_000)
    assert capsys.readouterr().err.splitlines() == [
        " 30%  2,500 documents, 2.5 MB/s, 300,000 tokens/s, 2.33 min left",
        " 10%  2,500 documents, 1.2 MB/s, 150,000 tokens/s, unknown time left",
    ]


def test_nothing_is_shown_by_the_other_processes_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, shown=False) as progress:
        progress.say("a line")
    assert capsys.readouterr().err == ""


def test_a_study_of_many_runs_leaves_few_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = 0.0
    monkeypatch.setattr("headgate.progress.time.monotonic", lambda: seconds)
    with StudyProgress() as progress:
        progress.phase("judging")
        progress.begin_runs(total=1200, done=0, runs=120, left=120)
        for number in range(120):
            seconds += 1.0
            if number == 70:
                progress.failed("local, seed 1", "out of memory")
            else:
                progress.finished(f"full, seed {number}", 2.5)
            progress.update_runs(10 * number + 10)
    assert capsys.readouterr().err.splitlines() == [
        " 25%  judging: 30 of 120 runs, last full, seed 29: 2.5000, 90 s left",
        " 50%  judging: 60 of 120 runs, last full, seed 59: 2.5000, 60 s left",
        "judging: local, seed 1: FAILED: out of memory",
        " 75%  judging: 90 of 120 runs, last full, seed 89: 2.5000, 30 s left",
        "judging: 120 runs trained in 2 min, 1 failed",
        "100%  judging: 120 of 120 runs, last full, seed 119: 2.5000, 0 ms left",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.35, "350 ms"),
        (12.5, "12.5 s"),
        (192, "3.2 min"),
        (18_360, "5.1 h"),
        (207_360, "2.4 days"),
        (2.15e9, "68.1 years"),
    ],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, words: str) -> None:
    assert duration(seconds) == words
