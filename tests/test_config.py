"""Configs refuse what they do not know, and come back from JSON equal."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headgate import config, files
from headgate.config import Config, ModelConfig
from headgate.errors import HeadgateError
from headgate.grammar import MechanismSpec
from headgate.recipes import RECIPES, get_recipe
from headgate.registry import Registry


@pytest.mark.parametrize("name", RECIPES.names())
def test_round_trip_through_json(name: str, tmp_path: Path) -> None:
    original = get_recipe(name)
    mechanism = (MechanismSpec("local", {"window": 7}), MechanismSpec("full"))
    original = replace(original, model=replace(original.model, mechanism=mechanism), seed=3)
    config.save(original, tmp_path / "config.json")
    assert config.load(Config, tmp_path / "config.json") == original
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_overrides_reach_every_level() -> None:
    changed = config.override(
        get_recipe("tiny"),
        [
            "model.d_model=256",
            "train.learning_rate=1e-3",
            "train.betas=[0.8, 0.9]",
            "train.schedule=constant",
            "seed=5",
            "model.shared_options.window=9",
            'model.mechanism=["local:window=16","full"]',
        ],
    )
    assert (changed.model.d_model, changed.train.learning_rate, changed.seed) == (256, 1e-3, 5)
    assert changed.train.betas == (0.8, 0.9)
    assert changed.train.schedule == "constant"
    assert changed.model.shared_options["window"] == 9
    assert changed.model.mechanism == (MechanismSpec("local", {"window": 16}), MechanismSpec("full"))
    assert [changed.model.layer_mechanism(i).name for i in range(3)] == ["local", "full", "local"]
    assert config.override(changed, ["model.mechanism=full"]).model.mechanism == (MechanismSpec("full"),)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("model.d_modle=256", "did you mean 'd_model'"),
        ("modle.d_model=256", "did you mean 'model'"),
        ("model.d_model.x=1", "single value"),
        ("model.d_model", "has no value"),
        ("model.d_model=wide", "model.d_model='wide' is not a whole number"),
        ("model.d_model=1.5", "is not a whole number"),
        ("model.d_model=true", "is not a whole number"),
        ("model.d_model=0", "d_model=0 is too small"),
        ("model.qk_norm=1", "is not true or false"),
        ("model.head_dim=33", "head_dim=33 is odd"),
        ("model.n_kv_heads=3", "n_heads=4 is not a multiple of n_kv_heads=3"),
        ("model.mechanism=[]", "names no mechanism"),
        ("model.mechanism=local:window", "has no value"),
        ("train.schedule=cosin", "did you mean 'cosine'"),
        ("train.learning_rate=-1", "learning_rate=-1.0 must be above 0"),
        ("train.betas=[1]", "train.betas=[1] is not a list of 2"),
    ],
)
def test_bad_override_is_one_clear_sentence(assignment: str, words: str) -> None:
    with pytest.raises(HeadgateError) as caught:
        config.override(get_recipe("tiny"), [assignment])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON: line 1"),
        ("[]", "holds a list; expected a JSON object"),
        ('{"seed": 1, "seed": 2}', "'seed' appears twice"),
        ('{"seed": 1}', "'model' is missing"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_bad_file_is_one_clear_sentence(text: str | bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(HeadgateError, match=words):
        config.load(Config, path)
    with pytest.raises(HeadgateError, match="cannot be read"):
        config.load(Config, tmp_path / "absent.json")


def test_a_misspelt_key_in_a_file_names_the_right_one(tmp_path: Path) -> None:
    values = config.to_dict(get_recipe("tiny"))
    values["model"]["n_head"] = values["model"].pop("n_heads")
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(HeadgateError, match=r"unknown key 'model.n_head'; did you mean 'n_heads'"):
        config.load(Config, tmp_path / "config.json")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config.save(get_recipe("tiny"), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        config.save({"learning_rate": float("inf")}, path)
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "\udc80")
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_registry_refuses_duplicates_and_suggests() -> None:
    things: Registry[int] = Registry("thing")
    things.register("one")(1)
    with pytest.raises(HeadgateError, match="thing 'one' is already registered"):
        things.register("one")(2)
    with pytest.raises(HeadgateError, match="unknown thing 'onee'; did you mean 'one'"):
        things.get("onee")
    assert (things.get("one"), things.names()) == (1, ["one"])


def test_model_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        get_recipe("tiny").model.d_model = 1  # type: ignore[misc]
    assert ModelConfig.__dataclass_params__.frozen  # type: ignore[attr-defined]
