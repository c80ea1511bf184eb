"""The last lines of `make demo`: what its two studies found, and what to try next.

python examples/demo/closing.py runs/demo
"""

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headgate
from headgate.compare.statistics import interval

WINDOW_ON_TEXT, WINDOW_ON_RECALL, ALONE = "window of 32", "window of 16", "no attention"


@dataclass(frozen=True)
class Share:
    """Right answers over the seeds, with the 95% interval as far as a share can go."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.0%} ({self.low:.0%} to {self.high:.0%})"


def main(folder: Path) -> None:
    text, recall = (headgate.read_study(folder / name) for name in ("text", "recall"))
    near, far, whole = _recalled(recall)
    forgets = far.high < whole.low
    lines = ["", "What was found", *_on_text(text), _on_recall(recall, near, far, whole, forgets=forgets)]
    if forgets and _verdict(text[WINDOW_ON_TEXT]) != "worse":
        lines.append("So a loss on text alone would have told you to throw far attention away.")
    lines += _closing(folder, text)
    for line in lines:
        indent = "  " * line.startswith("- ")
        print(
            textwrap.fill(line, 88, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
        )


def _on_text(text: Any) -> list[str]:
    alone, window = text[ALONE], text[WINDOW_ON_TEXT]
    pays = {"worse": "Attention pays", "better": "Attention does harm here"}
    opening = pays.get(_verdict(alone), "Whether attention pays is not shown")
    words = {"better": "better than full attention", "worse": "worse than full attention"}
    does = words.get(_verdict(window), "no differently from full attention, as far as is shown")
    return [
        f"- {opening}: without it, {_effect(alone)} on bytes of Python's own sources.",
        f"- On that text a {WINDOW_ON_TEXT} bytes does {does}: {_effect(window)}{_cost(window)}.",
    ]


def _recalled(recall: Any) -> tuple[Share, Share, Share]:
    """Of the window, within its reach and beyond that of all layers; and of full attention beyond it."""
    reach = recall[WINDOW_ON_RECALL]["options"][0]["window"]
    beyond = reach * recall.results["config"]["model"]["n_layers"]
    near = _right(recall[WINDOW_ON_RECALL], lambda place: place["end"] <= reach)
    far, whole = (
        _right(recall[name], lambda place: place["first"] >= beyond) for name in (WINDOW_ON_RECALL, "full")
    )
    return near, far, whole


def _on_recall(recall: Any, near: Share, far: Share, whole: Share, *, forgets: bool) -> str:
    chance = 1 / int(_option(recall, "values"))
    opening = "But it forgets" if forgets else "Whether it forgets is not shown"
    guessing = "as good as guessing" if far.low <= chance <= far.high else f"where guessing is {chance:.0%}"
    return (
        f"- {opening}. Asked for a key within its reach, a {WINDOW_ON_RECALL} tokens is right {near} of the "
        f"time; beyond the reach of all its layers {far}, {guessing}; full attention {whole}."
    )


def _closing(folder: Path, text: Any) -> list[str]:
    steps = text.results["config"]["train"]["steps"]
    return [
        "Losses: the difference to full attention and the interval that it is judged by. Answers: the mean "
        "over the seeds and its 95% interval. A small model and minutes of training: this shows what such "
        "studies can see, not which mechanism to use.",
        "",
        "The pages",
        f"- {folder / 'text' / 'report.html'}",
        f"- {folder / 'recall' / 'report.html'}",
        "",
        "What to try next",
        "- four times the tokens: the command at the end of the page of text, with "
        f"train.steps={4 * steps} and another --out",
        "- a mechanism of your own: headgate compare ./mine.py:mine "
        f"--data {folder / 'text-data'} --recipe examples/demo/text.json --out mine",
        "- your own text: headgate prepare FOLDER data --tokenizer byte",
    ]


def _verdict(variant: Any) -> str:
    return str(variant["difference"]["verdict"])


def _effect(variant: Any) -> str:
    d = variant["difference"]
    words = f"{d['relative']:+.1%} loss ({d['relative_low']:+.1%} to {d['relative_high']:+.1%})"
    return words.replace("-", "−")


def _cost(variant: Any) -> str:
    if not variant["speed"]:
        return ""
    return f", at {variant['speed']['ratio']:.2f}× the speed and {variant['memory']['ratio']:.2f}× the memory"


def _right(variant: Any, where: Any) -> Share:
    """The share of right answers at the distances that `where` picks, each seed's answers taken together."""
    shares = []
    for run in variant["runs"]:
        places = [place for place in run["answers"]["by_distance"] if where(place)]
        answers = sum(place["tokens"] for place in places)
        shares.append(sum(place["accuracy"] * place["tokens"] for place in places) / answers)
    found = interval(shares)
    assert found.mean is not None
    assert found.low is not None
    assert found.high is not None
    return Share(found.mean, max(0.0, found.low), min(1.0, found.high))


def _option(study: Any, name: str) -> str:
    source = study.results["data"]["request"]["source"]
    return str(dict(pair.split("=") for pair in source.partition(":")[2].split(","))[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
