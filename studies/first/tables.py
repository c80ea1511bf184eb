"""Fills the tables of docs/findings/first.md and README.md from the results in the folder beside this file.

    python studies/first/tables.py                        # from the results as they are
    python studies/first/tables.py --publish runs/study   # take a study's results and figures first
    python studies/first/tables.py --check                # code 1 if a table is not what its results say

A table stands between `<!-- table NAME -->` and `<!-- end -->`. Figures are kept if a page shows them.
"""

import argparse
import functools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headgate.compare.statistics import ALPHA, Difference, Losses, compare_losses, interval
from headgate.compare.tables import loss_of, p_value, ratio, signed
from headgate.files import write_text
from headgate.report.page import write_page
from headgate.report.publish import publish_study

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGES = (HERE.parents[1] / "docs" / "findings" / "first.md", HERE.parents[1] / "README.md")
PARTS = ("text", "late", "start", "recall", "long")
PAPERS = ("dynamic-sparse", "head-gated", "context-adaptive", "sparse-geometric")
NAMES = {
    "local:window=0": "the token alone (`local:window=0`)",
    "near-far:gate=constant,window=1024": "full times a constant (`near-far:gate=constant,window=1024`)",
}
Variant = Mapping[str, Any]


@functools.cache
def results(part: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((RESULTS / part / "results.json").read_text(encoding="utf-8"))
    return read


def variants(part: str) -> dict[str, Variant]:
    """By label, the lowest loss first."""
    found = sorted(results(part)["variants"], key=lambda variant: float(variant["loss"]["mean"]))
    return {variant["label"]: variant for variant in found}


def losses(variant: Variant) -> Losses:
    return Losses({run["seed"]: run["loss"] for run in variant["runs"] if run["state"] == "finished"})


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def name(label: str) -> str:
    return NAMES.get(label, label)


def difference(found: Mapping[str, Any] | Difference | None) -> list[str]:
    if found is None:
        return ["", ""]
    values = found if isinstance(found, Mapping) else vars(found)
    return [signed(values["mean"], values["high"], 4), p_value(values["p_corrected"])]


def text() -> str:
    """Mechanisms, without their ablations."""
    rows = []
    for label, variant in variants("text").items():
        if variant["ablation"] is None:
            found = variant["difference"]
            converged = variant["convergence"]["relative"] if found else None
            rows.append(
                [
                    name(label),
                    loss_of(variant),
                    *difference(found),
                    found["verdict"] if found else "baseline",
                    ratio(variant["speed"]),
                    ratio(variant["memory"]),
                    "" if converged is None else f"{converged:+.0%}",
                ]
            )
    columns = ["", "loss", "difference", "p", "verdict", "speed", "memory", "tokens to the baseline's loss"]
    return markdown(columns, rows)


def short() -> str:
    """The same for the README."""
    rows = [
        [name(label), loss_of(variant), *difference(variant["difference"]), ratio(variant["speed"])]
        for label, variant in variants("text").items()
        if label in ("full", "near-far", "local:window=0", *PAPERS)
    ]
    return markdown(["", "loss", "difference", "p", "speed"], rows)


def against() -> str:
    """Every other mechanism against near-far."""
    all_losses = {label: losses(variant) for label, variant in variants("text").items()}
    found = compare_losses(all_losses.pop("near-far"), all_losses)
    kept = [label for label, variant in variants("text").items() if variant["ablation"] is None]
    rows = [[name(label), *difference(found[label])] for label in kept if label in found]
    return markdown(["", "difference to near-far", "p"], rows)


def ablations() -> str:
    """Each ablation against its whole mechanism, corrected over the ablations of all."""
    found = variants("text")
    recalled = variants("recall")
    parts = {label: variant["mechanism"] for label, variant in found.items() if variant["ablation"]}
    tested = {}
    for label, whole in parts.items():
        pair = losses(found[whole]), {label: losses(found[label])}
        one = compare_losses(*pair, alpha=ALPHA / len(parts))[label]
        tested[label] = replace(one, p_corrected=None if one.p is None else min(1.0, one.p * len(parts)))
    rows = []
    for whole in (*PAPERS, "near-far"):
        mine = [label for label, mechanism in parts.items() if mechanism == whole]
        for label in (whole, *mine):
            variant, own = found[label], tested.get(label)
            rows.append(
                [
                    label,
                    loss_of(variant),
                    *difference(variant["difference"]),
                    *difference(own),
                    accuracy(recalled[label]),
                ]
            )
    columns = ["", "loss", "to full", "p", "to the whole mechanism", "p", "recall"]
    return markdown(columns, rows)


def test() -> str:
    """The text that nothing was chosen by."""
    stored = json.loads((RESULTS / "text" / "test.json").read_text(encoding="utf-8"))["losses"]
    by_label = {label: {int(seed): loss for seed, loss in seeds.items()} for label, seeds in stored.items()}
    found = compare_losses(
        Losses(by_label["full"]),
        {label: Losses(seeds) for label, seeds in by_label.items() if label != "full"},
    )
    rows = []
    for label in sorted(by_label, key=lambda label: interval(list(by_label[label].values())).mean or 0.0):
        loss = loss_of({"runs": [], "loss": vars(interval(list(by_label[label].values())))})
        rows.append([name(label), loss, *difference(found.get(label))])
    return markdown(["", "loss on the test split", "difference", "p"], rows)


def late() -> str:
    """After four times the tokens, against full attention and against near-far."""
    found, before = variants("late"), variants("text")
    to_ours = {label: losses(variant) for label, variant in found.items()}
    ours = compare_losses(to_ours.pop("near-far"), to_ours)
    rows = []
    for label, variant in found.items():
        known = before[label]["loss"]["mean"]
        cells = [name(label), f"{known:.3f}", loss_of(variant), *difference(variant["difference"])]
        rows.append([*cells, *difference(ours.get(label))])
    columns = ["", "above", "after four times the tokens", "to full", "p", "to near-far", "p"]
    return markdown(columns, rows)


def start() -> str:
    before = variants("text")
    rows = []
    for label, variant in variants("start").items():
        found = variant["difference"]
        verdict = found["verdict"] if found else "baseline"
        known = before[label]["loss"]["mean"]
        rows.append([name(label), f"{known:.3f}", loss_of(variant), *difference(found), verdict])
    return markdown(["", "above", "from this start", "difference", "p", "verdict"], rows)


def accuracy(variant: Variant) -> str:
    found = variant["answers"]["accuracy"]
    return f"{found['mean']:.3f} ({found['low']:.2f} to {found['high']:.2f})"


def recall() -> str:
    found = [variant for variant in variants("recall").values() if variant["ablation"] is None]
    places = [place for place in found[0]["answers"]["by_distance"] if place["first"] >= 8]
    rows = []
    for variant in sorted(found, key=lambda variant: -float(variant["answers"]["accuracy"]["mean"])):
        means = {place["first"]: place["mean"] for place in variant["answers"]["by_distance"]}
        shares = [f"{means[place['first']]:.2f}" for place in places]
        rows.append([name(variant["label"]), accuracy(variant), *shares])
    return markdown(["", "all", *(f"{place['first']}-{place['end'] - 1}" for place in places)], rows)


def long() -> str:
    """Loss by position, in bins that double."""
    found = variants("long")
    places = [place for place in next(iter(found.values()))["by_position"] if place["first"] >= 256]
    rows = []
    for label, variant in found.items():
        means = {place["first"]: place["mean"] for place in variant["by_position"]}
        by_place = [f"{means[place['first']]:.3f}" for place in places]
        tokens = [run["tokens"] for run in variant["runs"] if run["state"] == "finished"]
        trained = f"{sum(tokens) / len(tokens):,.0f}"
        rows.append([name(label), trained, loss_of(variant), *difference(variant["difference"]), *by_place])
    bins = [f"{place['first']:,}-{place['end'] - 1:,}" for place in places]
    return markdown(["", "tokens", "loss", "difference", "p", *bins], rows)


def papers() -> str:
    return (RESULTS / "text" / "papers.md").read_text(encoding="utf-8").strip()


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (text, short, against, ablations, test, late, start, recall, long, papers)
}


def filled(page: str) -> str:
    """The page with every table as the results have it."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}"

    return re.sub(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", table, page, flags=re.DOTALL)


def take(study: Path) -> None:
    """The results of a study's parts, and of their figures and pages those that a document shows."""
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for part in PARTS:
        if not (study / part / "results.json").exists():
            continue
        kept = {"results.json", "results.md", *re.findall(rf"results/{part}/([\w-]+\.svg)", pages)}
        if part == "text":
            kept.add("papers.md")
        (RESULTS / part).mkdir(exist_ok=True)
        for old in (RESULTS / part).glob("*.svg"):
            old.unlink()
        with tempfile.TemporaryDirectory() as folder:
            for path in publish_study(study / part, folder):
                if path.name in kept:
                    shutil.copy(path, RESULTS / part / path.name)
        if f"results/{part}/report.html" in pages:
            write_page(RESULTS / part)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--publish", type=Path, metavar="STUDY", help="the folder of a study's parts")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.publish:
        take(options.publish)
    stale = []
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if filled(page) != page:
            stale.append(path.name)
            if not options.check:
                write_text(path, filled(page))
    if options.check and stale:
        sys.exit(f"tables of {', '.join(stale)} are not what the results say; run studies/first/tables.py")


if __name__ == "__main__":
    main()
