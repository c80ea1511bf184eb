"""What a study compares: a mechanism with its options, or a pattern of them over the layers, under a label.

In text: `dynamic-sparse`, `sparse-geometric:gate=log`, an ablation as `dynamic-sparse:no-gate`, a pattern
over the layers as `local+local+full`; `@` gives it a label of its own, `sparse-geometric:gate=log@log gate`.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headgate.config import MechanismSpec, ModelConfig
from headgate.errors import HeadgateError, suggestion
from headgate.mechanisms.contract import MECHANISMS, make_options

BASELINE = "full"
PAPERS = ("dynamic-sparse", "head-gated", "context-adaptive", "sparse-geometric")
"""The mechanisms of the four papers: what is compared when nothing is named."""


@dataclass(frozen=True)
class Variant:
    label: str
    """What tables and figures call it."""
    mechanism: tuple[MechanismSpec, ...]
    """One for all layers, or a pattern that repeats over them."""
    ablation: str | None = None
    """The registered ablation that its options are, if they are one."""

    @classmethod
    def parse(cls, text: str) -> "Variant":
        body, at, label = text.partition("@")
        specs = tuple(map(_spec, re.split(r"\+(?=[a-z])", body.strip())))
        if at and not label.strip():
            raise HeadgateError(
                f"variant {text!r} has an empty label; write it after the @, or leave the @ out"
            )
        ablation = _ablation(specs[0]) if len(specs) == 1 else None
        return cls(label.strip() if at else body.strip(), specs, ablation)

    @property
    def folder(self) -> str:
        """A name for its folder that any file system takes, and no other label's has."""
        plain = re.sub(r"[^A-Za-z0-9._=+-]+", "-", self.label).strip("-.")
        if plain == self.label:
            return plain
        return f"{plain[:60]}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}".lstrip("-")

    @property
    def pattern(self) -> str:
        """The mechanisms in words that `headgate train` takes."""
        return json.dumps([asdict(spec) for spec in self.mechanism])

    def options(self, model: ModelConfig) -> list[dict[str, Any]]:
        """Every option of each mechanism of the pattern, as it comes out in this model."""
        return [asdict(make_options(s.name, s.options, model.shared_options)) for s in self.mechanism]


def _spec(text: str) -> MechanismSpec:
    """`name:option=value`, or `name:ablation`."""
    name, _, tail = text.partition(":")
    if not tail or "=" in tail:
        return MechanismSpec.parse(text)
    ablations = MECHANISMS.get(name.strip()).ablations
    if tail not in ablations:
        raise HeadgateError(f"{name} has no ablation {tail!r}; {suggestion(tail, ablations)}")
    return MechanismSpec(name.strip(), dict(ablations[tail]))


def _ablation(spec: MechanismSpec) -> str | None:
    for name, options in MECHANISMS.get(spec.name).ablations.items():
        if dict(spec.options) == dict(options):
            return name
    return None


def parse_variants(names: Sequence[str], model: ModelConfig) -> tuple[Variant, ...]:
    """The baseline first, then what is named, or the four papers' mechanisms."""
    found = [Variant.parse(name) for name in names or PAPERS]
    if not any(variant.mechanism == (MechanismSpec(BASELINE),) for variant in found):
        found.insert(0, Variant.parse(BASELINE))
    found.sort(key=lambda variant: variant.mechanism != (MechanismSpec(BASELINE),))
    for n, variant in enumerate(found):
        variant.options(model)  # options that no mechanism takes are refused before anything runs
        for other in found[:n]:
            if other.label == variant.label:
                raise HeadgateError(
                    f"variant {variant.label!r} is named twice; leave one out, or give it a label: "
                    f"{variant.label}@another"
                )
    return tuple(found)


def with_ablations(name: str) -> tuple[str, ...]:
    """The mechanism and each of its registered ablations, as they are written."""
    ablations = MECHANISMS.get(name).ablations
    if not ablations:
        having = [other for other in MECHANISMS.names() if MECHANISMS.get(other).ablations]
        raise HeadgateError(f"{name} has no ablations; those that have are {', '.join(having)}")
    return name, *(f"{name}:{ablation}" for ablation in ablations)
