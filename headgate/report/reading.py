"""Reads what the page shows: results.json from a study folder or a published one, and the files beside it;
of a suite, suite.json.

Results of older versions of headgate read like those of this one.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headgate import files
from headgate.errors import HeadgateError

ALPHA = 0.05
NEEDED = ("variants", "claims", "headline", "conditions", "config", "data")


def results_path(source: str | os.PathLike[str]) -> Path:
    """The results.json of a folder; a file stands for itself."""
    path = Path(source)
    return path if path.is_file() else path / "results.json"


def read_results(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The results in a folder or a file, with the gates on a passage under "passage", gate skipping under
    "skipping" and differences by document under "documents". A published folder lacks these.
    """
    path = results_path(source)
    results = _read_json_file(path)
    if results is None:
        raise HeadgateError(f"{str(source)!r} has no results.json; headgate compare writes one")
    if not isinstance(results.get("variants"), list):
        raise HeadgateError(f"{str(path)!r} has no variants, so it is not the results of a study")
    missing = [name for name in NEEDED if name not in results]
    if missing:
        raise HeadgateError(f"{str(path)!r} is not what headgate compare writes: it has no {missing[0]!r}")
    results["passage"] = _read_json_file(path.with_name("gates.json"))
    results["skipping"] = _read_json_file(path.with_name("skipping.json"))
    results["documents"] = _read_json_file(path.with_name("documents.json"))
    results["note"] = _read_note(path.with_name("note.txt"))
    results.setdefault("tuned", False)
    for name in ("commands", "tuning", "ladder"):
        results.setdefault(name, None)
    results.setdefault("sight", {"can_tell": None, "checks": [], "detectable": None, "advice": None})
    for variant in results["variants"]:
        for name in ("gates", "control", "published", "price", "trend"):
            variant.setdefault(name, None)
    _with_both_intervals(results)
    _with_one_price(results)
    results["claims"] = [judged for judged in results["claims"] if judged["verdict"] != "not run"]
    _with_claims_as_judged(results)
    return dict(results)


def read_suite(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The suite.json of a suite's folder or a published one."""
    source = Path(folder) / "suite.json"
    if not source.is_file():
        raise HeadgateError(f"{str(folder)!r} has no suite.json; headgate suite writes one")
    return files.read_sealed(source)


def _with_both_intervals(results: dict[str, Any]) -> None:
    """Give each difference both the interval it was judged by, `low` and `high`, and its own 95% interval,
    `plain_low` and `plain_high`.

    Older results hold only the latter, and p-values by Holm's method. The interval at the level that Holm's
    method reached excludes 0 exactly where a difference is shown.
    """
    judged = [v["difference"] for v in results["variants"] if v.get("difference")]
    tested = sum(difference["p"] is not None for difference in judged)
    for difference in judged:
        if "p_corrected" in difference:
            _with_plain_interval(difference)
            continue
        p, corrected = difference["p"], difference["p_holm"]
        difference |= {"p_corrected": corrected, "family": "named", "of_family": tested, "detectable": None}
        for end in ("low", "high", "relative_low", "relative_high"):
            difference[f"plain_{end}"] = difference[end]
        if difference["mean"] == difference["low"] == difference["high"] == 0:
            difference["verdict"] = "same by construction"
        if p is None or difference["low"] is None:
            continue
        level = ALPHA / tested if corrected >= 1 or not corrected else ALPHA * p / corrected
        difference["level"] = level
        wider = _t_ratio(level, difference["seeds"] - 1)
        for start in ("", "relative_"):
            mean = difference["relative" if start else "mean"]
            if mean is None:
                continue
            for end in ("low", "high"):
                difference[f"{start}{end}"] = mean + wider * (difference[f"{start}{end}"] - mean)


def _with_claims_as_judged(results: dict[str, Any]) -> None:
    """Beside a claim about the loss stands the interval that its verdict comes from; older results hold the
    95% interval there."""
    judged = {v["label"]: v["difference"] for v in results["variants"] if v.get("difference")}
    for claim in results["claims"]:
        difference = judged.get(claim["label"])
        if claim["claim"]["metric"] == "loss" and difference is not None:
            claim["low"], claim["high"] = difference["relative_low"], difference["relative_high"]


def _with_plain_interval(difference: dict[str, Any]) -> None:
    """Add the 95% interval to a corrected one: of the t distribution whose corrected interval is the same."""
    if "plain_low" in difference:
        return
    share = 1.0
    level, error, low, high = (difference.get(name) for name in ("level", "error", "low", "high"))
    if level and error and low is not None and high is not None and level < ALPHA:
        from scipy.optimize import brentq
        from scipy.special import stdtrit

        wanted = (high - low) / 2 / error

        def beyond(exponent: float) -> float:
            return float(stdtrit(math.exp(exponent), 1 - level / 2)) - wanted

        if beyond(-1) > 0 > beyond(15):
            share = 1 / _t_ratio(level, math.exp(float(brentq(beyond, -1, 15))))
    for start in ("", "relative_"):
        mean = difference["relative" if start else "mean"]
        for end in ("low", "high"):
            value = difference[f"{start}{end}"]
            plain = value if value is None or mean is None else mean + share * (value - mean)
            difference[f"plain_{start}{end}"] = plain


def _t_ratio(level: float, df: float) -> float:
    """How much wider the interval of 1 - level is than that of 95%."""
    from scipy.special import stdtrit

    return float(stdtrit(df, 1 - level / 2) / stdtrit(df, 1 - ALPHA / 2))


def _with_one_price(results: dict[str, Any]) -> None:
    """Tokens per second of each variant: the baseline's, times the ratio that was measured interleaved."""
    if not results.get("costs"):
        return
    costs = results["costs"]["costs"]
    of_baseline = {cost["length"]: cost for cost in costs if cost["label"] == results["baseline"]}
    for cost in costs:
        reference = of_baseline.get(cost["length"], cost)
        for kind, tokens in (("training", cost["length"] * cost["sequences"]), ("decoding", 1)):
            ratio = cost[kind]["ratio"] if reference is not cost else 1.0
            cost[kind]["tokens_per_second"] = tokens / reference[kind]["seconds"] * ratio
    context = results["config"]["train"]["context"]
    speeds = {c["label"]: c["training"]["tokens_per_second"] for c in costs if c["length"] == context}
    for variant in results["variants"]:
        variant["tokens_per_second"] = speeds.get(variant["label"], variant.get("tokens_per_second"))


def _read_json_file(path: Path) -> Any:
    if files.kind(path) == "missing":
        return None
    try:
        return files.read_sealed(path)
    except HeadgateError as error:
        raise HeadgateError(f"{error}; remove it and run the study again") from None


def _read_note(path: Path) -> str | None:
    """A remark about the study, from a text file beside its results."""
    return None if files.kind(path) == "missing" else " ".join(files.read_text(path).split()) or None


def is_control(variant: Mapping[str, Any]) -> bool:
    """Whether the study added the variant by itself, to check what it can see."""
    return bool(variant.get("control"))


def source_of(study: Mapping[str, Any]) -> str:
    """Where the text came from, without this machine's folders."""
    source = str((study["data"].get("request") or {}).get("source", ""))
    return source if "://" in source or source.count("/") < 2 else source.rsplit("/", 1)[1]
