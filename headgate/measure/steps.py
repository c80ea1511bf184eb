"""`headgate bench --steps`: every mechanism in a small model, against `full` in the same rounds.

One row per mechanism: the time of a training step and its peak memory, the time of a decoded token after
contexts of several lengths and how it grows with them, and how close its attention alone comes to the
speed of a matrix product.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from headgate.config import override
from headgate.grammar import parse_mechanisms
from headgate.machine import keep_memory
from headgate.measure.costs import build, decoding_step, peak_memories, refuse_lengths, training_step
from headgate.measure.speed import Shape, interleaved, measure, mechanism_cases, ratios
from headgate.mechanisms import MECHANISMS
from headgate.recipes import get_recipe

BASELINE = "full"
DECODED_AFTER = (2048, 65536)
ALONE_AT = 4096
"""The length at which attention alone is compared with a matrix product."""


@dataclass
class Row:
    """One mechanism, by length: times and bytes as multiples of full's, with quartiles of the times."""

    name: str
    step: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    memory: dict[int, float] = field(default_factory=dict)
    decoding: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    decoding_growth: float = 1.0
    """A token's time after the longest context, as a multiple of its time after the shortest."""
    sgemm_share: float = 0.0


def measure_steps(
    names: Sequence[str] | None,
    *,
    recipe: str,
    lengths: Sequence[int],
    decoded_after: Sequence[int] = DECODED_AFTER,
    memory: bool,
    seconds: float,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """About `seconds` for each mechanism at each length; one sequence per step, with the recipe's
    settings."""
    keep_memory()
    base = override(get_recipe(recipe), ["train.batch_size=1", "model.shared_options={}"])
    chosen = list(dict.fromkeys([BASELINE, *(MECHANISMS.names() if names is None else names)]))
    configs = {
        name: replace(base, model=replace(base.model, mechanism=parse_mechanisms(name))) for name in chosen
    }
    refuse_lengths(base, [*lengths, *decoded_after])
    rows = {name: Row(name) for name in chosen}
    spent = seconds * len(chosen)
    for length in lengths:
        steps = {n: training_step(build(c), c.train, length) for n, c in configs.items()}
        progress(f"steps at {length}")
        times = interleaved(steps, seconds=spent)
        del steps
        for name, row in rows.items():
            row.step[length] = ratios(times, name, BASELINE)
        if memory and length == max(lengths):
            progress(f"memory at {length}")
            measured = peak_memories([(config, length) for config in configs.values()])
            peaks = dict(zip(configs, measured, strict=True))
            for name, row in rows.items():
                row.memory[length] = peaks[name] / peaks[BASELINE]
    first_tokens: dict[str, float] = {}
    for length in sorted(decoded_after):
        progress(f"decoding after contexts of {length}")
        steps = {n: decoding_step(build(c).eval(), length)[0] for n, c in configs.items()}
        times = interleaved(steps, seconds=spent)
        for name, row in rows.items():
            row.decoding[length] = ratios(times, name, BASELINE)
            row.decoding_growth = median(times[name]) / first_tokens.setdefault(name, median(times[name]))
    shape = Shape()
    progress(f"attention alone at {ALONE_AT}")
    alone = measure(mechanism_cases(shape, chosen), [ALONE_AT], shape, seconds=seconds, most_rounds=3)
    for figure in alone.figures:
        if figure.name in rows and figure.passes == "forward+backward":
            rows[figure.name].sgemm_share = figure.sgemm_share
    return list(rows.values())


def steps_table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    table = Table(title="time and memory relative to full (quartiles)", box=box.MARKDOWN)
    table.title_justify = "left"
    table.add_column("", no_wrap=True)
    columns = [f"step T={n}" for n in first.step] + [f"memory T={n}" for n in first.memory]
    growth = f"{max(first.decoding)} / {min(first.decoding)}"
    for column in [*columns, *(f"token after {n}" for n in first.decoding), growth, "sgemm"]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        times = [f"{m:.2f} ({low:.2f}-{high:.2f})" for m, low, high in row.step.values()]
        memory = [f"{share:.2f}" for share in row.memory.values()]
        tokens = [f"{m:.2f} ({low:.2f}-{high:.2f})" for m, low, high in row.decoding.values()]
        last = [f"{row.decoding_growth:.2f}", f"{row.sgemm_share:.2f}"]
        table.add_row(Text(row.name), *map(Text, [*times, *memory, *tokens, *last]))
    return table


def steps_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
