"""The one display of progress, and how durations are written."""

import pytest

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


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.35, "350 ms"), (12.5, "12.5 s"), (192, "3.2 min"), (18_360, "5.1 h"), (207_360, "2.4 days")],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, words: str) -> None:
    assert duration(seconds) == words
