"""The runs of a study judged by the test split, which nothing was chosen by.

    python studies/first/test_split.py runs/study/text studies/first/results/text/test.json [--tokens 16384]

Writes the loss of each variant and seed: of the last checkpoint, on the first tokens of the split.
Run again, it resumes.
"""

import argparse
import json
from pathlib import Path

from headgate.files import write_json
from headgate.machine import keep_memory
from headgate.report.reading import read_results
from headgate.train.evaluate import evaluate_run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--ablations", action="store_true", help="the ablations too")
    options = parser.parse_args()
    keep_memory()
    losses: dict[str, dict[str, float]] = {}
    if options.out.exists():
        before = json.loads(options.out.read_text(encoding="utf-8"))
        losses = before["losses"] if before["tokens"] == options.tokens else {}
    for variant in read_results(options.study)["variants"]:
        if variant["ablation"] and not options.ablations:
            continue
        known = losses.setdefault(variant["label"], {})
        for run in variant["runs"]:
            seed = str(run["seed"])
            if run["state"] == "finished" and seed not in known:
                result = evaluate_run(options.study / run["folder"], split="test", tokens=options.tokens)
                known[seed] = result["loss"]
                write_json(options.out, {"tokens": options.tokens, "losses": losses})
        print(f"{variant['label']:40}", *(f"{loss:.4f}" for loss in known.values()), flush=True)


if __name__ == "__main__":
    main()
