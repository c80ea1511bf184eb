"""The same shards as datatrove's: it reads ours, and we train from what it wrote."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from data_examples import make_texts, write_parquet

from headgate.data.loader import IGNORED, Loader
from headgate.data.prepare import Request, prepare
from headgate.data.shards import check_data, open_split
from headgate.data.tokenizers import make_tokenizer

datatrove = pytest.importorskip("datatrove", reason="datatrove is absent (the dev extra); not run")

from datatrove.data import Document  # noqa: E402
from datatrove.pipeline.tokens import DocumentTokenizer  # noqa: E402
from datatrove.utils.dataset import DatatroveFolderDataset  # noqa: E402

TEXTS = make_texts(200)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(make_tokenizer("bpe:300", training_texts=lambda: TEXTS).definition)
    return path


def run_datatrove(folder: Path, tokenizer: Path, texts: list[str], **options: object) -> None:
    step = DocumentTokenizer(
        str(folder), tokenizer_name_or_path=str(tokenizer), eos_token="<|endoftext|>", seed=0, **options
    )
    metadata = {"no_loss_ranges": [(0, 3)]} if options.get("save_loss_metadata") else {}
    list(step.run((Document(text, str(n), metadata=metadata) for n, text in enumerate(texts)), 0, 1) or [])


def test_datatrove_writes_the_same_bytes(tmp_path: Path, tokenizer_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", TEXTS)
    request = Request(str(tmp_path / "a.parquet"), str(tokenizer_path), splits=(1, 0, 0))
    prepare(request, tmp_path / "ours", workers=2)
    run_datatrove(tmp_path / "theirs", tokenizer_path, TEXTS, shuffle_documents=False)
    (theirs,) = (tmp_path / "theirs").glob("*.ds")
    ours = tmp_path / "ours" / "train" / "00000.ds"
    assert ours.read_bytes() == theirs.read_bytes()
    assert Path(f"{ours}.index").read_bytes() == Path(f"{theirs}.index").read_bytes()


def test_datatrove_reads_ours(tmp_path: Path, tokenizer_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", TEXTS)
    prepare(Request(str(tmp_path / "a.parquet"), str(tokenizer_path)), tmp_path / "out", workers=1)
    split = open_split(tmp_path / "out", "train")
    stream, ends = split.shards[0].load_tokens(), split.shards[0].load_ends().tolist()
    starts = dict.fromkeys([0, *ends], 0)
    theirs = DatatroveFolderDataset(
        str(tmp_path / "out" / "train"),
        seq_len=31,
        token_size=2,
        filename_pattern="*.ds",
        return_positions=True,
    )
    assert len(theirs) == split.tokens // 32
    for number in range(len(theirs)):
        window = theirs[number]
        assert window["input_ids"].tolist() == stream[number * 32 : number * 32 + 32].tolist()
        position, expected = -1, []
        for place in range(number * 32, number * 32 + 32):
            position = 0 if place in starts else position + 1
            expected.append(position)
        assert window["positions"].tolist() == expected


@pytest.mark.parametrize("index", [True, False])
def test_we_train_from_what_datatrove_wrote(tmp_path: Path, tokenizer_path: Path, index: bool) -> None:
    run_datatrove(tmp_path, tokenizer_path, TEXTS, max_tokens_per_file=500, save_index=True)
    if not index:
        for path in tmp_path.glob("*.index"):
            path.unlink()
    split = open_split(tmp_path, "train")
    assert len(split.shards) > 3
    assert check_data(tmp_path) is None
    tokenizer = make_tokenizer(str(tokenizer_path))
    documents, end = [], tokenizer.end_of_text_id
    for shard in split.shards:
        tokens = shard.load_tokens()
        stops = np.flatnonzero(tokens == end) + 1
        documents += [
            tokenizer.decode(tokens[a : b - 1]) for a, b in itertools.pairwise([0, *stops.tolist()])
        ]
    assert sorted(documents) == sorted(TEXTS)
    loader = Loader(split, length=64, batch_size=4)
    counted = sum(int((next(loader)[1] != IGNORED).sum()) for _ in range(len(loader.windows) // 4))
    assert counted > 0.9 * split.tokens - 4 * 64


def test_a_loss_mask_of_datatrove(tmp_path: Path, tokenizer_path: Path) -> None:
    texts = [text for text in TEXTS if len(text) > 30]
    (tmp_path / "cluster").mkdir()
    run_datatrove(
        tmp_path / "cluster" / "train",
        tokenizer_path,
        texts,
        save_loss_metadata=True,
        shuffle_documents=False,
    )
    split = open_split(tmp_path / "cluster", "train")
    (shard,) = split.shards
    mask = shard.load_loss()
    assert 0 < mask.mean() < 1
    assert not mask[0]
    loader = Loader(split, length=50, batch_size=1)
    targets = [next(loader)[1] for _ in range(len(loader.windows))]
    assert sum(int((target != IGNORED).sum()) for target in targets) == int(mask[1:].sum())


def test_four_bytes_a_token(shared: Path, tmp_path: Path) -> None:
    qwen = shared / "tokenizers" / "qwen3" / "tokenizer.json"
    run_datatrove(tmp_path, qwen, TEXTS[:20], shuffle_documents=False, save_final_metadata=False)
    split = open_split(tmp_path, "train")
    assert split.shards[0].dtype == "<u4"
    tokenizer = make_tokenizer(str(qwen))
    expected = [
        t for tokens in tokenizer.encode(TEXTS[:20]) for t in [*tokens.tolist(), tokenizer.end_of_text_id]
    ]
    assert split.shards[0].load_tokens().tolist() == expected
