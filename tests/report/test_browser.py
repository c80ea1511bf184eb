"""The page in a real browser: nothing leaves it, everything is drawn, and everybody can use it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from study_examples import LABEL

from headgate.report.figures import figures
from headgate.report.page import write_page
from headgate.report.painting import CROWD
from headgate.report.publish import publish_study
from headgate.report.reading import read_results

FINDINGS = Path(__file__).parents[2] / "studies" / "first" / "results" / "text"
ROWS_EACH = [
    f"chart-{name}"
    for name in ("heads", "movement", "skipping", "differences", "ablations", "cost-against-length")
]
"""Figures with an axis that has a label for each of few things."""


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
        self.page.wait_for_selector("html[data-ready=yes]")

    def marks(self, figure: str, kind: str = "symbol") -> int:
        return int(self.page.locator(f"#chart-{figure} .mark-{kind} path").count())


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
    assert before >= 4
    page.locator("#variants summary").focus()
    page.keyboard.press("Enter")
    named = page.locator("#key-curves li")
    before_key = named.count()
    assert LABEL in named.all_text_contents()
    page.locator("[data-variant='1']").focus()
    page.keyboard.press("Space")  # a checkbox of the shared legend hides a variant in every figure
    page.wait_for_function(
        f"document.querySelectorAll('#chart-curves .mark-symbol path').length === {before // 2}"
    )
    assert named.count() == before_key - 1
    page.locator("[data-variant='1']").check()
    page.wait_for_function(
        f"document.querySelectorAll('#chart-curves .mark-symbol path').length === {before}"
    )

    def axis() -> str:
        return str(page.locator("#chart-curves .role-axis-title").first.text_content())

    assert axis() == "training tokens"
    caption = page.locator("#caption-curves").text_content()
    page.locator("[data-figure=curves][value='loss by tokens']").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "document.querySelector('#chart-curves .role-axis-title').textContent === 'seconds of training'"
    )
    assert page.locator("#caption-curves").text_content() != caption
    page.locator("#passage-variant").select_option(LABEL)
    page.locator("#passage-head").select_option("1")
    coloured = page.locator("#passage span").evaluate_all(
        "all => new Set(all.map(s => s.style.backgroundColor)).size"
    )
    assert coloured > 3
    text = "".join(read_results(report.parent)["passage"]["tokens"])
    assert page.locator("#passage").text_content() == text
    assert opened.said == []


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
    page.locator("#variants summary").click()
    page.locator("[data-show=all]").click()
    assert page.locator(shown).count() == 36
    page.locator("[data-show=mechanisms]").click()
    assert page.locator(shown).count() == without
    page.locator("[data-show=none]").click()
    assert page.locator(shown).count() == 0
    page.locator("[data-variant='1']").check()
    page.wait_for_function("document.querySelectorAll('#chart-curves .mark-area path').length > 0")
    page.locator("#variants summary").click()
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
    page = browser.new_context().new_page()
    labels = [variant["label"] for variant in read_results(crowd)["variants"]]
    for name in ("differences", "answers", "curves-loss-by-tokens", "tradeoff-memory"):
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
        assert drawn & set(labels[1:])
        if name in ("curves-loss-by-tokens", "answers"):
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


@pytest.mark.parametrize(("which", "width", "scheme"), [("report", 390, "dark"), ("crowd", 1280, "light")])
def test_everybody_can_use_it(
    browser: Any, report: Path, crowd: Path, which: str, width: int, scheme: str
) -> None:
    """By the rules that axe-core can check."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed; not run")
    path = report if which == "report" else crowd / "report.html"
    page = Opened(browser, path, width=width, scheme=scheme).page
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    for button in page.locator(".open").all()[:2]:
        button.click()
    found = axe.Axe().run(page).response["violations"]
    assert [(rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in found] == []


@pytest.mark.parametrize(("part", "width"), [("text", 1440), ("text", 390), ("crowd", 1280), ("crowd", 700)])
def test_names_cover_nothing(browser: Any, tmp_path: Path, crowd: Path, width: int, part: str) -> None:
    folder = crowd
    if part == "text":
        folder = tmp_path / "text"
        shutil.copytree(FINDINGS, folder)
        write_page(folder)
    page = Opened(browser, folder / "report.html", width=width).page
    # The answer comes first: on the first screen of a desktop, within two of a telephone.
    box = page.locator("#chart-tradeoff svg").bounding_box()
    assert box["y"] + box["height"] <= (800 if width > 640 else 2 * 844)
    texts = page.evaluate(
        "[...document.querySelectorAll('#chart-tradeoff .role-mark.mark-text text')]"
        ".filter((text) => text.textContent).map((text) => {const box = text.getBoundingClientRect();"
        "return [box.left, box.top + 2, box.right, box.bottom - 2]; })"
    )
    assert len(texts) > 2
    for number, one in enumerate(texts):
        assert box["x"] <= one[0]
        assert one[2] <= box["x"] + box["width"] + 1
        for other in texts[:number]:
            apart = one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]
            assert apart, (one, other)
    # Every axis of every figure has at least three labels, and 0 is among those of a difference.
    for chart in page.locator(".chart").all():
        for axis in chart.locator(".role-axis").all():
            labels = axis.locator(".role-axis-label text").all_text_contents()
            assert not labels or len(labels) >= 3 or chart.get_attribute("id") in ROWS_EACH
    assert "0" in page.locator("#chart-differences .role-axis-label text").all_text_contents()


def test_the_table_can_be_searched_and_opened(browser: Any, crowd: Path) -> None:
    opened = Opened(browser, crowd / "report.html", width=1280)
    page = opened.page
    rows = page.locator("tr[data-row]:visible")
    folded = rows.count()
    page.locator("#unfold").click()
    assert rows.count() == 36 > folded
    page.locator("#filter").fill("mechanism-1")
    assert 0 < rows.count() < folded
    assert "of 36 variants" in page.locator("#found").inner_text()
    page.locator("#filter").fill("")
    assert rows.count() == 36
    page.locator(".open").first.click()
    assert page.locator("tr.more:visible").count() == 1
    page.locator("[data-table=tradeoff] summary").click()
    page.wait_for_selector("[data-table=tradeoff] td")
    assert page.locator("[data-table=tradeoff] tbody tr").count() > CROWD
    with page.expect_download() as saved:
        page.locator("#save").click()
    lines = saved.value.path().read_text(encoding="utf-8").splitlines()
    assert len(lines) == 37
    assert lines[0].startswith("variant,mechanism,ablation,loss,difference")
    assert opened.said == []


def test_without_scripts(browser: Any, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("#tradeoff noscript svg, #tradeoff svg").count() > 0
    assert page.locator("tr[data-row]:visible").count() == 3
    assert page.locator("tr.more:visible").count() == 2
    assert page.locator("#filter").is_hidden()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.locator("#tradeoff svg").bounding_box()["width"] <= 390


def test_on_paper(browser: Any, crowd: Path) -> None:
    """Nothing is cut off at the edge of an A4 sheet, and the legend is there."""
    opened = Opened(browser, crowd / "report.html", width=1440)
    page = opened.page
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 688, "height": 1000})  # A4 less its margins
    page.wait_for_function(
        "document.querySelector('#chart-tradeoff svg').getBoundingClientRect().width > 600"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 688
    for table in page.locator("table:visible").all():
        assert table.evaluate("box => box.getBoundingClientRect().right") <= 688
    assert page.locator("#key-curves .swatch").first.is_visible()
    assert page.locator("#filter").is_hidden()
