"""The loader serves every target once an epoch, in an order that no number of ranks and no resume changes."""

import itertools
import random
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate
from headgate.data.loader import IGNORED, Loader, PackedDocuments, Windows, permute
from headgate.data.packing import pack
from headgate.data.shards import Split, open_split
from headgate.errors import HeadgateError


def make_split(folder: Path, tokens: int, *, shard_tokens: int = 1 << 27, loss: bool = False) -> Split:
    """A split whose token at place p is p itself, in documents of 1 to 7 tokens."""
    for number, start in enumerate(range(0, tokens, shard_tokens)):
        stream = np.arange(start, min(start + shard_tokens, tokens), dtype="<u2")
        ends = np.cumsum(np.resize([3, 1, 7, 2], len(stream)))
        path = folder / f"{number:05d}.ds"
        stream.tofile(path)
        np.append(ends[ends < len(stream)], len(stream)).astype("<u8").tofile(f"{path}.index")
        if loss:
            (stream % 5 != 0).tofile(f"{path}.loss")
    return open_split(folder, "train")


def served(tokens: torch.Tensor, targets: torch.Tensor) -> list[int]:
    """The targets that count; each must follow its token."""
    assert tokens.dtype == targets.dtype == torch.int64
    counting = targets != IGNORED
    assert torch.equal(tokens[counting] + 1, targets[counting])
    return targets[counting].tolist()


sizes = st.tuples(st.integers(2, 90), st.integers(1, 40), st.integers(1, 30))


@settings(deadline=None, max_examples=20)
@given(sizes, st.integers(1, 5), st.integers(1, 7), st.integers(0, 3), st.integers(0, 2))
def test_every_target_is_served_once_an_epoch_for_any_number_of_ranks(
    size: tuple[int, int, int], batch_size: int, ranks: int, seed: int, epoch: int
) -> None:
    tokens, length, shard_tokens = size
    with tempfile.TemporaryDirectory() as folder:
        split = make_split(Path(folder), max(tokens, length + 1), shard_tokens=shard_tokens)
        loaders = [
            Loader(split, length=length, batch_size=batch_size, seed=seed, rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
        windows = len(loaders[0].windows)
        targets: list[int] = []
        places: Counter[int] = Counter()
        for step in range(-(-(epoch + 1) * windows // (batch_size * ranks))):
            for rank, loader in enumerate(loaders):
                batch = next(loader)
                assert batch[0].shape == batch[1].shape == (batch_size, length)
                for row in range(batch_size):
                    sample = step * batch_size * ranks + rank * batch_size + row
                    places[sample] += 1
                    if sample // windows == epoch:
                        targets += served(batch[0][row], batch[1][row])
        assert max(places.values()) == 1
        assert sorted(targets) == list(range(1, split.tokens))
        assert len({tuple(loader.state().items()) for loader in loaders}) == 1


@settings(deadline=None, max_examples=20)
@given(
    sizes,
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4),
)
def test_a_resume_goes_on_exactly_with_another_number_of_ranks(
    size: tuple[int, int, int], seed: int, stages: list[tuple[int, int, int]]
) -> None:
    """Each stage is a number of ranks, a batch size and a number of steps; together they serve one order."""
    tokens, length, shard_tokens = size
    with tempfile.TemporaryDirectory() as folder:
        split = make_split(Path(folder), max(tokens, length + 1), shard_tokens=shard_tokens)
        rows = []
        state = None
        for ranks, batch_size, steps in stages:
            loaders = [
                Loader(
                    split,
                    length=length,
                    batch_size=batch_size,
                    seed=seed,
                    rank=rank,
                    ranks=ranks,
                    state=state,
                )
                for rank in range(ranks)
            ]
            for _ in range(steps):
                for loader in loaders:
                    rows += [row.tolist() for row in next(loader)[0]]
            state = loaders[-1].state()
        alone = Loader(split, length=length, batch_size=1, seed=seed)
        assert rows == [next(alone)[0][0].tolist() for _ in rows]
        assert state is not None
        assert state["samples"] == len(rows)
        assert all(type(value) is int for value in state.values())


@given(st.integers(1, 3000), st.integers(0, 2**32), st.integers(0, 50))
def test_permute_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(count), count, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(count))
    assert permute(np.array([count // 2]), count, seed, epoch)[0] == order[count // 2]


def test_permute_shuffles_well() -> None:
    """Of the shuffles of 4, each comes up about equally often; in one of 100,000 neighbours are unrelated."""
    found = Counter(tuple(permute(np.arange(4), 4, seed, epoch)) for seed in range(20) for epoch in range(60))
    assert len(found) == 24
    expected = 1200 / 24
    assert (
        sum((n - expected) ** 2 / expected for n in found.values()) < 50
    )  # chi squared, 23 degrees: p < 0.001
    order = permute(np.arange(100_000), 100_000, 0, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02
    assert (permute(np.arange(100_000), 100_000, 0, 1) == order).sum() < 20
    assert permute(np.array([10**12]), 10**13, 0, 0)[0] < 10**13


def test_the_order_is_fixed_for_good(tmp_path: Path) -> None:
    """A study resumed with a later version must see the same samples."""
    split = make_split(tmp_path, 1001)
    loader = Loader(split, length=100, batch_size=10, seed=7)
    assert loader.order(0, 20).tolist() == FIXED_ORDER
    assert loader.order(5, 15).tolist() == FIXED_ORDER[5:15]


FIXED_ORDER = [6, 9, 0, 4, 7, 2, 1, 8, 5, 3, 9, 2, 6, 5, 8, 3, 1, 4, 0, 7]


def test_seed_and_epoch_change_the_order(tmp_path: Path) -> None:
    split = make_split(tmp_path, 5000)
    orders = [Loader(split, length=10, batch_size=1, seed=seed).order(0, 1000) for seed in (0, 1)]
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0][:499], orders[0][500:999])
    loader = Loader(split, length=10, batch_size=100)
    assert [loader.epoch for _ in zip(range(7), loader, strict=False)] == [0, 0, 0, 0, 1, 1, 1]


def test_an_epoch_longer_than_a_block_of_the_order(tmp_path: Path) -> None:
    split = make_split(tmp_path, 10_001)
    order = Loader(split, length=1, batch_size=1).order(0, 20_000)
    assert np.array_equal(np.sort(order[:10_000]), np.arange(10_000))
    assert np.array_equal(np.sort(order[10_000:]), np.arange(10_000))


@settings(deadline=None, max_examples=20)
@given(sizes)
def test_document_ids_follow_the_index(size: tuple[int, int, int]) -> None:
    tokens, length, shard_tokens = size
    with tempfile.TemporaryDirectory() as folder:
        split = make_split(Path(folder), max(tokens, length + 1), shard_tokens=shard_tokens)
        document_of: list[int] = []
        documents = 0
        for shard in split.shards:
            for start, end in itertools.pairwise([0, *shard.load_ends().tolist()]):
                document_of += [documents] * (end - start)
                documents += 1
        loader = Loader(split, length=length, batch_size=2, document_ids=True)
        assert loader.windows.documents == documents
        for _ in range(len(loader.windows)):
            inputs, _, ids = next(loader)
            assert ids.tolist() == [[document_of[token] for token in row] for row in inputs.tolist()]
        everything = range(len(loader.windows))
        of_targets = loader.windows.target_documents(everything)
        tokens = loader.windows.read(everything)[0] + 1
        assert of_targets.tolist() == [[document_of[token] for token in row] for row in tokens.tolist()]


def test_documents_without_tokens_lose_no_boundary(tmp_path: Path) -> None:
    np.arange(12, dtype="<u2").tofile(tmp_path / "a.ds")
    np.array([5] * 6 + [6, 12], dtype="<u8").tofile(tmp_path / "a.ds.index")
    ids = Windows(open_split(tmp_path, "train"), 4).document_ids([0, 1])
    assert np.diff(ids.numpy()).astype(bool).tolist() == [[False, False, False], [True, True, False]]


@settings(deadline=None, max_examples=30)
@given(sizes, st.booleans())
def test_masked_documents_have_every_target_but_their_first_token_once(
    size: tuple[int, int, int], whole: bool
) -> None:
    """In windows of the stream and in packed ones, where all of a document stands together if it fits."""
    tokens, length, shard_tokens = size
    with tempfile.TemporaryDirectory() as folder:
        split = make_split(Path(folder), max(tokens, length + 1, 8), shard_tokens=max(8, shard_tokens))
        documents = []
        for shard in split.shards:
            before = sum(map(len, documents))
            for start, end in itertools.pairwise([0, *shard.load_ends().tolist()]):
                documents.append(range(before + start, before + end))
        expected = [token for document in documents for token in document[1:]]
        if whole and length == 1:
            return
        loader = Loader(
            split, length=length, batch_size=1, document_ids=True, packing="whole" if whole else "stream"
        )
        found, together = [], []
        for _ in range(len(loader.windows)):
            inputs, targets, ids = next(loader)
            found += served(inputs[0], targets[0])
            headgate.ops.document_starts(ids)  # raises if one returns
            for number in range(len(documents)):
                here = inputs[0][ids[0] == number].tolist()
                assert set(here) <= set(documents[number])
                together.append(here)
        assert sorted(found) == expected
        if whole:
            for document in documents:
                if 1 < len(document) <= length:
                    assert list(document) in together


def test_packing_is_best_fit_and_goes_on_exactly(tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(50):
        capacity = draw.randint(2, 40)
        lengths = [draw.randint(1, capacity) for _ in range(draw.randint(1, 60))]
        room: list[int] = []
        for length in sorted(lengths, reverse=True):
            fitting = [n for n, left in enumerate(room) if left >= length]
            if fitting:
                room[min(fitting, key=lambda n: room[n])] -= length
            else:
                room.append(capacity - length)
        found = pack(np.array(lengths), capacity)
        assert sorted(capacity - np.bincount(found, lengths)) == sorted(room)
    split = make_split(tmp_path, 3000, shard_tokens=700)
    options = {"length": 50, "batch_size": 3, "seed": 5, "document_ids": True, "packing": "whole"}
    whole = Loader(split, **options)
    assert isinstance(whole.windows, PackedDocuments)
    assert whole.windows.padding < 0.02
    rows = [next(whole) for _ in range(9)]
    before = Loader(split, **options)
    for _ in range(4):
        next(before)
    after = Loader(split, **options, state=before.state())
    for row in rows[4:]:
        assert all(torch.equal(a, b) for a, b in zip(row, next(after), strict=True))
    with pytest.raises(HeadgateError, match="state has no 'sequences'"):
        Loader(split, **options, state=Loader(split, length=50, batch_size=3, seed=5).state())
    with pytest.raises(HeadgateError, match="packing='whole' puts documents together"):
        Loader(split, length=50, batch_size=3, packing="whole")


def test_a_loss_mask_takes_targets_out(tmp_path: Path) -> None:
    split = make_split(tmp_path, 200, shard_tokens=37, loss=True)
    assert len(split.shards) > 3
    loader = Loader(split, length=30, batch_size=1)
    targets = [t for _ in range(len(loader.windows)) for t in served(*next(loader))]
    assert sorted(targets) == [token for token in range(1, 200) if token % 5]


def test_windows_in_plain_order_are_a_fixed_evaluation_set(tmp_path: Path) -> None:
    split = make_split(tmp_path, 11)
    tokens, targets = Windows(split, 4).read(range(3))
    assert tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [6, 7, 8, 9]]
    assert targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [IGNORED, IGNORED, 9, 10]]
    assert tokens.is_contiguous()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    split = make_split(tmp_path, 50)
    with pytest.raises(HeadgateError, match="split 'train' has 50 tokens, too few for a window of 50"):
        Loader(split, length=50, batch_size=1)
    with pytest.raises(HeadgateError, match="length=0 is too small"):
        Loader(split, length=0, batch_size=1)
    with pytest.raises(HeadgateError, match="rank=2, ranks=2 do not go together"):
        Loader(split, length=5, batch_size=1, rank=2, ranks=2)
    (tmp_path / "00000.ds.metadata").write_text("name|2\n50\n")
    (tmp_path / "00000.ds.index").unlink()
    bare = open_split(tmp_path, "train")
    assert next(Loader(bare, length=5, batch_size=1))[0].shape == (1, 5)
    with pytest.raises(HeadgateError, match=r"00000.ds has no index, so documents"):
        Loader(bare, length=5, batch_size=1, document_ids=True)
    state = Loader(split, length=5, batch_size=1).state()
    for name, value in (("length", 6), ("seed", 1), ("tokens", 51)):
        with pytest.raises(HeadgateError, match=f"was made with {name}={value}, not"):
            Loader(split, length=5, batch_size=1, state={**state, name: value})
    for samples in (-3, 1.5):
        with pytest.raises(HeadgateError, match=f"state has samples={samples}; expected a whole number"):
            Loader(split, length=5, batch_size=1, state={**state, "samples": samples})  # type: ignore[dict-item]
    with pytest.raises(HeadgateError, match="has no 'samples'"):
        Loader(split, length=5, batch_size=1, state={"seed": 0})
