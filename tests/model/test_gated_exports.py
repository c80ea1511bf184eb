"""Gated attention as other models have it: transformers' own classes compute the same from our export."""

import json
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headgate
from headgate import cli
from headgate.config import ModelConfig
from headgate.errors import HeadgateError
from headgate.model.convert import convert
from headgate.model.decoder import Decoder, with_mechanism
from headgate.model.families import WRITERS

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'headgate[hf]'")

BASE = ModelConfig(99, 32, 3, 4, 2, 16, 56, tied_embeddings=False, rope_theta=1e4)
GREEDY = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}


def decoder_with(mechanism: str, folder: Path, **settings: Any) -> Decoder:
    """Saved in the folder, with weights and gates far from where they start."""
    config = with_mechanism(ModelConfig(**{**BASE.__dict__, **settings}), mechanism)
    decoder, generator = Decoder(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    decoder.save(folder / "model.safetensors")
    return decoder.eval()


def some_tokens(length: int = 40) -> Tensor:
    return torch.randint(99, (2, length), generator=torch.Generator().manual_seed(0))


def same(ours: Decoder, theirs: Any) -> None:
    with torch.no_grad():
        expected = ours(some_tokens())
        assert expected.std() > 0.3
        assert (theirs(some_tokens()).logits - expected).abs().max() < 1e-4
    found = theirs.generate(some_tokens(9), **GREEDY)
    done = ours.generate(some_tokens(9), GREEDY["max_new_tokens"], temperature=0)
    assert [list(row.tokens) for row in done] == found[:, 9:].tolist()


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        ("gated", {}),
        ("gated:gate_bias=true", {"tied_embeddings": True}),
        ("gated:head", {}),
        ("gated:per=head,gate_bias=true", {"qkv_bias": True}),
        ("dynamic-sparse:no-window", {}),
    ],
)
def test_qwen3_5(mechanism: str, settings: dict[str, Any], tmp_path: Path) -> None:
    decoder = decoder_with(mechanism, tmp_path, **settings)
    convert(tmp_path, tmp_path / "out", to="qwen3_5")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == "Qwen3_5ForCausalLM"
    same(decoder, theirs)


def step(folder: Path) -> Any:
    """transformers has Step3.5's decoder inside Step3.7, whose other half sees pictures."""
    settings = json.loads((folder / "config.json").read_text())
    config = transformers.Step3p7Config(
        text_config=transformers.Step3p7TextConfig(**settings),
        vision_config={
            "width": 8, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14, "mlp_ratio": 1.0,
        },
        image_token_id=98,
        tie_word_embeddings=settings["tie_word_embeddings"],
    )  # fmt: skip
    config.save_pretrained(folder)
    model, told = transformers.Step3p7ForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True
    )
    assert not told["unexpected_keys"]
    assert all("vision" in name or "projector" in name for name in told["missing_keys"])
    return model.eval()


@pytest.mark.parametrize(
    "mechanism",
    [
        "dynamic-sparse:window=6,dense_prefix=0,gate_bias=false",
        "gated:head",
        "gated:head+dynamic-sparse:window=6,dense_prefix=7,gate_bias=false",
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_step3p5(mechanism: str, tied: bool, tmp_path: Path) -> None:
    decoder = decoder_with(mechanism, tmp_path, tied_embeddings=tied)
    convert(tmp_path, tmp_path / "out", to="step3p5")
    same(decoder, step(tmp_path / "out"))


@pytest.mark.parametrize(
    ("form", "mechanism", "settings", "words"),
    [
        ("qwen3_5", "full", {}, "the attention of layer 0 is 'full', which no qwen3_5 computes"),
        ("qwen3_5", "dynamic-sparse:window=6,dense_prefix=0", {}, "is not Qwen3.5, whose full attention"),
        ("qwen3_5", "gated", {"qk_norm": False}, "qk_norm=false with sliding layers: False, is not Qwen3.5"),
        ("step3p5", "gated", {}, "the gate of layer 0 has one value per channel"),
        ("step3p5", "dynamic-sparse:no-window", {}, r"has a bias.*\(gate_bias=false\)"),
        ("step3p5", "gated:head", {"qkv_bias": True}, "qk_norm=true with qkv_bias=true is not Step3.5"),
        ("step3p5", "dynamic-sparse:window=6,gate_bias=false", {}, "which no step3p5 computes with these"),
        ("qwen", "gated", {}, "is 'gated', which no qwen computes"),
    ],
)
def test_what_they_do_not_compute_is_refused(
    form: Any, mechanism: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    decoder_with(mechanism, tmp_path, **settings)
    with pytest.raises(HeadgateError, match=words):
        convert(tmp_path, tmp_path / "out", to=form)
    assert not (tmp_path / "out").exists()


def test_the_command_line_offers_every_form() -> None:
    hint = typing.get_type_hints(cli.COMMANDS["convert"])["to"]
    assert set(typing.get_args(hint)) == {"headgate", *WRITERS}


def test_options_of_earlier_models_are_understood() -> None:
    mechanism = headgate.build_mechanism("gated", d_model=8, n_heads=2, head_dim=4, bias=True)
    assert mechanism.options.gate_bias
