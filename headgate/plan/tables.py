"""Plans for people to read: one in detail, or several side by side."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.table import Table

from headgate import config
from headgate.data.shards import open_split
from headgate.errors import HeadgateError
from headgate.grammar import parse_mechanisms
from headgate.mechanisms.contract import on_shelf
from headgate.plan.devices import CPU, Seconds, find_device
from headgate.plan.planner import PLAIN, USABLE, Fit, Plan, make_plan, make_plans, with_batch
from headgate.progress import duration_range, table_console
from headgate.recipes import named_config

WIDTH = 80
PARTS = ("weights", "gradients", "optimiser", "activations", "loss")


def print_plan(plan: Plan, label: str) -> None:
    console = table_console(WIDTH)
    train, device = plan.config.train, plan.device
    console.print(
        f"{label}: {plan.parameters:,} parameters, {plan.mechanism_parameters:,} of them the mechanism's"
    )
    console.print(
        f"{train.context:,} tokens, {train.batch_size} sequences per pass, {train.accumulation} "
        f"pass{'es' * (train.accumulation > 1)} per step, {train.precision}, on {plan.count} x {device.name} "
        f"({device.source})"
    )
    console.print(
        f"A step takes {quantity(plan.flops['total'])}FLOP "
        f"({plan.flops['attention'] / plan.flops['total']:.0%} attention, by {' and '.join(plan.paths)}) and "
        f"moves {quantity(plan.bytes_moved)}B; decoding keeps {quantity(plan.cache)}B per sequence.\n"
    )
    table = _table("run with", "sequences", "peak", "fits", "a step", "the run")
    rows = [("as asked", plan.asked), *((way.options, way) for way in plan.ways if way != plan.asked)]
    for name, way in rows:
        table.add_row(
            name,
            f"{way.sequences} x {way.accumulation}",
            quantity(way.memory.total) + "B",
            "yes" if way.fits else "no",
            between(way.seconds),
            between(plan.hours(way).times(3600)),
        )
    console.print(table)
    console.print()
    shown = plan.best or plan.asked
    parts = ((part, getattr(shown.memory, part)) for part in PARTS)
    words = ", ".join(f"{part} {quantity(size)}B" for part, size in parts if size)
    console.print(f"Peak memory {'as asked' if shown == plan.asked else f'with {shown.options}'}: {words}.")
    console.print(verdict(plan))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        left = name in ("mechanism", "run with", "fits")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "run with")
    return table


def print_table(plans: Sequence[Plan], labels: Sequence[str]) -> None:
    """`labels` are the mechanisms; the plans are in the same order, context after context."""
    console = table_console(WIDTH)
    device = plans[0].device
    console.print(
        f"The fastest way that fits {plans[0].count} x {device.name} ({device.source}); sequences x passes.\n"
    )
    last = ["a step", "the run"] if plans[0].price is None else ["the run", "cost"]
    table = _table("mechanism", "run with", "peak", *last)
    for n, plan in enumerate(plans):
        label, way = labels[n % len(labels)], plan.best
        if n % len(labels) == 0:
            table.add_row(f"{plan.config.train.context:,} tokens")
        if way is None:
            least = min(way.memory.total for way in plan.ways)
            table.add_row(f"  {label}", "nothing fits", quantity(least) + "B")
            continue
        cost = plan.cost(way)
        table.add_row(
            f"  {label}",
            f"{way.sequences} x {way.accumulation}" + f", {way.options}" * (way.options != PLAIN),
            quantity(way.memory.total) + "B",
            *([between(way.seconds)] if cost is None else []),
            between(plan.hours(way).times(3600)),
            *([span(cost, lambda price: f"{price:,.0f}")] if cost is not None else []),
        )
    console.print(table)


def verdict(plan: Plan) -> str:
    way = plan.best
    if way is None:
        least = min(plan.ways, key=lambda way: way.memory.total)
        return (
            f"Nothing fits: one sequence at a time needs {quantity(least.memory.total)}B with "
            f"{least.options}, but {USABLE:.0%} of a device is {quantity(USABLE * plan.device.memory)}B; "
            "shorten the context, or plan for more or larger devices."
        )
    where = "this CPU" if plan.device.name == CPU else f"{plan.count} x {plan.device.name}"
    sentence = (
        f"Fastest: {settings(plan, way)}. The recipe's {amount(plan.config.train.tokens)} tokens take "
        f"{between(plan.hours(way).times(3600))} on {where}"
    )
    cost = plan.cost(way)
    if cost is not None:
        price = span(cost, lambda price: f"{price:,.0f}")
        return f"{sentence} and cost {price} at {plan.price:g} per device and hour."
    return sentence + ("." if plan.device.name == CPU else "; --price shows the cost.")


def settings(plan: Plan, way: Fit) -> str:
    train = plan.config.train
    batch = f"train.batch_size={way.sequences * plan.count} train.accumulation={way.accumulation}"
    own = train.batch_size == way.sequences * plan.count and train.accumulation == way.accumulation
    return way.options if own else f"{way.options}, {batch}"


def between(seconds: Seconds) -> str:
    return duration_range(seconds.low, seconds.high)


def span(seconds: Seconds, words: Callable[[float], str]) -> str:
    low, high = words(seconds.low), words(seconds.high)
    return low if low == high else f"{low} to {high}"


def amount(number: float) -> str:
    """In words: 3.28 billion, 614,400."""
    for word, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,.0f}"


def quantity(number: float) -> str:
    """With a decimal prefix: 1.5 G, 23 M."""
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g} "


def plan_words(
    recipe: str,
    overrides: Sequence[str],
    *,
    mechanism: str | None,
    context: int | None,
    batch: int | None,
    device: str,
    count: int,
    price: float | None,
    table: bool,
    mechanisms: Sequence[str],
    contexts: Sequence[int],
    threads: int | None,
    data: str | None,
    as_json: bool,
) -> None:
    """From command-line arguments to what is printed."""
    for name, value in (("context", context), ("batch", batch), ("threads", threads), ("count", count)):
        if value is not None and value < 1:
            raise HeadgateError(f"{name}={value} is too small; it must be at least 1")
    if mechanisms and not table:
        raise HeadgateError("--mechanisms needs --table; add it, or give --mechanism for one plan")
    if contexts and not table:
        raise HeadgateError("--contexts needs --table; add it, or give --context for one plan")
    if threads is not None:
        if device != "cpu":
            raise HeadgateError(f"--threads {threads} is for the cpu, but --device is {device}; leave it out")
        torch.set_num_threads(threads)
    asked = config.override(named_config(recipe), overrides)
    asked = with_batch(asked, context=context, batch=batch)
    split = None if data is None else open_split(data, "train", verify=False)
    if split is not None and asked.train.documents == "stream":
        raise HeadgateError(
            "--data shows how long documents are, but train.documents=stream does not keep them apart; leave "
            "it out, or add train.documents=mask"
        )
    if table:
        names = [*filter(None, [mechanism]), *mechanisms] or on_shelf("papers")
        variants = {name: parse_mechanisms(name) for name in dict.fromkeys(["full", *names])}
        lengths = contexts or [asked.train.context * factor for factor in (1, 4, 16)]
        plans = make_plans(
            asked,
            list(variants.values()),
            lengths,
            find_device(device),
            count=count,
            price=price,
            split=split,
        )
        if as_json:
            print(json.dumps([plan.to_dict() for plan in plans]))
        else:
            print_table(plans, list(variants))
        return
    label = "+".join(spec.name for spec in asked.model.mechanism)
    if mechanism is not None:
        specs = parse_mechanisms(mechanism)
        asked, label = replace(asked, model=replace(asked.model, mechanism=specs)), mechanism
    plan = make_plan(asked, find_device(device), count=count, price=price, split=split)
    if as_json:
        print(json.dumps(plan.to_dict()))
    else:
        print_plan(plan, f"{recipe}, {label}")
