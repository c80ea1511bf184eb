"""The papers' figures, against the papers, and the verdicts on them."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headgate.compare.claims import check_variants, judge, judge_papers
from headgate.compare.variants import Variant
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.papers.paper import Claim, Paper, load_paper, shipped_papers

SHARED = Path(os.environ.get("HEADGATE_SHARED", Path(__file__).parents[3] / "shared"))
PAPERS = {paper.paper: paper for paper in shipped_papers()}
CLAIMS = [(paper.paper, claim) for paper in PAPERS.values() for claim in paper.claims]
EACH_CLAIM = pytest.mark.parametrize(
    ("paper", "claim"), CLAIMS, ids=[f"{paper}-{claim.row}-{claim.metric}" for paper, claim in CLAIMS]
)
Reader = Callable[[str], list[str]]


@pytest.fixture
def papers() -> Reader:
    """The renderings of a paper as text: without the marks of TeX, ± as the papers' tables print it."""
    folder = SHARED / "papers"
    if not folder.is_dir():
        pytest.skip("the papers are absent (set HEADGATE_SHARED); not run")

    def read(paper: str) -> list[str]:
        texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"{paper}.*"))]
        assert texts, f"no text of {paper}"
        marks = r"\\cite\{[^}]*\}|\\textbf|[${}\\]"
        return [re.sub(r"[ \t]+", " ", re.sub(marks, "", text.replace(r"\pm", "±"))) for text in texts]

    return read


@EACH_CLAIM
def test_the_paper_prints_the_figure_in_its_row(paper: str, claim: Claim, papers: Reader) -> None:
    for text in papers(paper):
        lines = [line for line in text.splitlines() if claim.row in line]
        if claim.metric == "convergence":
            assert any("minimum loss 15% faster" in line for line in lines)
            assert claim.relative == pytest.approx(-0.15)
            continue
        unit = {"x": "x", "GB": "(GB)?"}.get(claim.unit, "")
        assert any(re.search(rf"(?<![\d.]){re.escape(claim.printed)}{unit}(?![\d])", line) for line in lines)
        of_baseline = [line for line in text.splitlines() if "aseline" in line]
        assert any(claim.baseline_printed in line for line in of_baseline)


@pytest.mark.parametrize("paper", PAPERS)
def test_no_figure_of_a_paper_is_left_out(paper: str, papers: Reader) -> None:
    claims = PAPERS[paper].claims
    by_metric = {
        metric: {claim.printed.partition(" ")[0] for claim in claims if claim.metric == metric}
        | {claim.baseline_printed.partition(" ")[0] for claim in claims if claim.metric == metric}
        for metric in ("loss", "speed", "memory")
    }
    for text in papers(paper):
        assert set(re.findall(r"\b[45]\.\d{3,4}\b", text)) == by_metric["loss"]
        assert set(re.findall(r"(?<![\d.])\d\.\d\d(?=x)", text)) <= by_metric["speed"]
        assert set(re.findall(r"[\d,]+(?= tokens/sec)", text)) <= by_metric["speed"]
        assert set(re.findall(r"\d+(?=GB)", text)) <= by_metric["memory"]


@pytest.mark.parametrize("paper", PAPERS)
def test_a_study_can_run_what_a_claim_is_about(paper: str, micro: Config) -> None:
    check_variants(PAPERS[paper], micro.model)
    assert {Variant.parse(claim.variant).label for claim in PAPERS[paper].claims}


def find(paper: str, row: str, metric: str) -> Claim:
    (claim,) = [c for c in PAPERS[paper].claims if (c.row, c.metric) == (row, metric)]
    return claim


def test_relative_differences_as_the_papers_word_them() -> None:
    assert find("dynamic-sparse", "Memory usage", "memory").relative == pytest.approx(-0.21, abs=0.005)
    assert find("dynamic-sparse", "Training speed", "speed").relative == pytest.approx(-0.05, abs=0.005)
    assert find("context-adaptive", "CAA", "memory").relative + 1 == pytest.approx(2.1, abs=0.05)
    assert find("context-adaptive", "CAA", "speed").relative == pytest.approx(-0.18)
    # More hours are less speed.
    assert find("head-gated", "Our Method", "speed").relative == pytest.approx(24.5 / 25.1 - 1)
    # The paper's own "5.7%" does not follow from its figures.
    assert find("head-gated", "Our Method", "loss").relative == pytest.approx(-0.0562, abs=5e-5)


def test_which_claims_say_equal_to_the_baseline() -> None:
    equal = {(paper, claim.row) for paper, claim in CLAIMS if claim.direction == 0}
    assert equal == {("dynamic-sparse", "Fixed Window"), ("sparse-geometric", "Disabling both components")}
    for _, claim in CLAIMS:
        assert claim.direction in (0, 1 if claim.relative > 0 else -1)
    assert find("sparse-geometric", "Dynamic Sparse", "loss").error == pytest.approx(
        0.01628 / 4.927, rel=1e-3
    )


def measured(**found: Any) -> dict[str, Any]:
    """The results of a variant."""
    return {"label": "mine", "difference": None, "speed": None, "memory": None, "convergence": None, **found}


def loss(verdict: str, relative: float | None, low: float | None, high: float | None) -> dict[str, Any]:
    ends = {"relative": relative, "relative_low": low, "relative_high": high}
    return {"seeds": 3, **ends, "verdict": verdict}


FULL_MODEL = find("dynamic-sparse", "Full Model", "loss")
NO_WINDOW = find("dynamic-sparse", "No Window", "loss")
NEITHER = find("sparse-geometric", "Disabling both components", "loss")


@pytest.mark.parametrize(
    ("claim", "difference", "expected"),
    [
        (FULL_MODEL, loss("better", -0.02, -0.03, -0.01), "same direction"),
        (FULL_MODEL, loss("worse", 0.02, 0.01, 0.03), "opposite"),
        (FULL_MODEL, loss("no difference shown", -0.02, -0.05, 0.01), "no difference shown"),
        # The interval of one variant may leave out 0 and the corrected test still show nothing.
        (FULL_MODEL, loss("no difference shown", -0.02, -0.039, -0.001), "no difference shown"),
        (FULL_MODEL, loss("not tested", -0.02, None, None), "no difference shown"),
        (FULL_MODEL, loss("worse", None, None, None), "opposite"),  # diverged
        (NO_WINDOW, loss("worse", 0.02, 0.01, 0.03), "same direction"),
        (NO_WINDOW, loss("better", -0.02, -0.03, -0.01), "opposite"),
        (NEITHER, loss("no difference shown", 0.0, 0.0, 0.0), "same direction"),
        (NEITHER, loss("worse", 0.001, 0.0005, 0.0015), "same direction"),
        (NEITHER, loss("no difference shown", 0.0, -0.02, 0.02), "no difference shown"),
        (NEITHER, loss("not tested", 0.0, None, None), "no difference shown"),
        (NEITHER, loss("worse", 0.02, 0.01, 0.03), "opposite"),
        (NEITHER, loss("better", -0.02, -0.03, -0.01), "opposite"),
    ],
)
def test_verdict_on_a_loss(claim: Claim, difference: dict[str, Any], expected: str) -> None:
    judged = judge(claim, measured(difference=difference))
    assert judged is not None
    assert judged.verdict == expected
    assert judged.label == "mine"
    assert (judged.relative, judged.low, judged.high) == (
        difference["relative"],
        difference["relative_low"],
        difference["relative_high"],
    )


SLOWER = find("dynamic-sparse", "Training speed", "speed")
FASTER = find("sparse-geometric", "Dynamic Sparse", "speed")
HOURS = find("head-gated", "Our Method", "speed")
LESS = find("dynamic-sparse", "Memory usage", "memory")
MORE = find("context-adaptive", "CAA", "memory")
SOONER = find("dynamic-sparse", "Convergence", "convergence")


@pytest.mark.parametrize(
    ("claim", "cost", "expected"),
    [
        (SLOWER, {"ratio": 0.9, "low": 0.85, "high": 0.95}, "same direction"),
        (SLOWER, {"ratio": 1.5, "low": 1.4, "high": 1.6}, "opposite"),
        (SLOWER, {"ratio": 0.99, "low": 0.9, "high": 1.01}, "no difference shown"),
        (SLOWER, {"ratio": 0.9, "low": None, "high": None}, "no difference shown"),
        (FASTER, {"ratio": 1.5, "low": 1.4, "high": 1.6}, "same direction"),
        (FASTER, {"ratio": 0.9, "low": 0.85, "high": 0.95}, "opposite"),
        (HOURS, {"ratio": 0.9, "low": 0.85, "high": 0.95}, "same direction"),
        (LESS, {"ratio": 0.98}, "same direction"),
        (LESS, {"ratio": 0.995}, "no difference shown"),
        (LESS, {"ratio": 1.02}, "opposite"),
        (MORE, {"ratio": 1.2}, "same direction"),
        (SOONER, {"relative": -0.1, "low": -0.2, "high": -0.05}, "same direction"),
        (SOONER, {"relative": -0.1, "low": -0.3, "high": 0.05}, "no difference shown"),
        (SOONER, {"relative": 0.1, "low": 0.05, "high": 0.2}, "opposite"),
        (SOONER, {"relative": None, "low": None, "high": None}, "no difference shown"),
    ],
)
def test_verdict_on_a_cost(claim: Claim, cost: dict[str, Any], expected: str) -> None:
    shown = loss("better", -0.1, -0.2, -0.05)
    judged = judge(claim, measured(difference=shown, **{claim.metric: cost}))
    assert judged is not None
    assert judged.verdict == expected
    if "ratio" in cost:
        assert judged.relative == pytest.approx(cost["ratio"] - 1)
    else:
        assert judged.relative == cost["relative"]


def test_sooner_counts_where_the_loss_is_shown_to_differ() -> None:
    by_chance = loss("no difference shown", -0.1, -0.2, -0.05)
    sooner = {"relative": -0.1, "low": -0.2, "high": -0.05}
    judged = judge(SOONER, measured(difference=by_chance, convergence=sooner))
    assert judged is not None
    assert judged.verdict == "no difference shown"


def test_only_claims_whose_variants_ran_are_judged() -> None:
    better, worse = loss("better", -0.1, -0.2, -0.05), loss("worse", 0.1, 0.05, 0.2)
    names = ["full", "dynamic-sparse:window=64", "dynamic-sparse:no-gate@mine", "dynamic-sparse", "local"]
    failed = loss("not tested", None, None, None) | {"seeds": 0}
    rows = [measured(difference=found) for found in (None, worse, worse, better, failed)]
    found = judge_papers(list(PAPERS.values()), [Variant.parse(name) for name in names], rows)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    verdicts = {(row["claim"]["paper"], row["claim"]["row"]): row["verdict"] for row in found["claims"]}
    assert verdicts == {
        ("dynamic-sparse", "Full Model"): "same direction",
        ("dynamic-sparse", "No Gating"): "opposite",
        ("sparse-geometric", "Dynamic Sparse"): "same direction",
    }
    (full_model,) = (row for row in found["claims"] if row["claim"]["row"] == "Full Model")
    assert (full_model["claim"]["value"], full_model["claim"]["baseline"]) == (4.904, 4.9266)
    assert (full_model["relative"], full_model["low"], full_model["high"]) == (-0.1, -0.2, -0.05)
    # A paper that the study has nothing of is not held against itself either.
    shown = PAPERS["dynamic-sparse"].contradictions + PAPERS["sparse-geometric"].contradictions
    assert [row["title"] for row in found["contradictions"]] == [one.title for one in shown]
    assert judge_papers([], [], []) == {"claims": [], "contradictions": []}
    assert judge(FULL_MODEL, measured()) is None


OWN = {"row": "Ours", "variant": "local", "metric": "loss", "printed": "4.90", "baseline_printed": "5.00"}


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ([OWN, OWN | {"metric": "los"}], r"claims\[1\].metric='los' is not a choice; did you mean 'loss'"),
        ([OWN | {"printed": 4.9}], r"claims\[0\].printed=4.9 is not text"),
        ([OWN | {"printed": "much"}], "row 'Ours': printed='much' is not a figure above 0"),
        ([OWN | {"baseline_printed": "0"}], "row 'Ours': baseline_printed='0' is not a figure above 0"),
        ([OWN | {"value": "4.9"}], r"unknown key 'claims\[0\].value'"),
        ([OWN, OWN], "row 'Ours' gives the loss of local twice"),
        ([{"row": "Ours"}], r"key 'claims\[0\].variant' is missing"),
    ],
)
def test_bad_claims_name_file_and_row(claims: list[Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"paper": "mine", "claims": claims}))
    with pytest.raises(HeadgateError, match=message) as error:
        load_paper(path)
    assert str(path) in str(error.value)


def test_a_claim_about_what_no_study_runs_is_refused(micro: Config) -> None:
    paper = Paper("mine", (Claim(**OWN | {"variant": "dynamic-sparse:no-gait"}),))  # type: ignore[arg-type]
    with pytest.raises(HeadgateError, match=r"claims of 'mine', row 'Ours': .* did you mean 'no-gate'"):
        check_variants(paper, micro.model)


def test_what_the_contradictions_quote_stands_in_the_papers(papers: Reader) -> None:
    """Every quotation, and every number with a decimal point or comma that is not reckoned from others."""
    everything = " ".join(" ".join(text.split()) for paper in PAPERS for text in papers(paper))
    reckoned = {"16.8", "1.5", "5.6"}
    checked = 0
    for contradiction in (one for paper in PAPERS.values() for one in paper.contradictions):
        text = f"{contradiction.title}. {contradiction.explanation}"
        quoted = [part for quotation in re.findall('"([^"]+)"', text) for part in quotation.split(" ... ")]
        numbers = [n for n in re.findall(r"\d+[.,]\d+", text) if n not in reckoned]
        for piece in [*quoted, *numbers]:
            plain = piece.replace("32,768", "32768")
            assert plain.lower() in everything.lower(), f"{piece!r} of {contradiction.title!r}"
            checked += 1
    assert checked > 30
