"""A mechanism is written the same everywhere: name, options, ablation, pattern, file."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from study_examples import write_recipe

import headgate
from headgate import config
from headgate.cli import run
from headgate.compare.variants import Variant, with_ablations
from headgate.config import Config, ModelConfig
from headgate.errors import HeadgateError
from headgate.grammar import MechanismSpec, parse_mechanisms
from headgate.mechanisms import MECHANISMS
from headgate.recipes import get_recipe

VARIABLE = "HEADGATE_MECHANISM_FILES"
MINE = '''"""mine: local attention under another name."""

from dataclasses import dataclass

from headgate import ops
from headgate.mechanisms import Mechanism, MechanismOptions, register


@dataclass(frozen=True)
class MineOptions(MechanismOptions):
    window: int = 4
    """Keys at a distance up to this are visible."""


@register("mine")
class Mine(Mechanism):
    Options = MineOptions
    ablations = {"narrow": {"window": 1}}

    def attend(self, x, q, k, v, past):
        return ops.attention(q, k, v, past.span(self.options.window))

    def first_key(self, position):
        return max(0, position - self.options.window)
'''
GATE_OPEN = MechanismSpec("dynamic-sparse", {"gate": "open"})
FULL = MechanismSpec("full")
FORMS = {
    "full": (FULL,),
    "local:window=3": (MechanismSpec("local", {"window": 3}),),
    "dynamic-sparse:no-gate": (GATE_OPEN,),
    "dynamic-sparse:no-gate,window=3": (MechanismSpec("dynamic-sparse", {"gate": "open", "window": 3}),),
    "local:window=3+full+dynamic-sparse:no-gate": (MechanismSpec("local", {"window": 3}), FULL, GATE_OPEN),
    "local+local+local+full:positions=none": (
        *(MechanismSpec("local"),) * 3,
        MechanismSpec("full", {"positions": "none"}),
    ),
    "MINE:mine": (MechanismSpec("mine"),),
    "MINE:mine:window=2": (MechanismSpec("mine", {"window": 2}),),
    "full+MINE:mine:narrow": (FULL, MechanismSpec("mine", {"window": 1})),
}
"""A written mechanism -> what it means; MINE stands for the path of a file."""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The path of a file with a mechanism; afterwards nothing of it is left."""
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    before = MECHANISMS.names()
    monkeypatch.setenv(VARIABLE, "")
    yield str(path)
    for name in set(MECHANISMS.names()) - set(before):
        MECHANISMS.unregister(name)


@pytest.fixture
def recipe(micro: Config, tmp_path: Path) -> str:
    return str(write_recipe(config.override(micro, ["model.mechanism=full", "train.steps=1"]), tmp_path))


def saved_mechanism(folder: Path) -> tuple[MechanismSpec, ...]:
    return headgate.load(folder).config.mechanism


def by_build_model(text: str, **given: Any) -> tuple[MechanismSpec, ...]:
    return headgate.build_model("tiny", mechanism=text).config.mechanism


def by_override(text: str, **given: Any) -> tuple[MechanismSpec, ...]:
    return config.override(get_recipe("tiny"), [f"model.mechanism={text}"]).model.mechanism


def by_variant(text: str, **given: Any) -> tuple[MechanismSpec, ...]:
    return Variant.parse(f"{text}@a label").mechanism


def by_train(text: str, *, recipe: str, data: Path, out: Path, **given: Any) -> tuple[MechanismSpec, ...]:
    run(["train", recipe, "--data", str(data), "--out", str(out), "--mechanism", text])
    return saved_mechanism(out)


def by_convert(text: str, *, recipe: str, out: Path, **given: Any) -> tuple[MechanismSpec, ...]:
    source = out.with_suffix(".safetensors")
    headgate.build_model(config.load(Config, recipe)).save(source)
    run(["convert", str(source), str(out), "--mechanism", text])
    return saved_mechanism(out)


def by_plan(text: str, *, recipe: str, capsys: Any, **given: Any) -> tuple[MechanismSpec, ...]:
    run(["plan", recipe, "--device", "L4", "--mechanism", text, "--json"])
    planned = json.loads(capsys.readouterr().out)
    return tuple(MechanismSpec(**spec) for spec in planned["mechanism"])


def by_bench(text: str, *, out: Path, **given: Any) -> tuple[MechanismSpec, ...]:
    figures = out.with_suffix(".json")
    words = ["--heads", "1", "--head-dim", "8", "--seconds", "0.001", "--no-peers", "--no-memory"]
    run(["bench", "--mechanisms", text, "--lengths", "8,16", "--json", str(figures), *words])
    measured = json.loads(figures.read_text())["figures"]
    assert {figure["length"] for figure in measured if figure["name"] == text} == {8, 16}
    return parse_mechanisms(text)


@pytest.mark.parametrize("text", FORMS)
@pytest.mark.parametrize(
    "read",
    [by_build_model, by_override, by_variant, by_train, by_convert, by_plan, by_bench],
    ids=lambda read: read.__name__,
)
def test_every_command_reads_every_form(
    read: Callable[..., tuple[MechanismSpec, ...]],
    text: str,
    mine: str,
    recipe: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"recipe": recipe, "data": data, "out": tmp_path / "out", "capsys": capsys}
    assert read(text.replace("MINE", mine), **given) == FORMS[text]


def test_labels_leave_the_file_out_and_ablations_keep_it(mine: str) -> None:
    assert Variant.parse(f"full+{mine}:mine:window=2").label == "full+mine:window=2"
    assert with_ablations(f"{mine}:mine") == (f"{mine}:mine", f"{mine}:mine:narrow")
    assert Variant.parse(f"{mine}:mine:narrow").ablation == "narrow"
    assert "dynamic-sparse:no-gate,window=3" in with_ablations("dynamic-sparse:window=3")


def test_a_file_shows_its_formula_and_options(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["mechanisms", f"{mine}:mine"])
    shown = capsys.readouterr().out
    for word in ("mine: local attention under another name.", "window", "Keys at a distance", "narrow"):
        assert word in shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("locl", "unknown mechanism 'locl'; did you mean 'local'?"),
        ("local:windw=3", "local has no option 'windw'; did you mean 'window'?"),
        ("local:window", "option 'window' in 'local:window' has no value; write local:window=VALUE"),
        ("dynamic-sparse:no-gat", "dynamic-sparse has no ablation 'no-gat'; did you mean 'no-gate'?"),
        ("dynamic-sparse:no-gate,gate=open", "'dynamic-sparse:no-gate,gate=open' sets 'gate' twice"),
        ("local:window=3,window=4", "'local:window=3,window=4' sets 'window' twice"),
        ("MINE", "names a file but no mechanism in it; write FILE.py:NAME"),
        ("MINE:mien", "registers no mechanism 'mien'; it registers mine"),
        ("MINE:full", "registers no mechanism 'full'; it registers mine"),
        ("nowhere.py:mine", "the file 'nowhere.py' of a mechanism does not exist; check its path"),
    ],
)
def test_a_mistake_is_one_clear_sentence(text: str, words: str, mine: str) -> None:
    with pytest.raises(HeadgateError) as caught:
        headgate.build_model("tiny", mechanism=text.replace("MINE", mine))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\ny = x / 0\n", "cannot be imported: ZeroDivisionError: division by zero, line 2"),
        ("def f(:\n", "cannot be imported: SyntaxError: invalid syntax, line 1"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module', line 1"),
        ("x = 1\n", "registers no mechanism 'mine'; decorate a class with @register(\"mine\")"),
        (MINE.replace('register("mine")', 'register("full")'), "mechanism 'full' is already registered"),
        (MINE + "\nraise SystemExit(3)\n", "cannot be imported: SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_leaves_nothing(source: str, words: str, mine: str) -> None:
    Path(mine).write_text(source)
    before = MECHANISMS.names()
    with pytest.raises(HeadgateError) as caught:
        parse_mechanisms(f"{mine}:mine")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert MECHANISMS.names() == before
    assert not os.environ[VARIABLE] or "registers no" in words


def test_a_config_never_runs_a_file_by_itself(mine: str, micro: Config) -> None:
    values = config.to_dict(micro.model) | {"mechanism": f"{mine}:mine"}
    with pytest.raises(HeadgateError, match="code is run only from files that you name"):
        config.from_dict(ModelConfig, values)
    headgate.use_file(mine)
    assert config.from_dict(ModelConfig, values).mechanism == (MechanismSpec("mine"),)


def test_a_study_with_a_file_that_is_not_installed(
    mine: str, recipe: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs, in processes of their own, find the file; what is saved names the mechanism, never code."""
    words = ["--recipe", recipe, "--data", str(data), "--out", str(tmp_path / "study"), "--seeds", "1"]
    run(["compare", f"{mine}:mine:window=2", *words, "--no-cost", "--no-controls"])
    (folder,) = (tmp_path / "study" / "runs").glob("mine*/seed-0")
    assert json.loads((folder / "config.json").read_text())["model"]["mechanism"] == [
        {"name": "mine", "options": {"window": 2}}
    ]
    MECHANISMS.unregister("mine")  # as in a process of another day
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(HeadgateError, match=r"uses the mechanism 'mine', .* add --mechanism-file FILE"):
        run(["evaluate", str(folder)])
    run(["evaluate", str(folder), "--mechanism-file", mine])
    assert os.environ[VARIABLE] == mine
