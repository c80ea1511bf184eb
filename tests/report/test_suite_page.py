"""The page of a suite: its answer, its figures, and that everybody can use it."""

import json
from pathlib import Path
from typing import Any

import pytest

from headgate.report.suite_figures import suite_figures
from headgate.report.suite_page import score_table, suite_page, suite_sentence, write_suite_page

SOLVED = {"full": (0.99, 0.95), "local": (0.3, 0.97), "<b>mine</b>": (None, None)}


def suite() -> dict[str, Any]:
    """Two tasks and three mechanisms, one of which failed everywhere."""

    def interval(mean: float | None) -> dict[str, Any]:
        spread = {"low": None, "high": None} if mean is None else {"low": mean - 0.4, "high": mean + 0.4}
        return {"mean": mean, **spread, "n": 2}

    def row(label: str, score: float | None) -> dict[str, Any]:
        places = [{"first": 1 << n, "end": 2 << n, "tokens": 9, **interval(score)} for n in range(4)]
        pairs = [{"pairs": 4 << n, "tokens": 9, **interval(score)} for n in range(3)]
        curve = [{"tokens": 1000 * n, "score": score} for n in range(1, 4)]
        failed = score is None
        return {
            "label": label,
            "rate": None if failed else 0.01,
            "at_the_edge": True,
            "runs": [] if failed else [{"seed": 0, "state": "finished", "curve": curve}],
            "failures": ["ran <out> of luck"] if failed else [],
            "score": interval(score),
            "accuracy": interval(score),
            "loss": interval(score),
            "by_distance": [] if failed else places,
            "by_pairs": [] if failed else pairs,
            "to_solve": {"median": 2000 if score and score > 0.9 else None, "reached": 1, "of": 2},
        }

    levels = {"accuracy": 0.25, "loss": 1.4}
    tasks = [
        {
            "name": name,
            "source": f"{name}:pairs=8",
            "judged_by": "accuracy",
            "chance": levels,
            "optimum": {"accuracy": 1.0, "loss": 0.0},
            "tokens": 3000,
            "variants": [row(label, scores[n]) for label, scores in SOLVED.items()],
        }
        for n, name in enumerate(("mqar", "copy"))
    ]
    variants = [
        {
            "label": label,
            "mean_score": None if None in scores else sum(scores) / 2,  # type: ignore[arg-type]
            "solved": sum(score is not None and score >= 0.9 for score in scores),
            "speed": {"seconds": 0.1, "ratio": 1.0, "low": 0.9, "high": 1.1},
            "parameters": 1000,
        }
        for label, scores in SOLVED.items()
    ]
    found = {"headgate": "1", "solved_at": 0.9, "rates": [0.003, 0.01], "tuning_seeds": 1, "seeds": 2}
    command = ["headgate", "suite", "local", "--out", "here"]
    costs = {"task": "copy", "threads": 1, "machine": {}}
    return found | {"tasks": tasks, "variants": variants, "command": command, "costs": costs}


def test_the_answer_counts_what_is_solved() -> None:
    assert suite_sentence(suite()) == "Full solves 2 of 2 tasks. Fewer: local (1), <b>mine</b> (0)."


def test_an_unfinished_suite_says_so_and_judges_what_is_there() -> None:
    begun = suite()
    begun["tasks"][0]["variants"][1]["score"]["mean"] = None
    begun["tasks"][1]["variants"][0]["score"]["mean"] = None
    assert (
        suite_sentence(begun)
        == "Not finished: 4 of 6 scores are known. Full solves mqar. Fewer: <b>mine</b> (0)."
    )
    begun["tasks"][0]["variants"][0]["score"]["mean"] = None
    assert suite_sentence(begun) == "Not finished: 3 of 6 scores are known."
    assert "3 of 6 scores" in suite_page(begun)


def test_figures_and_table_hold_the_numbers() -> None:
    made = suite_figures(suite())
    assert list(made) == ["by-distance", "by-pairs", "learning"]
    assert list(made["by-pairs"].views) == ["mqar", "copy"]
    rows = made["by-distance"].views["mqar"].rows
    ends = {row["label"]: [row["low"], row["high"]] for row in rows}
    assert ends == {"full": pytest.approx([0.59, 1.0]), "local": pytest.approx([0.0, 0.7])}
    assert len(score_table(suite())) == 7


def test_the_page_says_how_speed_was_measured() -> None:
    assert "training steps on copy, all mechanisms in turn on 1 thread, relative to full" in suite_page(
        suite()
    )
    without = suite() | {"costs": None}
    without["variants"] = [variant | {"speed": None} for variant in without["variants"]]
    assert "Speed was not measured" in suite_page(without)


def test_text_stays_text() -> None:
    text = suite_page(suite())
    assert "<b>mine" not in text
    assert "&lt;b&gt;mine&lt;/b&gt;" in text
    assert "ran &lt;out&gt; of luck" in text
    assert "headgate suite local --out here" in text
    assert len(text.encode()) < 2_000_000


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_in_a_browser(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed; not run")
    (tmp_path / "suite.json").write_text(json.dumps(suite()), encoding="utf-8")
    path = write_suite_page(tmp_path)
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#chart-by-distance .mark-line path").count() == 2
    page.locator("[data-figure=by-distance][value=copy]").check()
    page.wait_for_function("document.getElementById('caption-by-distance').textContent.startsWith('copy')")
    with page.expect_download() as saved:
        page.locator("#save").click()
    assert saved.value.suggested_filename == "suite.csv"
    found = axe.Axe().run(page).response["violations"]
    assert [(rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in found] == []
    assert said == []
