"""Computation that follows the gate: without the closed heads, decoding is the model with rounded gates."""

import math
from dataclasses import replace

import pytest
import torch
from small_models import SMALL, small_decoder, some_tokens
from torch import Tensor

import headgate
from headgate.errors import HeadgateError
from headgate.model.decoder import Decoder

GATED = ["dynamic-sparse", "head-gated", "context-adaptive", "context-adaptive:select=block,width=fixed"]


@torch.no_grad()
def decoded(decoder: Decoder, tokens: Tensor, prefilled: int) -> Tensor:
    cache = decoder.new_cache()
    logits = [decoder(tokens[:, :prefilled], cache=cache)]
    logits += [decoder(tokens[:, n : n + 1], cache=cache) for n in range(prefilled, tokens.shape[1])]
    return torch.cat(logits, 1)


@torch.no_grad()
def share_skipped(decoder: Decoder, tokens: Tensor, below: float) -> float:
    with headgate.skipping(decoder, below), headgate.probe(decoder) as seen:
        decoder(tokens)
    parts = [t[0].double().mean() for name, t in seen.items() if name.endswith("skipped")]
    assert len(parts) == decoder.config.n_layers
    return torch.stack(parts).mean().item()


@pytest.mark.parametrize("mechanism", GATED)
@pytest.mark.parametrize("below", [0.2, 0.45])
def test_tokens_decoded_one_by_one_and_all_at_once_skip_alike(mechanism: str, below: float) -> None:
    decoder, tokens = small_decoder(mechanism), some_tokens(3, 33)
    with torch.no_grad(), headgate.skipping(decoder, below):
        whole = decoder(tokens)
        assert torch.allclose(decoded(decoder, tokens, 6), whole, rtol=0, atol=1e-9)
    with torch.no_grad():
        plain = decoder(tokens)
    assert 0.02 < share_skipped(decoder, tokens, below) < 0.98
    assert (whole - plain).abs().max() > 1e-3


@pytest.mark.parametrize("mechanism", GATED)
def test_the_native_kernels_skip_alike(mechanism: str) -> None:
    decoder = small_decoder(mechanism, config=replace(SMALL, head_dim=16)).float()
    tokens = some_tokens(2, 33)
    with torch.no_grad(), headgate.skipping(decoder, 0.4):
        assert torch.allclose(decoded(decoder, tokens, 6), decoder(tokens), rtol=0, atol=1e-3)


@pytest.mark.parametrize("mechanism", GATED)
def test_a_threshold_that_no_gate_is_below_changes_nothing(mechanism: str) -> None:
    decoder, tokens = small_decoder(mechanism), some_tokens(2, 25)
    plain = decoded(decoder, tokens, 5)
    for below in (0.0, 1e-12):
        with headgate.skipping(decoder, below):
            assert torch.equal(decoded(decoder, tokens, 5), plain)
    assert share_skipped(decoder, tokens, 1e-12) == 0


def test_dynamic_sparse_closes_the_heads_below_and_those_alone() -> None:
    mechanism = headgate.build_mechanism("dynamic-sparse", d_model=8, n_heads=4, head_dim=16)
    with torch.no_grad():
        mechanism.gate.weight.zero_()
        mechanism.gate.bias.copy_(torch.tensor([-3.0, -2.0, 2.0, 3.0]))  # gates 0.047, 0.12, 0.88, 0.95
    q, k, v = (torch.randn(1, 4, n, 16) for n in (1, 30, 30))
    x = torch.randn(1, 1, 8)
    with torch.no_grad():
        plain = mechanism(x, q, k, v)
        with headgate.skipping(mechanism, 0.1):
            v[:, 0] = math.nan  # never read
            skipped = mechanism(x, q, k, v)
    assert (skipped[:, 0] == 0).all()
    assert torch.allclose(skipped[:, 1:], plain[:, 1:], rtol=0, atol=1e-6)


def test_head_gated_skips_the_far_keys_of_local_heads() -> None:
    mechanism = headgate.build_mechanism("head-gated", d_model=8, n_heads=2, head_dim=16, window=4)
    with torch.no_grad():
        mechanism.gate.weight.zero_()
        mechanism.gate.bias.copy_(torch.tensor([5.0, -5.0]))
    q, k, v = (torch.randn(1, 2, n, 16) for n in (1, 30, 30))
    x = torch.randn(1, 1, 8)
    with torch.no_grad():
        plain = mechanism(x, q, k, v)
        local = headgate.ops.window_attention(q, k, v, 4)
        with headgate.skipping(mechanism, 0.05):
            k[:, 0, :25] = math.nan
            skipped = mechanism(x, q, k, v)
    assert torch.allclose(skipped[:, 0], local[:, 0], rtol=0, atol=1e-6)
    assert torch.allclose(skipped[:, 1], plain[:, 1], rtol=0, atol=1e-6)  # its local branch costs nothing


def test_training_is_not_touched_and_the_threshold_ends_with_the_block() -> None:
    decoder, tokens = small_decoder("dynamic-sparse"), some_tokens(1, 1)
    with headgate.skipping(decoder, 0.5):
        decoder(tokens, tokens).backward()  # one token with a gradient: rounded, but computed
        with headgate.skipping(decoder, 0.1):
            pass
        assert decoder.layers[0].attention.mechanism.skip_below == 0.5
    assert decoder.layers[1].attention.mechanism.skip_below == 0
    gradient = decoder.layers[0].attention.v_proj.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()


def test_generate_takes_the_threshold() -> None:
    decoder = small_decoder("dynamic-sparse")
    start = some_tokens(1, 20).tolist()
    plain, off, some = (
        decoder.generate(start, 30, temperature=0, skip_below=below)[0].tokens for below in (None, 0, 0.45)
    )
    assert plain == off
    assert plain != some
    with torch.no_grad(), headgate.skipping(decoder, 0.45):
        logits = decoder(torch.tensor([start[0] + some]))[0, 19:-1]
    assert logits.argmax(-1).tolist() == some


def test_bad_thresholds_get_one_clear_sentence() -> None:
    decoder = small_decoder("dynamic-sparse:gate=open")
    for below, words in ((0.1, "would do nothing: no mechanism"), (-0.1, "is out of range")):
        with (
            pytest.raises(HeadgateError, match=f"skip_below={below} {words}"),
            headgate.skipping(decoder, below),
        ):
            pass
