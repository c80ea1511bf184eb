"""report.html: all of a study in one file that opens from disk and needs no network.

Text goes through the template, which escapes it, or into JSON inside the page, where no character can end the
script, and scripts insert it as text. So a label with markup in it shows as it was written. The page may run
its own scripts but make none: Vega interprets its expressions.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from headgate.files import write_text
from headgate.report.figures import figures
from headgate.report.looks import COLOURS, DARK_COLOURS, DARK_PAPER, PAPER, looks, shared_name
from headgate.report.painting import CROWD, PageFigure
from headgate.report.publish import standing_alone
from headgate.report.reading import read_results, results_path
from headgate.report.tradeoff import SHARE, effect
from headgate.report.verdict import answer_sentence
from headgate.report.words import bytes_in_words, decimal, p_in_words, percent, with_sign
from headgate.version import __version__

SYMBOLS = {
    "better": "▼",
    "worse": "▲",
    "no difference shown": "≈",
    "same by construction": "=",
    "not tested": "?",
    "baseline": "·",
}
METRICS = {"loss": "loss", "speed": "speed", "memory": "memory", "convergence": "tokens to converge"}


def write_page(source: str | os.PathLike[str]) -> Path:
    """Write report.html beside the results.json of a study folder, or beside the file itself."""
    path = results_path(source).with_name("report.html")
    write_text(path, page(read_results(source)))
    return path


def page(study: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headgate.report", "."),
        autoescape=jinja2.select_autoescape(default=True, disabled_extensions=("css", "js")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "signed": with_sign,
        "percent": percent,
        "number": decimal,
        "p": p_in_words,
        "bytes": bytes_in_words,
    }
    made, variants = figures(study), study["variants"]
    first = "tradeoff" if "tradeoff" in made else "differences"
    data = {
        "labels": [variant["label"] for variant in variants],
        "colours": dict(zip((*COLOURS, PAPER), (*DARK_COLOURS, DARK_PAPER), strict=True)),
        "figures": {figure.name: _drawn(figure) for figure in made.values()},
        "table": result_table(study),
        "passage": study["passage"],
    }
    return environment.get_template("page.html.jinja").render(
        study=study,
        variants=variants,
        baseline=variants[0],
        figures=made,
        stills={first: _still(made[first])} if first in made else {},
        groups=groups(variants),
        seeds=[_by_seed(variant, variants[0]) for variant in variants],
        looks=looks(variants),
        share=effect(study) is SHARE,
        columns=4 + 2 * bool(study["costs"]) + ("answers" in made),
        ablations=any(variant["ablation"] for variant in variants),
        crowded=len(variants) > CROWD,
        sections=_sections(study, made),
        tuned=study.get("tuned"),
        verdict=answer_sentence(study),
        rests_on=_rests_on(study),
        source=_source(study),
        symbols=SYMBOLS,
        metrics=METRICS,
        crossovers=_crossovers(study),
        commands=_shell_commands(study),
        config=json.dumps(study["config"], indent=2),
        data=Markup(_script_json(data)),  # noqa: S704 - every < in it is escaped
        vega=Markup(_vega()),  # noqa: S704 - the library's own file, nothing of a study's
        version=__version__,
    )


def groups(variants: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The order of the table: the baseline, then by difference; ablations under their mechanism."""
    heads = [n for n, variant in enumerate(variants) if not variant["ablation"]]
    home: dict[str, int] = {}
    for n in heads:
        home.setdefault(shared_name(variants[n]), n)
    members: dict[int, list[int]] = {}
    for n, variant in enumerate(variants):
        if variant["ablation"]:
            members.setdefault(home.get(shared_name(variant), n), []).append(n)
    alone = [n for n in members if n not in heads]

    def order(n: int) -> tuple[bool, float]:
        difference = variants[n]["difference"]
        mean = None if difference is None else difference["mean"]
        return n > 0, math.inf if mean is None else mean

    return [
        {"head": n, "members": sorted((m for m in members.get(n, []) if m != n), key=order)}
        for n in sorted([*heads, *alone], key=order)
    ]


def result_table(study: Mapping[str, Any]) -> list[list[Any]]:
    """What the table of every variant holds, unrounded, as rows of a CSV file."""
    names = (
        "variant",
        "mechanism",
        "ablation",
        "loss",
        "difference",
        "low",
        "high",
        "relative",
        "p",
        "verdict",
    )
    rows: list[list[Any]] = [[*names, "speed", "memory", "tokens_per_second", "parameters"]]
    for variant in study["variants"]:
        difference = variant["difference"] or {}
        rows.append(
            [
                variant["label"],
                variant["mechanism"],
                variant["ablation"] or "",
                variant["loss"]["mean"],
                *(difference.get(name) for name in ("mean", "low", "high", "relative", "p_corrected")),
                difference.get("verdict", "baseline"),
                (variant["speed"] or {}).get("ratio"),
                (variant["memory"] or {}).get("ratio"),
                variant["tokens_per_second"],
                variant["parameters"],
            ]
        )
    return [["" if cell is None else cell for cell in row] for row in rows]


def _drawn(figure: PageFigure) -> dict[str, Any]:
    return {
        name: {
            "spec": view.spec,
            "columns": view.columns,
            "caption": view.caption,
            "description": f"{figure.title}{f': {name}' if name else ''}. {view.caption}",
        }
        for name, view in figure.views.items()
    }


def _still(figure: PageFigure) -> Markup:
    """The first view as a picture that needs no script."""
    drawing = standing_alone(next(iter(figure.views.values())).spec)
    drawing["config"]["aria"] = False  # a description of each mark is of no use beside the caption
    svg: str = vl_convert.vegalite_to_svg(drawing)
    numbers: dict[str, str] = {}  # vl-convert counts on from one drawing to the next
    svg = re.sub(r"\bclip\d+", lambda found: numbers.setdefault(found[0], f"still{len(numbers)}"), svg)
    return Markup(svg)  # noqa: S704 - Vega escapes the texts in its drawings


def _by_seed(variant: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    if variant is baseline:
        return []
    theirs = {run["seed"]: run.get("loss") for run in baseline["runs"] if run["state"] == "finished"}
    return [
        with_sign(run["loss"] - theirs[run["seed"]], 3)
        for run in variant["runs"]
        if run["state"] == "finished" and run["loss"] is not None and theirs.get(run["seed"]) is not None
    ]


def _sections(study: Mapping[str, Any], made: Mapping[str, PageFigure]) -> list[tuple[str, str]]:
    """Anchors and names of the sections that this page has."""
    every = [
        ("differences-section", "Differences", "tradeoff" in made and "differences" in made),
        ("curves-section", "Learning curves", "curves" in made),
        ("tuning-section", "Tuning", bool(study["tuning"])),
        ("ladder", "Ladder", bool(study["ladder"])),
        ("answers-section", "Answers", "answers" in made),
        ("ablations-section", "Ablations", "ablations" in made),
        ("positions-section", "By position", "positions" in made),
        ("cost", "Cost", bool(study["costs"])),
        ("papers", "Papers", bool(study["claims"])),
        ("gates", "Gates", "heads" in made),
        ("mechanisms", "Formulas", True),
        ("reproduce", "Reproduce", True),
    ]
    return [(anchor, words) for anchor, words, there in every if there]


def _rests_on(study: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What stands beside the answer: what the study could have seen."""
    sight = study.get("sight") or {}
    if sight.get("checks"):
        words = "; ".join(check["words"] for check in sight["checks"])
        if sight.get("detectable") is not None:
            words += f". Differences of {sight['detectable']:.2g} nats or more would have been seen"
        return [("What it could see", f"{words[0].upper()}{words[1:]}.")]
    halves = sorted(
        (d["high"] - d["mean"], d["relative_high"] - d["relative"] if d["relative"] is not None else None)
        for v in study["variants"]
        if (d := v["difference"]) and d["high"] is not None and d["high"] > d["low"]
    )
    found = []
    if halves:
        nats, share = halves[len(halves) // 2]
        about = f"±{nats:.3f} nats" + (f" ({share:.1%})" if share is not None and share <= 1 else "")
        found.append(
            ("What it could see", f"Corrected intervals reach about {about}: what is smaller stays hidden.")
        )
    return found


def _source(study: Mapping[str, Any]) -> str:
    """Where the text came from, without the folders of the machine that it came from."""
    source = str((study["data"].get("request") or {}).get("source", ""))
    return source if "://" in source or source.count("/") < 2 else source.rsplit("/", 1)[1]


def _vega() -> str:
    """The scripts that draw, Vega and its companions, as one module."""
    bundle: str = vl_convert.javascript_bundle(None)  # type: ignore[arg-type]
    return bundle.replace("</script", "<\\/script")


def _script_json(data: Any) -> str:
    """JSON for a script element: nothing in it can close the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _crossovers(study: Mapping[str, Any]) -> list[dict[str, str]]:
    """Where each variant starts to be faster, in words; empty if only one length was measured."""
    lengths = {cost["length"] for cost in (study["costs"] or {"costs": []})["costs"]}
    if len(lengths) < 2:
        return []
    by_label: dict[str, dict[str, str]] = {}
    for crossover in study["costs"]["crossovers"]:
        wins_at, not_at = crossover["wins_at"], crossover["not_at"]
        if wins_at is None:
            words = f"not up to {max(lengths):,}"
        elif not_at is None:
            words = f"at every length measured, from {min(lengths):,}"
        else:
            words = f"between {not_at:,} and {wins_at:,}"
        row = by_label.setdefault(crossover["label"], {"label": crossover["label"]})
        row[crossover["kind"]] = words
    return list(by_label.values())


def _shell_commands(study: Mapping[str, Any]) -> dict[str, Any] | None:
    commands = study["commands"]
    if commands is None:
        return None
    return {
        "whole": [shlex.join(words) for words in (commands["prepare"], commands["compare"]) if words],
        "runs": [shlex.join(words) for words in commands["runs"]],
    }
