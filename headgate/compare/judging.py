"""From the judged runs in a study folder to verdicts: what `results.py` shows, and what decides whether a
study with planned looks continues."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from headgate.compare.folder import Study
from headgate.compare.jobs import Job
from headgate.compare.statistics import ABLATIONS, CONTROLS, NAMED, Difference, Losses, compare_losses
from headgate.compare.variants import Variant
from headgate.train.evaluate import DocumentLosses, read_document_losses
from headgate.train.folder import RunFolder


def judged_loss(job: Job) -> tuple[float, DocumentLosses | None]:
    """The loss by which a finished run is judged, in nats per token, and that of each document.

    It is that of all documents that the run kept, or else of its last evaluation; infinite if it diverged."""
    documents = read_document_losses(job.folder)
    if documents is not None and len(documents.loss):
        loss = float(documents.loss.sum() / documents.tokens.sum())
    else:
        final = RunFolder(job.folder).read_summary()["final"]["loss"]
        documents, loss = None, math.inf if final is None else float(final)
    return (loss, documents) if math.isfinite(loss) else (math.inf, None)


def losses_by_label(jobs: Iterable[Job]) -> dict[str, Losses]:
    """The losses of the finished jobs; a variant without any is left out."""
    seeds: dict[str, dict[int, float]] = {}
    documents: dict[str, dict[int, np.ndarray]] = {}
    first: DocumentLosses | None = None
    for job in jobs:
        label = job.variant.label
        seeds.setdefault(label, {})
        documents.setdefault(label, {})
        if not job.finished:
            continue
        seeds[label][job.seed], kept = judged_loss(job)
        if kept is None:
            continue
        first = first or kept
        if np.array_equal(kept.document, first.document) and np.array_equal(kept.tokens, first.tokens):
            documents[label][job.seed] = kept.loss
    tokens = None if first is None else first.tokens.astype(np.float64)
    return {label: Losses(by_seed, documents[label], tokens) for label, by_seed in seeds.items()}


def judge_variants(
    study: Study, losses: Mapping[str, Losses], reached: int | None = None
) -> dict[str, Difference]:
    """Every variant against the baseline, in its family, after this many of the planned looks."""
    baseline, *others = study.variants
    return compare_losses(
        losses[baseline.label],
        {variant.label: losses[variant.label] for variant in others},
        families={variant.label: family(variant) for variant in others},
        looks=study.looks,
        reached=reached,
    )


def family(variant: Variant) -> str:
    """The variants that are corrected for together."""
    if variant.control:
        return CONTROLS
    return ABLATIONS if variant.ablation else NAMED


def undecided(study: Study, jobs: Sequence[Job], reached: int) -> tuple[Variant, ...]:
    """The variants that more seeds could still tell something about, after the baseline; empty if none."""
    if not reached:
        return study.variants
    found = judge_variants(study, losses_by_label(jobs), reached)
    left = [variant for variant in study.variants[1:] if not found[variant.label].decided]
    return (study.variants[0], *left) if left else ()
