"""The first study, docs/findings/first.md: the commands of make, one of them run with a few steps."""

import json
import shlex
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
from waiting import HANG

from headgate.compare.controls import with_controls
from headgate.compare.space import parse_space
from headgate.compare.suite import suite_tasks
from headgate.compare.variants import parse_variants
from headgate.config import Config, load, override
from headgate.data.tasks.contract import TASKS
from headgate.mechanisms import MECHANISMS
from headgate.mechanisms.contract import on_shelf
from headgate.options import SuiteOptions

ROOT = Path(__file__).parents[2]
SHORT = "train.steps=2 train.warmup_steps=1 train.evaluate_every=2 train.evaluate_tokens=256"
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed; not run")


def make(*words: str) -> str:
    command = ["make", "-o", ".venv/.ready", f"BIN={Path(sys.executable).parent}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_commands_name_every_mechanism_and_every_ablation_of_the_papers() -> None:
    shown = make("-n", "study", "TEXT=web text", "NOVELS=novels").replace("\\\n", "")
    commands = [shlex.split(line)[1:] for line in shown.splitlines() if "headgate " in line]
    assert [words[:2] for words in commands if words[0] == "prepare"] == [
        ["prepare", "web text"],
        ["prepare", commands[2][1]],
        ["prepare", "web text"],
        ["prepare", "novels"],
    ]
    studies = [words for words in commands if words[0] == "compare"]
    assert [words[words.index("--out") + 1] for words in studies] == [
        f"runs/study/{part}" for part in ("text", "recall", "start", "long")
    ]
    for words in studies:
        recipe = load(Config, ROOT / words[words.index("--recipe") + 1])
        settings = [word for word in words if word.startswith(("train.", "model."))]
        config = override(recipe, settings)
        names = words[1 : words.index("--recipe")]
        variants = parse_variants(names, config.model)
        assert len(variants) == len(names) + 1
        if words[words.index("--out") + 1] in ("runs/study/text", "runs/study/recall"):
            classes = {name: MECHANISMS.get(name) for name in MECHANISMS.names()}
            ours = {name: cls for name, cls in classes.items() if cls.__module__.startswith("headgate.")}
            later = {name for name, cls in ours.items() if cls.shelf == "second shelf"} | {"short-path"}
            assert {v.mechanism[0].name for v in variants} == ours.keys() - later
            ablated = {(v.mechanism[0].name, v.ablation) for v in variants if v.ablation}
            for name in (*on_shelf("papers"), "near-far"):
                assert {a for n, a in ablated if n == name} == set(MECHANISMS.get(name).ablations)


def test_the_second_study_names_what_its_protocol_does() -> None:
    shown = make("-n", "second", "WEB=web text", "BOOKS=books").replace("\\\n", "")
    studies = [shlex.split(line)[1:] for line in shown.splitlines() if "headgate compare" in line]
    found = {}
    for words in studies:
        recipe = load(Config, ROOT / words[words.index("--recipe") + 1])
        after = words[words.index("--seeds") :]
        space = words[words.index("--space") + 1] if "--space" in words else None
        changes = ("model.", "train.", "seed=")
        settings = [word for word in after if word.startswith(changes) and word != space]
        config = override(recipe, settings)
        if space:
            parse_space(space, config)
        variants = parse_variants(words[1 : words.index("--recipe")], config.model)
        assert {variant.config(config).train.tokens for variant in variants} == {config.train.tokens}
        if "--no-controls" not in words:
            variants = with_controls(variants, config)
        labels = [variant.label for variant in variants]
        part = Path(words[words.index("--out") + 1]).name
        found[part] = labels
        if "--ladder-variants" in words:
            rest = words[words.index("--ladder-variants") + 1 :]
            on_it = list(takewhile(lambda word: not word.startswith(("model.", "train.")), rest))
            assert on_it == ["all"] or set(on_it) < set(labels)
        assert config.seed == (104 if part in ("again", "ablations") else 100)
    assert found.keys() == {"text", "ladder", "shelf", "novels", "narrow", "again", "ablations", "long"}
    assert sorted(found["again"]) == sorted(["full", *on_shelf("papers"), "short-path"])
    apart = ("dynamic-sparse", "sparse-geometric")
    parts = {f"{name}:{part}" for name in apart for part in MECHANISMS.get(name).ablations}
    assert {*found["ablations"]} == {"full", *parts}
    assert {*found["text"]} - {*found["ladder"]} == {"control: no attention", "control: window of 16"}
    assert {"full", "full, growing", "full, short"} < set(found["long"])
    ours = ["full times a constant", "short-path"]
    controls = ["control: no attention", "control: window of 16"]
    assert sorted(found["text"]) == sorted(["full", *on_shelf("papers"), *ours, *controls])
    assert "tables.py --publish runs/second" in shown


def test_the_suites_of_the_tasks_name_what_their_tables_need() -> None:
    shown = make("-n", "tasks").replace("\\\n", "")
    commands = [shlex.split(line)[1:] for line in shown.splitlines() if "headgate suite" in line]
    parts = [Path(words[words.index("--out") + 1]).name for words in commands]
    assert parts == ["patterns", "lookups", "mqar", "needle", "pairs", "layer", "window", "state"]
    of_every = [words[words.index("--tasks") + 1].split() for words in commands[:4]]
    assert sorted(name for names in of_every for name in names) == TASKS.names()
    assert all(words[1] == "--tasks" for words in commands[:4])  # no names: every mechanism
    for words, part in zip(commands, parts, strict=True):
        assert f"tables.py --publish {part} runs/tasks/{part}" in shown
        asked = words[words.index("--tasks") + 1] if "--tasks" in words else ""
        settings = [word for word in words if word.startswith(("train.", "model."))]
        assert len(suite_tasks(SuiteOptions(tasks=asked), settings)) == len(asked.split() or TASKS.names())


@pytest.mark.long
def test_a_part_of_it_runs(tmp_path: Path) -> None:
    make(
        "study-recall",
        f"STUDY={tmp_path}",
        "SEEDS=1",
        "RECALL=recall:context=256,pairs=8,queries=8,keys=8,values=4,noise=4,sequences=300,joined=true",
        f"SETTINGS={SHORT}",
        "MECHANISMS=near-far",
        "ABLATIONS=",
        "SHORT_REACH=",
    )
    recall = json.loads((tmp_path / "recall/results.json").read_text())
    assert [v["label"] for v in recall["variants"]] == ["full", "near-far"]
    for variant in recall["variants"]:
        assert variant["runs"][0]["state"] == "finished"
        places = variant["answers"]["by_distance"]
        assert places[-1]["end"] == 256
        assert all(0 <= place["mean"] <= 1 for place in places)
