"""`headgate bench`: the cost of every op and mechanism on this machine, as a table, JSON and a figure."""

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headgate.config import require_at_least
from headgate.errors import HeadgateError
from headgate.files import naming, require_writable, write_text
from headgate.machine import keep_memory, processor
from headgate.measure import steps
from headgate.measure.speed import (
    BASELINE,
    Measurement,
    Shape,
    extra_memory,
    measure,
    peer_cases,
    select_cases,
)
from headgate.options import require_distinct
from headgate.progress import table_console
from headgate.version import __version__


def bench(
    shape: Shape,
    *,
    lengths: Sequence[int],
    names: Sequence[str] | None,
    peers: bool,
    memory: bool,
    seconds: float,
    json_path: Path | None,
    figure_path: Path | None,
) -> None:
    require_at_least(shape, 1, "batch", "n_heads", "n_kv_heads", "head_dim", "window")
    if not lengths:
        raise HeadgateError("there are no lengths to measure at; give some, such as 1024,4096")
    shape.refuse_too_long(max(lengths))
    require_distinct(names or (), "mechanisms")
    _check_seconds(seconds)
    if figure_path is not None and figure_path.suffix not in (".html", ".png", ".svg"):
        raise HeadgateError(f"--figure {str(figure_path)!r} must end in .html, .png or .svg")
    for path in (json_path, figure_path):
        if path is not None:
            require_writable(path)
    keep_memory()
    console = table_console(width=max(120, 60 + 20 * len(lengths)))
    cases = select_cases(shape, None if names is None else list(names))
    missing: dict[str, str] = {}
    with console.status("preparing") as status:
        if peers:
            others, missing = peer_cases(shape)
            cases += others
        measured = measure(cases, sorted(lengths), shape, seconds=seconds, progress=status.update)
        measured.not_run.update(missing)
        if memory:
            add_memory(
                measured, [BASELINE, *(case.name for case in cases if case.kind != "peer")], status.update
            )
    print_tables(console, measured)
    if json_path is not None:
        write_text(json_path, json.dumps(to_json(measured), indent=1) + "\n")
    if figure_path is not None:
        save_figure(measured, figure_path)


def bench_steps(
    names: Sequence[str] | None,
    *,
    lengths: Sequence[int],
    decoded_after: Sequence[int],
    memory: bool,
    seconds: float,
    json_path: Path | None,
) -> None:
    """Measure every mechanism in whole steps of a small model, instead of attention alone."""
    if not lengths or not decoded_after:
        raise HeadgateError("there are no lengths to measure at; give some, such as 1024,8192")
    require_distinct(names or (), "mechanisms")
    _check_seconds(seconds)
    if json_path is not None:
        require_writable(json_path)
    console = table_console(width=max(120, 40 + 24 * (2 * len(lengths) + len(decoded_after))))
    with console.status("preparing") as status:
        rows = steps.measure_steps(
            names,
            recipe="tiny",
            lengths=lengths,
            decoded_after=decoded_after,
            memory=memory and sys.platform.startswith("linux"),
            seconds=seconds,
            progress=status.update,
        )
    console.print(
        f"{processor()}, {torch.get_num_threads()} threads, recipe tiny, fp32; sgemm: attention alone at "
        f"T={steps.ALONE_AT}, H=8 D=64, forward+backward, as a share of a matrix product's speed",
        highlight=False,
    )
    console.print(steps.steps_table(rows))
    if json_path is not None:
        answer = {"headgate": __version__, "rows": steps.steps_json(rows)}
        write_text(json_path, json.dumps(answer, indent=1) + "\n")


def _check_seconds(seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise HeadgateError(f"seconds={seconds} is no time to measure; it must be above 0")


def add_memory(measured: Measurement, names: list[str], progress: Any) -> None:
    if not sys.platform.startswith("linux"):
        measured.not_run["memory"] = "it is read from /proc, which this system does not have"
        return
    lengths = sorted({figure.length for figure in measured.figures})
    for name in names:
        progress(f"memory of {name}")
        answers = extra_memory(name, lengths, measured.shape)
        for figure in measured.figures:
            if figure.name == name and figure.passes == "forward+backward":
                figure.extra_bytes = answers[figure.length]


def to_json(measured: Measurement) -> dict[str, Any]:
    machine = {"processor": processor(), "python": platform.python_version(), "torch": torch.__version__}
    return {"headgate": __version__, "machine": machine, **asdict(measured)}


def print_tables(console: Console, measured: Measurement) -> None:
    shape = measured.shape
    console.print(
        f"{processor()}, {measured.threads} threads, sgemm {measured.sgemm_gflops:.0f} GFLOP/s; "
        f"B={shape.batch} H={shape.n_heads} G={shape.n_kv_heads} D={shape.head_dim} W={shape.window}, fp32",
        highlight=False,
    )
    for passes in ("forward", "forward+backward"):
        console.print()
        console.print(table_of(measured, passes))
    longest = max(figure.length for figure in measured.figures)
    console.print(
        f"\nms, sgemm and extra MB are at T={longest}. sgemm: useful speed as a share of it, counting 2 D "
        "flops for each product of each pair that the formula needs: two products forward, five backward.",
        highlight=False,
    )
    for name, reason in measured.not_run.items():
        console.print(f"not run: {name}: {reason}", highlight=False, markup=False)


def table_of(measured: Measurement, passes: str) -> Table:
    """One row per case: at each length its time as a multiple of the baseline's, with quartiles, then its
    costs."""
    both = passes == "forward+backward"
    lengths = sorted({figure.length for figure in measured.figures})
    table = Table(title=f"{passes}: time relative to causal SDPA (quartiles)", box=None, pad_edge=False)
    table.title_justify = "left"
    columns = (
        [f"T={length}" for length in lengths] + ["ms", "sgemm"] + (["growth", "extra MB"] if both else [])
    )
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    kind = BASELINE
    for name in dict.fromkeys(f.name for f in measured.figures if f.passes == passes):
        rows = {f.length: f for f in measured.figures if f.name == name and f.passes == passes}
        last = rows[lengths[-1]]
        if last.kind != kind:
            kind = last.kind
            table.add_row(Text(f"{kind}s" if name != BASELINE else "", style="dim"))
        cells = [
            f"{f.ratio:.2f} ({f.ratio_low:.2f}-{f.ratio_high:.2f})" for f in map(rows.__getitem__, lengths)
        ]
        cells += [f"{last.seconds * 1e3:.1f}", f"{last.sgemm_share:.2f}"]
        if both:
            growth = measured.growth.get(name)
            cells.append("" if growth is None else f"T^{growth:.2f}")
            cells.append("" if last.extra_bytes is None else f"{last.extra_bytes / 1e6:.0f}")
        table.add_row(Text(name), *map(Text, cells))
    return table


def save_figure(measured: Measurement, path: Path) -> None:
    """Forward+backward time against length, on logarithmic axes; .html is interactive and needs no
    network."""
    import altair

    rows = [asdict(figure) for figure in measured.figures if figure.passes == "forward+backward"]
    chart = (
        altair.Chart(altair.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=altair.X("length:Q", scale=altair.Scale(type="log", base=2), title="tokens"),
            y=altair.Y("seconds:Q", scale=altair.Scale(type="log"), title="seconds, forward+backward"),
            color=altair.Color("name:N", title=None, scale=altair.Scale(scheme="tableau20")),
            strokeDash=altair.StrokeDash("kind:N", title=None),
            tooltip=["name:N", "length:Q", "seconds:Q", "ratio:Q"],
        )
        .properties(width=560, height=400, title="Time of attention against length")
    )
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        with naming(path):
            if path.suffix == ".html":
                chart.save(temporary, inline=True)
            else:
                chart.save(temporary, scale_factor=2)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
