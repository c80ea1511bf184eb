"""A mechanism inside models of transformers: equal to our decoder, padded, cached, saved and trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headgate
from headgate.errors import HeadgateError
from headgate.mechanisms import MECHANISMS
from headgate.model.convert import convert

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'headgate[hf]'")

from headgate.model.hf import take_out, use  # noqa: E402

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {},
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Gemma": {},
    "Gemma3": {"layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 9},
}
OPTIONS = {"window": 5, "max_window": 9, "dense_prefix": 7, "block": 4, "stride": 4, "hidden": 8}
NAMES = [n for n in headgate.mechanisms() if not n.endswith("-example") and n != "value-residual"]
GREEDY = {"max_new_tokens": 10, "do_sample": False}


def make(family: str = "Qwen3", **settings: Any) -> Any:
    kind = f"{family}Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**SIZES | FAMILIES[family] | settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.15)
    return model


def of(name: str) -> dict[str, Any]:
    known = MECHANISMS.get(name).Options.__dataclass_fields__
    return {option: value for option, value in OPTIONS.items() if option in known}


def shaken(model: Any, seed: int = 3) -> Any:
    """Mechanisms away from where they start, the same in every model of the same names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".mechanism." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def some_tokens(length: int = 40, rows: int = 2) -> Tensor:
    return torch.randint(1, 99, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_our_decoder(name: str, tmp_path: Path) -> None:
    """In logits, and in the tokens that it generates with transformers' cache."""
    model = make()
    model.save_pretrained(tmp_path / "qwen")
    words = ",".join(f"{option}={value}" for option, value in of(name).items())
    convert(tmp_path / "qwen", tmp_path / "ours", mechanism=f"{name}:{words}" if words else name)
    decoder = shaken(headgate.load(tmp_path / "ours"))
    shaken(use(model, name, **of(name)))
    with torch.no_grad():
        expected = decoder(some_tokens())
        assert torch.allclose(model(some_tokens()).logits, expected, rtol=0, atol=1e-5)
        assert expected.std() > 0.3
    found = model.generate(some_tokens(9), **GREEDY)
    done = decoder.generate(some_tokens(9), 10, temperature=0)
    assert found[:, 9:].tolist() == [list(row.tokens) for row in done]


def stretched(kind: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 32}
    return {
        "rope_parameters": rope
        | ({"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {})
    }


@pytest.mark.parametrize("name", ["dynamic-sparse", "forgetting"])
@pytest.mark.parametrize(("family", "rope"), [("Qwen2", "yarn"), ("Llama", "llama3"), ("Mistral", "yarn")])
def test_headgate_converts_what_was_saved(family: str, rope: str, name: str, tmp_path: Path) -> None:
    """A folder saved with a mechanism in some layers, into our decoder, which computes the same."""
    model = shaken(use(make(family, **stretched(rope)), name, layers=[0, 2], **of(name)))
    model.save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "ours")
    decoder = headgate.load(tmp_path / "ours")
    assert [spec.name for spec in decoder.config.mechanism] == [name, "full", name]
    with torch.no_grad():
        expected = decoder(some_tokens())
        assert torch.allclose(model(some_tokens()).logits, expected, rtol=0, atol=1e-5)
    found = model.generate(some_tokens(9), **GREEDY)
    done = decoder.generate(some_tokens(9), 10, temperature=0)
    assert found[:, 9:].tolist() == [list(row.tokens) for row in done]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_starts_as_it_was_and_can_be_given_back(family: str) -> None:
    model, tokens = make(family), some_tokens()
    with torch.no_grad():
        expected = model(tokens).logits
        use(model, "dynamic-sparse", window=512)
        assert model.config._attn_implementation == "headgate"
        assert torch.allclose(model(tokens).logits, expected, rtol=0, atol=2e-3 * expected.std().item())
        use(model, "dynamic-sparse", window=5, dense_prefix=7)
        changed = model(tokens).logits
        assert torch.allclose(changed[:, :7], expected[:, :7], rtol=0, atol=2e-3 * expected.std().item())
        assert (changed[:, 20:] - expected[:, 20:]).abs().max() > 0.05 * expected.std()
        plain = {name for name, _ in make(family).named_parameters()}
        assert {name for name, _ in take_out(model).named_parameters()} == plain
        assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sliding", [False, True])
def test_our_kernels_as_an_attention_of_transformers(family: str, sliding: bool) -> None:
    settings: dict[str, Any] = {}
    if sliding:
        if family in ("Llama", "Gemma"):
            return
        settings = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
        if family in ("Qwen3", "Gemma3"):
            settings["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    model, tokens = make(family, **settings), some_tokens(30)
    mask = torch.ones_like(tokens)
    mask[0, :11] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).logits
        generated = model.generate(tokens, attention_mask=mask, **GREEDY)
        model.set_attn_implementation("headgate")
        found = model(tokens, attention_mask=mask).logits
    real = mask.bool()
    assert torch.allclose(found[real], expected[real], rtol=0, atol=1e-5 * expected.std().item())
    assert torch.equal(model.generate(tokens, attention_mask=mask, **GREEDY), generated)


@pytest.mark.parametrize("name", ["dynamic-sparse", "local", "sparse-geometric", "forgetting"])
def test_padding_changes_no_token(name: str) -> None:
    model = shaken(use(make(), name, **of(name)))
    rows = [some_tokens()[0, :length] for length in (30, 1, 17, 30)]
    for side in ("left", "right"):
        pads = [(30 - len(row), 0) if side == "left" else (0, 30 - len(row)) for row in rows]
        tokens = torch.stack([F.pad(row, pad, value=7) for row, pad in zip(rows, pads, strict=True)])
        mask = torch.stack([F.pad(torch.ones_like(r), pad) for r, pad in zip(rows, pads, strict=True)])
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask, use_cache=False).logits
            for n, row in enumerate(rows):
                alone = model(row[None]).logits[0]
                assert torch.allclose(logits[n, mask[n].bool()], alone, rtol=0, atol=1e-4)


def test_generation_of_prompts_of_different_lengths_and_of_beams() -> None:
    model = shaken(use(make(), "dynamic-sparse", **of("dynamic-sparse")))
    tokens, mask = some_tokens(14), torch.ones(2, 14, dtype=torch.long)
    mask[1, :9] = 0
    together = model.generate(tokens, attention_mask=mask, **GREEDY)
    alone = model.generate(tokens[1:, 9:], **GREEDY)
    assert torch.equal(together[1, 14:], alone[0, 5:])
    beams = [
        model.generate(tokens, max_new_tokens=9, num_beams=3, do_sample=False, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*beams)


@pytest.mark.parametrize("name", ["dynamic-sparse", "sparse-geometric"])
def test_it_is_saved_and_loaded_again(name: str, tmp_path: Path) -> None:
    model = shaken(use(make("Llama"), name, layers=[0, 2], **of(name)))
    model.save_pretrained(tmp_path)
    loaded = use(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    with torch.no_grad():
        assert torch.equal(loaded(some_tokens()).logits, model(some_tokens()).logits)
    with pytest.raises(HeadgateError, match="was not saved with a mechanism"):
        use(make())


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"])
def test_every_auto_class_loads_it_with_its_mechanism(auto: str, tmp_path: Path) -> None:
    """Whichever class saved it."""
    model = shaken(use(make(), "dynamic-sparse", **of("dynamic-sparse")))
    model.save_pretrained(tmp_path / "first")
    load = getattr(transformers, auto).from_pretrained
    load(tmp_path / "first", trust_remote_code=True).save_pretrained(tmp_path / "second")
    again = load(tmp_path / "second", trust_remote_code=True).eval()
    states = getattr(again, "model", again)(some_tokens()).last_hidden_state
    assert torch.equal(states, model.model(some_tokens()).last_hidden_state)
    assert sum(".mechanism." in name for name, _ in again.named_parameters()) == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_generates(family: str) -> None:
    """With its own cache what it generates without."""
    model = shaken(use(make(family), "dynamic-sparse", window=5, dense_prefix=7))
    cached, uncached = (model.generate(some_tokens(9), **GREEDY, use_cache=c) for c in (True, False))
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_peft_train_it(family: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs it: pip install 'headgate[hf]'")
    peft = pytest.importorskip("peft", reason="needs the extra: pip install 'headgate[dev]'")
    model = use(make(family), "dynamic-sparse", window=5, dense_prefix=7)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["mechanism"])
    )
    gate = next(
        p for n, p in adapted.named_parameters() if n.endswith("default.gate.bias") and p.requires_grad
    )
    before = gate.detach().clone()
    rows = [{"input_ids": row, "labels": row} for row in some_tokens(24, rows=8)]
    trainer = transformers.Trainer(
        model=adapted,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=4,
            learning_rate=3e-2,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=rows,
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0] - 0.1
    assert not torch.equal(gate, before)


def packed() -> dict[str, Tensor]:
    return {"input_ids": some_tokens(8), "position_ids": torch.arange(8).remainder(4).expand(2, 8)}


REFUSED = {
    "family": (
        lambda: use(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1)), "local"),
        "'gpt2' is",
    ),
    "first values": (lambda: use(make(), "value-residual"), "needs the first layer's values"),
    "sliding": (
        lambda: use(make("Mistral", sliding_window=6), "local"),
        "layer 0 of this model slides over its keys",
    ),
    "layers": (lambda: use(make(), "local", layers=[3]), r"layers=\[3\]; expected numbers from 0 to 2"),
    "option": (lambda: use(make(), "local", windw=3), "has no option 'windw'"),
    "dropout": (lambda: use(make(attention_dropout=0.1), "local"), "attention_dropout=0.1"),
    "packed": (lambda: use(make(), "local")(**packed()), "packed texts|position_ids start again"),
    "packed, plain": (lambda: make(attn_implementation="headgate")(**packed()), "packed texts|start again"),
    "static cache": (
        lambda: use(make(), "local").generate(some_tokens(4), cache_implementation="static", **GREEDY),
        "static caches",
    ),
    "beams": (
        lambda: use(make(), "sparse-geometric").generate(some_tokens(4), num_beams=2, **GREEDY),
        "beams and assisted generation cannot reorder",
    ),
    "holes": (
        lambda: use(make(), "local")(
            some_tokens(4), attention_mask=torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
        ),
        "padding between tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(case: str) -> None:
    attempt, words = REFUSED[case]
    with pytest.raises(HeadgateError, match=words), torch.no_grad():
        attempt()
