"""The decoder: what it computes, what it holds in memory, how it starts, what it refuses."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headgate
from headgate.config import ModelConfig
from headgate.errors import HeadgateError
from headgate.grammar import MechanismSpec
from headgate.model.decoder import Decoder
from headgate.ops.rotary import rotate, rotation
from headgate.recipes import RECIPES, get_recipe

SMALL = ModelConfig(
    vocab_size=50,
    d_model=24,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_mlp=40,
    shared_options={"window": 5, "max_window": 9, "dense_prefix": 12, "block": 4, "stride": 4},
)
PAPER_AND_BASELINES = [name for name in headgate.mechanisms() if not name.endswith("-example")]


def some_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))


def with_weights_of_unit_scale(decoder: Decoder) -> Decoder:
    """Initial weights are so small that every layer is nearly the identity; tests want layers that matter."""
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim > 1 and "mechanism" not in name:
                parameter.mul_(0.3 / parameter.std())
    return decoder


@pytest.mark.parametrize("name", RECIPES.names())
def test_a_recipe_has_the_parameters_it_promises(name: str) -> None:
    with torch.device("meta"):
        decoder = headgate.build_model(name)
    assert decoder.parameter_count() == RECIPES.get(name).parameters
    assert all(parameter.is_meta for parameter in decoder.parameters())


def test_the_paper_recipes_have_the_papers_sizes() -> None:
    assert RECIPES.get("paper-134m").parameters == pytest.approx(134e6, rel=0.01)
    assert RECIPES.get("paper-1.5b").parameters == pytest.approx(1.5e9, rel=0.05)
    paper = get_recipe("paper-1.5b")
    tokens_of_a_step = paper.train.context * paper.train.batch_size * paper.train.accumulation
    assert (tokens_of_a_step, paper.train.steps) == (16_777_216, 399)
    assert get_recipe("paper-134m-context-adaptive").train.accumulation * 32 == 512


@pytest.mark.parametrize(
    ("qk_norm", "qkv_bias", "tied"),
    [(True, False, True), (False, True, False), (True, True, False), (False, False, True)],
)
def test_the_decoder_is_the_qwen_formula(qk_norm: bool, qkv_bias: bool, tied: bool) -> None:
    """Against the formula written out for one sequence, token by token and head by head."""
    config = replace(SMALL, qk_norm=qk_norm, qkv_bias=qkv_bias, tied_embeddings=tied)
    decoder = with_weights_of_unit_scale(Decoder(config)).double()
    with torch.no_grad():
        for parameter in decoder.parameters():  # norms and biases off their initial 1 and 0
            if parameter.ndim == 1:
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3
                )
    tokens, weights = some_tokens(1, 9)[0], dict(decoder.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weights[name]

    def turned(vector: Tensor, position: int) -> Tensor:
        result = vector.clone()
        for pair in range(4):
            angle = torch.tensor(position * 1e6 ** (-2 * pair / 8), dtype=torch.float64)
            a, b = vector[pair], vector[pair + 4]
            result[pair] = a * angle.cos() - b * angle.sin()
            result[pair + 4] = b * angle.cos() + a * angle.sin()
        return result

    x = weights["embedding.weight"][tokens]
    for n in range(3):
        at = f"layers.{n}.attention."
        y, heads = norm(x, f"layers.{n}.attention_norm.weight"), {}
        for what in "qkv":
            projected = y @ weights[f"{at}{what}_proj.weight"].T
            if qkv_bias:
                projected = projected + weights[f"{at}{what}_proj.bias"]
            heads[what] = projected.view(9, -1, 8)
        for what in "qk":
            if qk_norm:
                heads[what] = norm(heads[what], f"{at}{what}_norm.weight")
            heads[what] = torch.stack([torch.stack([turned(h, t) for h in heads[what][t]]) for t in range(9)])
        attended = torch.zeros(9, 4, 8, dtype=torch.float64)
        for t in range(9):
            for h in range(4):
                logits = heads["k"][: t + 1, h // 2] @ heads["q"][t, h] / 8**0.5
                attended[t, h] = logits.softmax(0) @ heads["v"][: t + 1, h // 2]
        x = x + attended.flatten(1) @ weights[f"{at}o_proj.weight"].T
        y = norm(x, f"layers.{n}.mlp_norm.weight")
        gate, up, down = (weights[f"layers.{n}.mlp.{w}_proj.weight"] for w in ("gate", "up", "down"))
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    expected = norm(x, "norm.weight") @ weights["embedding.weight" if tied else "head.weight"].T
    assert torch.allclose(decoder(tokens[None])[0], expected, rtol=1e-5, atol=1e-5)  # RoPE's angles are fp32


def test_rope_depends_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    products = []
    for i, j in ((5, 2), (105, 102), (1005, 1002)):
        cos, sin = rotation(torch.tensor([i, j]), 16, 1e4)
        products.append((rotate(q, cos[:1], sin[:1]) * rotate(k, cos[1:], sin[1:])).sum().item())
    assert products[0] == pytest.approx(products[1], abs=1e-4)
    assert products[0] == pytest.approx(products[2], abs=1e-3)


@pytest.mark.parametrize("length", [1, 2, 37])
def test_the_loss_and_its_gradients_are_those_of_the_logits(length: int) -> None:
    decoder = with_weights_of_unit_scale(Decoder(SMALL)).double()
    tokens, targets = some_tokens(2, length), some_tokens(2, length, seed=1)
    targets[0, 0] = -100  # a token that does not count
    if length > 1:
        targets[1, 1] = -100
    loss = decoder(tokens, targets)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in decoder.named_parameters()}
    decoder.zero_grad()
    expected = F.cross_entropy(decoder(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for name, parameter in decoder.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, rtol=1e-9, atol=1e-12), name


def test_the_loss_of_a_large_vocabulary_fits_in_memory() -> None:
    """T=3072, V=151,936: logits alone would be 1.9 GB; loss and backward must fit in 1.2 GB above the
    model."""
    script = """
import resource, torch, headgate
from headgate.config import ModelConfig
sizes = dict(d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, d_mlp=64)
config = ModelConfig(vocab_size=151_936, **sizes)
decoder = headgate.build_model(config, mechanism="local", window=64)
tokens = torch.randint(151_936, (1, 3072))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loss = decoder(tokens, tokens.roll(1))
loss.backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, loss.item())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    kilobytes, loss = run.stdout.split()
    assert int(kilobytes) * 1024 < 1.2e9
    assert float(loss) == pytest.approx(11.93, abs=0.3)  # about log(V) before training


@pytest.mark.parametrize("name", PAPER_AND_BASELINES)
def test_variants_share_every_weight_they_have_in_common(name: str) -> None:
    ours, baseline = (Decoder(replace(SMALL, mechanism=(MechanismSpec(n),)), seed=3) for n in (name, "full"))
    weights = dict(ours.named_parameters())
    for parameter_name, parameter in baseline.named_parameters():
        assert torch.equal(parameter, weights[parameter_name]), parameter_name
    again, other = (Decoder(replace(SMALL, mechanism=(MechanismSpec(name),)), seed=seed) for seed in (3, 4))
    for parameter_name, parameter in again.named_parameters():
        assert torch.equal(parameter, weights[parameter_name]), parameter_name
    assert not torch.equal(other.embedding.weight, ours.embedding.weight)


def test_no_two_weights_start_equal() -> None:
    decoder = Decoder(replace(SMALL, mechanism=(MechanismSpec("context-adaptive"),)))
    firsts = [p.flatten()[:8].tolist() for p in decoder.parameters() if p.ndim > 1]
    assert len({tuple(first) for first in firsts}) == len(firsts)


PATTERNS = [[name] for name in PAPER_AND_BASELINES] + [
    ["local", "full"],
    ["sparse-geometric:gate=log", "local"],
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda names: "+".join(names))
@pytest.mark.parametrize("sizes", [[1] * 40, [13, 1, 7, 19], [39, 1], [1, 39]], ids=str)
def test_whole_chunks_and_single_tokens_give_the_same_logits(pattern: list[str], sizes: list[int]) -> None:
    decoder = with_weights_of_unit_scale(headgate.build_model(SMALL, pattern)).double()
    tokens, cache, done, outputs = some_tokens(2, 40), decoder.new_cache(), 0, []
    with torch.no_grad():
        whole = decoder(tokens)
        for size in sizes:
            outputs.append(decoder(tokens[:, done : done + size], cache=cache))
            done += size
            for layer, held in zip(decoder.layers, cache.groups[0].layers, strict=True):
                assert len(held) == done - layer.attention.mechanism.first_key(done)
    assert cache.length == 40
    assert torch.allclose(torch.cat(outputs, 1), whole, rtol=0, atol=1e-9)


def test_a_windowed_cache_stays_small_for_ever() -> None:
    decoder = headgate.build_model(SMALL, "local", window=5)
    full = headgate.build_model(SMALL, "full")
    cache, full_cache = decoder.new_cache(), full.new_cache()
    sizes = []
    with torch.no_grad():
        for n in range(100):
            decoder(some_tokens(1, 1, seed=n), cache=cache)
            full(some_tokens(1, 1, seed=n), cache=full_cache)
            sizes.append(cache.bytes)
    per_token = 2 * 2 * 8 * 4 * 3  # k and v, two heads of 8 in fp32, three layers
    assert max(sizes[20:]) <= 2 * (5 + 2) * per_token
    assert full_cache.bytes >= 100 * per_token


def test_a_pattern_repeats_over_the_layers() -> None:
    decoder = headgate.build_model("tiny", mechanism=["local", "full"])
    names = [type(layer.attention.mechanism).__name__ for layer in decoder.layers]
    assert names == ["Local", "Full", "Local", "Full"]
    options = headgate.build_model(
        "tiny", mechanism=["local:window=7", "head-gated"], window=9
    ).config.mechanism
    assert [spec.options["window"] for spec in options] == [9, 9]
    assert (
        headgate.build_model("tiny", mechanism="local:window=7").layers[0].attention.mechanism.options.window
        == 7
    )


def test_probe_names_every_layer() -> None:
    decoder = headgate.build_model(SMALL, ["dynamic-sparse", "full", "context-adaptive"])
    with headgate.probe(decoder) as seen:
        decoder(some_tokens(2, 20))
        decoder(some_tokens(2, 11))
    gates = {name: [tuple(t.shape) for t in values] for name, values in seen.items() if name.endswith("gate")}
    shapes = [(2, 20, 4), (2, 11, 4)]
    assert gates == {f"layers.{n}.attention.mechanism.gate": shapes for n in (0, 2)}


def test_save_and_load(tmp_path: Path) -> None:
    decoder = headgate.build_model(SMALL, ["head-gated:window=3", "full"], seed=9)
    decoder.save(tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        loaded = headgate.load(path)
        assert loaded.config == decoder.config
        assert torch.equal(loaded(some_tokens(1, 30)), decoder(some_tokens(1, 30)))
        loaded(some_tokens(1, 5), some_tokens(1, 5)).backward()  # its parameters can be trained on
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_load_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="holds no model"):
        headgate.load(tmp_path)
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(HeadgateError, match="is not a complete safetensors file"):
        headgate.load(tmp_path / "model.pt")
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, tmp_path / "plain.safetensors")
    with pytest.raises(HeadgateError, match="no headgate config in its header"):
        headgate.load(tmp_path / "plain.safetensors")
    decoder = headgate.build_model(SMALL)
    del decoder.layers[1].mlp.up_proj
    decoder.save(tmp_path / "part.safetensors")
    with pytest.raises(HeadgateError, match=r"layers.1.mlp.up_proj.weight is missing, expected \(40, 24\)"):
        headgate.load(tmp_path / "part.safetensors")
    whole = (tmp_path / "part.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HeadgateError, match="is not a complete safetensors file"):
        headgate.load(tmp_path / "cut.safetensors")


def test_bad_calls_get_one_clear_sentence() -> None:
    decoder = headgate.build_model(SMALL)
    with pytest.raises(HeadgateError, match=r"tokens have shape \(3,\); expected \(B,T\)"):
        decoder(torch.zeros(3, dtype=torch.long))
    with pytest.raises(HeadgateError, match="at least one token"):
        decoder(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(
        HeadgateError, match=r"targets have shape \(1, 4\); expected the tokens' shape \(1, 5\)"
    ):
        decoder(some_tokens(1, 5), some_tokens(1, 4))
    with pytest.raises(HeadgateError, match="a cache carries no gradients"):
        decoder(some_tokens(1, 5), cache=decoder.new_cache())
    decoder.recompute = True
    with pytest.raises(HeadgateError, match="a cache carries no gradients"):
        decoder(some_tokens(1, 5), cache=decoder.new_cache())
    cache = decoder.new_cache()
    with torch.no_grad():
        decoder(some_tokens(1, 5), cache=cache)
        assert cache.length == 5
        with pytest.raises(HeadgateError, match="a batch of 2 was given to a cache of batch 1"):
            decoder(some_tokens(2, 5), cache=cache)
    with pytest.raises(HeadgateError, match="unknown recipe 'tinny'; did you mean 'tiny'"):
        headgate.build_model("tinny")
    with pytest.raises(HeadgateError, match="local has no option 'gate'"):
        headgate.build_model("tiny", mechanism="local", gate="open")
    with pytest.raises(
        HeadgateError, match="no mechanism has the shared option 'windo'; did you mean 'window'"
    ):
        headgate.build_model(replace(SMALL, shared_options={"windo": 3}))
    with pytest.raises(HeadgateError, match="mechanism=\\[\\] names no mechanism"):
        headgate.build_model("tiny", mechanism=[])


@pytest.mark.parametrize("name", headgate.mechanisms())
def test_a_scaled_start_leaves_the_token_in_the_stream(name: str) -> None:
    """Each layer adds nothing at first, and has a gradient to change that by."""
    config = replace(SMALL, start="scaled", tied_embeddings=False, vocab_size=512)
    decoder = headgate.build_model(config, mechanism=name)
    tokens = some_tokens(2, 20)
    stream = decoder.embedding(tokens)
    assert stream.square().mean().sqrt().item() == pytest.approx(1.0, abs=0.1)
    assert torch.equal(decoder.hidden(tokens), decoder.norm(stream))
    loss = decoder(tokens, some_tokens(2, 20, seed=1))
    assert loss.item() == pytest.approx(math.log(512) + 0.5, abs=0.5)  # logits of deviation 1
    loss.backward()
    for layer in decoder.layers:
        assert layer.attention.o_proj.weight.grad.abs().max() > 0
        assert layer.mlp.down_proj.weight.grad.abs().max() > 0
    assert decoder.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(config.d_model**-0.5, rel=0.2)
    with pytest.raises(HeadgateError, match=r"set model\.tied_embeddings=false"):
        replace(config, tied_embeddings=True)


@pytest.mark.parametrize("name", ["full", "local", "near-far", "sparse-geometric"])
def test_without_positions_nothing_is_rotated(name: str) -> None:
    """Then the base of the rotation does not matter; with positions it does."""
    tokens = some_tokens(2, 30)
    for positions, same in (("none", True), ("rope", False)):
        outputs = []
        for theta in (1e6, 100.0):
            config = replace(
                SMALL, rope_theta=theta, shared_options=SMALL.shared_options | {"positions": positions}
            )
            with torch.no_grad():
                outputs.append(headgate.build_model(config, mechanism=name)(tokens))
        assert torch.equal(*outputs) == same, positions


ROWS = [[20, 1, 33, 10], [40, 24]]
"""Lengths of the documents in each row of a batch."""


def packed_documents(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and document ids; every token has a target, those across a boundary too."""
    stream = some_tokens(2, sum(ROWS[0]) + 1, seed)
    ids = torch.tensor([[7 - n for n, size in enumerate(row) for _ in range(size)] for row in ROWS])
    return stream[:, :-1], stream[:, 1:], ids


def results_of(decoder: Decoder, loss: Tensor) -> dict[str, Tensor]:
    decoder.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", PAPER_AND_BASELINES)
def test_packed_documents_are_as_if_alone(name: str, recompute: bool) -> None:
    """Loss and every gradient, with positions that begin anew; the target of a document's last token, but
    that of the row, belongs to another document and does not count."""
    config = replace(SMALL, head_dim=16)
    decoder = with_weights_of_unit_scale(headgate.build_model(config, name))
    decoder.recompute = recompute
    tokens, targets, ids = packed_documents()
    packed = results_of(decoder, decoder(tokens, targets, documents=ids, reduction="sum"))
    total = torch.zeros(())
    for row, sizes in enumerate(ROWS):
        for n, (x, y) in enumerate(zip(tokens[row].split(sizes), targets[row].split(sizes), strict=True)):
            y = y.clone()
            if n + 1 < len(sizes):
                y[-1] = -100
            total = total + decoder(x[None], y[None], reduction="sum")
    for what, expected in results_of(decoder, total).items():
        error = (packed[what] - expected).abs().max() / max(1.0, expected.abs().max().item())
        assert error <= 1e-5, f"{what}: {error:.1e}"


def test_a_boundary_counts_and_positions_go_on_if_asked() -> None:
    decoder = with_weights_of_unit_scale(headgate.build_model(SMALL, "full"))
    tokens, targets, ids = packed_documents()
    counted = decoder(tokens, targets, documents=ids, reduction="none", count_boundaries=True)
    ignored = decoder(tokens, targets, documents=ids, reduction="none")
    ends = (ids[:, :-1] != ids[:, 1:]).nonzero().tolist()
    assert len(ends) == 4
    for row, place in ends:
        assert ignored[row, place] == 0
        ignored[row, place] = counted[row, place]
    assert torch.equal(counted, ignored)
    on = decoder(tokens, documents=ids, positions="stream")
    anew = decoder(tokens, documents=ids)
    torch.testing.assert_close(on[0, :20], anew[0, :20])
    torch.testing.assert_close(
        on[0, 21:54], anew[0, 21:54], atol=1e-4, rtol=1e-4
    )  # RoPE sees distances alone
    torch.testing.assert_close(decoder(tokens, documents=torch.zeros_like(ids)), decoder(tokens))


def test_documents_that_do_not_fit_are_refused() -> None:
    decoder = headgate.build_model(SMALL, "full")
    tokens, _, ids = packed_documents()
    with pytest.raises(HeadgateError, match=r"documents have shape \(2, 63\)"):
        decoder(tokens, documents=ids[:, 1:])
    with pytest.raises(HeadgateError, match="documents return to 0 in row 0"):
        decoder(tokens, documents=(torch.arange(tokens.shape[1]) % 3).expand_as(tokens))
    with torch.no_grad(), pytest.raises(HeadgateError, match="run them without a cache"):
        decoder(tokens, documents=ids, cache=decoder.new_cache())
