"""The cache of a batch whose rows stand at different positions: every row is as if it were alone."""

from dataclasses import replace

import pytest
import torch
from small_models import BLOCK, PREFIX, SMALL, WINDOW, small_decoder, some_tokens, variants

import headgate
from headgate.errors import HeadgateError
from headgate.model.cache import Cache, LayerCache
from headgate.model.decoder import Decoder

LENGTHS = [PREFIX + WINDOW, 3, BLOCK, PREFIX - 1]


def ragged(decoder: Decoder, lengths: list[int]) -> Cache:
    """A cache whose row n has seen the first lengths[n] tokens of sequence n."""
    caches = []
    for row, length in enumerate(lengths):
        caches.append(decoder.new_cache())
        decoder(some_tokens(1, length, seed=row), cache=caches[-1])
    return Cache.join(caches)


@pytest.mark.parametrize("pattern", [*variants(), ["local", "full"]], ids=str)
@torch.no_grad()
def test_rows_of_different_lengths_are_as_if_alone(pattern: str | list[str]) -> None:
    decoder = small_decoder(pattern)
    cache = ragged(decoder, LENGTHS)
    assert cache.lengths == LENGTHS
    for count in (1, 1, 3, 1):  # single tokens, and a chunk that takes rows over their edges
        after = [length + count for length in cache.lengths]
        whole = [some_tokens(1, 40, seed=row)[:, :length] for row, length in enumerate(after)]
        tokens = torch.cat([row[:, -count:] for row in whole])
        logits = decoder(tokens, cache=cache)
        for row, expected in enumerate(decoder(sequence)[0, -count:] for sequence in whole):
            assert torch.allclose(logits[row], expected, rtol=0, atol=1e-9), f"row {row}"
    assert cache.lengths == after
    assert cache.length == max(after)


@pytest.mark.parametrize(
    "mechanism", ["full", "dynamic-sparse", "local:global_tokens=3", "head-gated", "sparse-geometric"]
)
@torch.no_grad()
def test_the_native_kernels_take_rows_apart_alike(mechanism: str) -> None:
    decoder = small_decoder(mechanism, config=replace(SMALL, head_dim=16)).float()
    cache = ragged(decoder, LENGTHS)
    cache.select([2, 0, 3, 1])
    following = some_tokens(4, 3, seed=9)
    logits = torch.cat([decoder(token, cache=cache) for token in following.split(1, dim=1)], 1)
    for place, row in enumerate([2, 0, 3, 1]):
        sequence = torch.cat([some_tokens(1, LENGTHS[row], seed=row), following[place : place + 1]], 1)
        assert torch.allclose(logits[place], decoder(sequence)[0, -3:], rtol=0, atol=1e-3), f"row {row}"


@torch.no_grad()
def test_rows_are_kept_and_reordered_as_asked() -> None:
    decoder = small_decoder("dynamic-sparse")
    cache = ragged(decoder, [7, 3, 7, 20])
    cache.select([3, 0, 0, 2])  # without row 1; row 0 twice, as a beam search has it
    assert cache.lengths == [20, 7, 7, 7]
    chosen = [some_tokens(1, length, seed=row) for row, length in ((3, 20), (0, 7), (0, 7), (2, 7))]
    following = torch.tensor([[1], [2], [3], [4]])
    logits = decoder(following, cache=cache)
    for row, sequence in enumerate(chosen):
        expected = decoder(torch.cat([sequence, following[row : row + 1]], 1))[0, -1]
        assert torch.allclose(logits[row, 0], expected, rtol=0, atol=1e-9), f"row {row}"
    before = cache.bytes
    cache.select([1])
    assert cache.bytes < before / 2
    assert cache.lengths == [8]


@torch.no_grad()
def test_rows_of_one_group_that_stand_apart() -> None:
    """Equal lengths prefilled together, then put where they belong in the batch."""
    decoder = small_decoder("combiner")
    pair, single = decoder.new_cache(), decoder.new_cache()
    decoder(torch.cat([some_tokens(1, 9, seed=s) for s in (0, 2)]), cache=pair)
    decoder(some_tokens(1, 6, seed=1), cache=single)
    cache = Cache.join([pair, single])
    cache.select([0, 2, 1])
    assert cache.lengths == [9, 6, 9]
    logits = decoder(torch.tensor([[5], [6], [7]]), cache=cache)
    for row, length in enumerate([9, 6, 9]):
        sequence = torch.cat([some_tokens(1, length, seed=row), torch.tensor([[5 + row]])], 1)
        assert torch.allclose(logits[row, 0], decoder(sequence)[0, -1], rtol=0, atol=1e-9), f"row {row}"


def test_a_batch_of_equal_lengths_is_one_group() -> None:
    decoder, cache = small_decoder("local"), small_decoder("local").new_cache()
    assert (cache.batch, cache.length, cache.lengths) == (None, 0, [])
    with torch.no_grad():
        decoder(some_tokens(3, 5), cache=cache)
    assert (cache.batch, cache.length, cache.lengths) == (3, 5, [5, 5, 5])
    assert len(cache.groups) == 1


@pytest.mark.parametrize("dropped", [1, 700, 1000, 1900])
def test_keys_that_move_to_the_front_stay_as_they_are(dropped: int) -> None:
    """By less than their own length, so that where they were and where they go overlap, or by more."""
    keys = torch.arange(2200.0)[None, None, :, None].expand(2, 3, 2200, 4)
    cache = LayerCache()
    cache.append(keys[:, :, :1000])
    cache.append(keys[:, :, 1000:2000])  # as many as there was room for
    cache.drop_before(dropped)
    for at in range(2000, 2200):
        (held,) = cache.append(keys[:, :, at : at + 1])
        assert torch.equal(held, keys[:, :, dropped : at + 1])


def test_bad_use_gets_one_clear_sentence() -> None:
    decoder = headgate.build_model("tiny")
    with pytest.raises(HeadgateError, match="a cache that has seen no token has no rows to join"):
        Cache.join([decoder.new_cache()])
