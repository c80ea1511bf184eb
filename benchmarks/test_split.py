"""The runs of a study judged by the test split, which nothing was chosen by.

    python benchmarks/test_split.py runs/study/text docs/findings/text/test.json [--tokens 65536]

Writes the loss of each variant and seed: of the last checkpoint, on the first tokens of the split.
"""

import argparse
from pathlib import Path

from headgate.config import write_json
from headgate.ops.native.memory import keep_memory
from headgate.report.collect import read_study
from headgate.train.evaluate import evaluate_run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--ablations", action="store_true", help="the ablations too")
    options = parser.parse_args()
    keep_memory()
    losses: dict[str, dict[int, float]] = {}
    for variant in read_study(options.study)["variants"]:
        if variant["ablation"] and not options.ablations:
            continue
        label = variant["label"]
        losses[label] = {}
        for run in variant["runs"]:
            if run["state"] == "finished":
                told = evaluate_run(options.study / run["folder"], split="test", tokens=options.tokens)
                losses[label][run["seed"]] = told["loss"]
        print(f"{label:40}", *(f"{loss:.4f}" for loss in losses[label].values()), flush=True)
    write_json(options.out, {"tokens": options.tokens, "losses": losses})


if __name__ == "__main__":
    main()
