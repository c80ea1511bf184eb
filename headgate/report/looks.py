"""How variants look in every figure: a hue for each family, a dash and a shape for each member.

A mechanism and its ablations are a family. The baseline's family and the controls share grey.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLOURS = (
    "#4d4d4d", "#0072b2", "#c25200", "#00805c", "#b04c82", "#8f6a00", "#0d7f8f", "#7b3294", "#8a5a2b",
)  # fmt: skip
"""Each has a contrast of at least 4.5 on white, so that it can also be a text colour."""
DARK_COLOURS = (
    "#cfcfcf", "#4da3e0", "#ff8c42", "#2fd3a0", "#f0a3cb", "#e6c04a", "#5cc8d6", "#c39bd9", "#d9a26b",
)  # fmt: skip
PAPER, DARK_PAPER = "#fefefe", "#15181c"
"""The page behind a figure, which fills the marks of variants not shown to differ."""
DASHES = (
    [1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4], [1, 4], [10, 2, 2, 2, 2, 2], [4, 1],
)  # fmt: skip
SHAPES = (
    "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z",
    "M-0.9,-0.9H0.9V0.9H-0.9Z",
    "M0,-1L1,0.8H-1Z",
    "M0,-1.2L1,0L0,1.2L-1,0Z",
    "M-0.4,-1H0.4V-0.4H1V0.4H0.4V1H-0.4V0.4H-1V-0.4H-0.4Z",
    "M0,1L1,-0.8H-1Z",
    "M1,0L-0.8,1V-1Z",
    "M-1,0L0.8,1V-1Z",
)
"""Circle, square, triangle, diamond, cross, three more triangles: as paths, which Vega and SVG both draw."""


@dataclass(frozen=True)
class Look:
    colour: str
    dash: Sequence[int]
    shape: str


def looks(variants: Sequence[Mapping[str, Any]]) -> list[Look]:
    """A look for each variant of a study, whose first is the baseline."""
    hues: dict[str, int] = {shared_name(variants[0]): 0} if variants else {}
    for variant in variants:
        hues.setdefault(shared_name(variant), 1 + (len(hues) - 1) % (len(COLOURS) - 1))
    members: dict[int, int] = {}
    found = []
    for variant in variants:
        hue = 0 if variant.get("control") else hues[shared_name(variant)]
        member = members.get(hue, 0)
        members[hue] = member + 1
        found.append(Look(COLOURS[hue], DASHES[member % len(DASHES)], SHAPES[(hue + member) % len(SHAPES)]))
    return found


def shared_name(variant: Mapping[str, Any]) -> str:
    return str(variant["mechanism"])
