"""What all tests share."""

import gc
import json
import os
import random
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from unittest.mock import patch

# Two workers share two cores, so every process of the suite computes on one thread; a test about threads sets
# its own number. PyTorch reads this when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is compiled is compiled in its test's own process: helpers would first load PyTorch, each of them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import hypothesis
import pytest
import torch
from filelock import FileLock
from forked import ForkedNursery
from study_examples import asked, asked_suite, write_claims, write_recipe

from headgate.compare.executors import local
from headgate.compare.executors.nursery import can_fork
from headgate.config import Config, ModelConfig, TrainConfig
from headgate.data.prepare import Request, prepare
from headgate.grammar import MechanismSpec
from headgate.machine import avoid_broken_tiles, keep_memory

# Triton reads it when it is first imported: its kernels then run on the CPU, one operation at a time.
# On a device (`make test-gpu`) they are compiled.
if os.environ.get("HEADGATE_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")


hypothesis.settings.register_profile("any speed", deadline=None)
hypothesis.settings.load_profile("any speed")


def pytest_configure(config: pytest.Config) -> None:
    """Every process of the suite does without matrix tiles that the machine announces and cannot run. Memory
    that a test frees is kept for the next: fresh pages took a third of the time of the ops' tests."""
    keep_memory()
    if not hasattr(config, "workerinput"):  # a worker inherits what was found out
        avoid_broken_tiles()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live until the end, so looking for garbage among them is in vain: a third of the time
    of collecting, and some of every test's."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones first; the others keep their order."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are fastest on one thread; a test about threads sets its own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def forked_nurseries() -> Iterator[None]:
    """Studies in this process fork theirs; those of commands load PyTorch themselves."""
    if not can_fork():
        yield
        return
    with patch.object(local, "Nursery", ForkedNursery):
        yield
    for left in list(ForkedNursery.living):
        left.stop()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that an op allocates and forgets to write holds NaN, so that no test passes by luck."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


Share = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def share(tmp_path_factory: pytest.TempPathFactory) -> Share:
    """A folder that all workers use and one of them makes, the first that asks for it; the others wait."""
    base = tmp_path_factory.getbasetemp()
    common = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def shared(name: str, make: Callable[[Path], None]) -> Path:
        home = common / f"shared-{name}"
        with FileLock(common / f".{name}.lock"):
            if not (home / "made").exists():
                home.mkdir()  # an error if another worker failed to make it
                make(home)
                (home / "made").touch()
        return home

    return shared


WORDS = ["the", "gate", "at", "head", "of", "a", "channel", "sets", "how", "much", "water", "goes", "down"]


@pytest.fixture(scope="session")
def data(share: Share) -> Path:
    """A prepared folder of short texts."""

    def make(home: Path) -> None:
        source, draw = home / "texts.jsonl", random.Random(0)
        with source.open("w") as file:
            for _ in range(160):
                file.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(20, 80)))}) + "\n")
        prepare(Request(str(source), tokenizer="byte"), home / "shards", workers=1)

    return share("data", make) / "shards"


@pytest.fixture(scope="session")
def micro() -> Config:
    """So small that a run of a dozen steps takes a fraction of a second."""
    return Config(
        model=ModelConfig(
            vocab_size=257,
            d_model=16,
            n_layers=2,
            n_heads=2,
            n_kv_heads=1,
            head_dim=8,
            d_mlp=24,
            mechanism=(MechanismSpec("dynamic-sparse"),),
            shared_options={"window": 6, "max_window": 9, "dense_prefix": 8, "block": 4, "stride": 4},
        ),
        train=TrainConfig(
            context=24,
            batch_size=4,
            steps=12,
            learning_rate=1e-2,
            warmup_steps=2,
            evaluate_every=4,
            evaluate_tokens=120,
        ),
    )


@pytest.fixture(scope="session")
def study(data: Path, micro: Config, share: Share, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study with its costs and results."""
    from headgate.compare.study import run_study

    def make(home: Path) -> None:
        write_recipe(micro, data.parent)
        write_claims(data.parent)
        assert run_study(*asked(home / "study", data))

    out = tmp_path_factory.mktemp("study") / "study"  # a worker's own: tests lock it
    shutil.copytree(share("study", make) / "study", out)
    assert run_study(*asked(out, data))  # trains nothing again; the results then name this folder
    return out


@pytest.fixture(scope="session")
def finished_suite(share: Share, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite of one task and one variant, with its results."""
    from headgate.compare.suite import run_suite

    def make(home: Path) -> None:
        assert run_suite(*asked_suite(home / "suite"))

    out = tmp_path_factory.mktemp("suite") / "suite"
    shutil.copytree(share("suite", make) / "suite", out)
    return out
