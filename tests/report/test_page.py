"""The page: made from the folder alone; in a real browser, where markup is text and no request leaves it."""

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from study_examples import LABEL

from headgate.errors import HeadgateError
from headgate.report.figures import CROWD, _frontier, figures, look
from headgate.report.page import page, write_page
from headgate.report.publish import publish_study
from headgate.report.reading import read_results

FINDINGS = Path(__file__).parents[2] / "studies" / "first" / "results"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def report(study: Path) -> Path:
    return write_page(study)


@pytest.fixture(scope="module")
def crowd(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of 36 variants that answer questions, two of three of them ablations."""
    study = read_results(report.parent)
    last = study["variants"][-1]
    for number in range(36 - len(study["variants"])):
        variant = copy.deepcopy(last) | {"label": f"mechanism-{number}:gate=constant,window=1024"}
        variant |= {"mechanism": f"mechanism-{number % 4}", "ablation": "no-gate" if number % 3 else None}
        variant["gates"] = None
        study["variants"].append(variant)
        costs = [cost for cost in study["costs"]["costs"] if cost["label"] == last["label"]]
        study["costs"]["costs"] += [cost | {"label": variant["label"]} for cost in costs]
    place = {"first": 1, "end": 2, "mean": 0.9, "low": -0.1, "high": 1.14, "n": 2}
    far = place | {"first": 2, "end": 4, "low": None, "high": None}
    for variant in study["variants"]:
        variant["answers"] = {"accuracy": place, "by_distance": [place, far]}
    last["difference"]["relative"] = 1029.3
    study["data"]["request"] = {"source": f"recall:{'pairs=8,' * 20}", "tokenizer": "recall"}
    folder = tmp_path_factory.mktemp("crowd")
    for name in ("results.json", "gates.json", "skipping.json", "results.md", "papers.md"):
        shutil.copy(report.parent / name, folder / name)
    (folder / "results.json").write_text(json.dumps(study), encoding="utf-8")
    write_page(folder)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; not run")
    if CHROMIUM is None:
        pytest.skip("no chromium here (Debian: apt install chromium); the page was not opened")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Opened:
    """The page in the browser, with everything it said and asked for."""

    def __init__(self, browser: Any, report: Path, *, width: int, scheme: str = "light") -> None:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(report.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]", timeout=60_000)

    def marks(self, figure: str, kind: str = "symbol") -> int:
        return int(self.page.locator(f"#chart-{figure} .mark-{kind} path").count())


def test_one_small_file_that_needs_nothing(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert len(text.encode()) < 3_000_000
    outside = text[: text.index('<script type="module">')] + text[text.rindex("</script>") :]
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", outside)


def test_the_page_comes_from_the_folder_alone(report: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("results.json", "gates.json", "skipping.json"):
        shutil.copy(report.parent / name, moved / name)
    assert write_page(moved).read_text() == report.read_text()
    with pytest.raises(HeadgateError, match=r"has no results\.json"):
        write_page(tmp_path)


def test_markup_is_text(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert "<b>log</b>" not in text
    assert "&lt;b&gt;log&lt;/b&gt; &amp; co" in text
    assert "<i>Ours</i>" not in text
    assert "&lt;i&gt;Ours&lt;/i&gt;" in text


def test_a_document_cannot_end_the_script(report: Path) -> None:
    study = read_results(report.parent)
    study["passage"]["tokens"] = ["</script><script>alert(1)</script>", "<!--", "\u2028"]
    study["variants"][1]["label"] = "</script><img src=x onerror=alert(1)>"
    text = page(study)
    assert "<img src=x" not in text
    assert text.count("<script") == page(read_results(report.parent)).count("<script")
    assert "alert(1)</script>" not in text


def test_a_published_study_is_small_and_has_every_figure(report: Path, tmp_path: Path) -> None:
    written = publish_study(report.parent, tmp_path / "published")
    study = read_results(report.parent)
    made = figures(study)
    assert len(written) == 3 + sum(len(figure.views) for figure in made.values()) == len(set(written))
    text = (tmp_path / "published/results.json").read_text(encoding="utf-8")
    assert len(text) < 0.7 * len((report.parent / "results.json").read_text(encoding="utf-8"))
    assert str(report.parent) not in text
    assert study["data"]["folder"] not in text
    papers = (tmp_path / "published/papers.md").read_text(encoding="utf-8")
    assert papers.count("\n") == 2 + len(study["claims"])
    assert "| dynamic-sparse | Full Model | loss | 4.904 against 4.9266 validation loss | -0.5% |" in papers
    published = json.loads(text)["variants"]
    assert [v["difference"] for v in published] == [v["difference"] for v in study["variants"]]
    assert [[run["loss"] for run in v["runs"]] for v in published] == [
        [run["loss"] for run in v["runs"]] for v in study["variants"]
    ]
    curves = (tmp_path / "published/curves-by-tokens.svg").read_text(encoding="utf-8")
    assert curves.startswith("<svg")
    assert "dynamic-sparse" in curves  # in the legend
    assert "<b>" not in curves  # a label is text here too
    for figure in made.values():
        assert figure.views == figures(read_results(report.parent))[figure.name].views


def test_a_published_study_has_its_page_again(report: Path, tmp_path: Path) -> None:
    publish_study(report.parent, tmp_path)
    text = write_page(tmp_path).read_text(encoding="utf-8")
    assert all(f'id="{section}"' in text for section in ("result", "papers", "cost", "reproduce"))
    assert 'id="gates"' not in text
    assert "headgate train" not in text


@pytest.mark.parametrize("part", ["text", "late", "start", "recall", "long"])
def test_committed_results_have_a_page(part: str) -> None:
    results = read_results(FINDINGS / part)
    text = page(results)
    assert results["headline"].split(" (")[0] in text
    assert "not run" not in text


def test_no_claims_no_papers(report: Path) -> None:
    study = read_results(report.parent)
    study["claims"], study["contradictions"] = [], []
    assert 'id="papers"' in report.read_text(encoding="utf-8")
    assert "papers" not in re.findall(r'(?:id="|href="#)([\w-]+)"', page(study))


def test_the_figures_hold_the_numbers(report: Path) -> None:
    study = read_results(report.parent)
    made = figures(study)
    assert set(made) == {
        "differences", "curves", "loss-against-cost", "cost-against-length", "positions", "heads",
        "movement", "skipping",
    }  # fmt: skip
    shown = json.dumps(made["curves"].views["by tokens"])
    for variant in study["variants"]:
        assert str(variant["curve"][-1]["mean"]) in shown
    assert list(made["heads"].views) == ["dynamic-sparse", LABEL]


def test_a_study_without_costs_or_gates_has_a_page(report: Path) -> None:
    study = read_results(report.parent)
    study["costs"], study["passage"], study["skipping"] = None, None, None
    for variant in study["variants"]:
        variant |= {"gates": None, "speed": None, "memory": None, "tokens_per_second": None}
    text = page(study)
    assert 'id="cost"' not in text
    assert 'id="gates"' not in text
    assert 'id="result"' in text


def test_failed_and_diverged_runs_are_shown(report: Path) -> None:
    study = read_results(report.parent)
    failed, diverged = study["variants"][1:]
    failed["runs"][1] = {
        "seed": 1,
        "folder": "x",
        "state": "failed",
        "reason": "ran <out> of luck",
        "curve": [],
    }
    diverged["loss"] |= {"mean": None, "low": None, "high": None}
    diverged["difference"] |= {"mean": None, "low": None, "high": None, "diverged": 1}
    text = page(study)
    assert "seed 1: failed: ran &lt;out&gt; of luck" in text
    assert "1 of 2 seeds diverged" in text


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_in_a_browser(browser: Any, report: Path, width: int, scheme: str) -> None:
    opened = Opened(browser, report, width=width, scheme=scheme)
    assert opened.said == []
    assert opened.asked == [report.as_uri()]
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.page.locator("b", has_text="log").count() == 0
    assert LABEL in opened.page.locator("#result").inner_text()
    # Every figure is drawn, as wide as it may be.
    for name in figures(read_results(report.parent)):
        box = opened.page.locator(f"#chart-{name} svg").bounding_box()
        assert box is not None
        assert 200 < box["width"] <= width


def test_toggles_and_keyboard(browser: Any, report: Path) -> None:
    opened = Opened(browser, report, width=1280)
    page = opened.page
    before = opened.marks("curves")
    assert before >= 6
    page.locator("[data-variant='1']").focus()
    page.keyboard.press("Space")  # a checkbox of the shared legend hides a variant in every figure
    page.wait_for_function(
        f"document.querySelectorAll('#chart-curves .mark-symbol path').length === {before * 2 // 3}"
    )
    page.locator("[data-variant='1']").check()
    page.wait_for_function(
        f"document.querySelectorAll('#chart-curves .mark-symbol path').length === {before}"
    )

    def axis() -> str:
        return str(page.locator("#chart-curves .role-axis-title").first.text_content())

    assert axis() == "training tokens"
    page.locator("[data-figure=curves][value='by tokens']").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "document.querySelector('#chart-curves .role-axis-title').textContent === 'seconds of training'"
    )
    page.locator("#passage-variant").select_option(LABEL)
    page.locator("#passage-head").select_option("1")
    coloured = page.locator("#passage span").evaluate_all(
        "all => new Set(all.map(s => s.style.backgroundColor)).size"
    )
    assert coloured > 3
    text = "".join(read_results(report.parent)["passage"]["tokens"])
    assert page.locator("#passage").text_content() == text
    assert opened.said == []


def test_every_variant_has_its_own_look() -> None:
    assert len({(look(n).colour, str(look(n).dash)) for n in range(36)}) == 36
    assert len({(look(n).colour, look(n).shape) for n in range(54)}) == 54


def test_a_share_stays_a_share(crowd: Path) -> None:
    spec = figures(read_results(crowd))["answers"].views[""]
    rows = next(layer["data"] for layer in [spec, *spec["layer"]] if "data" in layer)
    rows = rows["values"] if "values" in rows else spec["datasets"][rows["name"]]
    assert {(row["low"], row["high"]) for row in rows} == {(0.0, 1.0), (None, None)}


def test_the_frontier() -> None:
    points = [("a", 1, 5.0), ("b", 2, 4.0), ("c", 2, 4.5), ("d", 3, 4.0), ("e", 4, 3.0)]
    rows = [{"label": label, "seconds": cost, "mean": loss} for label, cost, loss in points]
    assert _frontier(rows, "seconds") == {"a", "b", "e"}


def test_one_length_has_no_crossover(report: Path) -> None:
    study = read_results(report.parent)
    assert "cost-against-length" in figures(study)
    assert "Where each starts to be faster" in report.read_text(encoding="utf-8")
    context = study["config"]["train"]["context"]
    study["costs"]["costs"] = [cost for cost in study["costs"]["costs"] if cost["length"] == context]
    assert "cost-against-length" not in figures(study)
    text = page(study)
    assert "Where each starts to be faster" not in text
    assert 'id="cost"' in text


def test_whose_seconds_they_are(report: Path) -> None:
    study = read_results(report.parent)
    assert "separate measurement of speed" in figures(study)["curves"].caption
    study["costs"] = None
    assert "those of the runs, which may have shared the machine" in figures(study)["curves"].caption


def test_no_share_of_a_loss_next_to_nothing(crowd: Path) -> None:
    assert "102930" not in (crowd / "report.html").read_text(encoding="utf-8")


def test_a_place_that_cannot_be_written_is_named(report: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("here", encoding="utf-8")
    for place in (file, file / "inside"):
        with pytest.raises(HeadgateError, match=r"cannot write into .*file.*--publish takes a folder"):
            publish_study(report.parent, place)
    assert file.read_text(encoding="utf-8") == "here"


@pytest.mark.parametrize("width", [1280, 390])
def test_a_crowd_in_a_browser(browser: Any, crowd: Path, width: int) -> None:
    opened = Opened(browser, crowd / "report.html", width=width)
    page = opened.page
    assert opened.said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for table in page.locator(".scroll").all():
        assert table.evaluate("box => box.scrollWidth <= box.clientWidth")
    # It starts without ablations, and without bands while many are shown.
    shown = "[data-variant]:checked"
    without = page.locator(shown).count()
    assert CROWD < without < 36
    assert opened.marks("curves", "area") == 0
    page.locator("[data-show=all]").click()
    assert page.locator(shown).count() == 36
    page.locator("[data-show=mechanisms]").click()
    assert page.locator(shown).count() == without
    page.locator("[data-show=none]").click()
    assert page.locator(shown).count() == 0
    page.locator("[data-variant='1']").check()
    page.wait_for_function("document.querySelectorAll('#chart-curves .mark-area path').length > 0")
    # Each row of an ablation stays, whatever is hidden elsewhere.
    assert opened.marks("ablations") > 0
    # A link leads to a heading that the legend does not cover.
    page.locator("nav a[href='#ablations-section']").click()
    covered = """() => {
      const box = document.querySelector("#ablations-section h2").getBoundingClientRect();
      const at = document.elementFromPoint(box.left + 5, box.top + box.height / 2);
      return at === null || at.closest("#ablations-section") === null;
    }"""
    assert not page.evaluate(covered)
    assert opened.said == []


def test_published_figures_cut_and_overlap_nothing(browser: Any, crowd: Path, tmp_path: Path) -> None:
    publish_study(crowd, tmp_path)
    page = browser.new_page()
    labels = [variant["label"] for variant in read_results(crowd)["variants"]]
    for name in ("differences", "answers", "curves-by-tokens", "loss-against-cost-memory"):
        page.goto((tmp_path / f"{name}.svg").as_uri())
        size = page.evaluate(
            "['width', 'height'].map((side) => document.documentElement[side].baseVal.value)"
        )
        kind = "axis" if name == "differences" else "legend"
        texts = page.evaluate(
            f"[...document.querySelectorAll('.role-{kind}-label text, .role-{kind}-symbol path')]"
            ".map((text) => {const box = text.getBoundingClientRect();"
            "return [text.textContent, box.left, box.top, box.right, box.bottom]; })"
        )
        drawn = {text[0] for text in texts}
        assert set(labels[1:]) <= drawn
        for _, left, top, right, bottom in texts:
            assert left >= 0
            assert top >= 0
            assert right <= size[0]
            assert bottom <= size[1]
        boxes = [text[1:] for text in texts if text[0] in labels or text[0] == ""]
        for number, one in enumerate(boxes):
            for other in boxes[:number]:
                beside = one[0] >= other[2] or other[0] >= one[2]
                assert beside or one[1] >= other[3] - 3 or other[1] >= one[3] - 3
