"""The page: made from the folder alone, with every number, and text that stays text."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import altair
import pytest
from study_examples import LABEL

from headgate.errors import HeadgateError
from headgate.report.figures import figures
from headgate.report.looks import COLOURS, DARK_COLOURS, DARK_PAPER, PAPER, looks
from headgate.report.page import groups, page, write_page
from headgate.report.publish import LOSSES, digest, publish_study
from headgate.report.reading import read_results
from headgate.report.tradeoff import frontier
from headgate.report.verdict import answer_sentence
from headgate.report.words import percent, percent_ends, with_sign

STUDIES = Path(__file__).parents[2] / "studies"
FINDINGS = STUDIES / "first" / "results"
SECOND = STUDIES / "second" / "results" / "text"


def test_one_small_file_that_needs_nothing(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert len(text.encode()) < 3_000_000
    outside = text[: text.index('<script type="module">')] + text[text.rindex("</script>") :]
    assert not re.findall(r"""(?:src|href)=["'](?:\w+:|//)""", outside)
    assert "unsafe-eval" not in text


def test_the_page_comes_from_the_folder_alone(report: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("results.json", "results.md", "gates.json", "skipping.json", "documents.json"):
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
    assert len(written) == 4 + sum(len(figure.views) for figure in made.values()) == len(set(written))
    text = (tmp_path / "published/results.json").read_text(encoding="utf-8")
    assert len(text) < 0.7 * len((report.parent / "results.json").read_text(encoding="utf-8"))
    assert str(report.parent) not in text
    assert study["data"]["folder"] not in text
    study["data"]["request"]["source"] = "/home/somebody/text.parquet"
    assert digest(study)["data"]["request"]["source"] == "text.parquet"
    papers = (tmp_path / "published/papers.md").read_text(encoding="utf-8")
    assert papers.count("\n") == 2 + len(study["claims"])
    assert "| dynamic-sparse | Full Model | loss | 4.904 against 4.9266 validation loss | -0.5% |" in papers
    assert (tmp_path / "published" / LOSSES).read_bytes() == (report.parent / LOSSES).read_bytes()
    published = json.loads(text)["variants"]
    assert [v["difference"] for v in published] == [v["difference"] for v in study["variants"]]
    assert [[run["loss"] for run in v["runs"]] for v in published] == [
        [run["loss"] for run in v["runs"]] for v in study["variants"]
    ]
    curves = (tmp_path / "published/curves-loss-by-tokens.svg").read_text(encoding="utf-8")
    assert curves.startswith("<svg")
    assert "dynamic-sparse" in curves  # in the legend
    assert "<b>" not in curves  # a label is text here too
    again = figures(read_results(report.parent))
    assert {name: figure.views for name, figure in again.items()} == {
        name: figure.views for name, figure in made.items()
    }


def test_the_figures_are_valid(report: Path) -> None:
    """By the schema of Vega-Lite, which refuses a misspelt property; each figure of one study that has it."""
    studies = [report.parent, FINDINGS / "text", FINDINGS / "recall", SECOND]
    made = {name: figure for study in studies[::-1] for name, figure in figures(read_results(study)).items()}
    for figure in made.values():
        for view in figure.views.values():
            altair.Chart.from_dict(view.spec)


def test_a_control_far_off_leaves_the_others_legible() -> None:
    study = read_results(SECOND)
    made = figures(study)
    named = [v["difference"] for v in study["variants"] if v["difference"] and not v["control"]]
    apart = max(d["high"] for d in named) - min(d["low"] for d in named)
    far, near = "control: no attention", "control: window of 16"
    for name in ("differences", "tradeoff"):
        view = next(iter(made[name].views.values()))
        rows = {row["label"]: row for row in view.rows}
        assert rows[far]["relative"] > 0.5 > 10 * rows[far]["at"]
        assert all(row["at"] == row["relative"] for label, row in rows.items() if label != far)
        assert "at the edge lies" in view.caption
    assert rows[far]["name_wide"] == f"{far}, +52%"
    assert rows[near]["name_wide"] == near
    differences = made["positions"].views["difference"]
    domains = [layer["encoding"]["y"].get("scale", {}).get("domain") for layer in differences.spec["layer"]]
    (low, high), *_ = [domain for domain in domains if domain]
    assert high - low < 10 * apart
    assert "leave the figure" in differences.caption
    for variant in study["variants"]:  # as named variants both are drawn to scale
        variant["control"] = False
    rows = {row["label"]: row for row in next(iter(figures(study)["differences"].views.values())).rows}
    assert rows[far]["at"] == rows[far]["relative"]


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
    assert html.escape(answer_sentence(results), quote=False).replace("'", "&#39;") in text
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
        "tradeoff", "differences", "spread", "curves", "cost-against-length", "positions", "heads",
        "movement", "skipping",
    }  # fmt: skip
    assert next(iter(made["curves"].views)) == "difference by tokens"
    shown = json.dumps(made["curves"].views["loss by tokens"].rows)
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


def made_up(*names: str) -> list[dict[str, Any]]:
    """Variants by their names, such as near-far or near-far:no-gate."""
    return [
        {"label": name, "mechanism": name.partition(":")[0], "ablation": name.partition(":")[2] or None}
        for name in names
    ]


def test_a_hue_is_a_family() -> None:
    families = [f"mechanism-{n}" for n in range(8)]
    variants = made_up("full", *(f"{family}{part}" for family in families for part in ("", ":a", ":b", ":c")))
    found = dict(zip([v["label"] for v in variants], looks(variants), strict=True))
    for family in families:
        assert len({found[f"{family}{part}"].colour for part in ("", ":a", ":b", ":c")}) == 1
    assert len({one.colour for one in found.values()}) == 9
    assert len({(one.colour, str(one.dash)) for one in found.values()}) == len(variants)
    assert len({(one.colour, one.shape) for one in found.values()}) == len(variants)


def luminance(colour: str) -> float:
    shares = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("colours", "paper"), [(COLOURS, PAPER), (DARK_COLOURS, DARK_PAPER)])
def test_colours_stand_out(colours: tuple[str, ...], paper: str) -> None:
    for colour in colours:
        light, dark = sorted((luminance(colour), luminance(paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, colour


def test_a_share_stays_a_share(crowd: Path) -> None:
    rows = figures(read_results(crowd))["answers"].views[""].rows
    assert {(row["low"], row["high"]) for row in rows} == {(0.0, 1.0), (None, None)}


def test_the_frontier() -> None:
    points = [("a", 1, 5.0), ("b", 2, 4.0), ("c", 2, 4.5), ("d", 3, 4.0), ("e", 4, 3.0)]
    rows = [{"label": label, "seconds": cost, "mean": loss} for label, cost, loss in points]
    assert frontier(rows, "seconds", "mean") == {"a", "b", "e"}


@pytest.mark.parametrize("part", ["text", "late", "start", "recall", "long"])
def test_no_interval_contradicts_its_verdict(part: str) -> None:
    for variant in read_results(FINDINGS / part)["variants"][1:]:
        difference = variant["difference"]
        shown = difference["verdict"] in ("better", "worse")
        if difference["verdict"] == "same by construction":
            continue
        assert shown == (not difference["low"] <= 0 <= difference["high"])
        assert difference["low"] <= difference["plain_low"] <= difference["plain_high"] <= difference["high"]


def test_the_same_by_construction_is_called_so() -> None:
    results = read_results(FINDINGS / "text")
    same = [
        v["label"]
        for v in results["variants"]
        if (v["difference"] or {}).get("verdict", "").startswith("same")
    ]
    assert same == ["head-gated:global-only", "sparse-geometric:neither"]
    text = page(results)
    assert text.count("= same by construction") + text.count("</span> same by construction") == 2


def test_the_table_is_sorted_and_folds_ablations() -> None:
    variants = read_results(FINDINGS / "text")["variants"]
    found = groups(variants)
    heads = [variants[group["head"]] for group in found]
    assert heads[0]["label"] == "full"
    means = [head["difference"]["mean"] for head in heads[1:]]
    assert means == sorted(means)
    assert not any(head["ablation"] for head in heads)
    assert sorted(n for group in found for n in (group["head"], *group["members"])) == list(range(29))
    for group in found:
        for n in group["members"]:
            assert variants[n]["mechanism"] == variants[group["head"]]["mechanism"]


def test_the_verdict_names_effect_interval_speed_and_memory() -> None:
    results = read_results(FINDINGS / "text")
    words = answer_sentence(results)
    assert re.fullmatch(
        r"Untuned, near-far:gate=constant,window=1024 beats full: −5.4% loss \(−\d\.\d% to −\d\.\d%\), "
        r"0.91× speed, 1.05× memory. Of the others: 3 also better, 22 not shown to differ, 2 the same by "
        r"construction.",
        words,
    )
    for variant in results["variants"][1:]:
        if variant["difference"]["verdict"] == "better":
            variant["difference"]["verdict"] = "no difference shown"
    assert answer_sentence(results).startswith(
        "Untuned, no mechanism beat full. Best: near-far:gate=constant,window=1024, −5.4%"
    )
    for variant in results["variants"][1:]:
        variant["difference"]["verdict"] = "worse"
    words = answer_sentence(results)
    assert words.startswith("Untuned, full beats every mechanism. Least behind: near-far:gate=constant")
    assert words.endswith("Of the others: 27 worse.")
    alone = {**results, "variants": results["variants"][:2]}
    assert answer_sentence(alone).startswith("Untuned, dynamic-sparse is worse than full: ")
    checks = [{"passed": True, "words": "all is well"}, {"passed": False, "words": "why (-0.1, -0.2 to 0)"}]
    results["sight"] = {"can_tell": False, "checks": checks, "detectable": None, "advice": "Add seeds."}
    assert answer_sentence(results) == "This study cannot tell: why. Add seeds."
    assert "All is well; why (−0.1, −0.2 to 0)." in page(results)
    assert "100% of answers right against 100%" in answer_sentence(read_results(FINDINGS / "recall"))


def test_nothing_is_minus_nothing() -> None:
    assert percent(-0.0004) == "0.0%"
    assert percent(0.0) == "0.0%"
    assert percent_ends(-0.06, -0.0003) == "−6.00% to −0.03%"  # an end that is shown to differ from 0 does
    assert percent_ends(-0.06, 0.0) == "−6.0% to 0.0%"
    assert percent(-0.012) == "−1.2%"
    assert with_sign(-0.00001) == "0.0000"
    for part in ("text", "late", "start", "recall", "long"):
        assert not re.search(r"[+−-]0(\.0+)?%", page(read_results(FINDINGS / part)).partition("<script")[0])


def test_one_price_for_all() -> None:
    results = read_results(FINDINGS / "text")
    baseline = results["variants"][0]["tokens_per_second"]
    for variant in results["variants"]:
        assert variant["tokens_per_second"] == pytest.approx(baseline * variant["speed"]["ratio"])


def test_a_file_of_results_alone_has_a_page(tmp_path: Path) -> None:
    path = Path(shutil.copy(FINDINGS / "text" / "results.json", tmp_path / "found.json"))
    assert write_page(path) == tmp_path / "report.html"
    path.write_text('{"variants": 1}', encoding="utf-8")
    with pytest.raises(HeadgateError, match="not the results of a study"):
        write_page(path)


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

    def caption() -> str:
        return figures(study)["curves"].views["loss by seconds"].caption

    assert "separate measurement of speed" in caption()
    study["costs"] = None
    assert "from the runs, which may have shared the machine" in caption()


def test_no_share_of_a_loss_next_to_nothing(crowd: Path) -> None:
    assert "102930" not in (crowd / "report.html").read_text(encoding="utf-8")


def test_a_place_that_cannot_be_written_is_named(report: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("here", encoding="utf-8")
    for place in (file, file / "inside"):
        with pytest.raises(HeadgateError, match=r"cannot write into .*file.*--publish takes a folder"):
            publish_study(report.parent, place)
    assert file.read_text(encoding="utf-8") == "here"


def tuned(study: dict[str, Any]) -> dict[str, Any]:
    """The study as if its variants had been tuned and the baseline trained at three budgets."""
    trials = [
        {"number": 0, "round": 0, "settings": {}, "losses": [3.0, 2.9]},
        {"number": 1, "round": 0, "settings": {"train.learning_rate": 0.02}, "losses": [2.8, 2.7, 2.5]},
        {"number": 2, "round": 1, "settings": {"train.learning_rate": 0.03}, "losses": [None]},
    ]
    one = {"winner": 1, "settings": trials[1]["settings"], "expected_best": [2.95, 2.8, None]}
    edges = [[], ["train.learning_rate at its high edge"], []]
    variants = study["variants"]
    study["tuning"] = {"trials": 2, "seeds": 1, "rungs": [0.25, 0.5, 1.0], "complete": True} | {
        "space": ["train.learning_rate=0.001..0.01"],
        "variants": [
            one | {"label": v["label"], "trials": trials, "edges": edges[n]} for n, v in enumerate(variants)
        ],
    }
    study["tuned"] = True
    for variant in variants:
        variant["published"] = {"loss": variant["loss"], "difference": variant["difference"]}
    worth = {"value": 1.3, "low": 1.1, "high": None}
    variants[1]["price"] = {"tokens": worth, "time": worth, "ladder": [0.25, 4.0], "beyond": False}
    variants[2]["price"] = {"tokens": worth | {"value": None}, "ladder": [0.25, 4.0], "beyond": True}
    rung = {"tokens": 1, "mean": 2.5, "low": 2.4, "high": 2.6, "n": 2}
    study["ladder"] = [rung | {"multiple": multiple} for multiple in (0.25, 1.0, 4.0)]
    return study


def test_tuning_and_compute_are_shown(report: Path) -> None:
    study = tuned(read_results(report.parent))
    made = figures(study)
    assert list(made["tuning"].views) == ["learning rate", "best of n trials"]
    tried = made["tuning"].views["learning rate"]
    own = study["config"]["train"]["learning_rate"]
    assert {row["value"] for row in tried.rows} == {own, 0.02}  # the recipe's own, which trial 0 has
    assert sum(row["shown"] for row in tried.rows) == 3
    assert len({row["drawn"] for row in tried.rows}) == len(tried.rows)  # side by side
    assert tried.caption.endswith("failed or diverged: 3.")
    assert list(made["ladder"].views) == ["worth at equal time", "worth at equal tokens", "full by budget"]
    (row,) = made["ladder"].views["worth at equal tokens"].rows
    assert (row["value"], row["shown"]) == (1.3, True)  # the interval begins above 1 and has no end
    assert LABEL in made["ladder"].views["worth at equal time"].caption
    text = page(study)
    assert "and 1 more where the best was at an edge" in text
    assert "train.learning_rate at its high edge" in text
    assert "1.10 to beyond" in text
    assert "beyond the ladder" in text
    assert answer_sentence(study).startswith("Tuned alike, ")
    assert "The same without tuning" in text
    untuned = '<th scope="col" class="n">as published</th>'
    assert untuned in text
    assert "on a seed that judges nothing else" in text
    for variant in study["variants"]:
        variant["published"] = None
    study["tuning"]["seeds"] = 3
    text = page(study)
    assert untuned not in text
    assert "each on 3 seeds and judged by their mean" in text


def test_what_was_not_run_is_said_once(report: Path) -> None:
    study = read_results(report.parent)
    for run in study["variants"][1]["runs"]:
        run["state"] = "not run"
    text = page(study)
    assert text.count("Not run, or not to the end:") == 1
    assert f"{len(study['variants'][1]['runs'])} of {len(study['variants'][1]['runs'])} seeds" in text


def test_seeds_and_documents(report: Path) -> None:
    study = read_results(report.parent)
    views = figures(study)["spread"].views
    assert list(views) == ["by seed", "by document"]
    first = study["variants"][1]
    rows = [row for row in views["by seed"].rows if row["label"] == first["label"]]
    assert len(rows) == len(first["runs"])
    assert sum(row["nats"] for row in rows) / len(rows) == pytest.approx(
        first["difference"]["mean"], abs=1e-6
    )
    found = study["documents"]["variants"][first["label"]]
    assert found["most"][0]["difference"] <= found["quantiles"][2] <= found["most"][-1]["difference"]
    study["documents"]["openings"] = dict.fromkeys(
        study["documents"]["openings"], "<script>alert(1)</script>"
    )
    text = page(study)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script>alert(1)" not in text
    study["documents"]["openings"] = {}
    assert f"document {found['most'][0]['document']}</span>" in page(study)
    study["documents"] = None
    assert list(figures(study)["spread"].views) == ["by seed"]


def test_the_page_names_no_folder_of_the_machine(report: Path) -> None:
    study = read_results(report.parent)
    text = report.read_text(encoding="utf-8")
    assert str(report.parents[1]) not in text
    assert study["data"]["folder"] not in text
    assert f"--out {report.parent.name} " in text
    assert f"headgate train {report.parent.name}/config.json --data " in text


def test_a_word_of_caution_stands_beside_the_answer(report: Path, tmp_path: Path) -> None:
    shutil.copy(report.parent / "results.json", tmp_path)
    (tmp_path / "note.txt").write_text("Chosen on\n<this> text.\n", encoding="utf-8")
    text = write_page(tmp_path).read_text(encoding="utf-8")
    assert "</strong> Chosen on &lt;this&gt; text.</p>" in text
    assert 'href="results.csv"' in text
    assert 'href="results.md"' not in text  # it is not there
    lines = (tmp_path / "results.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(read_results(tmp_path)["variants"])
