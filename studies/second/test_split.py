"""The judged runs of a study's part on the test split, which nothing was chosen by and which is opened once.

    python studies/second/test_split.py runs/second/text studies/second/results/text

Writes test.safetensors, the loss of every tuned run on every document of the split, laid out as a study's
losses.safetensors is. Controls are left out. Run again, it resumes.
"""

import argparse
from pathlib import Path

import torch

from headgate.compare.documents import TOKENS
from headgate.machine import keep_memory
from headgate.model.decoder import load
from headgate.model.tensors import read_tensors, replace_tensors
from headgate.report.reading import read_results
from headgate.train.evaluate import DocumentLosses, evaluate, open_run

FILE = "test.safetensors"


def losses_on_test(run: Path) -> DocumentLosses:
    opened = open_run(run, split="test")
    train = opened.settings.train
    found = evaluate(
        load(opened.checkpoint),
        opened.windows,
        batch_size=train.batch_size,
        precision=train.precision,
        positions=train.document_positions,
        by_document=True,
    )
    assert found.documents is not None, "the data was prepared by this project, which keeps documents"
    return found.documents


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path, help="the folder of the part's published results")
    options = parser.parse_args()
    keep_memory()
    file = options.out / FILE
    kept = read_tensors(file) if file.exists() else {}
    for variant in read_results(options.study)["variants"]:
        if variant["control"]:
            continue
        for run in variant["runs"]:
            name = f"{variant['label']}/{run['seed']}"
            if run["state"] == "finished" and name not in kept:
                losses = losses_on_test(options.study / run["folder"])
                kept[name] = torch.from_numpy(losses.loss)
                kept[TOKENS] = torch.from_numpy(losses.tokens.astype("float64"))
                replace_tensors(file, kept)
                print(f"{name:40} {losses.loss.sum() / losses.tokens.sum():.4f}", flush=True)


if __name__ == "__main__":
    main()
