"""The docs are true: tables are current, commands parse, links lead somewhere, the README's example runs."""

import dataclasses
import functools
import importlib.util
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import headgate
from headgate import cli, config
from headgate.mechanisms import MECHANISMS, Past
from headgate.model.cache import LayerCache
from headgate.recipes import RECIPES, get_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load(ROOT / "docs" / "tables.py")


@each_page
def test_tables_of_the_registry_are_current(tables: ModuleType, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text) == text, f"{page.name} is stale; run python docs/tables.py"


def test_every_mechanism_is_in_every_table_of_mechanisms(tables: ModuleType) -> None:
    for table in (tables.overview, tables.mechanisms, tables.costs, tables.retrofit):
        for name in tables.ours():
            assert re.search(rf"^\| \[?{name}\b", table(), re.MULTILINE), f"{table.__name__} lacks {name}"


def test_a_stale_table_is_named_and_written_anew(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- registry skipped -->\n| stale |\n<!-- end -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check", str(page)])
    with pytest.raises(SystemExit, match=r"tables of page.md are not current"):
        tables.main()
    assert "stale" in page.read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["tables.py", str(page)])
    tables.main()
    written = page.read_text(encoding="utf-8")
    assert written.startswith("before\n<!-- registry skipped -->\n\n| mechanism |")
    assert "| dynamic-sparse | near 0 |" in written
    assert written.endswith("\n<!-- end -->\nafter\n")


def readme_example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = (block for block in blocks if "@register(" in block)
    return str(example)


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """The README's mechanism in a file outside the package."""
    path = tmp_path / "mine.py"
    path.write_text(readme_example(), encoding="utf-8")
    yield path
    if "mine" in MECHANISMS.names():
        MECHANISMS.unregister("mine")


@pytest.mark.parametrize("own_value", [True, False])
def test_the_mechanism_of_the_readme(mine: Path, own_value: bool) -> None:
    load(mine)
    mechanism = headgate.build_mechanism(
        "mine", d_model=24, n_heads=4, head_dim=8, n_kv_heads=2, window=5, own_value=own_value
    )
    x, q = torch.randn(2, 23, 24), torch.randn(2, 4, 23, 8)
    k, v = torch.randn(2, 2, 23, 8), torch.randn(2, 2, 23, 8)
    whole = mechanism(x, q, k, v)
    torch.testing.assert_close(whole, mechanism.reference(x, q, k, v))
    cache, parts = LayerCache(), []
    with torch.no_grad(), headgate.probe(mechanism) as seen:
        for a, b in ((0, 9), (9, 10), (10, 23)):
            some = (x[:, a:b], *(t[:, :, a:b] for t in (q, k, v)))
            parts.append(mechanism(*some, Past(cache=cache)))
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    assert cache.start == 18
    assert [tuple(gate.shape) for gate in seen["gate"]] == [(2, 9, 4), (2, 1, 4), (2, 13, 4)]


def written_commands(page: Path) -> list[str]:
    """The `headgate ...` lines of a page's indented and fenced blocks, without comments."""
    text = re.sub(r" *\\\n\s*", " ", page.read_text(encoding="utf-8"))
    found = re.findall(r"^(?: {4,}|\t)?((?:.*\| |torchrun .*-m )?headgate [a-z].*)$", text, re.MULTILINE)
    blocks = set(re.findall(r"^(?: {4,}|\t)(.*)$", text, re.MULTILINE))
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        blocks |= set(block.split("\n"))
    return [re.sub(r"\s+#.*", "", line) for line in found if line in blocks and "[--" not in line]


COMMANDS = [(page.name, line) for page in PAGES for line in dict.fromkeys(written_commands(page))]


def parsed(line: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """A command's name and the arguments that it would be run with."""
    words = shlex.split(line[line.index("headgate ") :])[1:]
    given: dict[str, Any] = {}

    @functools.wraps(cli.COMMANDS[words[0]])
    def note(*positional: Any, **named: Any) -> None:
        given.update(named, positional=positional)

    monkeypatch.setitem(cli.COMMANDS, words[0], note)
    cli.run(words)
    return words[0], given


def test_the_docs_have_commands() -> None:
    assert {line.split("headgate ")[1].split()[0] for _, line in COMMANDS} == set(cli.COMMANDS)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{p}: {c}" for p, c in COMMANDS])
def test_a_command_of_the_docs_parses(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        name, given = parsed(line, monkeypatch)
    except SystemExit:
        pytest.fail(f"{page}: {line}\n{capsys.readouterr().err}")
    if name in ("train", "plan") and given["positional"][0]:
        assert given["positional"][0] in RECIPES.names()
        assert config.override(get_recipe(given["positional"][0]), given["override"])


def flags(command: str) -> set[str]:
    """The options of a command, without their dashes."""
    names: set[str] = {"mechanism-file"}
    for parameter in inspect.signature(cli.COMMANDS[command]).parameters.values():
        of_class = dataclasses.is_dataclass(parameter.annotation)
        fields = [f.name for f in dataclasses.fields(parameter.annotation)] if of_class else [parameter.name]
        names |= {name.replace("_", "-") for name in fields}
    return names | {f"no-{name}" for name in names}


@each_page
def test_commands_within_sentences_exist_with_their_options(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    for name, rest in re.findall(r"`headgate ([a-z]+)((?: [^`]*)?)`", text):
        assert name in cli.COMMANDS, f"there is no command headgate {name}"
        unknown = set(re.findall(r"--([a-z-]+)", rest)) - flags(name)
        assert not unknown, f"headgate {name} has no option {unknown}"


@each_page
def test_scripts_targets_and_tests_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    makefile = "".join(
        p.read_text(encoding="utf-8") for p in (ROOT / "Makefile", *ROOT.glob("studies/*/*.mk"))
    )
    for target in re.findall(r"(?:`|    )make ([a-z][a-z-]*)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target} does not exist"
    for script, rest in re.findall(r"python ((?:benchmarks|docs|studies)/[\w/]+\.py)([^`\n]*)", text):
        assert (ROOT / script).is_file(), f"{script} does not exist"
        source = (ROOT / script).read_text(encoding="utf-8")
        for flag in re.findall(r"--([a-z-]+)", rest):
            named = flag.removeprefix("no-").replace("-", "_")
            assert re.search(rf"--{flag}\b|\b{named}\b", source), f"{script} has no --{flag}"
    for path in re.findall(r"\b((?:tests|examples|headgate)/[\w/]+\.(?:py|cpp|h))\b", text):
        assert (ROOT / path).is_file(), f"{path} does not exist"


def anchors(page: Path) -> set[str]:
    """The names by which GitHub links to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index


def test_the_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {headgate.__version__}\n" in citation
