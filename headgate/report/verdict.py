"""The answer in one sentence: the best of a study with effect, interval, speed and memory."""

from collections.abc import Mapping
from typing import Any

from headgate.report.reading import is_control
from headgate.report.tradeoff import SHARE, effect
from headgate.report.words import percent, percent_ends, with_sign


def answer_sentence(results: Mapping[str, Any]) -> str:
    """What the page opens with. A study that cannot tell says so instead."""
    sight = results.get("sight") or {}
    named = [v for v in results["variants"][1:] if not is_control(v) and v["difference"]["mean"] is not None]
    tested = [v for v in named if v["difference"]["verdict"] not in ("not tested", "same by construction")]
    if sight.get("can_tell") is False:
        return _blind_sentence(sight)
    if not tested:
        return str(results["headline"])
    better = [v for v in tested if v["difference"]["verdict"] == "better"]
    among = [v for v in better or tested if not v["ablation"]] or better or tested
    best = min(among, key=lambda v: float(v["difference"]["mean"]))
    counts = {
        words: sum(v is not best and v["difference"]["verdict"] == kind for v in named)
        for kind, words in (
            ("better", "also better"),
            ("no difference shown", "not shown to differ"),
            ("worse", "worse"),
            ("same by construction", "the same by construction"),
        )
    }
    others = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
    baseline = results["baseline"]
    amount = f"{_amount(results, best)}"
    how = "Tuned alike" if results["tuned"] else "Untuned"
    if better:
        first = f"{how}, {best['label']} beats {baseline}: {amount}."
    elif all(v["difference"]["verdict"] == "worse" for v in named):
        if len(named) == 1:
            return f"{how}, {best['label']} is worse than {baseline}: {amount}."
        first = f"{how}, {baseline} beats every mechanism. Least behind: {best['label']}, {amount}."
    else:
        first = f"{how}, no mechanism beat {baseline}. Best: {best['label']}, {amount}."
    return f"{first} Of the others: {others}." if others else first


def _blind_sentence(sight: Mapping[str, Any]) -> str:
    """Why a study cannot tell, without the figures, which stand beside the answer."""
    reasons = [check["words"].partition(" (")[0] for check in sight["checks"] if not check["passed"]]
    return f"This study cannot tell: {'; '.join(reasons)}. {sight['advice'] or ''}".strip()


def published_sentence(results: Mapping[str, Any]) -> str | None:
    """What a tuned study found about the variants as published; None if it did not judge them."""
    rows = [
        (v["label"], v["published"]["difference"])
        for v in results["variants"][1:]
        if not is_control(v) and v["published"] and v["published"]["difference"]
    ]
    if not results["tuned"] or not rows:
        return None
    groups: dict[str, list[str]] = {}
    for label, difference in rows:
        groups.setdefault(difference["verdict"], []).append(label)
    return "; ".join(
        f"{verdict}: {', '.join(labels) if len(labels) < 4 else f'{len(labels)} variants'}"
        for verdict, labels in groups.items()
    )


def _amount(results: Mapping[str, Any], variant: Mapping[str, Any]) -> str:
    difference = variant["difference"]
    if effect(results) is SHARE:
        low, high = difference["relative_low"], difference["relative_high"]
        loss = f"{percent(difference['relative'])} loss"
        parts = [loss if low is None else f"{loss} ({percent_ends(low, high)})"]
    else:
        low, high = difference["low"], difference["high"]
        loss = f"{with_sign(difference['mean'])} loss"
        parts = [loss if low is None else f"{loss} ({with_sign(low)} to {with_sign(high)})"]
        if low is not None and with_sign(low) == with_sign(high) == with_sign(0.0):
            parts = ["the same loss in the digits shown"]
    answers, theirs = variant["answers"], results["variants"][0]["answers"]
    if answers and theirs and None not in (answers["accuracy"]["mean"], theirs["accuracy"]["mean"]):
        shares = [one["accuracy"]["mean"] for one in (answers, theirs)]
        parts.append(f"{shares[0]:.0%} of answers right against {shares[1]:.0%}")
    for name in ("speed", "memory"):
        if variant[name]:
            parts.append(f"{variant[name]['ratio']:.2f}× {name}")
    return ", ".join(parts)
