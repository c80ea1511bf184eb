"""Generation: cached tokens are the uncached ones, rows are as if alone, draws follow their definition."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from small_models import BLOCK, MAX_WINDOW, PREFIX, SMALL, WINDOW, small_decoder, some_tokens, variants
from torch import Tensor

import headgate
from headgate.errors import HeadgateError
from headgate.model.decoder import Decoder
from headgate.model.generate import Sampler, Sampling

EDGES = sorted(
    {1, 2}
    | {edge + step for edge in (BLOCK, WINDOW, MAX_WINDOW, PREFIX, PREFIX + WINDOW) for step in (-1, 0, 1)}
)


def prompt(length: int, seed: int = 0) -> list[int]:
    return some_tokens(1, length, seed=seed)[0].tolist()


@torch.no_grad()
def uncached(decoder: Decoder, start: list[int], new: list[int], sampling: Sampling) -> list[int]:
    """What would be chosen at each place without a cache, given that all before it was chosen alike."""
    logits = decoder(torch.tensor([start + new]))[0, len(start) - 1 : -1]
    sampler = Sampler(sampling, [torch.tensor(start)], decoder.config.vocab_size)
    return [sampler(row[None])[1][0] for row in logits]


@pytest.mark.parametrize(
    "mechanism", [name for name in variants() if ":" not in name or name.endswith(("=block", "=log", "=3"))]
)
def test_150_cached_tokens_are_the_uncached_ones(mechanism: str) -> None:
    """Greedy, with a penalty that keeps the model out of the loop that greedy choice ends in."""
    decoder, start = (
        small_decoder(mechanism, config=replace(SMALL, n_layers=1, tied_embeddings=False)),
        prompt(3),
    )
    new = decoder.generate([start], 150, temperature=0, repetition_penalty=1.3)[0].tokens
    assert len(new) == 150
    assert new == uncached(decoder, start, new, Sampling(1.3, 0))
    assert len(set(new)) > 20


@pytest.mark.parametrize("mechanism", variants())
def test_half_precision_generates_too(mechanism: str) -> None:
    decoder = small_decoder(mechanism).bfloat16()
    skip_below = 0.4 if decoder.layers[0].attention.mechanism.skips else None
    completions = decoder.generate([prompt(3), prompt(PREFIX + WINDOW)], 4, skip_below=skip_below)
    assert [len(c.tokens) for c in completions] == [4, 4]


@pytest.mark.parametrize("mechanism", ["full", "dynamic-sparse", "local", "head-gated"])
def test_single_precision_chooses_what_is_likeliest_but_for_rounding(mechanism: str) -> None:
    """fp32 and a head width of 16 take the native kernels where they are built."""
    decoder = small_decoder(mechanism, config=replace(SMALL, head_dim=16)).float()
    start = prompt(3)
    new = decoder.generate([start], 60, temperature=0)[0].tokens
    with torch.no_grad():
        logits = decoder(torch.tensor([start + new]))[0, 2:-1]
    missed = logits.amax(-1) - logits.gather(-1, torch.tensor(new)[:, None])[:, 0]
    assert missed.max() < 1e-4


@pytest.mark.parametrize("mechanism", [*variants(), ["local", "full"]], ids=str)
def test_at_every_edge_a_batch_of_all_prompts_gives_the_uncached_tokens(mechanism: str | list[str]) -> None:
    decoder, starts = small_decoder(mechanism), [prompt(length, seed=length) for length in EDGES]
    completions = decoder.generate(starts, 7, temperature=0, prefill_chunk=BLOCK + 1)
    for start, completion in zip(starts, completions, strict=True):
        assert len(completion.tokens) == 7
        assert completion.tokens == uncached(decoder, start, completion.tokens, Sampling(temperature=0)), len(
            start
        )


@pytest.mark.parametrize("mechanism", ["dynamic-sparse", "context-adaptive:select=block", "sparse-geometric"])
def test_a_row_does_not_depend_on_the_rows_beside_it(mechanism: str) -> None:
    """Rows end at different times, lengths repeat, and row 0's random numbers are row 0's in any batch."""
    decoder = small_decoder(mechanism)
    starts = [prompt(length, seed=n) for n, length in enumerate((9, 3, 9, 14, 3, 1))]
    stop = [[7], [11, 12], 20, 21, 22]
    together = decoder.generate(starts, 40, seed=5, stop=stop)
    assert {c.ended for c in together} == {"stop", "length"} or len({len(c.tokens) for c in together}) > 2
    for count in (1, 3):
        alone = decoder.generate(starts[:count], 40, seed=5, stop=stop)
        assert alone == together[:count]


def test_a_tensor_and_lists_and_chunks_of_any_size_give_the_same() -> None:
    decoder = small_decoder("head-gated")
    tokens = some_tokens(3, 30)
    expected = decoder.generate(tokens, 12, seed=1)
    assert expected == decoder.generate(tokens.tolist(), 12, seed=1)
    assert expected == decoder.generate(list(tokens), 12, seed=1)
    for chunk in (1, 7, 30, 90, 1000):
        assert expected == decoder.generate(tokens, 12, seed=1, prefill_chunk=chunk)


def test_the_prompts_are_run_in_chunks_of_the_size_asked_for() -> None:
    decoder, seen = small_decoder("full"), []
    decoder.layers[0].register_forward_hook(lambda _, given, __: seen.append(tuple(given[0].shape[:2])))
    decoder.generate([prompt(20), prompt(20), prompt(5)], 2, prefill_chunk=16)
    assert seen == [(1, 5), (2, 8), (2, 8), (2, 4), (3, 1)]


def test_only_the_last_position_gets_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, seen = small_decoder("full"), []
    plain = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, *more: Tensor) -> Tensor:
        if weight.shape[0] == decoder.config.vocab_size:
            seen.append(x.shape[:-1].numel())
        return plain(x, weight, *more)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    decoder.generate([prompt(20)], 3)
    assert seen == [1, 1, 1]


def defined(logits: Tensor, occurred: set[int], s: Sampling) -> list[float]:
    """The distribution as the documentation defines it, in plain Python."""
    scores = logits.tolist()
    for token in occurred:
        scores[token] = (
            scores[token] / s.repetition_penalty
            if scores[token] > 0
            else scores[token] * s.repetition_penalty
        )
    weights = {token: math.exp((score - max(scores)) / s.temperature) for token, score in enumerate(scores)}
    order = sorted(weights, key=lambda token: -weights[token])[: s.top_k]
    total, kept, mass = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if s.top_p is not None and mass >= s.top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    left = {token for token in kept if weights[token] >= (s.min_p or 0) * weights[order[0]]}
    total = sum(weights[token] for token in left)
    return [weights[token] / total if token in left else 0.0 for token in range(len(scores))]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=5),
        Sampling(top_k=1),
        Sampling(top_k=1000),
        Sampling(top_p=0.7),
        Sampling(top_p=1e-6),
        Sampling(top_p=1.0),
        Sampling(min_p=0.2),
        Sampling(min_p=1.0),
        Sampling(repetition_penalty=1.5),
        Sampling(repetition_penalty=0.7, temperature=0.8, top_k=9, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_draws_follow_their_definition(sampling: Sampling) -> None:
    """10,000 draws: no token that has no probability, and a chi-square that chance exceeds once in 10,000."""
    rows, rounds = 2000, 5
    logits = torch.randn(20, generator=torch.Generator().manual_seed(2)) * 1.5
    seen, counts = {1, 4, 6}, Counter()
    probabilities = defined(logits, seen, sampling)
    for seed in range(rounds):
        start = torch.tensor(sorted(seen))
        sampler = Sampler(replace(sampling, seed=seed), [start] * rows, 20)
        counts.update(sampler(logits.expand(rows, -1))[1])
    assert all(probabilities[token] > 0 for token in counts)
    expected = [p * rows * rounds for p in probabilities if p > 0]
    observed = [counts[token] for token, p in enumerate(probabilities) if p > 0]
    chi_square = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 12


def test_top_p_looks_as_far_as_it_must() -> None:
    """Of a large vocabulary a part is looked at first; a flat distribution needs more of it."""
    size = 5000
    draws = {}
    for scale in (0.01, 3.0):
        logits = torch.randn(size, generator=torch.Generator().manual_seed(3)) * scale
        kept = {token for token, p in enumerate(defined(logits, set(), Sampling(top_p=0.9))) if p > 0}
        sampler = Sampler(Sampling(top_p=0.9), [torch.tensor([0])] * 400, size)
        draws[scale] = set(sampler(logits.expand(400, -1))[1])
        assert draws[scale] <= kept
    assert len(draws[0.01]) > 300 > len(draws[3.0]) > 20


def test_greedy_takes_the_highest_logit_after_the_penalty() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0], [-0.5, -0.4, -0.65]])
    sampler = Sampler(
        Sampling(temperature=0, repetition_penalty=1.5), [torch.tensor([0]), torch.tensor([1])], 3
    )
    assert sampler(logits)[1] == [1, 0]
    assert sampler(logits)[1] == [0, 1]  # the first choices count as well
    sampler.select([1])
    assert sampler(logits[1:])[1] == [1]  # of -0.75, -0.6 and -0.65


def test_seeds_repeat_and_differ() -> None:
    decoder = small_decoder("full")
    first, again, other = (decoder.generate([prompt(4)] * 2, 20, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert first[0].tokens != first[1].tokens  # equal prompts, but other random numbers


def test_generation_leaves_the_random_state_and_the_mode_alone() -> None:
    decoder = small_decoder("full").train()
    before = torch.get_rng_state()
    decoder.generate([prompt(4)], 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert decoder.training
    decoder(some_tokens(1, 5), some_tokens(1, 5)).backward()


def test_stops_end_a_row_where_they_occur_in_what_is_new() -> None:
    decoder = small_decoder("full")
    start = prompt(4)
    free = decoder.generate([start], 30, seed=2)[0]
    assert (free.ended, len(free.tokens)) == ("length", 30)
    pair = free.tokens[5:7]
    first = next(n for n in range(29) if free.tokens[n : n + 2] == pair)
    assert decoder.generate([start], 30, seed=2, stop=[pair])[0].tokens == free.tokens[: first + 2]
    token = free.tokens[9]
    for stop in (token, [token], [[token]], [49_000, token]):
        completion = decoder.generate([start], 30, seed=2, stop=stop)[0]
        assert completion.tokens == free.tokens[: free.tokens.index(token) + 1]
        assert completion.ended == "stop"
    across = [start[-1], free.tokens[0]]  # begins in the prompt
    assert decoder.generate([start], 3, seed=2, stop=[across])[0].tokens == free.tokens[:3]


def test_the_stream_sees_every_token_as_it_comes() -> None:
    decoder, seen = small_decoder("local"), []
    starts = [prompt(3), prompt(8), prompt(3, seed=1)]
    completions = decoder.generate(
        starts, 15, seed=4, stop=[1, 2, 3], stream=lambda *given: seen.append(given)
    )
    for row, completion in enumerate(completions):
        assert [token for r, token in seen if r == row] == completion.tokens
    assert sorted(row for row, _ in seen[:3]) == [0, 1, 2]

    class Enough(Exception):
        pass

    def leave(row: int, token: int) -> None:
        raise Enough

    with pytest.raises(Enough):  # whoever listens may end it
        decoder.generate(starts, 15, stream=leave)


@pytest.mark.parametrize(
    "mechanism", ["local", "dynamic-sparse", "head-gated:gate=local", "local:global_tokens=3"]
)
def test_memory_and_keys_stay_bounded_for_windows(mechanism: str) -> None:
    decoder = small_decoder(mechanism)
    caches, plain = [], decoder.new_cache

    def new_cache(most: int | None = None) -> object:
        caches.append(plain(most))
        return caches[-1]

    decoder.new_cache = new_cache  # type: ignore[method-assign, assignment]
    sizes = []
    decoder.generate([prompt(40)], 200, prefill_chunk=8, stream=lambda *_: sizes.append(caches[0].bytes))
    per_token = 2 * 2 * 8 * 8 * 2  # k and v, two heads of 8 in fp64, two layers
    pinned = decoder.layers[0].attention.mechanism.pinned_keys
    assert max(sizes[20:]) <= 4 * (WINDOW + 1 + pinned) * per_token
    assert max(sizes) <= 2 * (PREFIX + 8) * per_token


def test_a_full_cache_holds_no_more_than_it_will_need() -> None:
    decoder = small_decoder("full")
    cache = decoder.new_cache(70)
    with torch.no_grad():
        decoder(some_tokens(1, 40), cache=cache)
        for n in range(30):
            decoder(some_tokens(1, 1, seed=n), cache=cache)
            assert cache.bytes <= 70 * 2 * 2 * 8 * 8 * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 is too small; it must be at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk=0 is too small; it must be at least 1"),
        ({"temperature": -0.1}, "temperature=-0.1 is out of range; expected 0"),
        ({"temperature": math.nan}, "temperature=nan is out of range"),
        ({"top_k": 0}, "top_k=0 is out of range; expected at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 is out of range; expected more than 0 and at most 1"),
        ({"top_p": 1.1}, "top_p=1.1 is out of range"),
        ({"min_p": -0.1}, "min_p=-0.1 is out of range; expected 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 is out of range; expected more than 0"),
        ({"seed": -1}, "seed=-1 is out of range"),
        ({"stop": [[]]}, "a stop without tokens would end everything at once"),
        ({"tokens": []}, "there is no prompt"),
        ({"tokens": [[1], []]}, "prompt 1 is empty; give it at least one token"),
        ({"tokens": [1, 2]}, "prompt 0 is not a list of tokens; expected a list of token lists"),
        ({"tokens": [[1.5]]}, "prompt 0 is not a list of tokens"),
        ({"tokens": [["a"]]}, "prompt 0 is not a list of tokens"),
        ({"tokens": [[3, 50]]}, "prompt 0 has the token 50; expected tokens in the vocabulary, 0 to 49"),
        ({"tokens": [[-1, 5]]}, "prompt 0 has the token -1"),
        ({"tokens": torch.zeros(3, dtype=torch.long)}, r"the prompts have shape \(3,\); expected \(B,T\)"),
        (
            {"skip_below": 0.1},
            "skip_below=0.1 would do nothing: no mechanism in this model has a learned gate",
        ),
        ({"skip_below": 0.7}, "skip_below=0.7 is out of range"),
    ],
    ids=str,
)
def test_bad_arguments_get_one_clear_sentence(arguments: dict[str, object], words: str) -> None:
    decoder = headgate.build_model(SMALL)
    with pytest.raises(HeadgateError, match=words) as caught:
        decoder.generate(**({"tokens": [[1]], "max_new_tokens": 3} | arguments))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_logits_that_are_not_finite_are_told() -> None:
    decoder = headgate.build_model(SMALL)
    with torch.no_grad():
        decoder.norm.weight[3] = math.nan
    with pytest.raises(HeadgateError, match="the model's logits are not finite"):
        decoder.generate([[1, 2]], 3)
