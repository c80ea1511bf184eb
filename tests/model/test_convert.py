"""Models that transformers makes, turned into ours and back: the same logits, or one clear sentence."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headgate
from headgate.cli import run
from headgate.config import ModelConfig
from headgate.errors import HeadgateError
from headgate.grammar import MechanismSpec
from headgate.mechanisms import MECHANISMS
from headgate.mechanisms.contract import probe
from headgate.model.convert import convert, read_source
from headgate.model.decoder import Decoder
from headgate.ops.rotary import rotation

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'headgate[hf]'")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"rope_theta": 1e4, "tie_word_embeddings": False}),
    "qwen2-tied-ungrouped": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2.5": ("Qwen2", {"rope_theta": 1e6, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen2.5-sliding": (
        "Qwen2",
        {"rope_theta": 1e6, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"rope_theta": 1e6, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"rope_theta": 5e5, "head_dim": 8, "tie_word_embeddings": False}),
    "qwen3-alternating": (
        "Qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "llama": ("Llama", {"rope_theta": 1e4, "tie_word_embeddings": True}),
    "llama-3.1": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e2,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "head_dim": 16},
    ),
    "mistral": ("Mistral", {"rope_theta": 1e6, "sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 7}),
    "ministral": (
        "Ministral",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "qwen3-yarn": (
        "Qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e2,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral-yarn": (
        "Mistral",
        {
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e2,
                "factor": 4.0,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
                "mscale": 0.7,
                "mscale_all_dim": 0.3,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}


def form(family: str) -> Any:
    """What `convert --to` calls it."""
    kind = FAMILIES[family][0].lower().rstrip("23")
    return "mistral" if kind == "ministral" else kind


def make(family: str, folder: Path, *, shards: bool = True) -> Any:
    """A random model, saved; every weight far enough from its initial value to matter."""
    kind, settings = FAMILIES[family]
    settings = {**SIZES, **settings}
    theta = settings.pop("rope_theta", None)
    if theta is not None:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config = getattr(transformers, f"{kind}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    return model


def some_tokens(length: int = 40) -> Tensor:
    return torch.randint(99, (2, length), generator=torch.Generator().manual_seed(0))


def difference(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_the_logits_are_the_same(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path / "qwen")
    assert len(list((tmp_path / "qwen").glob("*.safetensors"))) > 1
    done = convert(tmp_path / "qwen", tmp_path / "ours")
    decoder = headgate.load(tmp_path / "ours")
    assert done.parameters == decoder.parameter_count() == model.num_parameters()
    assert len({path.stat().st_mode for path in (tmp_path / "ours").iterdir()}) == 1
    with torch.no_grad():
        expected = model(some_tokens()).logits
        assert expected.std() > 0.3
        assert difference(decoder(some_tokens()), expected) < 1e-4
        convert(tmp_path / "ours", tmp_path / "back", to=form(family))
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
        assert type(back) is type(model)
        assert difference(back(some_tokens()).logits, expected) == 0
    assert back.config.max_position_embeddings == 128
    for name, parameter in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], parameter), name


PLAIN = {
    "head-gated:global-only": None,
    "head-gated:gate=local,window=6": 7,
    "dynamic-sparse:gate=open,window=6,dense_prefix=7": 7,
    "dynamic-sparse:gate=open,window=null": None,
    "near-far:gate=open,stretch=1,window=6": 7,
    "context-adaptive:gate=local,width=fixed,window=6": 7,
    "gated:no-gate": None,
    "sparse-geometric:neither": None,
}


@pytest.mark.parametrize("mechanism", PLAIN)
def test_what_is_plain_attention_is_exported_as_it(mechanism: str, tmp_path: Path) -> None:
    """And read again, and its tokens are those of transformers, also past the window."""
    make("qwen3", tmp_path / "qwen")
    convert(tmp_path / "qwen", tmp_path / "ours", mechanism=mechanism)
    convert(tmp_path / "ours", tmp_path / "plain", to="qwen")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert theirs.config.sliding_window == PLAIN[mechanism]
    convert(tmp_path / "plain", tmp_path / "again")
    with torch.no_grad():
        expected = theirs(some_tokens()).logits
        assert difference(headgate.load(tmp_path / "ours")(some_tokens()), expected) < 1e-4
        assert difference(headgate.load(tmp_path / "again")(some_tokens()), expected) < 1e-4
    tokens = theirs.generate(some_tokens(9), max_new_tokens=12, do_sample=False, pad_token_id=0)
    done = headgate.load(tmp_path / "ours").generate(some_tokens(9), 12, temperature=0)
    assert [list(row.tokens) for row in done] == tokens[:, 9:].tolist()


def test_far_positions_are_turned_by_the_same_angles(tmp_path: Path) -> None:
    """Angles grow with the position, and so would a last digit of the frequencies that differs."""
    model = make("qwen3", tmp_path / "qwen")
    positions = torch.tensor([0, 1, 4097, 131_071])
    theirs = model.model.rotary_emb(torch.zeros(1), positions[None])
    ours = rotation(positions, 16, 1e6)
    for mine, (their,) in zip(ours, theirs, strict=True):
        assert torch.equal(torch.cat([mine, mine], -1), their)


@pytest.mark.parametrize("family", ["llama-3.1", "llama-linear", "qwen3-yarn", "mistral-yarn"])
def test_stretched_positions_are_turned_by_the_same_angles(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path / "source")
    config = read_source(tmp_path / "source").config
    positions = torch.tensor([0, 1, 4097, 131_071])
    theirs = model.model.rotary_emb(torch.zeros(1), positions[None])
    plain = rotation(positions, config.head_dim, config.rope_theta)
    ours = rotation(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    for mine, unscaled, (their,) in zip(ours, plain, theirs, strict=True):
        # at far positions a last digit of a frequency is a thousandth of a turn
        assert torch.allclose(torch.cat([mine, mine], -1)[:2], their[:2], rtol=0, atol=1e-6)
        assert torch.allclose(torch.cat([mine, mine], -1), their, rtol=0, atol=2e-2)
        assert not torch.allclose(unscaled, mine, rtol=0, atol=2e-2)


def test_sliding_layers_become_local_ones(tmp_path: Path) -> None:
    make("qwen2.5-sliding", tmp_path / "a")
    make("qwen3-alternating", tmp_path / "b")
    full, local = MechanismSpec("full"), MechanismSpec("local", {"window": 6})
    assert read_source(tmp_path / "a").config.mechanism == (full, local, local)
    assert read_source(tmp_path / "b").config.mechanism == (MechanismSpec("local", {"window": 4}), full)
    make("mistral-sliding", tmp_path / "c")
    assert read_source(tmp_path / "c").config.mechanism == (local,)
    settings = json.loads((tmp_path / "c" / "config.json").read_text())
    del settings["sliding_window"]  # transformers then takes 4,096
    (tmp_path / "c" / "config.json").write_text(json.dumps(settings))
    assert read_source(tmp_path / "c").config.mechanism == (MechanismSpec("local", {"window": 4095}),)


def test_old_settings_files_are_understood(tmp_path: Path) -> None:
    """As they were written before transformers 5: rope_theta by itself, null where there is no scaling."""
    make("qwen2.5", tmp_path / "qwen")
    change(tmp_path / "qwen", rope_parameters=None, rope_theta=25.0, rope_scaling=None, layer_types=None)
    config = read_source(tmp_path / "qwen").config
    assert (config.rope_theta, config.head_dim, config.mechanism) == (25.0, 8, (MechanismSpec("full"),))


def test_the_weights_keep_their_dtype_unless_another_is_asked_for(tmp_path: Path) -> None:
    make("qwen3", tmp_path / "qwen").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    convert(tmp_path / "half", tmp_path / "kept", mechanism="head-gated")
    convert(tmp_path / "half", tmp_path / "wide", dtype="fp32")
    assert {p.dtype for p in headgate.load(tmp_path / "kept").parameters()} == {torch.bfloat16}
    assert {p.dtype for p in headgate.load(tmp_path / "wide").parameters()} == {torch.float32}


def change(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


OPTIONS = {"window": 11, "max_window": 15, "dense_prefix": 20, "block": 8, "stride": 4, "hidden": 8}
REACH = {
    "full": 40,
    "dynamic-sparse": 20,
    "local": 12,
    "near-far": 12,
    "head-gated": 40,
    "context-adaptive": 16,
    "sparse-geometric": 40,
    "positional": 40,
    "combiner": 8,
    "gated:gate_bias=true": 40,
    "sinks": 40,
    "shifted": 40,
    "short-path": 40,
    "differential:gate_bias=true": 40,
    "value-residual": 40,
    "moba": 32,
    "dynamic-sparse:gate_bias=false": 0,
    "head-gated:gate_bias=false": 12,
    "context-adaptive:gate_bias=false": 2,
    "gated": 0,
    "shifted:mode=offset": 0,
    "differential": 0,
    "exclusive": 0,
    "forgetting": 0,
    "gated-delta": 0,
    "nsa": 0,
}
"""At how many of the first positions a retrofitted mechanism is full attention."""


@pytest.mark.parametrize("name", REACH)
def test_a_retrofit_starts_as_the_model_it_came_from(name: str, tmp_path: Path) -> None:
    model = make("qwen3", tmp_path / "qwen")
    known = MECHANISMS.get(name.partition(":")[0]).Options.__dataclass_fields__
    options = ",".join(f"{key}={value}" for key, value in OPTIONS.items() if key in known)
    asked = f"{name}{',' if ':' in name else ':'}{options}"
    done = convert(tmp_path / "qwen", tmp_path / "ours", mechanism=asked)
    decoder, reach = headgate.load(tmp_path / "ours"), REACH[name]
    assert (reach == 0) == any("has no state in which it is full attention" in c for c in done.changes)
    with torch.no_grad():
        expected, found = model(some_tokens()).logits, decoder(some_tokens())
    assert expected.std() > 0.3
    if reach:
        assert difference(found[:, :reach], expected[:, :reach]) < 1e-3
    if reach < 40:
        assert difference(found, expected) > 1e-2


def test_every_mechanism_is_retrofitted_above() -> None:
    assert {name.partition(":")[0] for name in REACH} == {
        name for name in headgate.mechanisms() if not name.endswith("-example")
    }


@pytest.mark.parametrize("name", ["dynamic-sparse", "head-gated", "context-adaptive", "sparse-geometric"])
def test_a_retrofitted_gate_learns(name: str, tmp_path: Path) -> None:
    make("qwen3", tmp_path / "qwen")
    window = ":window=5" if "window" in MECHANISMS.get(name).Options.__dataclass_fields__ else ""
    convert(tmp_path / "qwen", tmp_path / "ours", mechanism=name + window)
    decoder = headgate.load(tmp_path / "ours")
    gates = [p for n, p in decoder.named_parameters() if ".mechanism." in n]
    optimizer = torch.optim.AdamW(gates, lr=0.1)
    tokens = some_tokens()

    def gate() -> Tensor:
        with torch.no_grad(), probe(decoder) as seen:
            decoder(tokens)
        return torch.cat([values[0].flatten() for key, values in seen.items() if key.endswith(".gate")])

    before, losses = gate(), []
    for _ in range(20):
        loss = decoder(tokens[:, :-1], tokens[:, 1:])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert (gate() - before).abs().max() > 0.05


def test_learned_gates_are_kept_under_other_options(tmp_path: Path) -> None:
    decoder = Decoder(
        ModelConfig(99, 32, 2, 4, 2, 8, 56, mechanism=(MechanismSpec("dynamic-sparse"),)), seed=3
    )
    decoder.save(tmp_path / "model.safetensors")
    done = convert(tmp_path, tmp_path / "out", mechanism="dynamic-sparse:window=7")
    assert done.changes == ("dynamic-sparse keeps its weights under other options",)
    changed = headgate.load(tmp_path / "out")
    assert changed.layers[1].attention.mechanism.options.window == 7
    for name, parameter in decoder.named_parameters():
        assert torch.equal(changed.get_parameter(name), parameter), name
    done = convert(tmp_path, tmp_path / "plain", mechanism="full", to="qwen")
    assert done.changes == ("full replaces dynamic-sparse, so the model starts changed",)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "qwen"
    make("qwen3-untied", folder)
    return folder


def drop_from_index(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"]["model.norm.weight"]
    file.write_text(json.dumps(index))


def wrong_shard_in_index(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    file.write_text(json.dumps(index))


def pickled_only(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def cut_a_shard(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-9])


FAULTS = {
    "pickle": (pickled_only, r"has its weights only as pickle \(pytorch_model.bin\)"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], "has no weights; expected"),
    "missing shard": (
        lambda f: sorted(f.glob("*.safetensors"))[1].unlink(),
        "lacks the shard 'model-00002-of-",
    ),
    "cut shard": (cut_a_shard, "is not a complete safetensors file"),
    "index lacks a tensor": (drop_from_index, r"model.norm.weight is missing, expected \(32,\)"),
    "index is wrong": (wrong_shard_in_index, "has no tensor 'model.norm.weight', though"),
    "shape": (
        lambda f: change(f, intermediate_size=57),
        r"mlp.gate_proj.weight is \(56, 32\), expected \(57, 32\)",
    ),
    "fewer layers": (
        lambda f: change(f, num_hidden_layers=2, layer_types=None),
        "has a tensor 'model.layers.2.",
    ),
    "architecture": (
        lambda f: change(f, model_type="gpt2"),
        "has model_type='gpt2'; expected qwen2, qwen3",
    ),
    "norms of another family": (
        lambda f: change(f, model_type="llama"),
        "that llama does not",
    ),
    "no architecture": (
        lambda f: (f / "config.json").write_text("{}"),
        "has no config.json with a model_type",
    ),
    "broken settings": (lambda f: (f / "config.json").write_text('{"a":'), "config.json' is not JSON"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "holds a list; expected a JSON object"),
    "wrong type": (
        lambda f: change(f, hidden_size="32"),
        "hidden_size='32' is not a whole number",
    ),
    "too many layers": (lambda f: change(f, num_hidden_layers=10**9), "expected from 1 to 1,000"),
    "too few layers": (lambda f: change(f, num_hidden_layers=-1), "expected from 1 to 1,000"),
    "rope list": (lambda f: change(f, rope_scaling=[1]), "rope_scaling=.* is not an object of settings"),
    "activation": (lambda f: change(f, hidden_act="gelu"), "has hidden_act='gelu', which headgate's"),
    "bias": (lambda f: change(f, attention_bias=True), "has attention_bias=True"),
    "quantised": (lambda f: change(f, quantization_config={"bits": 4}), "has quantization_config="),
    "yarn": (
        lambda f: change(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}),
        "key '.*config.json: RoPE.factor' is missing",
    ),
    "a word of another yarn": (
        lambda f: change(f, rope_parameters={"rope_type": "yarn", "factor": 4.0, "betta": 1}),
        "unknown key '.*config.json: RoPE.betta'; known are attention_factor",
    ),
    "longrope": (
        lambda f: change(f, rope_parameters={"rope_type": "longrope", "long_factor": [1.0]}),
        "asks for RoPE with {'rope_type': 'longrope'.* headgate computes linear, llama3 and yarn",
    ),
    "dynamic": (
        lambda f: change(f, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "asks for RoPE with {'type': 'dynamic'",
    ),
    "partial": (
        lambda f: change(f, rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.5}),
        "on only some of the dimensions; headgate rotates all",
    ),
    "layer types": (lambda f: change(f, layer_types=["full_attention"] * 2), "has layer_types="),
    "unused window": (
        lambda f: change(f, layer_types=["sliding_attention"] * 3, use_sliding_window=False),
        "has sliding layers with sliding_window=",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_source_is_one_sentence_and_nothing_is_written(
    fault: str, qwen: Path, tmp_path: Path
) -> None:
    break_it, words = FAULTS[fault]
    shutil.copytree(qwen, tmp_path / "source")
    break_it(tmp_path / "source")
    with pytest.raises(HeadgateError, match=words) as raised:
        convert(tmp_path / "source", tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"to": "qwen", "mechanism": "head-gated"},
            "the attention of layer 0 is 'head-gated', which no qwen",
        ),
        ({"to": "qwen", "mechanism": "local:global_tokens=2"}, "the attention of layer 0 is 'local'"),
        (
            {"to": "qwen", "mechanism": "dynamic-sparse:no-gate"},
            "the attention of layer 0 is 'dynamic-sparse'",
        ),
        ({"to": "qwen", "mechanism": "local:window=0"}, "layer 0 has window=0, so a token sees only itself"),
        (
            {"to": "qwen", "mechanism": ["local:window=4", "local:window=5"]},
            "windows of 4 and 5; qwen has one",
        ),
        ({"mechanism": "dynamic-spars"}, "unknown mechanism 'dynamic-spars'; did you mean"),
        ({"mechanism": "local:windw=3"}, "local has no option 'windw'"),
        ({"mechanism": "[local, full]"}, "unknown mechanism '.local, full.'; known are"),
        ({"dtype": "int8"}, "dtype='int8' is not a choice"),
        (
            {"to": "llama"},
            "qkv_bias=false is not llama, which has neither; write --to qwen",
        ),
        ({"to": "mistral"}, "is not mistral"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str, qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match=words):
        convert(qwen, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("norm", [True, False])
def test_what_is_neither_qwen2_nor_qwen3_is_not_exported(norm: bool, tmp_path: Path) -> None:
    Decoder(ModelConfig(99, 32, 1, 4, 2, 8, 56, qk_norm=norm, qkv_bias=norm)).save(
        tmp_path / "model.safetensors"
    )
    with pytest.raises(HeadgateError, match=f"qk_norm={norm} with qkv_bias={norm} is not a Qwen") as raised:
        convert(tmp_path, tmp_path / "out", to="qwen")
    assert ("--to llama" in str(raised.value)) is not norm
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_llama_with_windows_is_a_mistral(tmp_path: Path) -> None:
    make("llama", tmp_path / "llama")
    with pytest.raises(HeadgateError, match="windows of 6, but Llama has none; write --to mistral"):
        convert(tmp_path / "llama", tmp_path / "out", to="llama", mechanism="local:window=6")
    convert(tmp_path / "llama", tmp_path / "windowed", to="mistral", mechanism="local:window=6")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "windowed")
    convert(tmp_path / "windowed", tmp_path / "ours")
    theirs.generation_config.eos_token_id = None
    with torch.no_grad():
        ours = headgate.load(tmp_path / "ours")
        assert difference(ours(some_tokens()), theirs(some_tokens()).logits) < 1e-4
    tokens = theirs.generate(some_tokens(9), max_new_tokens=12, do_sample=False, pad_token_id=0)
    done = ours.generate(some_tokens(9), 12, temperature=0)
    assert [list(row.tokens) for row in done] == tokens[:, 9:].tolist()


def test_a_folder_in_use_is_left_alone(qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(HeadgateError, match="exists already; choose another folder"):
        convert(qwen, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]
    with pytest.raises(HeadgateError, match="does not exist; expected a folder with a model"):
        convert(tmp_path / "nothing", tmp_path / "out")


def test_the_command_says_what_the_new_model_starts_as(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        [
            "convert",
            str(qwen),
            str(tmp_path / "out"),
            "--mechanism",
            "dynamic-sparse:window=64,dense_prefix=9",
        ]
    )
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("qwen3 -> headgate: ")
    assert second == (
        "dynamic-sparse starts as full attention at the first 65 positions, and changes the model beyond"
    )
    run(["convert", str(qwen), str(tmp_path / "mixed"), "--mechanism", "local:window=8+full"])
    names = [spec.name for spec in headgate.load(tmp_path / "mixed").config.mechanism]
    assert names == ["local", "full"]


def test_weights_pass_through_without_being_held(tmp_path: Path) -> None:
    """64 MB of weights, and the process's own memory grows by less than a quarter of them."""
    few, many = tmp_path / "few.safetensors", tmp_path / "many.safetensors"
    Decoder(ModelConfig(99, 32, 1, 4, 2, 8, 56)).save(few)
    Decoder(ModelConfig(16_384, 512, 4, 8, 4, 64, 1536)).save(many)
    assert many.stat().st_size > 64e6
    script = """
import sys, threading
from pathlib import Path
from headgate.model.convert import convert
few, many, out = sys.argv[1:]
convert(few, out + "-few")  # what is imported on the way does not count
def own():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])
most, done = own(), threading.Event()
def watch():
    global most
    while not done.wait(0.002):
        most = max(most, own())
before, thread = own(), threading.Thread(target=watch)
thread.start()
convert(many, out, to="qwen")
done.set(); thread.join()
print(most - before)
"""
    if not Path("/proc/self/status").is_file():
        pytest.skip("the memory of a process is read from /proc")
    arguments = [sys.executable, "-c", script, str(few), str(many), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 16e6
