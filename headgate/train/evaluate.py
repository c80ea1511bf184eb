"""Evaluation: the loss over fixed tokens, how it varies with position, and what the gates do meanwhile."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headgate.config import Config
from headgate.data.answers import AnswerGroup, distances, position_bins
from headgate.data.loader import IGNORED, Windows, validation_windows
from headgate.data.shards import check_range, open_split, read_manifest, sha256
from headgate.data.tokenizers import Tokenizer
from headgate.errors import HeadgateError
from headgate.files import finite, kind
from headgate.machine import avoid_broken_tiles
from headgate.mechanisms.contract import probe
from headgate.model.decoder import Decoder, header_config, load, model_file
from headgate.model.tensors import read_tensors, replace_tensors
from headgate.ops.documents import document_starts
from headgate.ops.gpu import has_double
from headgate.train import checkpoint
from headgate.train.distributed import World, join
from headgate.train.folder import RunFolder, describe_data, read_config, read_data

FIRST_TOKENS = 24
"""Enough of a document's beginning to recognise it."""
DOCUMENTS = "documents.safetensors"
"""The file of a run folder with the loss of each validation document."""


@dataclass(frozen=True)
class PositionLoss:
    """The mean loss of the tokens at positions from `first` up to but not including `end`."""

    first: int
    end: int
    loss: float


@dataclass(frozen=True)
class GateStatistics:
    """One layer's gate over the first batch; values at or near 0 and 1 are closed and open heads."""

    layer: int
    mean: float
    spread: float
    """Standard deviation."""
    below_01: float
    """Share of the values below 0.1."""
    above_09: float
    """Share of the values above 0.9."""
    by_head: tuple[float, ...]
    """Mean of each head."""


@dataclass(frozen=True)
class DistanceAnswers:
    """The answers whose key last appeared `first` to `end` - 1 tokens before the query."""

    first: int
    end: int
    tokens: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class PairsAnswers:
    """The answers in samples with this many key-value pairs."""

    pairs: int
    tokens: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Answers:
    """For data whose loss mask marks answers, as a task's does: how many were the likeliest token."""

    accuracy: float
    by_distance: tuple[DistanceAnswers, ...]
    by_pairs: tuple[PairsAnswers, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    tokens: int
    """How many were predicted."""
    loss: float
    """Mean cross-entropy in nats per token."""
    perplexity: float | None
    """exp(loss); None when that overflows a float."""
    bits_per_byte: float | None
    """From the split's bytes per token; None when its bytes are unknown."""
    by_position: tuple[PositionLoss, ...]
    gates: tuple[GateStatistics, ...]
    answers: Answers | None = None
    """Present if the split has a loss mask."""
    documents: "DocumentLosses | None" = None
    """Per document, if asked for and if the documents are known."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: a number that is not finite becomes null. Leaves out the documents."""
        plain: dict[str, Any] = finite(asdict(replace(self, documents=None)))
        plain.pop("documents")
        return plain


@dataclass(frozen=True, eq=False)
class DocumentLosses:
    """The loss of each document of a split with at least one target that counts, in the split's order."""

    loss: np.ndarray
    """float64: nats, summed over the document's counted targets."""
    tokens: np.ndarray
    """int64: how many targets count."""
    document: np.ndarray
    """int64: the document's number in the split, ascending."""


def evaluate(
    decoder: Decoder,
    windows: Windows,
    *,
    tokens: int | None = None,
    batch_size: int = 1,
    precision: str = "fp32",
    positions: Literal["document", "stream"] = "document",
    world: World | None = None,
    by_document: bool = False,
    document_tokens: int | None = None,
) -> Evaluation:
    """Evaluate the first `tokens` tokens (whole windows, at least one), or all; every rank must call it.

    `batch_size` is the number of windows in one forward pass over all ranks. `by_document` adds the loss of
    each document, over the first `document_tokens` tokens or all. Where the windows keep documents apart,
    `positions` says how positions are counted, and losses by position use the position in the document.
    """
    world = world or World(0, 1, next(decoder.parameters()).device)
    count = _whole_windows(windows, tokens)
    share = -(-batch_size // world.size)
    documents = _DocumentSums(windows, world) if by_document and windows.has_documents else None
    losses = torch.zeros(windows.length, dtype=torch.float64)
    counted = torch.zeros(windows.length, dtype=torch.float64)
    groups = _answer_groups(windows)
    answers = torch.zeros(3, len(groups), dtype=torch.float64)  # tokens, loss, right; by group
    gates: dict[str, Tensor] = {}
    passes = [(first, count) for first in range(0, count, share * world.size)]
    if documents is not None:
        end = _whole_windows(windows, document_tokens)
        passes += [(first, end) for first in range(count, end, share * world.size)]
    with torch.no_grad():
        for first, end in passes:
            mine = first + world.rank * share + np.arange(share)
            # When the windows run out, a rank computes one for nothing: sharded weights need every rank.
            inside, mine = torch.from_numpy(mine < end).to(world.device), np.minimum(mine, end - 1)
            x, targets = (t.to(world.device) for t in windows.read(mine))
            targets[~inside] = IGNORED
            how: dict[str, Any] = {}
            if windows.separate:
                how = {"documents": windows.document_ids(mine), "positions": positions}
                how["count_boundaries"] = windows.count_boundaries
            with autocast(world.device, precision):
                if first == 0:
                    with probe(decoder) as seen, _uncompiled(decoder):
                        loss = decoder(x, targets, reduction="none", **how)
                    gates = {name: _moments(values[0][inside]) for name, values in sorted(seen.items())}
                else:
                    loss = decoder(x, targets, reduction="none", **how)
                if documents is not None:
                    documents.add(mine, targets, loss)
                if first >= count:
                    continue
                if windows.has_loss:
                    right = decoder(x, predict=True, **how) == targets
                    marks = windows.marks(mine) if windows.answer_groups else None
                    answers += _by_group(x, targets, loss, right, marks, len(groups))
            place = _positions(how.get("documents"), x)
            losses.index_add_(0, place, loss.cpu().double().flatten())
            counted.index_add_(0, place, (targets != IGNORED).cpu().double().flatten())
    losses, counted = (world.sum_tensor(t) for t in (losses, counted))
    statistics = tuple(
        _statistics(int(name.split(".")[1]), world.sum_tensor(moments))
        for name, moments in gates.items()
        if name.startswith("layers.") and name.endswith(".gate")
    )
    if windows.has_loss:
        answers = world.sum_tensor(answers)
    total = int(counted.sum())
    mean = losses.sum().item() / max(total, 1)
    split = windows.split
    return Evaluation(
        tokens=total,
        loss=mean,
        perplexity=math.exp(mean) if mean < 700 else None,
        bits_per_byte=mean / math.log(2) * split.tokens / split.bytes if split.bytes else None,
        by_position=tuple(
            PositionLoss(first, end, (losses[first:end].sum() / counted[first:end].sum()).item())
            for first, end in position_bins(windows.length)
            if counted[first:end].any()
        ),
        gates=statistics,
        answers=_answers(answers, groups) if windows.has_loss else None,
        documents=None if documents is None else documents.total(),
    )


def _positions(documents: Tensor | None, x: Tensor) -> Tensor:
    """The position in its document of every token (B*T)."""
    places = torch.arange(x.shape[1]).expand_as(x)
    starts = None if documents is None else document_starts(documents)
    return (places if starts is None else places - starts).flatten()


def _whole_windows(windows: Windows, tokens: int | None) -> int:
    return len(windows) if tokens is None else min(len(windows), max(1, tokens // windows.length))


class _DocumentSums:
    """Adds up losses and targets by document."""

    def __init__(self, windows: Windows, world: World) -> None:
        self.windows, self.world = windows, world
        self.sums = torch.zeros(2, windows.documents, dtype=torch.float64)  # loss, targets

    def add(self, windows: np.ndarray, targets: Tensor, loss: Tensor) -> None:
        counted = (targets != IGNORED).cpu()
        numbers = self.windows.target_documents(windows)[counted]
        values = torch.stack([loss.cpu().double()[counted], torch.ones(len(numbers), dtype=torch.float64)])
        self.sums.index_add_(1, numbers, values)

    def total(self) -> DocumentLosses:
        """The sums over all ranks."""
        loss, tokens = self.world.sum_tensor(self.sums)
        seen = torch.nonzero(tokens).squeeze(1)
        return DocumentLosses(loss[seen].numpy(), tokens[seen].long().numpy(), seen.numpy())


def write_document_losses(run: str | os.PathLike[str], losses: DocumentLosses) -> None:
    replace_tensors(
        Path(run) / DOCUMENTS, {name: torch.from_numpy(values) for name, values in vars(losses).items()}
    )


def read_document_losses(run: str | os.PathLike[str]) -> DocumentLosses | None:
    """The loss of each validation document in a run's last evaluation; None if none were kept: the run is not
    finished, was made by an earlier version, or its data has no index of documents."""
    path = Path(run) / DOCUMENTS
    if kind(path) == "missing":
        return None
    found = read_tensors(path)
    expected = {"loss": torch.float64, "tokens": torch.int64, "document": torch.int64}
    types = {name: values.dtype for name, values in found.items()}
    if types != expected or len({values.shape for values in found.values()}) > 1 or found["loss"].ndim != 1:
        raise HeadgateError(
            f"{str(path)!r} does not hold the losses of documents; expected loss, tokens and document, all "
            "of one length"
        )
    return DocumentLosses(*(found[name].numpy() for name in expected))


def _answer_groups(windows: Windows) -> tuple[AnswerGroup, ...]:
    """A task's own groups, or one for each bin of distances."""
    return windows.answer_groups or tuple(AnswerGroup(place) for place in position_bins(windows.length))


def _by_group(
    x: Tensor, targets: Tensor, loss: Tensor, right: Tensor, marks: np.ndarray | None, groups: int
) -> Tensor:
    """Sums over the answers in each group; without marks the distances are computed here."""
    asked = (targets != IGNORED).cpu()
    if marks is not None:
        group = torch.from_numpy(marks)[asked] - 1
    else:
        far = torch.from_numpy(distances(x.cpu().numpy(), targets.cpu().numpy(), asked.numpy()))[asked]
        firsts = torch.tensor([first for first, _ in position_bins(x.shape[1])])
        group = torch.bucketize(far, firsts, right=True) - 1
    values = torch.stack([asked.double(), loss.cpu().double(), right.cpu().double()])[:, asked]
    return torch.zeros(3, groups, dtype=torch.float64).index_add_(1, group, values)


def _answers(sums: Tensor, groups: tuple[AnswerGroup, ...]) -> Answers:
    def judged(**kind: object) -> tuple[int, float, float]:
        """Tokens, mean loss and accuracy of the answers of one kind."""
        ((name, value),) = kind.items()
        of_kind = sums[:, [n for n, group in enumerate(groups) if getattr(group, name) == value]].sum(1)
        tokens, loss, right = of_kind.tolist()
        return int(tokens), loss / max(1.0, tokens), right / max(1.0, tokens)

    # Answers at distance 0 have a key that was not seen before.
    places = sorted({group.distance for group in groups if group.distance is not None and group.distance[0]})
    counts = sorted({group.pairs for group in groups if group.pairs is not None})
    total, _, right = sums.sum(1).tolist()
    return Answers(
        right / max(1.0, total),
        tuple(
            DistanceAnswers(first, end, *found)
            for first, end in places
            if (found := judged(distance=(first, end)))[0]
        ),
        tuple(PairsAnswers(count, *found) for count in counts if (found := judged(pairs=count))[0]),
    )


@contextmanager
def autocast(device: torch.device, precision: str) -> Iterator[None]:
    """The arithmetic of a forward pass."""
    half = precision == "bf16"
    if device.type == "cpu" and half:
        avoid_broken_tiles()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half), rounded_products(precision):
        yield


@contextmanager
def rounded_products(precision: str) -> Iterator[None]:
    """The arithmetic of matrix products in fp32, forward and backward, for all of this process."""
    if precision != "bf16-products":
        yield
        return
    avoid_broken_tiles()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class OpenedRun:
    """A checkpoint of a run, and the tokens to judge it by."""

    settings: Config
    checkpoint: Path
    windows: Windows


def open_run(
    run: str | os.PathLike[str],
    *,
    split: str = "val",
    which: str = "last",
    data: str | os.PathLike[str] | None = None,
    context: int | None = None,
) -> OpenedRun:
    """A checkpoint of a run folder (`which`: last, best or a step) and a split of its training data, or of
    other data in the same tokens, in sequences as long as in training unless `context` says
    otherwise."""
    settings, record = read_config(run), read_data(run)
    folder = checkpoint.find(RunFolder(run), which)
    checkpoint.refuse_other_settings(checkpoint.read_state(folder), settings, RunFolder(run))
    if data is None:
        trained_on = [open_split(record.folder, name, verify=False) for name in ("train", "val")]
        if describe_data(record.folder, *trained_on).fingerprint != record.fingerprint:
            raise HeadgateError(
                f"{record.folder!r} is no longer the data that {str(run)!r} was trained on; say with --data "
                "where it is now, or which other data to use"
            )
    else:
        _refuse_other_tokens(Path(run), data)
    length = settings.train.context if context is None else context
    chosen = open_split(record.folder if data is None else data, split)
    check_range(settings.model.vocab_size, chosen)
    return OpenedRun(settings, folder, validation_windows(chosen, length, settings.train))


def _refuse_other_tokens(run: Path, data: str | os.PathLike[str]) -> None:
    """Raise if the data was prepared with a tokenizer other than the run's: its tokens mean other words."""
    manifest, own = read_manifest(data), run / "tokenizer.json"
    if manifest is not None and own.is_file() and manifest.tokenizer.sha256 != sha256(own):
        raise HeadgateError(
            f"{str(data)!r} was prepared with a different tokenizer from {str(run)!r}; prepare it with "
            f"--tokenizer {own}"
        )


def evaluate_run(
    run: str | os.PathLike[str],
    *,
    split: str = "val",
    tokens: int | None = None,
    which: str = "last",
    data: str | os.PathLike[str] | None = None,
    context: int | None = None,
    device: str | None = None,
    by_document: int = 0,
) -> dict[str, Any]:
    """Evaluate a checkpoint of a run folder (`which`: last, best or a step) on a split of its data, or any
    other model on the given data. `by_document` adds this many of the hardest and easiest documents."""
    for name, value in (("tokens", tokens), ("context", context)):
        if value is not None and value < 1:
            raise HeadgateError(f"{name}={value} is too small; expected at least 1, or none for all")
    if (Path(run) / "checkpoints").is_dir():
        opened = open_run(run, split=split, which=which, data=data, context=context)
        folder, windows, train = opened.checkpoint, opened.windows, opened.settings.train
        batch_size, precision, step = train.batch_size, train.precision, checkpoint.read_state(folder).step
        positions = train.document_positions
    else:
        folder, batch_size, precision, step = model_file(run), 1, "fp32", None
        positions = "document"
        if data is None or context is None:
            raise HeadgateError(
                f"{str(run)!r} is a model, not a run, so it has no data or context of its own; give --data "
                "and --context"
            )
        _check_vocabulary(folder, data)
        opened_split = open_split(data, split)
        check_range(header_config(folder).vocab_size, opened_split)
        windows = Windows(opened_split, context)
    with join(device) as world:
        decoder = load(folder).to(world.device)
        result = evaluate(
            decoder,
            windows,
            tokens=tokens,
            batch_size=batch_size,
            precision=precision,
            positions=positions,
            world=world,
            by_document=by_document > 0,
            document_tokens=tokens,
        )
    found = {"run": str(run), "checkpoint": folder.name, "step": step, "split": split, **result.to_dict()}
    if by_document:
        if result.documents is None:
            raise HeadgateError(
                f"the documents of split {split!r} are unknown because its shards have no index; drop "
                "--by-document"
            )
        found["documents"] = _extremes(result.documents, windows, by_document, run, data)
    return found


def _extremes(
    losses: DocumentLosses,
    windows: Windows,
    count: int,
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
) -> dict[str, Any]:
    """The hardest and easiest documents by mean loss, each with how it begins."""
    beside = [Path(run) / "tokenizer.json", *([] if data is None else [Path(data) / "tokenizer.json"])]
    file = next((path for path in beside if path.is_file()), None)
    tokenizer = None if file is None else Tokenizer.of_file(file)
    means = losses.loss / losses.tokens
    order = np.argsort(means, kind="stable")

    def described(n: int) -> dict[str, Any]:
        document = int(losses.document[n])
        begin = windows.beginning(document, FIRST_TOKENS)
        text = None if tokenizer is None else tokenizer.decode(begin)
        tokens = int(losses.tokens[n])
        return {"document": document, "tokens": tokens, "loss": float(means[n]), "text": text}

    hardest, easiest = order[::-1][:count], order[:count]
    described_all = {"hardest": [described(n) for n in hardest], "easiest": [described(n) for n in easiest]}
    plain: dict[str, Any] = finite({"count": len(order), **described_all})
    return plain


def _check_vocabulary(model: Path, data: str | os.PathLike[str]) -> None:
    manifest, known = read_manifest(data), header_config(model).vocab_size
    if manifest is not None and manifest.tokenizer.vocab_size > known:
        raise HeadgateError(
            f"{str(data)!r} has {manifest.tokenizer.vocab_size} kinds of tokens, but the model knows "
            f"{known}; prepare it with the model's tokenizer"
        )


@contextmanager
def _uncompiled(decoder: Decoder) -> Iterator[None]:
    """A probe runs different Python in each layer, so a compiled decoder would recompile every layer for it.
    What the ops compile for themselves stays compiled: otherwise FlexAttention computes all pairs."""
    compiled = [layer._compiled_call_impl for layer in decoder.layers]
    try:
        for layer in decoder.layers:
            layer._compiled_call_impl = None
        yield
    finally:
        for layer, impl in zip(decoder.layers, compiled, strict=True):
            layer._compiled_call_impl = impl


def _moments(gate: Tensor) -> Tensor:
    """For each head of a gate (B,T,H): count, sum, sum of squares, number below 0.1 and above 0.9: (5,H)."""
    values = (gate if has_double(gate.device) else gate.cpu()).double().flatten(0, 1)
    below, above = (values < 0.1).double(), (values > 0.9).double()
    return torch.stack([t.sum(0) for t in (torch.ones_like(values), values, values.square(), below, above)])


def _statistics(layer: int, moments: Tensor) -> GateStatistics:
    count, total, squares, below, above = moments.sum(1).tolist()
    mean = total / count
    spread = math.sqrt(max(0.0, squares / count - mean * mean)) if math.isfinite(mean) else math.nan
    by_head = tuple((moments[1] / moments[0]).tolist())
    return GateStatistics(layer, mean, spread, below / count, above / count, by_head)
