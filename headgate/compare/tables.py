"""The results of a study in words and as tables, for the terminal and for a paper."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from headgate.compare.statistics import Difference
from headgate.progress import table_console

COLUMNS = (
    "variant",
    "loss",
    "difference",
    "p",
    "verdict",
    "could see",
    "speed",
    "memory",
    "parameters",
    "to the baseline's loss",
    "worth",
)
LEGEND = (
    "loss: validation, nats per token, mean over the seeds ± half its 95% interval. difference: to the "
    "baseline with the same seed, judged over seeds and documents; the interval and p are corrected over the "
    "variants of a family, and an interval excludes 0 where a difference is shown. could see: the smallest "
    "difference that would have been shown with a power of 0.8. speed, memory: of a training step, relative "
    "to the baseline. Controls are marked as such and form their own family."
)
IMPORTANT = ("variant", "verdict", "difference", "speed", "memory", "loss", "worth", "untuned", "could see")
"""Columns, those that a narrow terminal drops last coming first."""
NAMED = 4
"""The headline names at most this many variants of a verdict, and counts the rest of a longer list."""


def _columns(results: Mapping[str, Any]) -> list[str]:
    """The names say whether the variants were tuned, and what is shown of them as published."""
    kind = "tuned" if results["tuned"] else "untuned"
    names = [f"{name}, {kind}" if name in ("loss", "verdict") else name for name in COLUMNS]
    return [*names, "untuned", "tuned to"] if results["tuned"] else names


def _cells(variant: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    cells = _plain_cells(variant)
    if not results["tuned"]:
        return cells
    published = variant["published"]
    before = "" if published is None else verdict_of({**variant, **published})
    if published is not None and published["difference"] is not None:
        found = published["difference"]
        before = f"{signed(found['mean'], found['high'], 4)} {before}".strip()
    settings = (f"{key.rpartition('.')[2]}={value}" for key, value in variant["settings"].items())
    return [*cells, before, ", ".join(settings) or "as published"]


def _plain_cells(variant: Mapping[str, Any]) -> list[str]:
    difference = variant["difference"]
    return [
        variant["label"],
        loss_of(variant),
        "" if difference is None else signed(difference["mean"], difference["high"], 4),
        "" if difference is None else p_value(difference["p_corrected"]),
        verdict_of(variant),
        "" if difference is None else detectable(difference["detectable"]),
        ratio(variant["speed"]),
        ratio(variant["memory"]),
        "" if variant["parameters"] is None else f"{variant['parameters']:,}",
        convergence(variant["convergence"]) if difference is not None else "",
        price_in_words(variant["price"]),
    ]


def loss_of(variant: Mapping[str, Any]) -> str:
    failed = [run for run in variant["runs"] if run["state"] == "failed"]
    missing = [run for run in variant["runs"] if run["state"] == "not run"]
    loss = variant["loss"]
    text = "" if loss["mean"] is None else f"{loss['mean']:.4f}"
    if loss["high"] is not None:
        text += f" ± {loss['high'] - loss['mean']:.4f}"
    if loss["mean"] is None and loss["n"]:
        text = "diverged"
    for runs, what in ((failed, "failed"), (missing, "not run")):
        if runs:
            text = f"{text}{', ' if text else ''}{len(runs)} of {len(variant['runs'])} seeds {what}"
    return text


def verdict_of(variant: Mapping[str, Any]) -> str:
    difference = variant["difference"]
    if difference is None:
        return "baseline"
    if difference["verdict"] == "not tested":
        return f"not tested ({difference['seeds']} shared seed{'s' * (difference['seeds'] != 1)})"
    return str(difference["verdict"]) + " (control)" * bool(variant.get("control"))


def signed(mean: float | None, high: float | None, digits: int) -> str:
    if mean is None:
        return ""
    shown = round(mean, digits) + 0.0  # of nothing no sign
    return f"{shown:+.{digits}f}" + ("" if high is None else f" ± {high - mean:.{digits}f}")


def p_value(p: float | None) -> str:
    if p is None:
        return ""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def detectable(amount: float | None) -> str:
    return "" if amount is None else f"{amount:.2g} or more"


def ratio(cost: Mapping[str, Any] | None) -> str:
    return "" if cost is None else f"{cost['ratio']:.2f}x"


def price_in_words(price: Mapping[str, Any] | None) -> str:
    """The compute multiplier at equal time if a speed is known, else at equal tokens."""
    if price is None:
        return ""
    found, of = (price["time"], "time") if "time" in price else (price["tokens"], "tokens")
    if price["beyond"] or found["value"] is None:
        return "beyond the ladder"
    ends = [f"{found[end]:.2f}" if found[end] is not None else "beyond" for end in ("low", "high")]
    return f"{found['value']:.2f}x compute at equal {of} ({ends[0]} to {ends[1]})"


def convergence(found: Mapping[str, Any] | None) -> str:
    """Tokens to reach the baseline's final loss, relative to the baseline."""
    if found is None:
        return ""
    if found["relative"] is None:
        early = found["reached"] == found["of"] and found["early"]
        return "at the first evaluation" if early else f"reached by {found['reached']} of {found['of']} seeds"
    return f"{found['relative']:+.0%} tokens"


def headline(results: Mapping[str, Any]) -> str:
    """The verdict in a sentence or two; or that the study cannot tell, why, and what to change."""
    sight = results["sight"]
    if sight["can_tell"] is not False:
        return str(results["verdicts"])
    missed = [check["words"] for check in sight["checks"] if check["passed"] is False]
    study = "This study" if results["tuned"] else "This untuned study"
    return f"{study} cannot tell: {'; '.join(missed)}. {sight['advice']}"


def verdicts(results: Mapping[str, Any]) -> str:
    """What was measured, tuned and as published."""
    if not results["tuned"]:
        return f"Untuned: {_verdicts(results['variants'])}."
    words = f"Tuned alike: {_verdicts(results['variants'])}."
    if results["variants"][0]["published"] is None:
        return words
    rows = [{**variant, **variant["published"]} for variant in results["variants"]]
    return f"{words} As published, untuned: {_verdicts(rows)}."


def _verdicts(variants: Sequence[Mapping[str, Any]]) -> str:
    """What was measured for the variants other than controls."""
    baseline, *others = variants
    groups: dict[str, list[str]] = {}
    seen: list[float] = []
    for variant in others:
        if not variant["control"]:
            verdict = variant["difference"]["verdict"]
            groups.setdefault(verdict, []).append(_named(variant))
            if verdict == "no difference shown" and variant["difference"]["detectable"] is not None:
                seen.append(variant["difference"]["detectable"])
    parts: list[str] = []
    for verdict, words in (
        ("better", "better than"),
        ("worse", "worse than"),
        ("no difference shown", "not shown to differ from"),
        ("same by construction", "the same as"),
    ):
        if verdict in groups:
            names = groups[verdict]
            listed = _in_words(_few(names, shown=verdict in ("better", "worse"), more=bool(parts)))
            part = f"{listed} {'is' if len(names) == 1 else 'are'} {words} {baseline['label']}"
            if verdict == "no difference shown" and seen:
                least = f"{max(seen):.2g}"
                part += f" (differences of {least} nats or more would have been seen)"
            parts.append(part + " by construction" * (verdict == "same by construction"))
    if "not tested" in groups:
        listed = _in_words(_few(groups["not tested"], shown=False, more=bool(parts)))
        parts.append(f"{listed} could not be tested: that takes two seeds of both")
    return "; ".join(parts) or "there is nothing to compare with the baseline"


def _named(variant: Mapping[str, Any]) -> str:
    """With its difference if one is shown: as a share of the baseline's loss, unless that is almost 0."""
    difference = variant["difference"]
    if difference["verdict"] not in ("better", "worse") or difference["mean"] is None:
        return str(variant["label"])
    relative = difference["relative"]
    meaningful = relative is not None and abs(relative) <= 1
    amount = f"{relative:+.1%}" if meaningful else f"{difference['mean']:+.4f}"
    return f"{variant['label']} ({amount} loss)"


def _few(names: Sequence[str], *, shown: bool, more: bool) -> list[str]:
    """All if they are few; otherwise the first, if they are shown to differ, and the number of the others."""
    if len(names) <= NAMED:
        return list(names)
    first = list(names[: NAMED - 1]) if shown else []
    return [*first, f"{len(names) - len(first)} {'others' if first or more else 'variants'}"]


def _in_words(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def conditions(results: Mapping[str, Any]) -> str:
    """The conditions under which the headline holds."""
    train, seeds = results["config"]["train"], _seeds(results)
    parameters = results["variants"][0]["parameters"]
    size = "" if parameters is None else f", {parameters / 1e6:,.2f}M parameters"
    equal = "at equal tokens" if results["budget"] == "tokens" else "at equal seconds"
    tuning = results["tuning"]
    equal += f", {_trials(tuning)} of each variant" if results["tuned"] else ", untuned"
    return (
        f"Recipe {Path(results['recipe']).name}{size}, context {train['context']:,}, "
        f"{results['tokens_per_run']:,} training tokens per run, {seeds}, {equal}{_devices(results)}"
    )


def _trials(tuning: Mapping[str, Any]) -> str:
    seeds = tuning["seeds"]
    return f"{tuning['trials']} trials" + (f" on {seeds} seeds" if seeds > 1 else "")


def devices(machines: Iterable[Mapping[str, Any]]) -> list[str]:
    """The devices of runs, each once; other numbers of processes or threads are as good as another device."""
    found = []
    for machine in machines:
        counts = {what: machine[what] for what in ("processes", "threads") if machine[what] != 1}
        found.append(", ".join([_device(machine), *(f"{count} {what}" for what, count in counts.items())]))
    return list(dict.fromkeys(found))


def _device(machine: Mapping[str, Any]) -> str:
    return str(machine["device_name"] or machine["processor"])


def _devices(results: Mapping[str, Any]) -> str:
    """Whether the runs were spread over different devices, and whether another measured the costs."""
    words, machines = "", results["circumstances"]["machines"]
    trained, costs = devices(machines), results["costs"]
    if len(trained) > 1:
        words += f"; trained on different devices ({'; '.join(trained)}), whose seconds are not compared"
    if costs and costs["machine"] and _device(costs["machine"]) not in map(_device, machines):
        words += f"; costs measured on {_device(costs['machine'])}"
    return words


def _seeds(results: Mapping[str, Any]) -> str:
    most, looks = results["seeds"], results["looks"]
    words = f"{most} seed{'s' * (most != 1)}"
    if looks:
        words = f"up to {words}, planned looks after {_in_words([str(look) for look in looks])}"
    for before in results["extended"]:
        words += f", extended from {before} after its results were known, which the verdicts do not allow for"
    documents = [v["difference"]["documents"] for v in results["variants"][1:] if v["difference"]]
    known = [count for count in documents if count is not None]
    return words + (f", {max(known):,} documents" if known else "")


def markdown(results: Mapping[str, Any]) -> str:
    columns = _columns(results)
    lines = [_literally(f"{results['headline']} {results['conditions']}."), ""]
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(map(_literally, _cells(v, results)))} |" for v in results["variants"]]
    return "\n".join([*lines, "", LEGEND, ""])


def _literally(text: str) -> str:
    """For Markdown: labels and paths are literal text, whatever they contain."""
    return re.sub(r"([\\\\`*\[\]<>|&]|\b_|_\b)", r"\\\1", text.replace("\n", " "))


def claims_markdown(results: Mapping[str, Any]) -> str:
    """Each paper's figures beside ours, both relative to their own baseline."""
    lines = ["| paper | row | metric | as printed | there | here | |", f"|{'---|' * 7}"]
    for judged in results["claims"]:
        claim = judged["claim"]
        here = "" if judged["relative"] is None else f"{judged['relative']:+.1%}"
        if here and judged["low"] != judged["high"]:
            here += f" ({judged['low']:+.1%} to {judged['high']:+.1%})"
        printed = f"{claim['printed']} against {claim['baseline_printed']} {claim['unit']}"
        cells = [claim["paper"], claim["row"], claim["metric"], printed, f"{claim['relative']:+.1%}"]
        lines.append(f"| {' | '.join(map(_literally, [*cells, here, judged['verdict']]))} |")
    return "\n".join([*lines, ""])


def print_against(label: str, differences: Mapping[str, Difference]) -> None:
    table = Table("variant", f"difference to {label}", "p", "verdict", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, difference in differences.items():
        words = [name, signed(difference.mean, difference.high, 4), p_value(difference.p_corrected)]
        table.add_row(*map(Text, [*words, difference.verdict]))
    table_console().print(table)


def print_results(results: Mapping[str, Any], answer: str) -> None:
    """The table, with as many columns as fit, what failed, and the answer last."""
    console = table_console()
    variants = results["variants"][:1] + sorted(results["variants"][1:], key=_by_difference)
    columns, cells = _columns(results), [_cells(variant, results) for variant in variants]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    shown = _fitting(columns, widths, console.width)
    table = Table(*(columns[n] for n in shown), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in cells:
        table.add_row(*(Text(row[n]) for n in shown))
    console.print(table)
    if len(shown) < len(columns):
        console.print(f"{len(columns) - len(shown)} more columns are in results.md and on the page.")
    for variant in variants:
        for run in variant["runs"]:
            if run["state"] == "failed":
                reason = f"failed: {variant['label']}, seed {run['seed']}: {run['reason']}"
                console.print(reason, markup=False, soft_wrap=True)
    console.print(f"\n{answer} {results['conditions']}.", markup=False, soft_wrap=True)


def _by_difference(variant: Mapping[str, Any]) -> float:
    mean = variant["difference"]["mean"]
    return math.inf if mean is None else float(mean)


def _fitting(columns: Sequence[str], widths: Sequence[int], room: int) -> list[int]:
    """The columns that fit in a line of `room` characters: the most important, in their order."""
    ranks = {name: rank for rank, name in enumerate(IMPORTANT)}
    order = sorted(range(len(columns)), key=lambda n: ranks.get(columns[n].partition(",")[0], len(ranks)))
    found: list[int] = []
    for n in order:
        if found and room < widths[n] + 1:
            break
        found.append(n)
        room -= widths[n] + 1
    return sorted(found)
