"""The space that variants are tuned over, and the trials drawn from it: the same for all.

Written as settings with a range, drawn evenly on a logarithmic scale, or with a list of values:

    train.learning_rate=5e-4..8e-3,train.attention_output_rate=0.05..4,model.rope_theta=[100,10000]

If every setting has a list, the trials are all combinations: a grid. Otherwise the first trial is the recipe
as it is, and the others are Halton's points, which fill a space evenly however many are drawn.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headgate import config
from headgate.compare.variants import Variant
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.grammar import split_assignments
from headgate.mechanisms.contract import MECHANISMS

OWN = "mechanism."
"""Prefix of an option of the mechanism's own."""
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
OUTER = 0.15
"""The share of a range, on a logarithmic scale, that counts as its edge."""


@dataclass(frozen=True)
class Dimension:
    """A setting to be tuned: from `low` to `high`, or one of the choices."""

    setting: str
    low: float = 1.0
    high: float = 1.0
    choices: tuple[Any, ...] = ()

    def at(self, share: float) -> Any:
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        return float(f"{self.low * (self.high / self.low) ** share:.4g}")

    def share(self, value: float) -> float:
        if value <= 0:
            return -math.inf
        return math.log(value / self.low) / math.log(self.high / self.low)

    def side(self, value: Any) -> str | None:
        """Whether a value is at the low or the high edge."""
        if self.choices:
            numbers = [choice for choice in self.choices if isinstance(choice, int | float)]
            if len(numbers) < max(3, len(self.choices)) or value not in numbers:
                return None
            return {min(numbers): "low", max(numbers): "high"}.get(value)
        share = self.share(value)
        return "low" if share < OUTER else "high" if share > 1 - OUTER else None

    def beyond(self, side: str) -> "Dimension":
        """What is past an edge: half as much again, on a logarithmic scale."""
        reach = math.sqrt(self.high / self.low)
        if side == "low":
            return replace(self, low=float(f"{self.low / reach:.4g}"), high=self.low)
        return replace(self, low=self.high, high=float(f"{self.high * reach:.4g}"))

    def written(self) -> str:
        if self.choices:
            return f"{self.setting}=[{','.join(map(str, self.choices))}]"
        return f"{self.setting}={self.low:g}..{self.high:g}"


@dataclass(frozen=True)
class Trial:
    """Settings to try, by name; none for the recipe as it is."""

    number: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    round: int = 0
    """0 for the first draws, then one more each time the space was extended."""

    def of(self, variant: Variant) -> tuple[Variant, tuple[str, ...]]:
        """The variant with its own options, and the words that change the other settings."""
        own = {key.removeprefix(OWN): value for key, value in self.settings.items() if key.startswith(OWN)}
        if own:
            specs = [replace(spec, options={**spec.options, **own}) for spec in variant.mechanism]
            variant = replace(variant, mechanism=tuple(specs))
        shared = (f"{key}={value}" for key, value in self.settings.items() if not key.startswith(OWN))
        return variant, tuple(shared)

    def for_variant(self, variant: Variant) -> "Trial":
        """Without what the variant sets itself."""
        left = {key: value for key, value in self.settings.items() if key not in variant.settings}
        return replace(self, settings=left)


def parse_space(text: str, base: Config) -> tuple[Dimension, ...]:
    """The dimensions as written, or the default: learning rate, output multiplier and RoPE's base."""
    if not text:
        rate, output = base.train.learning_rate, base.train.attention_output_rate or 1.0
        return (
            Dimension("train.learning_rate", rate / 4, rate * 4),
            Dimension("train.attention_output_rate", output / 16, output * 4),
            Dimension("model.rope_theta", 100.0, max(1e5, base.model.rope_theta)),
        )
    assignments, bare = split_assignments(text)
    if bare or not assignments:
        word = bare[0] if bare else text
        raise HeadgateError(f"space {word!r} has no range; write it as train.learning_rate=1e-4..1e-2")
    found = tuple(_dimension(setting, value) for setting, value in assignments)
    for dimension in found:
        config.override(base, [f"{dimension.setting}={dimension.at(0.5)}"])  # an unknown setting is refused
    if len(found) > len(PRIMES) - 2:
        raise HeadgateError(f"space={text!r} has too many settings; expected at most {len(PRIMES) - 2}")
    return found


def _dimension(setting: str, value: Any) -> Dimension:
    if isinstance(value, list) and value:
        return Dimension(setting, choices=tuple(value))
    low, dots, high = str(value).partition("..")
    try:
        ends = float(low), float(high)
    except ValueError:
        ends = (0.0, 0.0)
    if not dots or not 0 < ends[0] < ends[1] < math.inf:
        raise HeadgateError(
            f"space {setting}={value} is not a range above 0; write it as {setting}=1e-4..1e-2, or as a list"
        )
    return Dimension(setting, *ends)


def own_dimensions(variant: Variant) -> tuple[Dimension, ...]:
    """What a mechanism declares tunable, except the options that the variant sets itself."""
    if len(variant.mechanism) != 1:
        return ()
    spec = variant.mechanism[0]
    found = []
    for option, values in MECHANISMS.get(spec.name).tunable.items():
        if option not in spec.options:
            is_range = isinstance(values, tuple)
            found.append(
                Dimension(OWN + option, *values)
                if is_range
                else Dimension(OWN + option, choices=tuple(values))
            )
    return tuple(found)


def draw_trials(space: Sequence[Dimension], own: Sequence[Dimension], count: int) -> list[Trial]:
    """The first trials of a variant. Those of two variants differ only in their own settings."""
    if space and all(dimension.choices for dimension in space):
        values = itertools.product(*(dimension.choices for dimension in space))
        trials = [dict(zip((d.setting for d in space), point, strict=True)) for point in values]
        if len(trials) != count:
            raise HeadgateError(f"tune={count} does not fit the space, a grid of {len(trials)} points")
        return [Trial(number, settings) for number, settings in enumerate(trials)]
    points = _points([*space, *own])
    return [Trial(0), *(Trial(n, next(points)) for n in range(1, count))]


def draw_beyond(
    space: Sequence[Dimension],
    own: Sequence[Dimension],
    edges: Sequence[tuple[str, str]],
    count: int,
    first: int,
    round_: int,
) -> list[Trial]:
    """More trials where the space is extended past these edges (setting, side), taken in turn."""
    points = itertools.islice(_points([*space, *own]), max(0, first - 1), None)
    trials = []
    shares = [_halton(2) for _ in edges]
    for number, settings in zip(range(first, first + count), points, strict=False):
        (setting, side), share = edges[number % len(edges)], next(shares[number % len(edges)])
        (dimension,) = (d for d in space if d.setting == setting)
        changed = {**settings, setting: dimension.beyond(side).at(share)}
        trials.append(Trial(number, changed, round_))
    return trials


def _points(dimensions: Sequence[Dimension]) -> Iterator[dict[str, Any]]:
    sequences = [_halton(prime) for _, prime in zip(dimensions, PRIMES, strict=False)]
    for shares in zip(*sequences, strict=True):
        yield {d.setting: d.at(share) for d, share in zip(dimensions, shares, strict=True)}


def _halton(base: int) -> Iterator[float]:
    """1/2, 1/4, 3/4, 1/8, ... and so on, likewise in other bases."""
    for number in itertools.count(1):
        share, digit = 0.0, 1.0
        while number:
            number, rest = divmod(number, base)
            digit /= base
            share += rest * digit
        yield share
