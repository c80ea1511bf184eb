"""report.html: all of a study in one file that opens from disk and needs no network.

Text goes through the template, which escapes it, or into JSON inside the page, where no character can end the
script, and scripts insert it as text. So a label with markup in it shows as it was written.
"""

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from headgate.files import write_text
from headgate.report.figures import COLOURS, CROWD, DARK_COLOURS, figures, look
from headgate.report.reading import read_results
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


def write_page(folder: str | os.PathLike[str]) -> Path:
    """Write report.html into a study folder that has its results.json."""
    path = Path(folder) / "report.html"
    write_text(path, page(read_results(folder)))
    return path


def page(study: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headgate.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "signed": _signed,
        "percent": _percent,
        "number": _decimal,
        "p": _p,
        "bytes": _bytes_in_words,
    }
    made = figures(study)
    data = {
        "labels": [variant["label"] for variant in study["variants"]],
        "colours": dict(zip(COLOURS, DARK_COLOURS, strict=True)),
        "figures": {figure.name: figure.views for figure in made.values()},
        "passage": study["passage"],
    }
    return environment.get_template("page.html.jinja").render(
        study=study,
        variants=study["variants"],
        baseline=study["variants"][0],
        figures=made,
        looks=[look(n) for n in range(len(study["variants"]))],
        crowded=len(study["variants"]) > CROWD,
        symbols=SYMBOLS,
        metrics=METRICS,
        crossovers=_crossovers(study),
        commands=_shell_commands(study),
        config=json.dumps(study["config"], indent=2),
        data=Markup(_script_json(data)),
        vega=Markup(_vega()),
        version=__version__,
    )


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


def _signed(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:+.{digits}f}".replace("-", "−")


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:+.{digits}%}".replace("-", "−")


def _decimal(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _bytes_in_words(value: float | None) -> str:
    if value is None:
        return ""
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} GB"
