"""The last lines of `make demo`: what its two studies found, and what to try next.

python examples/demo/closing.py runs/demo
"""

import sys
from pathlib import Path
from typing import Any

import headgate

WINDOW_ON_TEXT, WINDOW_ON_RECALL, ALONE = "window of 32", "window of 16", "no attention"


def main(folder: Path) -> None:
    text, recall = (headgate.read_study(folder / name) for name in ("text", "recall"))
    layers, window = (
        recall.results["config"]["model"]["n_layers"],
        recall[WINDOW_ON_RECALL]["options"][0]["window"],
    )
    near, far = _near_and_far(recall[WINDOW_ON_RECALL], window, layers)
    whole = _near_and_far(recall["full"], window, layers)[1]
    chance = 1 / int(_option(recall, "values"))
    misled = text[WINDOW_ON_TEXT]["difference"]["verdict"] != "worse" and far < 0.5 * whole
    lines = [
        "",
        "What was found",
        f"- Attention pays: without it, {_effect(text[ALONE])} on bytes of Python's own sources.",
        f"- On that text a {WINDOW_ON_TEXT} bytes does {_verdict(text[WINDOW_ON_TEXT])}: "
        f"{_effect(text[WINDOW_ON_TEXT])}{_cost(text[WINDOW_ON_TEXT])}.",
        f"- But it forgets. Asked for a key within its reach, a {WINDOW_ON_RECALL} tokens is right "
        f"{near:.0%} of the time; beyond it {far:.0%}, where guessing is {chance:.0%} and full attention "
        f"{whole:.0%}.",
        *(["So a loss on text alone would have told you to throw far attention away."] if misled else []),
        "(Differences in loss with the interval they are judged by, three seeds, paired. A small model,",
        "minutes of training: it shows what these studies see, not which mechanism to use.)",
        "",
        "The pages",
        f"- {folder / 'text' / 'report.html'}",
        f"- {folder / 'recall' / 'report.html'}",
        "",
        "What to try next",
        "- four times the tokens: add train.steps=1280 and another --out to the command at the end of the",
        "  page of text",
        "- a mechanism of your own: headgate compare ./mine.py:mine --recipe examples/demo/text.json "
        f"--data {folder / 'text-data'} --out mine",
        "- your own text: headgate prepare FOLDER data --tokenizer byte",
    ]
    print("\n".join(lines))


def _effect(variant: Any) -> str:
    d = variant["difference"]
    words = f"{d['relative']:+.1%} loss ({d['relative_low']:+.1%} to {d['relative_high']:+.1%})"
    return words.replace("-", "−")


def _verdict(variant: Any) -> str:
    words = {"better": "better than full attention", "worse": "worse than full attention"}
    return words.get(variant["difference"]["verdict"], "no differently from full attention, as far as shown")


def _cost(variant: Any) -> str:
    if not variant["speed"]:
        return ""
    return f", at {variant['speed']['ratio']:.2f}× the speed and {variant['memory']['ratio']:.2f}× the memory"


def _near_and_far(variant: Any, window: int, layers: int) -> tuple[float, float]:
    """The share of right answers at distances within the window, and beyond the reach of all layers."""
    places = variant["answers"]["by_distance"]
    near = [place["mean"] for place in places if place["end"] <= window]
    far = [place["mean"] for place in places if place["first"] >= window * layers]
    return sum(near) / len(near), sum(far) / len(far)


def _option(study: Any, name: str) -> str:
    source = study.results["data"]["request"]["source"]
    return str(dict(pair.split("=") for pair in source.partition(":")[2].split(","))[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
