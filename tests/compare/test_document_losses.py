"""documents.json: the documents on which a variant differs most, and how they begin."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headgate.compare.documents import (
    LOSSES,
    MOST,
    document_openings,
    read_losses,
    write_documents,
    write_losses,
)
from headgate.compare.folder import StudyFolder
from headgate.compare.judging import losses_by_label
from headgate.compare.results import main_jobs
from headgate.errors import HeadgateError
from headgate.model.tensors import read_tensors, replace_tensors
from headgate.train.evaluate import read_document_losses


def test_those_that_differ_most(study: Path) -> None:
    found = json.loads((study / "documents.json").read_text())
    folder = StudyFolder(study)
    jobs = main_jobs(folder, *folder.read())
    label = "dynamic-sparse"
    losses = {
        name: [read_document_losses(job.folder) for job in jobs if job.variant.label == name]
        for name in ("full", label)
    }
    tokens = losses["full"][0].tokens  # type: ignore[union-attr]
    difference = np.mean(
        [(ours.loss - theirs.loss) / tokens for ours, theirs in zip(*reversed(losses.values()), strict=True)],  # type: ignore[union-attr]
        axis=0,
    )
    of = found["variants"][label]
    assert found["count"] == len(tokens)
    assert of["quantiles"][2] == pytest.approx(np.median(difference))
    assert of["lower"] == np.mean(difference < 0)
    long_enough = difference[tokens >= tokens.mean() / 4]
    shown = [row["difference"] for row in of["most"]]
    assert shown == pytest.approx([*np.sort(long_enough)[:MOST], *np.sort(long_enough)[-MOST:]])
    assert np.mean(of["most"][0]["by_seed"]) == pytest.approx(of["most"][0]["difference"])


def test_how_they_begin(study: Path, data: Path) -> None:
    found = json.loads((study / "documents.json").read_text())
    texts = [json.loads(line)["text"] for line in (data.parent / "texts.jsonl").open()]
    assert found["openings"].keys() == found["tokens"].keys()
    for opening in found["openings"].values():
        start = opening.removesuffix("…")
        assert len(start) > 20
        assert any(text.startswith(start[:200]) for text in texts)


def test_openings_are_never_those_of_other_data(study: Path, tmp_path: Path) -> None:
    folder = StudyFolder(study)
    settings, base = folder.read()
    assert document_openings(settings.data, [0])
    assert document_openings(replace(settings.data, fingerprint="another"), [0]) is None
    # Where the data is gone, what was found before stays.
    path = Path(shutil.copy(study / "documents.json", tmp_path))
    before = path.read_text()
    gone = replace(settings.data, folder=str(tmp_path / "nowhere"))
    write_documents(path, main_jobs(folder, settings, base), gone)
    assert path.read_text() == before
    write_documents(path, [], gone)
    assert not path.exists()


def test_the_losses_are_those_of_the_runs_or_refused(study: Path, tmp_path: Path) -> None:
    folder = StudyFolder(study)
    expected, found = losses_by_label(main_jobs(folder, *folder.read())), read_losses(study / LOSSES)
    assert found.keys() == expected.keys()
    for label, of in expected.items():
        assert found[label].by_seed == pytest.approx(of.by_seed, rel=1e-12)
        assert all(np.array_equal(found[label].documents[seed], nats) for seed, nats in of.documents.items())
    path = Path(shutil.copy(study / LOSSES, tmp_path))
    replace_tensors(path, {**read_tensors(path), "full/0": read_tensors(path)["full/0"][1:]})
    with pytest.raises(HeadgateError, match="does not hold a study's losses"):
        read_losses(path)
    write_losses(path, {})
    assert read_losses(path) == {}
