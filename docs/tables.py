"""Fills the docs' tables of mechanisms, ops, recipes and tasks from the registries: none is kept by hand.

    python docs/tables.py            # write them
    python docs/tables.py --check    # exit code 1, naming the pages, if a table is not current

A table stands between `<!-- registry NAME -->` and `<!-- end -->` in README.md or a page of docs/; NAME is
one of TABLES below. What a table says of a mechanism comes from its file: the docstring, the options, the
ablations, and what the class answers when it is built with default options and run.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

import headgate
from headgate import config
from headgate.data.tasks import TASKS, DrawnTask
from headgate.data.tokenizers import END_OF_TEXT
from headgate.files import write_text
from headgate.mechanisms import MECHANISMS, Mechanism, MechanismOptions, Past
from headgate.mechanisms.contract import build_mechanism, description, skipping
from headgate.model.cache import LayerCache
from headgate.ops import dispatch
from headgate.recipes import RECIPES

ROOT = Path(__file__).parents[1]
LENGTH = 8192
"""Tokens at which keys and pairs are counted: well beyond every default window."""
SIZES = {"d_model": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32}
ARCHIVES = {"arXiv": "https://arxiv.org/abs/", "aardXiv": "https://aardxiv.org/abs/"}
REFERENCE = re.compile(r"(arXiv|aardXiv) (\d{4}\.\d{5})")


def ours() -> list[str]:
    """The mechanisms of this package: installed packages may have registered others."""
    return [n for n in MECHANISMS.names() if MECHANISMS.get(n).__module__.startswith("headgate.mechanisms.")]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def linked(text: str) -> str:
    """The text with its papers' numbers as links."""
    return REFERENCE.sub(lambda m: f"[{m[0]}]({ARCHIVES[m[1]]}{m[2]})", text)


def summary(name: str) -> str:
    """The first line of the mechanism's file without its name, and papers that only later lines name."""
    text = description(MECHANISMS.get(name))
    first = text.splitlines()[0].partition(": ")[2].rstrip(".")
    named = {m[0] for m in REFERENCE.finditer(first)}
    later = dict.fromkeys(m[0] for m in REFERENCE.finditer(text) if m[0] not in named)
    return linked(first + "".join(f"; {reference}" for reference in later))


def source(name: str, folder: str) -> str:
    """The name as a link to the mechanism's file, seen from a page's folder."""
    file = Path(inspect.getsourcefile(MECHANISMS.get(name)) or "").name
    return f"[{name}]({folder}headgate/mechanisms/{file})"


def code(options: Mapping[str, Any]) -> str:
    shown = (f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items())
    return "`" + ",".join(shown) + "`"


def overview() -> str:
    """Every mechanism in a line, for the README."""
    return markdown(["mechanism", "what it is"], [[source(n, ""), summary(n)] for n in ours()])


def mechanisms() -> str:
    """Every mechanism with its options and ablations."""
    base = {f.name: f.default for f in fields(MechanismOptions)}
    rows = []
    for name in ours():
        cls = MECHANISMS.get(name)
        own = {f.name: f.default for f in fields(cls.Options) if base.get(f.name, ()) != f.default}
        options = "<br>".join(code({k: v}) for k, v in own.items())
        ablations = "<br>".join(f"`{name}:{k}` is {code(v)}" for k, v in cls.ablations.items())
        rows.append([source(name, "../"), summary(name), options, ablations])
    return markdown(["mechanism", "what it is", "options and defaults", "ablations"], rows)


class _Watched(LayerCache):
    """A cache that remembers what a mechanism handed it."""

    kept: tuple[Tensor, ...] = ()

    def append(self, *new: Tensor) -> list[Tensor]:
        self.kept = new
        return super().append(*new)


def run(mechanism: Mechanism, length: int = 8) -> _Watched:
    """The cache after a few tokens."""
    heads, cache = mechanism.heads, _Watched()
    x = torch.zeros(1, length, heads.d_model)
    q = torch.zeros(1, heads.n_heads, length, heads.head_dim)
    k = torch.zeros(1, heads.n_kv_heads, length, heads.head_dim)
    first = k if mechanism.uses_first_values else None
    with torch.no_grad():
        mechanism(x, q, k, k, Past(cache=cache, first_values=first))
    return cache


def costs_of(mechanism: Mechanism) -> list[str]:
    """Keys kept, what is kept besides, pairs."""
    first = mechanism.first_key(LENGTH)
    keys = LENGTH - first + min(first, mechanism.pinned_keys)
    cache = run(mechanism)
    states = ["x".join(map(str, (t.shape[1], *t.shape[3:]))) for t in cache.kept[2:]]
    besides = [f"per key {s}" for s in states]
    besides += [f"{n} {'x'.join(map(str, t.shape[1:]))}" for n, t in cache.carried.items()]
    share = mechanism.pairs(LENGTH) / (LENGTH * (LENGTH + 1) // 2)
    return ["all" if keys == LENGTH else f"{keys:,}", ", ".join(besides), f"{share:.3f}"]


def costs() -> str:
    """What a mechanism keeps and computes; of its ablations those that differ in it."""
    rows = []
    for name in ours():
        plain = costs_of(build_mechanism(name, **SIZES))
        rows.append([name, *plain])
        for ablation, options in MECHANISMS.get(name).ablations.items():
            ablated = costs_of(build_mechanism(name, **SIZES, **options))
            if ablated != plain:
                rows.append([f"{name}:{ablation}", *ablated])
    return markdown(["mechanism", "keys kept", "kept besides", "pairs, of full attention's"], rows)


def retrofit() -> str:
    """How each mechanism starts as full attention, and how far."""
    rows = []
    for name in ours():
        mechanism = build_mechanism(name, **SIZES)
        how = inspect.cleandoc(type(mechanism).start_as_full.__doc__ or "")
        if type(mechanism).start_as_full is Mechanism.start_as_full:
            how = "cannot"
        elif not how:
            how = "Its gates start open." if mechanism.skips else "Nothing to set."
        positions = mechanism.start_as_full()
        reach = "every position" if positions == float("inf") else f"the first {positions:,.0f}"
        rows.append([name, " ".join(how.split(". ")[0].split()).rstrip("."), reach if positions else "none"])
    return markdown(["mechanism", "how it starts", "is full attention at"], rows)


@contextmanager
def watched_gates(seen: set[str]) -> Iterator[None]:
    """Notes which ends of a gate the mechanisms run inside let `skipping` round."""
    plain = Mechanism.followed

    def followed(self: Mechanism, gate: Tensor, *, down: bool = False, up: bool = False) -> Tensor:
        seen.update(end for end, asked in (("near 0", down), ("near 1", up)) if asked)
        return plain(self, gate, down=down, up=up)

    Mechanism.followed = followed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Mechanism.followed = plain  # type: ignore[method-assign]


def skipped() -> str:
    """The mechanisms whose gates decoding can follow."""
    rows = []
    for name in ours():
        mechanism = build_mechanism(name, **SIZES)
        if mechanism.skips:
            ends: set[str] = set()
            with watched_gates(ends), skipping(mechanism, 0.1):
                run(mechanism)
            rows.append([name, " and ".join(sorted(ends))])
    return markdown(["mechanism", "gates that save work"], rows)


def choices(cls: type[Mechanism]) -> Iterator[dict[str, Any]]:
    """Default options, every ablation, and every choice of an option that has choices."""
    yield {}
    yield from map(dict, cls.ablations.values())
    for option, hint in get_type_hints(cls.Options).items():
        if get_origin(hint) is Literal:
            yield from ({option: choice} for choice in get_args(hint))


def users() -> dict[str, list[str]]:
    """Op -> the mechanisms that call it."""
    found: dict[str, list[str]] = {}
    for name in ours():
        before = dispatch.paths_taken()
        for options in choices(MECHANISMS.get(name)):
            mechanism = build_mechanism(name, **SIZES, **options)
            run(mechanism)
            with skipping(mechanism, 0.1 if mechanism.skips else 0):
                run(mechanism, 1)
        taken = {p.partition(":")[0] for p, n in dispatch.paths_taken().items() if n > before.get(p, 0)}
        for op in sorted(taken):
            found.setdefault(op, []).append(name)
    return found


def ops() -> str:
    """Every op with its paths, in the order in which they are tried."""
    paths: dict[str, list[str]] = {}
    for module in pkgutil.walk_packages(headgate.ops.__path__, "headgate.ops."):
        if ".native." in module.name or ".triton." in module.name:
            continue  # kernels: they need what they are compiled with, and hold no ops
        for entry in vars(importlib.import_module(module.name)).values():
            if isinstance(entry, dispatch.Op):
                paths[entry.name] = [path.name for path in entry.paths]
    used = users()
    rows = [
        [f"`{op}`", " ".join(f"`{p}`" for p in paths[op]), ", ".join(used.get(op, []))]
        for op in sorted(paths)
    ]
    return markdown(["op", "paths, first to last", "mechanisms"], rows)


def recipes() -> str:
    rows = []
    for name in sorted(RECIPES.names(), key=lambda n: RECIPES.get(n).parameters):
        recipe = RECIPES.get(name)
        model, train = recipe.make().model, recipe.make().train
        sizes = f"{model.n_layers} layers of width {model.d_model}, context {train.context:,}"
        millions = f"{recipe.parameters / 1e6:,.1f}M"
        rows.append([f"`{name}`", linked(recipe.summary.rstrip(".")), sizes, millions])
    return markdown(["name", "what", "sizes", "parameters"], rows)


def task_file(name: str) -> str:
    return f"[{name}](../headgate/data/tasks/{Path(inspect.getsourcefile(TASKS.get(name)) or '').name})"


def tasks() -> str:
    """Every task with its options, chance and optimum."""
    rows = []
    for name in TASKS.names():
        cls = TASKS.get(name)
        common = {f.name for f in fields(DrawnTask)}
        options = [code({f.name: f.default}) for f in fields(cls) if f.name not in common]
        presets = [f"`{name}:{preset}` is {code(values)}" for preset, values in cls.presets.items()]
        task = cls()
        asked = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
        best, value = "1", f"{task.chance.accuracy:.3f}"
        if isinstance(task, DrawnTask) and task.judged_by == "loss":
            samples = list(task.sample("val", 0, task.held_out))
            answers = sum(np.count_nonzero(each.answers) for each in samples)
            best = f"{sum(task.optimum(each)[0] for each in samples) / answers:.4f} nats"
            value = f"{task.chance.loss:.4f} nats"
        rows.append([task_file(name), asked, "<br>".join(options + presets), value, best])
    return markdown(["task", "what a sample is", "options, defaults, presets", "chance", "optimum"], rows)


def task_examples() -> str:
    """A small sample of every task, its answers in bold."""
    rows = []
    for name in TASKS.names():
        task = config.from_dict(TASKS.get(name), TASKS.get(name).small)
        words = [END_OF_TEXT, *task.words]
        _, samples = next(task.parts((80, 10, 10)))
        shown = zip(samples.tokens[0], samples.answers[0], strict=True)
        line = " ".join(f"**{words[token]}**" if answer else words[token] for token, answer in shown)
        rows.append([f"`{name}:{code(TASKS.get(name).small)[1:-1]}`", line])
    return markdown(["task", "its first sample"], rows)


TABLES: dict[str, Callable[[], str]] = {
    t.__name__: t
    for t in (overview, mechanisms, costs, retrofit, skipped, ops, recipes, tasks, task_examples)
}


def filled(page: str) -> str:
    """The page with its tables as the registries have them."""

    def table(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            sys.exit(f"there is no table {match[2]!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}"

    return re.sub(r"(<!-- registry (\w+) -->\n).*?(<!-- end -->)", table, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table is stale")
    parser.add_argument("pages", nargs="*", type=Path, help="README.md and docs/*.md when absent")
    options = parser.parse_args()
    stale = []
    for path in options.pages or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        page = path.read_text(encoding="utf-8")
        if filled(page) != page:
            stale.append(path.name)
            if not options.check:
                write_text(path, filled(page))
    if options.check and stale:
        sys.exit(f"tables of {', '.join(stale)} are not current; run python docs/tables.py")


if __name__ == "__main__":
    main()
