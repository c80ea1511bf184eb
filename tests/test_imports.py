"""Imports point one way, and the light parts stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "headgate"
# A room may import itself and those that stand before it on its line.
BASE = ["errors", "version", "files", "machine", "progress", "registry", "grammar", "config", "options"]
TRAINED = [*BASE, "recipes", "ops", "mechanisms", "model", "train", "measure"]
LINES = [
    [*TRAINED, "papers", "compare"],
    [*TRAINED, "plan"],
    [*BASE, "data", "train", "measure", "compare"],
    [*BASE, "data", "plan"],
    [*BASE, "report"],
]
TOP = {"cli", "__init__", "__main__"}  # they tie the rooms together


def imported_rooms(path: Path) -> set[str]:
    """The headgate rooms a file imports, inside functions too, but not those for type checkers alone."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "headgate":
            parts = node.module.split(".")
            rooms |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            rooms |= {a.name.split(".")[1] for a in node.names if a.name.startswith("headgate.")}
    return rooms


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room in TOP:
        return
    allowed = {room}
    for line in LINES:
        if room in line:
            allowed |= set(line[: line.index(room)])
    assert imported_rooms(path) <= allowed, f"{room} imports {imported_rooms(path) - allowed}"


def test_every_room_is_on_a_line() -> None:
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES}
    assert rooms <= TOP | {room for line in LINES for room in line}


LIGHT = [
    "headgate",
    "headgate.cli",
    "headgate.config",
    "headgate.files",
    "headgate.machine",
    "headgate.recipes",
    "headgate.papers.paper",
    "headgate.compare.statistics",
]


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_do_not_import_heavy_ones(module: str) -> None:
    heavy = {"torch", "numpy", "scipy", "tyro", "rich"}
    script = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_no_compiler_is_imported_before_it_is_needed() -> None:
    """Not by ops, nor by a decoder without values, which every loading of a model begins with."""
    script = (
        "import sys, torch, headgate, headgate.ops\n"
        "with torch.device('meta'): headgate.build_model('tiny')\n"
        "print(sorted({'triton', 'torch._dynamo'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_report_never_imports_torch() -> None:
    for path in (ROOT / "report").rglob("*.py"):
        assert "import torch" not in path.read_text(encoding="utf-8")


# One word for one role: a kernel's passes and its refusal, the two ways to a file, a class decorator.
IDIOMS = {"forward", "backward", "refuse", "load", "save", "register"}


def test_no_two_things_share_a_name() -> None:
    """But for commands, which are named after what they call, and ops, whose reference has their name."""
    homes: dict[str, set[str]] = {}
    for path in FILES:
        room = path.relative_to(ROOT).parts[0]
        twin = path.relative_to(ROOT).as_posix() in ("ops/reference.py", "ops/flex.py", "ops/span/sdpa.py")
        if room == "cli":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                of_op = twin and node.name.endswith(("_attention", "_convolution"))
                home = "ops" if of_op else str(path.relative_to(ROOT))
                homes.setdefault(node.name, set()).add(home)
    for name, paths in homes.items():
        if "ops" in paths and all(path.startswith("ops") for path in paths):
            homes[name] = {"ops"}
    shared = {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in IDIOMS} == {}
