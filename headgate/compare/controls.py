"""Controls: what every study also trains, to see whether it can tell anything about attention at all.

*no attention*: each token sees only itself. If plain attention does not beat it, attention is worth nothing
here, and no mechanism can be shown to be better at it. *a short window*: if plain attention does not beat it,
nothing beyond the last few tokens helped. And the baseline's loss must fall with the position in the context,
or more context did not help. A study that fails one of these says so instead of giving a verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from headgate.compare.statistics import interval
from headgate.compare.variants import Variant
from headgate.config import Config
from headgate.grammar import MechanismSpec

WINDOW = 16
"""The short window, in tokens; at most a quarter of the context."""
ALONE, SHORT = "no attention", "short window"


def control_variants(base: Config) -> tuple[Variant, ...]:
    window = max(1, min(WINDOW, base.train.context // 4))
    return (
        Variant(f"control: {ALONE}", (MechanismSpec("local", {"window": 0}),), control=True),
        Variant(f"control: window of {window}", (MechanismSpec("local", {"window": window}),), control=True),
    )


def with_controls(variants: Sequence[Variant], base: Config) -> tuple[Variant, ...]:
    """The variants followed by the controls, except those that the user named anyway."""
    named = [variant.meaning for variant in variants]
    labels = {variant.label for variant in variants}
    added = [control for control in control_variants(base) if control.meaning not in named]
    return (*variants, *(replace(c, label=f"{c.label} ") if c.label in labels else c for c in added))


def find_controls(variants: Sequence[Variant], base: Config) -> dict[str, str]:
    """The labels of the variants that serve as controls, by role."""
    found = {}
    for role, control in zip((ALONE, SHORT), control_variants(base), strict=True):
        label = next((v.label for v in variants if v.meaning == control.meaning), None)
        if label is not None:
            found[role] = label
    return found


def sight(variants: Sequence[Variant], base: Config, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the study could see, for results.json: from its variants' rows, the baseline's first.

    `can_tell` is None where nothing could be checked, for lack of controls or seeds.
    """
    labels = find_controls(variants, base)
    by_label = {row["label"]: row for row in rows}
    checks = [
        _beats(rows[0]["label"], by_label[label], role) for role, label in labels.items() if label in by_label
    ]
    fall = _falls_with_position(rows[0])
    checks += [fall] if fall is not None else []
    known = [check["passed"] for check in checks if check["passed"] is not None]
    judged = [
        row["difference"]["detectable"]
        for row in rows[1:]
        if row["difference"]["family"] != "controls" and row["difference"]["detectable"] is not None
    ]
    can_tell = all(known) if known and len(labels) == 2 else None
    return {
        "can_tell": can_tell,
        "checks": checks,
        "detectable": median(judged) if judged else None,
        "advice": advice(base, checks) if can_tell is False else None,
    }


def _beats(baseline: str, control: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Whether the baseline is shown to beat a control."""
    difference = control["difference"]
    passed = None if difference["verdict"] == "not tested" else difference["verdict"] == "worse"
    words = f"{baseline} is {'shown' if passed else 'not shown'} to beat {_plainly(control['label'], role)}"
    if difference["low"] is not None:
        ends = f"{difference['low']:+.4f} to {difference['high']:+.4f}"
        words += f" ({difference['mean']:+.4f} nats per token against {baseline}, {ends})"
    return {"what": role, "passed": passed, "words": words}


def _plainly(label: str, role: str) -> str:
    name = label.removeprefix("control: ").strip()
    return name if name != label or name == role else f"{role} ({label})"


def _falls_with_position(baseline: Mapping[str, Any]) -> dict[str, Any] | None:
    """Whether the baseline's loss in the last half of the context is below that of an early part, over the
    seeds. Where only answers count, positions are not comparable, and nothing is checked."""
    runs = [run for run in baseline["runs"] if run["state"] == "finished" and run.get("by_position")]
    if baseline["answers"] is not None or len(runs) < 2 or len(runs[0]["by_position"]) < 4:
        return None
    places = runs[0]["by_position"]
    late = len(places) - 1
    early = max(0, late - 3)
    falls = []
    for run in runs:
        ends = [run["by_position"][n]["loss"] for n in (early, late)]
        falls.append(math.inf if None in ends else ends[1] - ends[0])
    found = interval(falls)
    passed = found.high is not None and found.high < 0
    where = [f"positions {places[n]['first']:,} to {places[n]['end'] - 1:,}" for n in (early, late)]
    words = f"{baseline['label']}'s loss {'falls' if passed else 'is not shown to fall'} with position"
    if found.mean is not None:
        words += f" ({found.mean:+.4f} from {where[0]} to {where[1]})"
    return {"what": "position", "passed": passed, "words": words}


def advice(base: Config, checks: Sequence[Mapping[str, Any]]) -> str:
    """What to change so that the study can tell."""
    missed = {check["what"] for check in checks if check["passed"] is False}
    ways = [f"train on more tokens (train.steps={4 * base.train.steps})"]
    if base.model.vocab_size > 1000:
        ways.append(
            "use a smaller vocabulary, for which attention pays sooner (prepare with --tokenizer byte)"
        )
    if missed & {SHORT, "position"}:
        ways.append("take longer documents and a longer context")
    if base.model.start == "qwen":
        ways.append("give attention a better start (model.start=scaled model.tied_embeddings=false)")
    if base.model.rope_theta > 1e5 and base.train.context <= 2048:
        ways.append("lower RoPE's base to suit the context (model.rope_theta=10000, or --tune)")
    ways.append("add seeds")
    return "To change that: " + "; ".join(ways) + "."
