"""A prepared folder and a config so small that a run of a dozen steps takes a fraction of a second."""

import json
import random
from pathlib import Path

import pytest

from headgate.config import Config, MechanismSpec, ModelConfig, TrainConfig
from headgate.data.prepare import Request, prepare

WORDS = ["the", "gate", "at", "head", "of", "a", "channel", "sets", "how", "much", "water", "goes", "down"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("train-data")
    source, draw = home / "texts.jsonl", random.Random(0)
    with source.open("w") as file:
        for _ in range(160):
            file.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(20, 80)))}) + "\n")
    prepare(Request(str(source), tokenizer="byte"), home / "shards", workers=1)
    return home / "shards"


@pytest.fixture
def micro() -> Config:
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
