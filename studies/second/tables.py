"""Fills the tables of docs/findings.md from the results in the folder beside this file.

    python studies/second/tables.py                          # from the results as they are
    python studies/second/tables.py --publish runs/second    # take a study's results first
    python studies/second/tables.py --check                  # code 1 if a table is not what its results say

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

import argparse
import functools
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headgate.compare.results import differences_to
from headgate.compare.tables import loss_of, p_value, ratio
from headgate.files import write_text
from headgate.report.page import write_page
from headgate.report.publish import publish_study
from headgate.report.reading import read_results

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parents[1] / "docs" / "findings.md"
PARTS = ("text",)
OURS, CONSTANT = "short-path", "full times a constant"
Row = Mapping[str, Any]


@functools.cache
def results(part: str) -> dict[str, Any]:
    return dict(read_results(RESULTS / part))


def rows(part: str) -> list[Row]:
    """The variants, the lowest loss first."""
    return sorted(results(part)["variants"], key=lambda row: float(row["loss"]["mean"]))


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [columns, ["---"] * len(columns), *lines])


def ends(difference: Row | None) -> str:
    """A difference in nats with its corrected interval."""
    if difference is None or difference["mean"] is None:
        return ""
    if difference["verdict"] == "same by construction" or difference["low"] is None:
        return f"{difference['mean']:+.4f}"
    return f"{difference['mean']:+.4f} ({difference['low']:+.4f} to {difference['high']:+.4f})"


def cells(row: Row) -> list[str]:
    difference = row["difference"]
    verdict = "baseline" if difference is None else difference["verdict"]
    p = "" if difference is None else p_value(difference["p_corrected"])
    return [row["label"], loss_of(row), ends(difference), p, verdict]


def contrasts() -> str:
    """Tuned, against tuned full attention."""
    lines = [[*cells(row), ratio(row["speed"])] for row in rows("text")]
    return markdown(["", "loss", "to full, tuned", "p", "verdict", "speed"], lines)


def mean_of(loss: Row) -> str:
    return f"{loss['mean']:.4f} ± {loss['high'] - loss['mean']:.4f}"


def published() -> str:
    """The same mechanisms at the recipe's settings."""
    lines = []
    for row in rows("text"):
        as_it_is = row["published"]
        if as_it_is is not None:
            difference = as_it_is["difference"]
            verdict = "baseline" if difference is None else difference["verdict"]
            lines.append([row["label"], mean_of(as_it_is["loss"]), ends(difference), verdict])
    return markdown(["", "loss", "to full, untuned", "verdict"], lines)


def settings() -> str:
    """What each was tuned to."""
    short = {"train.learning_rate": "learning rate", "train.attention_output_rate": "output's rate"}
    lines = []
    for row in rows("text"):
        tuned = row["settings"]
        words = ", ".join(f"{short.get(k, k.rpartition('.')[2])} {v:g}" for k, v in tuned.items())
        lines.append([row["label"], words or "the recipe"])
    return markdown(["", "tuned to"], lines)


def against() -> str:
    """Ours and the others against full attention times a constant, over the seeds alone."""
    found = differences_to(CONSTANT, results("text"))
    lines = []
    for label, difference in sorted(found.items(), key=lambda item: item[1].mean or 0.0):
        as_row = {n: getattr(difference, n) for n in ("mean", "low", "high", "verdict")}
        lines.append([label, ends(as_row), p_value(difference.p_corrected), difference.verdict])
    return markdown(["", f"to {CONSTANT}", "p", "verdict"], lines)


def positions() -> str:
    """Loss by position: what more context is worth to each."""
    shown = [place for place in rows("text")[0]["by_position"] if place["first"] >= 4]
    lines = []
    for row in rows("text"):
        by_first = {place["first"]: place["mean"] for place in row["by_position"]}
        lines.append([row["label"], *(f"{by_first[place['first']]:.3f}" for place in shown)])
    return markdown(["", *(f"{place['first']}-{place['end'] - 1}" for place in shown)], lines)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table for table in (contrasts, published, settings, against, positions)
}


def filled(page: str) -> str:
    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}"

    return re.sub(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", table, page, flags=re.DOTALL)


def take(study: Path) -> None:
    """The results of a study's parts, and of their figures those that the page shows."""
    page = PAGE.read_text(encoding="utf-8")
    for part in PARTS:
        if not (study / part / "results.json").exists():
            continue
        kept = {"results.json", "results.md", *re.findall(rf"results/{part}/([\w-]+\.svg)", page)}
        (RESULTS / part).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            for path in publish_study(study / part, folder):
                if path.name in kept:
                    shutil.copy(path, RESULTS / part / path.name)
        if f"results/{part}/report.html" in page:
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
    page = PAGE.read_text(encoding="utf-8")
    if filled(page) == page:
        return
    if options.check:
        sys.exit(f"tables of {PAGE.name} are not what the results say; run studies/second/tables.py")
    write_text(PAGE, filled(page))


if __name__ == "__main__":
    main()
