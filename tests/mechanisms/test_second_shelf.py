"""The second shelf against truths of other hands: fla-core's naive functions, and formulas written out here.

Outputs and the gradients of all inputs and parameters agree, on random weights.
"""

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headgate
from headgate.mechanisms import Mechanism, Past
from headgate.mechanisms.contract import build_mechanism

HEADS, GROUPS, WIDTH, MODEL, LENGTH = 4, 2, 16, 24, 70
Truth = Callable[[Any, Tensor, Tensor, Tensor, Tensor], Tensor]


def fla(path: str) -> ModuleType:
    """A file of fla-core by itself: the package imports its kernels, which take long to load."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        pytest.skip("fla-core is not installed; pip install -c constraints.txt 'headgate[dev]'")
    file = Path(package.submodule_search_locations[0]) / path
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    kernels = {n: MagicMock() for n in ("fla", "fla.ops", "fla.ops.utils", "fla.ops.utils.pooling")}
    with patch.dict(sys.modules, kernels):
        spec.loader.exec_module(module)
    return module


def per_head(t: Tensor) -> Tensor:
    return torch.stack([t[:, h // (HEADS // GROUPS)] for h in range(HEADS)], 1)


def softmax_weights(q: Tensor, k: Tensor, seen: Tensor | None = None) -> Tensor:
    """(B,H,T,T) of causal attention, or over the pairs that are seen."""
    scores = torch.einsum("bhid,bhjd->bhij", q, per_head(k)) / math.sqrt(WIDTH)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if seen is None else seen
    return scores.masked_fill(~seen, -math.inf).softmax(-1)


def full(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    return torch.einsum("bhij,bhjd->bhid", softmax_weights(q, k, seen), per_head(v))


def gate(x: Tensor, weight: Tensor) -> Tensor:
    """sigmoid(W x) of each head, (B,H,T,1) or with its channels (B,H,T,D)."""
    return (1 / (1 + torch.exp(-(x @ weight.T)))).unflatten(-1, (HEADS, -1)).transpose(1, 2)


def gated(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return full(q, k, v) * gate(x, m.gate.weight)


def sinks(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, per_head(k)) / math.sqrt(WIDTH)
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    sink = m.sink[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ per_head(v)


def exclusive(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, unit = full(q, k, v), per_head(v / v.norm(dim=-1, keepdim=True))
    return out - (out * unit).sum(-1, keepdim=True) * unit


def before(t: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(t[:, :, :1]), t[:, :, :-1]], 2)


def shifted(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (a, b), (c, d) = m.keys[..., None, None], m.values[..., None, None]
    return full(q, a * k + b * before(k), c * v + d * before(v))


def differential(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    second = (x @ m.q_proj.weight.T).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    second = second / (second.square().mean(-1, keepdim=True) + 1e-6).sqrt() * m.q_norm.weight
    return full(q, k, v) - gate(x, m.gate.weight) * full(second, k, v)


def block_means(t: Tensor, block: int) -> Tensor:
    return torch.stack([t[:, :, n : n + block].mean(2) for n in range(0, LENGTH - block + 1, block)], 2)


def moba(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    block, top_k = m.options.block, m.options.top_k
    scores = torch.einsum("bhid,bhnd->bhin", q, per_head(block_means(k, block)))
    seen = torch.zeros(*q.shape[:3], LENGTH, dtype=torch.bool)
    for at in [(b, h, i) for b in range(len(q)) for h in range(HEADS) for i in range(LENGTH)]:
        own = at[2] // block
        best = sorted(range(own), key=lambda n: (scores[(*at, n)].item(), n))[-top_k:]
        for n in [*best, own]:
            seen[(*at, slice(n * block, min(at[2] + 1, (n + 1) * block)))] = True
    return full(q, k, v, seen)


def nsa(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The compressed and the selected branch by fla-core, the choice of blocks and the window by hand."""
    naive, block = fla("ops/nsa/naive.py"), m.options.block
    keys, values = block_means(k, block), block_means(v, block)
    weights, kept = [], []
    for i in range(
        LENGTH
    ):  # fla-core counts a query's own block as soon as it is complete: hand it over short
        n, row = i // block, [t[:, :, : i // block].transpose(1, 2) for t in (keys, values)]
        out = torch.zeros_like(q[:, :, i])
        if n:
            one = q[:, :, i : i + 1].transpose(1, 2)
            padded = torch.cat([torch.zeros_like(one).expand(-1, LENGTH, -1, -1), one], 1)
            out = naive.naive_nsa_compression(padded, *row, 1, WIDTH**-0.5)[0][:, -1]
        kept.append(out)
        scores = torch.einsum("bhd,bhnd->bhn", q[:, :, i], per_head(keys[:, :, :n])) / math.sqrt(WIDTH)
        weights.append(scores.softmax(-1).unflatten(1, (GROUPS, -1)).sum(2))
    compressed = torch.stack(kept, 2)
    chosen = torch.full((len(q), LENGTH, GROUPS, m.options.top_k), -1)
    for at in [(b, g, i) for b in range(len(q)) for g in range(GROUPS) for i in range(LENGTH)]:
        (b, g, i), own = at, at[2] // block
        ranked = sorted(range(1, own), key=lambda n, b=b, g=g, i=i: weights[i][b, g, n].item(), reverse=True)
        blocks = list(dict.fromkeys([own, *([0] if own else []), *ranked]))[: m.options.top_k]
        chosen[b, i, g, : len(blocks)] = torch.tensor(blocks)
    swapped = [t.transpose(1, 2) for t in (q, k, v)]
    # its output takes the shape of the values after their heads are repeated
    selected = naive.naive_nsa_selection(*swapped, chosen, block).transpose(1, 2)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    window = full(q, k, v, (distance >= 0) & (distance <= m.options.window))
    gates = [gate(x, w) for w in m.gates.weight.chunk(3)]
    return gates[0] * compressed + gates[1] * selected + gates[2] * window


def forgetting(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    naive = fla("ops/forgetting_attn/naive.py")
    log_f = torch.log(torch.sigmoid(x @ m.forget.weight.T + m.forget.bias))
    return naive.naive_forgetting_attn(*(t.transpose(1, 2) for t in (q, k, v)), log_f).transpose(1, 2)


def gated_delta(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The recurrence by fla-core, what stands around it by hand."""
    naive = fla("ops/gated_delta_rule/naive.py")

    def convolved(name: str, t: Tensor) -> Tensor:
        channels = t.transpose(1, 2).flatten(2).mT  # (B,heads*D,T)
        weight = m.convolutions[name][:, None]
        mixed = F.conv1d(F.pad(channels, (3, 0)), weight, groups=weight.shape[0])
        return F.silu(mixed).mT.unflatten(-1, (-1, WIDTH))  # (B,T,heads,D)

    q, k, v = convolved("q", q), convolved("k", k), convolved("v", v)
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    k, v = k.repeat_interleave(HEADS // GROUPS, 2), v.repeat_interleave(HEADS // GROUPS, 2)
    beta = torch.sigmoid(x @ m.beta.weight.T)
    log_alpha = -m.log_rate.exp() * F.softplus(x @ m.step.weight.T + m.step.bias)
    out, _ = naive.naive_recurrent_gated_delta_rule(q, k, v, beta, log_alpha, scale=1.0)
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * m.norm.weight
    return (out * F.silu(x @ m.out_gate.weight.T).unflatten(-1, (HEADS, WIDTH))).transpose(1, 2)


TRUTHS: dict[str, tuple[Truth, dict[str, Any]]] = {
    "gated": (gated, {}),
    "sinks": (sinks, {}),
    "exclusive": (exclusive, {}),
    "forgetting": (forgetting, {}),
    "shifted": (shifted, {}),
    "differential": (differential, {}),
    "moba": (moba, {"block": 8, "top_k": 3}),
    "nsa": (nsa, {"block": 8, "top_k": 4, "window": 12}),
    "gated-delta": (gated_delta, {}),
}


def build(name: str, **options: Any) -> Mechanism:
    """With random weights of a size that matters."""
    sizes = {"d_model": MODEL, "n_heads": HEADS, "n_kv_heads": GROUPS, "head_dim": WIDTH}
    mechanism = build_mechanism(name, **sizes, **options)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return mechanism


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, LENGTH, MODEL), *((2, n, LENGTH, WIDTH) for n in (HEADS, GROUPS, GROUPS))]
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", TRUTHS)
def test_outputs_and_gradients_agree_with_another_hand(name: str) -> None:
    truth, options = TRUTHS[name]
    mechanism, leaves = build(name, **options), inputs()
    expected, found = truth(mechanism, *leaves), mechanism(*leaves)
    direction = torch.randn(found.shape)
    wanted = [*leaves, *mechanism.parameters()]
    compared = [("output", found, expected)]
    names = ["x", "q", "k", "v", *(n for n, _ in mechanism.named_parameters())]
    gradients = (
        torch.autograd.grad(out, wanted, direction, allow_unused=True, materialize_grads=True)
        for out in (found, expected)
    )
    compared += list(zip(names, *gradients, strict=True))
    for what, given, true in compared:
        difference = (given - true).abs().max() / max(1.0, true.abs().max().item())
        assert difference < 1e-4, f"{what}: {difference:.1e}"


def test_value_residual_mixes_in_the_first_layers_values() -> None:
    mechanism, (x, q, k, v) = build("value-residual"), inputs()
    first = torch.randn_like(v)
    found = mechanism(x, q, k, v, Past(first_values=first))
    assert torch.allclose(found, full(q, k, mechanism.own * v + mechanism.first * first), atol=1e-5)
    assert torch.allclose(mechanism(x, q, k, v), full(q, k, v), atol=1e-5)  # the first layer


def test_an_offset_key_is_half_rotated_and_half_that_of_the_token_before() -> None:
    mechanism, (x, q, k, v) = build("shifted", mode="offset"), inputs()
    positions = torch.arange(LENGTH)
    rates = 100.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
    angles = positions[:, None] * rates
    found = mechanism(x, q, k, v, Past(rotation=(angles.cos(), angles.sin())))

    def turned(t: Tensor) -> Tensor:
        """Pairs as complex numbers, turned at the rates of rotary positions of half the width."""
        pairs = torch.complex(*t[..., : WIDTH // 2].chunk(2, -1))
        turns = torch.polar(torch.ones(LENGTH, WIDTH // 4), positions[:, None] * rates[::2])
        return torch.cat([(pairs * turns).real, (pairs * turns).imag], -1)

    half = WIDTH // 2
    keys = torch.cat([turned(k), before(k)[..., half:]], -1)
    assert torch.allclose(found, full(torch.cat([turned(q), q[..., half:]], -1), keys, v), atol=1e-5)


def test_three_windows_and_all_keys_without_positions() -> None:
    """The last layer of the pattern rotates nothing; whole and token by token agree through the decoder."""
    decoder = headgate.build_model(
        "tiny", mechanism=["local", "local", "local", "full:positions=none"], window=8
    )
    tokens = torch.randint(4096, (1, 40), generator=torch.Generator().manual_seed(0))
    mechanism = decoder.layers[3].attention.mechanism
    seen: list[Tensor] = []
    mechanism.register_forward_hook(lambda m, given, out: seen.extend([*given[1:4], out]))
    cache = decoder.new_cache()
    with torch.no_grad():
        whole = decoder(tokens)
        steps = torch.cat([decoder(tokens[:, t : t + 1], cache=cache) for t in range(40)], 1)
    q, k, v, out = seen[:4]
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(out, plain, atol=1e-5)
    assert torch.allclose(steps, whole, atol=1e-4)
