"""Every command of the pages is carried out, in the order of its page, in a folder of the page's own.

As written, but for sizes: recipes, texts and measured lengths are tiny, the hub's texts and models are small
ones of this machine, and a study goes as far as its plan (`--dry-run`), since others train whole ones.
"""

import functools
import io
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from study_examples import asked_suite
from test_docs import PAGES, readme_example, written_commands

import headgate
from headgate import cli, config
from headgate.config import Config, ModelConfig
from headgate.data.tokenizers import make_tokenizer
from headgate.measure.speed import interleaved
from headgate.mechanisms import MECHANISMS
from headgate.model.convert import convert
from headgate.model.decoder import Decoder, with_mechanism
from headgate.options import EngineOptions, StudyOptions, SuiteOptions

MOST = {"train.steps": 2, "train.context": 16, "train.batch_size": 2, "train.evaluate_tokens": 120}
MOST |= {"train.document_tokens": 2000}
"""Settings that a command may give, and the most that they are here."""
PLANNED: set[tuple[Any, ...]] = set()
"""Studies that some page's command has planned already."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Room:
    """What the commands of a page find."""

    recipe: Path
    finished: Callable[[str], Path]
    """The fixture of a finished study or suite."""

    def smaller(self, command: str, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        change: Callable[..., Arguments] | None = getattr(self, f"_{command}", None)
        return (positional, named) if change is None else change(positional, named)

    def _prepare(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        if named.get("check"):
            return positional, named
        source, out = positional
        if str(source).startswith("hf://"):
            source = "stdlib"
        if named.get("tokenizer") == "Qwen/Qwen3-0.6B":
            named["tokenizer"] = "Qwen3-0.6B"
        if source in ("stdlib", "books", "TEXT"):
            named["max_tokens"] = 400_000 if named.get("tokenizer") == "byte" else 60_000
        if Path(out).is_dir():
            shutil.rmtree(out)
        return (source, out), named

    def _train(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        if positional[0] is None:
            return positional, named
        asked = dict(word.split("=", 1) for word in named["override"])
        smaller = {name: most for name, most in MOST.items() if float(asked.get(name, 1e9)) > most}
        named["override"] += tuple(f"{name}={most}" for name, most in smaller.items())
        if Path(named["out"]).exists():
            shutil.rmtree(named["out"])  # a page may have two runs of one name
        named["options"] = replace(named["options"], shard=False)  # of torchrun, this is one process
        return (str(self.recipe), *positional[1:]), named

    def _convert(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        source, out = map(Path, positional)
        if not source.exists():
            shutil.copytree("folder", source)
        if out.exists():
            shutil.rmtree(out)  # a page may show two ways to the same folder
        return positional, named

    def _study(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        options = replace(named["options"], recipe=str(self.recipe), seeds="3", dry_run=True)
        here = replace(named["engine"], on="local", slurm="", ray="")
        assert isinstance(options, StudyOptions)
        assert isinstance(here, EngineOptions)
        named |= {"options": options, "engine": here}
        return positional, named

    _compare = _ablate = _study

    def _suite(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        assert isinstance(named["options"], SuiteOptions)
        if not Path("suite").exists():
            shutil.copytree(self.finished("finished_suite"), "suite")
        names, out, override, options = asked_suite(Path("suite"))  # finished, so nothing is trained
        return (tuple(names),), {"out": str(out), "override": override, "options": options}

    def _report(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        if positional[0] == "study" and not Path("study").exists():
            shutil.copytree(self.finished("study"), "study")
        if named.get("watch"):
            named["watch"] = 0.1
        return positional, named

    _status = _cancel = _report

    def _bench(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        named |= {"lengths": "32", "seconds": 0.01, "memory": False}
        named["mechanisms"] = named["mechanisms"] or ("local", "window_attention")
        named["peers"] &= named["steps"]
        if named["steps"]:
            named |= {"decoded_after": "8", "mechanisms": ("local",)}
        return positional, named

    def _evaluate(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        return positional, named | {"tokens": 200}

    def _generate(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        return positional, named | {"max_new_tokens": 5}


@pytest.fixture
def room(
    micro: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Room]:
    """A folder with what the pages take for granted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(str(MECHANISMS.files_variable), "")  # a command names its files there to its children
    bare, plain = {"qk_norm": False, "vocab_size": 257}, {"vocab_size": 257}
    models: dict[str, tuple[str, dict[str, Any], Any]] = {
        "Qwen3-0.6B": ("full", plain, "qwen"),
        "path/to/Qwen3-0.6B": ("full", plain, "qwen"),
        "Llama-3.2-1B": ("full", bare, "llama"),
        "windowed": ("local:window=5", bare, "headgate"),
        "gated-run": ("gated", plain, "headgate"),
        "folder": ("full", {"vocab_size": 4096}, "headgate"),
    }
    for name, (mechanism, settings, form) in models.items():
        ours = tmp_path / "ours-of" / name
        ours.mkdir(parents=True)
        model: ModelConfig = replace(micro.model, **settings)
        Decoder(with_mechanism(model, mechanism)).save(ours / "model.safetensors")
        (ours / "tokenizer.json").write_text(make_tokenizer("byte").definition)
        convert(ours, tmp_path / name, to=form)
    Path("mine.py").write_text(readme_example(), encoding="utf-8")
    Path("some.py").write_text("def main():\n    return 1\n" * 40)
    text = "a gate at the head of a channel sets how much water goes down it.\n" * 30
    for number in range(40):
        for folder in ("books", "TEXT"):
            Path(folder).mkdir(exist_ok=True)
            Path(folder, f"{number}.txt").write_text(f"{number} {text}")
    config.save(replace(micro, model=replace(micro.model, vocab_size=4096)), tmp_path / "recipe.json")
    yield Room(tmp_path / "recipe.json", request.getfixturevalue)
    if "mine" in MECHANISMS.names():
        MECHANISMS.unregister("mine")


@pytest.mark.parametrize("page", [p for p in PAGES if written_commands(p)], ids=lambda path: path.name)
def test_the_commands_of_a_page_run(
    page: Path, room: Room, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headgate.measure.steps.ALONE_AT", 48)
    monkeypatch.setattr("headgate.measure.costs.interleaved", in_one_round)
    monkeypatch.setattr("headgate.plan.cpu_timing.WORK", 1e7)  # a plan's figures need not be precise here
    for name, command in list(cli.COMMANDS.items()):
        monkeypatch.setitem(cli.COMMANDS, name, on_small_things(command, name, room))
    for line in written_commands(page):
        monkeypatch.setattr(sys, "stdin", io.StringIO("def main("))
        for needed in ("data", "other", "OUT"):
            if re.search(rf"--(data|check) {needed}\b", line) and not Path(needed).exists():
                cli.run(["prepare", "stdlib", needed])
        try:
            cli.run(shlex.split(line[line.index("headgate ") :])[1:])
        except SystemExit as stop:
            if stop.code:
                pytest.fail(f"{page.name}: {line}\n{capsys.readouterr().err}")


BLOCKS = {
    page.name: re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for page in PAGES
}


@pytest.mark.parametrize("page", [name for name, blocks in BLOCKS.items() if blocks])
def test_the_python_of_a_page_runs(page: str, room: Room, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block after the one before it, with the tensors that it takes for granted."""
    if page == "huggingface.md":
        pytest.importorskip("transformers", reason="needs the extra: pip install 'headgate[hf]'")
    convert("folder", "run")
    decoder = headgate.load("run")
    cache = decoder.new_cache()
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        decoder(tokens, cache=cache)
    q, k = torch.randn(2, 8, 6, 64), torch.randn(2, 2, 6, 64)
    given = {"tokens": tokens, "targets": tokens, "x": torch.randn(2, 6, 512), "q": q, "k": k, "v": k}
    given |= {"headgate": headgate, "decoder": decoder, "other": cache}
    for block in BLOCKS[page]:
        if "AutoTokenizer" in block:  # the section on folders that convert wrote
            shutil.rmtree("gated")
            convert("Qwen3-0.6B", "gated", mechanism="dynamic-sparse")
        with torch.no_grad():
            exec(compile(block, page, "exec"), given)  # noqa: S102


def in_one_round(runs: Mapping[str, Callable[[], object]], **asked: Any) -> dict[str, list[float]]:
    return interleaved(runs, seconds=0.0, least_rounds=1)


def on_small_things(command: Callable[..., None], name: str, room: Room) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*positional: Any, **named: Any) -> None:
        positional, named = room.smaller(name, positional, named)
        if name in ("compare", "ablate"):  # several pages show the same study
            plan = (name, positional, str(replace(named["options"], recipe="")))
            if plan in PLANNED:
                return
            PLANNED.add(plan)
        command(*positional, **named)

    return run
