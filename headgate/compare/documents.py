"""documents.json: how each variant's difference spreads over the documents, and those that differ most.
losses.safetensors: the losses themselves, of every judged run on every document.

A document's difference is the variant's nats per token minus the baseline's with the same seed, averaged over
the seeds. Documents shorter than a quarter of the mean are not picked: over a few tokens any difference is
large.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headgate import files
from headgate.compare.jobs import Job
from headgate.compare.judging import judged_loss
from headgate.compare.statistics import Losses
from headgate.data.loader import Windows
from headgate.data.shards import open_split
from headgate.data.tokenizers import Tokenizer
from headgate.errors import HeadgateError
from headgate.model.tensors import read_tensors, replace_tensors
from headgate.train.evaluate import DocumentLosses
from headgate.train.folder import DataRecord, describe_data

LOSSES = "losses.safetensors"
TOKENS = "tokens"
MOST = 3
"""Documents shown at either end."""
OPENING, OPENING_TOKENS = 240, 320
"""Characters of a document's opening, and the tokens read to get them."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PICKED_FROM = 0.25
"""The shortest document to pick, as a share of the mean length."""


def write_documents(path: Path, jobs: Sequence[Job], data: DataRecord) -> None:
    """Write the file, or remove it if the runs kept no losses of documents. If the data is gone, openings
    found earlier are kept."""
    found = document_differences(jobs)
    if found is None:
        path.unlink(missing_ok=True)
        return
    openings = document_openings(data, [int(number) for number in found["tokens"]])
    if openings is None:
        openings = files.read_sealed(path)["openings"] if path.is_file() else {}
    files.write_sealed(path, {**found, "openings": openings})


def write_losses(path: Path, losses: Mapping[str, Losses]) -> None:
    """Write the file, or remove it if the runs kept no losses of documents."""
    tokens = next((of.tokens for of in losses.values() if of.tokens is not None), None)
    if tokens is None:
        path.unlink(missing_ok=True)
        return
    found = {
        f"{label}/{seed}": torch.from_numpy(nats)
        for label, of in losses.items()
        for seed, nats in of.documents.items()
    }
    replace_tensors(path, {TOKENS: torch.from_numpy(tokens), **found})


def read_losses(path: Path) -> dict[str, Losses]:
    """By label; empty if there is no such file."""
    if files.is_missing(path):
        return {}
    tensors = {name: tensor.numpy() for name, tensor in read_tensors(path).items()}
    tokens = tensors.pop(TOKENS, None)
    keys = {name: name.rpartition("/") for name in tensors}
    if tokens is None or not all(
        label and seed.isdecimal() and tensors[name].shape == tokens.shape
        for name, (label, _, seed) in keys.items()
    ):
        raise HeadgateError(
            f"{str(path)!r} does not hold a study's losses; expected {TOKENS}, and LABEL/SEED as long as that"
        )
    found: dict[str, Losses] = {}
    for name, (label, _, seed) in sorted(keys.items(), key=lambda item: int(item[1][2])):
        mine = found.setdefault(label, Losses({}, {}, tokens))
        nats = tensors[name]
        found[label] = Losses(
            {**mine.by_seed, int(seed): float(nats.sum() / tokens.sum())},
            {**mine.documents, int(seed): nats},
            tokens,
        )
    return found


def document_differences(jobs: Sequence[Job]) -> dict[str, Any] | None:
    """Every variant against the first; None if no two of them share a seed and its documents."""
    kept: dict[str, dict[int, DocumentLosses]] = {}
    for job in jobs:
        documents = judged_loss(job)[1] if job.finished else None
        mine = kept.setdefault(job.variant.label, {})
        if documents is not None:
            mine[job.seed] = documents
    if not any(kept.values()):
        return None
    baseline = next(iter(kept))
    variants = {
        label: spread
        for label, mine in kept.items()
        if label != baseline and (spread := _spread(mine, kept[baseline])) is not None
    }
    if not variants:
        return None
    counts = next(iter(kept[baseline].values()))
    lengths = dict(zip(counts.document.tolist(), counts.tokens.tolist(), strict=True))
    named = {row["document"] for of in variants.values() for row in of["most"]}
    return {
        "count": len(lengths),
        "quantiles": list(QUANTILES),
        "tokens": {str(number): lengths[number] for number in sorted(named)},
        "variants": variants,
    }


def _spread(
    variant: Mapping[int, DocumentLosses], baseline: Mapping[int, DocumentLosses]
) -> dict[str, Any] | None:
    """Quantiles over the documents, the share of them with a lower loss, and those that differ most, lowest
    first."""
    pairs = [(variant[seed], baseline[seed]) for seed in sorted(variant) if seed in baseline]
    if not pairs:
        return None
    first = pairs[0][0]
    if not all(np.array_equal(one.document, first.document) for pair in pairs for one in pair):
        return None
    by_seed = np.stack([(mine.loss - theirs.loss) / first.tokens for mine, theirs in pairs])  # (S,N)
    if not np.isfinite(by_seed).all():
        return None
    means = by_seed.mean(0)
    long_enough = np.flatnonzero(first.tokens >= PICKED_FROM * first.tokens.mean())
    order = long_enough[np.argsort(means[long_enough], kind="stable")]
    chosen = [*order[:MOST], *order[MOST:][-MOST:]]
    return {
        "quantiles": np.quantile(means, QUANTILES).tolist(),
        "lower": float((means < 0).mean()),
        "most": [
            {
                "document": int(first.document[n]),
                "difference": float(means[n]),
                "by_seed": by_seed[:, n].tolist(),
            }
            for n in chosen
        ],
    }


def document_openings(data: DataRecord, numbers: Sequence[int]) -> dict[str, str] | None:
    """How each of these validation documents begins; None if the data is gone or has changed, or has no
    tokenizer to read it with."""
    definition = Path(data.folder) / "tokenizer.json"
    if not definition.is_file():
        return None
    train, val = (open_split(data.folder, name, verify=False) for name in ("train", "val"))
    if describe_data(data.folder, train, val).fingerprint != data.fingerprint:
        return None
    windows, tokenizer = Windows(val, 1), Tokenizer.of_file(definition)
    openings = {}
    for number in numbers:
        tokens = windows.beginning(number, OPENING_TOKENS)
        closed = tokens[-1:] == [tokenizer.end_of_text_id]
        text = tokenizer.decode(tokens[:-1] if closed else tokens).removesuffix("\ufffd")
        openings[str(number)] = text[:OPENING] + "…" * (len(text) > OPENING or len(tokens) == OPENING_TOKENS)
    return openings
