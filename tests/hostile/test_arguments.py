"""Words that mean nothing, too much or harm, for every command: each is refused in one sentence, and nothing
is left behind.

A row is a command line; {data}, {run}, {recipe}, {text} and {begun}, a study, are sound, {out} is to be
written, {long} is 500 letters, and {file}, {binary}, {pipe}, {empty}, {deep} and {taken} are what their names
say.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from attempts import assert_refused, attempt, tree

import headgate
from headgate import config
from headgate.compare.folder import Study, StudyFolder
from headgate.compare.variants import parse_variants
from headgate.config import Config
from headgate.data.shards import open_split
from headgate.data.tasks import TASKS
from headgate.errors import HeadgateError
from headgate.train.folder import describe_data

SOUND = {
    "prepare": "prepare {text} {out} --tokenizer byte",
    "train": "train {recipe} --data {data} --out {out}",
    "evaluate": "evaluate {run} --tokens 24",
    "generate": "generate {run} --prompt the --max-new-tokens 2",
    "convert": "convert {run} {out}",
    "compare": "compare local --data {data} --out {out} --recipe {recipe}",
    "ablate": "ablate local --data {data} --out {out} --recipe {recipe}",
    "suite": "suite local --out {out} --tasks mqar",
    "status": "status {begun}",
    "report": "report {begun}",
    "bench": "bench --lengths 32 --mechanisms local --seconds 0.01 --no-memory --no-peers",
    "plan": "plan tiny",
    "mechanisms": "mechanisms local",
}
"""Commands that work, to which one thing is added."""

WHOLE = ["0", "-1", "1.5", "x", "", "nan", "1e3"]
REAL = ["nan", "-1", "x", "", "1e400"]
OPTIONS: dict[str, dict[str, list[str]]] = {
    "prepare": {
        "--max-tokens": WHOLE,
        "--workers": WHOLE,
        "--splits": ["", "8/1", "a/b/c", "0/5/5", "-1/1/1", "1/1/1/1", "1e3/1/1", "1/x/1", f"1/1/{10**4000}"],
        "--text-column": [""],
        "--end-of-text": ["", "<|nothing|>"],
        "--separator": [""],
        "--dedup": ["maybe"],
        "--check": ["{data}", "", "{empty}", "{file}", "{pipe}", "absent"],
    },
    "train": {
        "--save-every": WHOLE,
        "--save-minutes": [*REAL, "0"],
        "--keep": WHOLE,
        "--until": WHOLE,
        "--log-every": WHOLE,
        "--on-nonfinite": ["go", "", "Stop"],
        "--device": ["mps", "xpu", "cuda", "cuda:7", "gpu", "", "meta", "cpu0", "vulkan"],
        "--track": ["nothing", ""],
        "--mechanism": [
            "nothing",
            "",
            "local:window=0.5",
            "local:window=x",
            "local:nothing=1",
            "local+",
        ],
        "--init": ["absent", "{empty}", "{file}", "{pipe}", "{binary}", ""],
        "--override": ["x", "nothing=1", "train.nothing=1"],
    },
    "evaluate": {
        "--split": ["vall", "", "train,val"],
        "--tokens": WHOLE,
        "--checkpoint": ["first", "", "-1", "99", "9" * 40, "1.5"],
        "--data": ["absent", "{empty}", "{file}", "{pipe}", ""],
        "--context": [*WHOLE, "1000000000"],
        "--device": ["mps", "cuda", "gpu"],
        "--skip-below": ["nan", "-1", "x", "2"],
    },
    "generate": {
        "--max-new-tokens": ["-1", "1.5", "x", ""],
        "--temperature": ["-1", "nan", "inf", "x", "1e-320", ""],
        "--top-k": WHOLE,
        "--top-p": ["0", "-1", "1.5", "nan", "x", ""],
        "--min-p": ["-1", "1.5", "nan", "x"],
        "--repetition-penalty": ["0", "-1", "nan", "inf", "x"],
        "--seed": ["x", "1.5", ""],
        "--skip-below": ["nan", "-1", "2", "x"],
        "--checkpoint": ["first", "", "99"],
        "--tokenizer": ["absent", "{empty}", "{pipe}", "{binary}", "", "bpe:x"],
        "--end-of-text": ["", "<|nothing|>"],
        "--device": ["mps", "cuda", "gpu"],
        "--prompt": [""],
    },
    "convert": {
        "--to": ["llama", "", "Qwen"],
        "--dtype": ["fp8", "", "float32"],
        "--mechanism": ["nothing", "[1]", "local:window=x"],
    },
    "compare": {
        "--seeds": [
            *WHOLE,
            "5..3",
            "4..4",
            "1..4",
            "4..",
            "..4",
            "0..4",
            "4...8",
            "4,2",
            "4,4",
            "1,2",
            "4..2000",
            "2..99999999999999999",
            "9" * 5000,
        ],
        "--tune": ["1", "-1", "1.5", "x", ""],
        "--space": ["train.learning_rate=1e-3..1e-2"],
        "--ladder": ["x", "1", "1,2", "0,1,2", "-1,1,2", "nan,1,2", "inf,1,2", "1,,2"],
        "--on": ["cloud", "", "Slurm"],
        "--processes": [*WHOLE, "7"],
        "--nodes": [*WHOLE, "2"],
        "--slurm": ["partition=gpu", "x"],
        "--ray": ["num_gpus=1", "x"],
        "--ray-address": ["nowhere:1", ""],
        "--claims": ["absent", "{empty}", "{file}", "{pipe}", "{deep}", "{binary}", ""],
        "--budget": ["money", ""],
        "--jobs": WHOLE,
        "--threads": WHOLE,
        "--lengths": ["x", "0", "-1", "1,,2", "1.5", "1000000000"],
        "--cost-seconds": [*REAL, "0"],
        "--recipe": ["absent", "{empty}", "{file}", "{pipe}", "{deep}", ""],
        "--data": ["absent", "{empty}", "{file}", "{pipe}", ""],
    },
    "ablate": {"--seeds": WHOLE, "--threads": WHOLE, "--cost-seconds": REAL, "--tune": ["1"], "--on": ["x"]},
    "suite": {
        "--tasks": ["nothing", '"mqar mqar"', "mqar:nothing=1", "mqar:pairs=0", "mqar+mqar"],
        "--rates": ["x", "0", "-1", "nan", "inf", "0.1,0.1", ""],
        "--tuning-seeds": WHOLE,
        "--seeds": [*WHOLE, "4..8"],
        "--jobs": WHOLE,
        "--on": ["x", ""],
        "--ray": ["num_gpus=1"],
        "--nodes": ["2"],
    },
    "status": {"--watch": [*REAL, "0", "inf"], "--json": ["x"]},
    "bench": {
        "--lengths": ["0", "-1", "x", "", "32,32", "100000000", "9" * 5000],
        "--decoded-after": ["64"],
        "--mechanisms": ["nothing", "local:window=x", "local local"],
        "--batch": WHOLE,
        "--heads": [*WHOLE, "100000000"],
        "--kv-heads": [*WHOLE, "3"],
        "--head-dim": [*WHOLE, "7"],
        "--window": ["-1", "x", "1.5"],
        "--seconds": [*REAL, "0"],
        "--threads": WHOLE,
        "--json": ["{empty}", "", "{file}/x.json", "absent/x.json"],
        "--figure": ["{empty}", "", "x.gif", "absent/x.svg"],
    },
    "plan": {
        "--context": [*WHOLE, "1000000000000"],
        "--batch": [*WHOLE, "1000000000000"],
        "--device": ["TPU", "", "A1000"],
        "--count": WHOLE,
        "--price": ["nan", "-1", "inf", "x", ""],
        "--contexts": ["x", "0", "-1", "1,,2"],
        "--threads": WHOLE,
        "--mechanism": ["nothing", "local:window=x"],
        "--mechanisms": ["local"],
        "--data": ["absent", "{empty}", ""],
    },
}
SETTINGS = [
    *(f"train.learning_rate={value}" for value in ("0", "-1", "1e400", "Infinity", "NaN", "x", "null")),
    *(f"train.betas={value}" for value in ("[2,3]", "[0.9]", "x", "[0.9,1.0]", "[-0.1,0.9]", "[]", "0.9")),
    *(f"train.steps={value}" for value in ("0", "-1", "1.5", "1e3", "x", "null", "true", "[1]")),
    *(f"train.context={value}" for value in ("0", "-1", "100000000", "1.5")),
    *(f"train.batch_size={value}" for value in ("0", "-1", "1.5", "x", "1000000000")),
    *(f"train.accumulation={value}" for value in ("0", "-1", "1000000000")),
    *(f"train.weight_decay={value}" for value in ("-1", "Infinity", "NaN")),
    *(f"train.eps={value}" for value in ("0", "-1", "Infinity")),
    *(f"train.clip={value}" for value in ("0", "-1", "NaN")),
    *(f"train.precision={value}" for value in ("fp16", "bf17", "32")),
    *(f"train.schedule={value}" for value in ("sine", "1")),
    "train.documents=nothing", "train.packing=whole", "train.boundaries=3", "train.document_tokens=0",
    "train.document_positions=none", "train.optimizer=sgd", "train.momentum=1", "train.mlp_rate=-1",
    "train.warmup_share=1", "train.warmup_share=NaN", "train.warmup_steps=-1", "train.final_learning_rate=-1",
    "model.start=scaled", "model.start=x", "model.tied_embeddings=3", "model.embedding_deviation=0",
    "train.evaluate_every=0", "train.evaluate_tokens=0", "train.evaluate_tokens=-5",
    *(f"model.n_layers={value}" for value in ("0", "-1", "10000", "100000000", "1.5", "x")),
    *(f"model.d_model={value}" for value in ("0", "-1", "100000000", "1.5")),
    *(f"model.d_mlp={value}" for value in ("0", "-16", "10000000000")),
    *(f"model.n_heads={value}" for value in ("0", "-2", "3000000000")),
    "model.n_kv_heads=0", "model.n_kv_heads=3", "model.head_dim=7", "model.head_dim=0",
    "model.head_dim=1000000000",
    "model.vocab_size=200", "model.vocab_size=0", "model.vocab_size=999999999999999999999",
    "model.norm_eps=Infinity", "model.norm_eps=NaN", "model.rope_theta=Infinity",
    "model.mechanism=nothing", "model.mechanism=[]", "model.mechanism=3", 'model.mechanism=["local", "no"]',
    "model.shared_options=3", "model.shared_options.nothing=3", "model.nothing=3", "nothing.at.all=3",
    "model=3", "train={}", "train.steps.more=3", "seed=x", "seed=1.5", "seed=null", "lr=0.1",
    'train={"steps": 1, "steps": 2}', "train.steps=" + "9" * 5000, "model.shared_options=" + "[" * 100_000,
]  # fmt: skip
FREE = """
nothing
prepar
--nothing
mechanisms nothing
mechanisms local full
mechanisms local:window=3:x
prepare
prepare {text}
prepare {text} {out} more
prepare "" {out}
prepare {text} ""
prepare {text} " "
prepare absent {out}
prepare absent*.txt {out}
prepare {pipe} {out}
prepare {binary} {out}
prepare {empty} {out}
prepare {deep} {out}
prepare {data} {out}
prepare {text} {file}
prepare {text} {file}/out
prepare {text} {pipe}
prepare {text} {taken}
prepare {text} {out} --tokenizer nothing
prepare {text} {out} --tokenizer ""
prepare {text} {out} --tokenizer bpe:
prepare {text} {out} --tokenizer bpe:x
prepare {text} {out} --tokenizer bpe:10
prepare {text} {out} --tokenizer bpe:-300
prepare {text} {out} --tokenizer bpe:999999999999
prepare {text} {out} --tokenizer bpe:50000
prepare {text} {out} --tokenizer {pipe}
prepare {text} {out} --tokenizer {empty}
prepare {text} {out} --tokenizer {binary}
prepare {text} {out} --tokenizer {deep}
prepare {text} {out} --tokenizer {file}
prepare --check
prepare --check {data} --splits 1/1/1
prepare --check {data} {text}
prepare recall:context=0 {out}
prepare recall:context=x {out}
prepare recall:nothing=1 {out}
prepare recall:context=16,context=16 {out}
prepare recall:context=4,pairs=100 {out}
prepare recall {out} --dedup
prepare nothing://there {out}
train
train --out {out}
train {recipe} --out {out}
train {recipe} --data {data}
train {recipe} --data {data} --out ""
train {recipe} --data {data} --out " "
train {recipe} --data "" --out {out}
train {recipe} --data {empty} --out {out}
train {recipe} --data {file} --out {out}
train {recipe} --data {pipe} --out {out}
train {recipe} --data {data} --out {file}
train {recipe} --data {data} --out {pipe}
train {recipe} --data {data} --out {file}/run
train {recipe} --data {data} --out {taken}
train {recipe} more --data {data} --out {out}
train nothing --data {data} --out {out}
train "" --data {data} --out {out}
train absent.json --data {data} --out {out}
train {empty} --data {data} --out {out}
train {pipe} --data {data} --out {out}
train {binary} --data {data} --out {out}
train {deep} --data {data} --out {out}
train {file} --data {data} --out {out}
train train.steps=3 --data {data} --out {out}
train {recipe} --data {data} --out {out} --out {out}
train {recipe} --data {data} --out {out} --keep 2 --keep 3
train {recipe} --data {data} --out {out} --compile --no-compile
train {recipe} --data {data} --out {out} --kep 2
train {recipe} --data {data} --out {out} --keep
train {recipe} --data {data} --out {out} -k 2
train {recipe} --data {data} --out {out} --shard
train {recipe} --data {data} --out {out} --override
evaluate
evaluate ""
evaluate absent
evaluate {empty}
evaluate {file}
evaluate {pipe}
evaluate {binary}
evaluate {data}
evaluate {run} {run}
evaluate {run} --tokens 3 --tokens 4
evaluate {run} --spilt val
generate
generate {run}
generate "" --prompt x
generate absent --prompt x
generate {empty} --prompt x
generate {file} --prompt x
generate {pipe} --prompt x
generate {binary} --prompt x
generate {run} --prompt
generate {run} --prompt x y
generate {run} --prompt x --prompt y
convert
convert {run}
convert {run} {taken}
convert {run} {file}
convert {run} {pipe}
convert {run} ""
convert "" {out}
convert absent {out}
convert {empty} {out}
convert {file} {out}
convert {pipe} {out}
convert {binary} {out}
convert {data} {out}
convert {run} {out} more
compare nothing --data {data} --out {out} --recipe {recipe}
compare local:window=x --data {data} --out {out} --recipe {recipe}
compare local local --data {data} --out {out} --recipe {recipe}
compare local --data {data} --recipe {recipe}
compare local --out {out} --recipe {recipe}
compare local --data {data} --out "" --recipe {recipe}
compare local --data {data} --out {file} --recipe {recipe}
compare local --data {data} --out {pipe} --recipe {recipe}
compare local --data {data} --out {taken} --recipe {recipe}
compare local --data {data} --out {out} --recipe {recipe} train.steps=0
compare local --data {data} --out {out} --recipe {recipe} nothing=0
compare local --data {data} --out {out} --recipe {recipe} --seed 3
ablate
ablate nothing --data {data} --out {out} --recipe {recipe}
ablate local full --data {data} --out {out} --recipe {recipe}
ablate local --data {data} --out "" --recipe {recipe}
compare local@ --data {data} --out {out} --recipe {recipe}
compare local@digest --data {data} --out {out} --recipe {recipe}
compare local full@local --data {data} --out {out} --recipe {recipe}
compare --data {data} --out {begun} --recipe {recipe} --seeds 1 train.steps=9
compare local --data {data} --out {begun} --recipe {recipe} --threads 2
compare local --data {data} --out {out} --recipe {recipe} --no-published
compare local --data {data} --out {out} --recipe {recipe} --tuning-seeds 2
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --tuning-seeds 0
compare local --data {data} --out {out} --recipe {recipe} --ladder-variants all
compare local --data {data} --out {out} --recipe {recipe} --ladder 0.5,1,2 --ladder-variants locall
compare local --data {data} --out {out} --recipe {recipe} --dry-run --seeds 0
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space x
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space nothing=1..2
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space train.nothing=1..2
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space train.learning_rate=1..1
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space train.learning_rate=2..1
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space train.learning_rate=0..1
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space train.learning_rate=nan..1
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space train.learning_rate=1..inf
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space train.learning_rate=[]
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space train.learning_rate=[1,2]
compare local --data {data} --out {out} --recipe {recipe} --tune 2 --space train.learning_rate=[1,-2]
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space seed=1..2,seed=1..2
compare local --data {data} --out {out} --recipe {recipe} --tune 4 --space train.steps=1..3
compare local --data {data} --out {out} --recipe {recipe} --on ray --ray num_gpus=x
compare local --data {data} --out {out} --recipe {recipe} --on ray --ray num_gpus=-1
compare local --data {data} --out {out} --recipe {recipe} --on ray --ray num_gpus=nan
compare local --data {data} --out {out} --recipe {recipe} --on ray --ray-address ""
compare local --data {data} --out {out} --recipe {recipe} --on slurm --slurm gpus
compare local --data {data} --out {out} --recipe {recipe} model.d_model=4000000
suite local
suite nothing --out {out} --tasks mqar
suite local local --out {out} --tasks mqar
suite local:window=x --out {out} --tasks mqar
suite local --out "" --tasks mqar
suite local --out {file} --tasks mqar
suite local --out {pipe} --tasks mqar
suite local --out {taken} --tasks mqar
suite local --out {run} --tasks mqar
suite local --out {out} --tasks mqar nothing=1
suite local --out {out} --tasks mqar train.steps=0
suite local --out {out} --tasks mqar model.d_model=x
status
status ""
status absent
status {empty}
status {file}
status {pipe}
status {run}
status {begun} {begun}
cancel
cancel ""
cancel absent
cancel {empty}
cancel {pipe}
cancel {run}
cancel {begun} {begun}
cancel {begun} --ray-address
report {begun} {begun}
report
report ""
report absent
report {empty}
report {file}
report {run}
report {run} --publish {out}
bench more
bench --lenghts 32
plan
plan nothing
plan ""
plan {empty}
plan {pipe}
plan {deep}
plan tiny more
plan tiny --threads 2 --device A100
plan tiny train.steps=0
plan tiny --device A100 --device H100
recipes nothing
recipes ""
recipes {pipe}
recipes {deep}
recipes {empty}
recipes tiny small
runs absent
runs {empty}
runs {pipe}
runs {file}
runs ""
runs {run} {run}
runs {run} --json=3
completion
completion tcsh
completion bash zsh
generate {run} --prompt a\udcff
generate {run} --prompt x --end-of-text a\udcff
prepare {text} {out} --tokenizer byte --end-of-text a\udcff
compare local@a\udcff --data {data} --out {out} --recipe {recipe}
compare local@{long} --data {data} --out {out} --recipe {recipe}
suite local@a\udcff --out {out} --tasks mqar
generate {run} --prompt x --tokenizer {odd}
prepare {text} {out} --tokenizer {odd}
prepare {text} {out} --separator x
prepare {data} {out} --separator x
bench --steps --seconds nan
bench --steps --lengths 1000000000
bench --steps --lengths 32 --decoded-after 1000000000
plan tiny --table --contexts 1000000000
train {recipe} --data {data} --out {out} train.batch_size=1048576 train.accumulation=1048576
bench --steps --seconds -1
bench --steps --json {empty}
bench --steps --heads 4
bench --steps --window 4
bench --steps --figure {out}.svg
bench --steps --no-peers
bench --steps --decoded-after x
bench --steps --decoded-after 32,32
bench --steps --mechanisms local local
bench --mechanisms local local+full local
plan tiny --contexts 32
plan tiny --table --contexts 32,32
plan tiny model.n_layers=10000
convert {run} {out} --to qwen
evaluate {run} --context 24 --data
evaluate {run} --by-document=3
mechanisms --mechanism-file
mechanisms --mechanism-file absent.py
mechanisms --mechanism-file {binary}
mechanisms --mechanism-file {pipe}
mechanisms --mechanism-file {empty}
mechanisms --mechanism-file {file}
bench --json /proc/x.json --mechanisms local
bench --figure /proc/x.svg --mechanisms local
mechanisms {pipe}.py:x
train {recipe} --data {data} --out {out} train.steps=3 train.steps=4
""".strip().splitlines()


def rows() -> list[str]:
    found = list(FREE)
    for command, options in OPTIONS.items():
        for option, values in options.items():
            base = SOUND[command]
            if option == "--check":
                base = "prepare {text}"
            if f" {option} " in f" {base} ":
                words = base.split()
                del words[words.index(option) : words.index(option) + 2]
                base = " ".join(words)
            found += [
                f"{base} {option} {json.dumps(value) if ' ' in value or not value else value}"
                for value in values
            ]
    found += [f"{SOUND['train']} {json.dumps(setting)}" for setting in SETTINGS]
    for task in TASKS.names():
        found += [
            f"prepare {task}:{words} {{out}}" for words in ("nothing=1", "samples=0", "length=x", "seed=")
        ]
    return found


ROWS = rows()


@pytest.fixture(scope="module")
def places(
    data: Path, whole: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("places")
    (home / "text.jsonl").write_text("".join(f'{{"text": "a document, number {n}"}}\n' for n in range(40)))
    (home / "file").write_text("just a file\n")
    (home / "binary.safetensors").write_bytes(bytes(range(256)) * 4)
    (home / "deep.json").write_text("[" * 200_000)
    (home / "empty").mkdir()
    (home / "taken").mkdir()
    (home / "taken" / "diary.txt").write_text("mine")
    os.mkfifo(home / "pipe.txt")
    (home / "odd").mkdir()
    (home / "odd" / "vocab.json").write_text('{"a": -1}')
    (home / "odd" / "merges.txt").write_text("a b c")
    names = {"text": "text.jsonl", "binary": "binary.safetensors", "deep": "deep.json", "pipe": "pipe.txt"}
    paths = {
        name: home / names.get(name, name)
        for name in ("text", "file", "binary", "deep", "empty", "taken", "pipe", "odd")
    }
    shutil.copytree(whole, home / "run")
    base = config.load(Config, recipe)
    splits = [open_split(data, name) for name in ("train", "val")]
    begun = Study(str(recipe), describe_data(data, *splits), parse_variants(["local"], base.model), seeds=1)
    StudyFolder(home / "begun").write(begun, base)
    return paths | {"tmp": home, "data": data, "run": home / "run", "recipe": recipe, "begun": home / "begun"}


def words_of(row: str, places: dict[str, Path], out: Path) -> list[str]:
    import shlex

    words = shlex.split(row)
    for name, path in {**places, "out": out, "long": "x" * 500}.items():
        words = [word.replace(f"{{{name}}}", str(path)) for word in words]
    return words


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[:60])
def test_each_is_refused_in_one_sentence_and_leaves_nothing(
    row: str, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = tree(places["tmp"])
    assert_refused(attempt(*words_of(row, places, tmp_path / "out")))
    assert list(tmp_path.iterdir()) == []
    assert tree(places["tmp"]) == before


ENVIRONMENTS = [
    {"RANK": "0"},
    {"RANK": "x", "WORLD_SIZE": "1"},
    {"RANK": "9" * 5000, "WORLD_SIZE": "9" * 5000},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"},
    {"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"},
    {"RANK": "0", "WORLD_SIZE": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"},
]


@pytest.mark.parametrize("variables", ENVIRONMENTS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("command", ["train", "evaluate", "generate"])
def test_half_a_job_is_refused(
    command: str,
    variables: dict[str, str],
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answer = attempt(*words_of(SOUND[command], places, tmp_path / "out"))
    assert answer.code == 2
    assert "RANK" in answer.sentence
    assert list(tmp_path.iterdir()) == []


CALLS = {
    "load": headgate.load,
    "read_study": headgate.read_study,
    "use_file": headgate.use_file,
    "build_model": headgate.build_model,
}


@pytest.mark.parametrize("place", ["file", "binary", "empty", "taken", "pipe", "deep", "absent", "nothing"])
@pytest.mark.parametrize("call", CALLS)
def test_calls_from_python_raise_one_sentence(call: str, place: str, places: dict[str, Path]) -> None:
    before = tree(places["tmp"])
    with pytest.raises(HeadgateError) as raised:
        CALLS[call]("" if place == "nothing" else str(places.get(place, places["tmp"] / place)))
    assert "\n" not in str(raised.value)
    assert tree(places["tmp"]) == before


def test_there_are_enough_rows() -> None:
    assert len(set(ROWS)) > 700
