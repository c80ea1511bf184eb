"""What a study compares: a mechanism, or a pattern of them over the layers, under a label.

Written as everywhere else (`grammar.parse_mechanisms`); a label of your own may follow after @, as in
`sparse-geometric:gate=log@log gate`.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headgate.config import Config, ModelConfig
from headgate.errors import HeadgateError
from headgate.files import SEAL
from headgate.grammar import MechanismSpec, parse_mechanisms, split_mechanisms
from headgate.mechanisms.contract import MECHANISMS, make_options, on_shelf

BASELINE = "full"


@dataclass(frozen=True)
class Variant:
    label: str
    """What tables and figures call it."""
    mechanism: tuple[MechanismSpec, ...]
    """One for all layers, or a pattern that repeats over them."""
    ablation: str | None = None
    """The registered ablation that its options make up, if they do."""
    control: bool = False
    """Whether it was added to see what the study can tell, rather than asked for."""

    @classmethod
    def parse(cls, text: str) -> "Variant":
        body, at, label = text.partition("@")
        specs = parse_mechanisms(body)
        if at and not label.strip():
            raise HeadgateError(
                f"variant {text!r} has an empty label; write it after the @, or leave the @ out"
            )
        if len(label) > 100 or not label.isprintable():
            raise HeadgateError(
                f"variant {text!r} has a label that is too long, or that cannot be printed; choose another"
            )
        if label.strip() == SEAL:
            raise HeadgateError(
                f"variant {text!r} has the label {SEAL!r}, which a study's files use; choose another"
            )
        ablation = _ablation(specs[0]) if len(specs) == 1 else None
        plain = "+".join(written.without_file for written in split_mechanisms(body))
        return cls(label.strip() if at else plain, specs, ablation)

    @property
    def folder(self) -> str:
        """A folder name that every file system accepts and that belongs to this label alone."""
        plain = re.sub(r"[^A-Za-z0-9._=+-]+", "-", self.label).strip("-.")
        if plain == self.label and len(plain) <= 100:
            return plain
        return f"{plain[:60]}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}".lstrip("-")

    @property
    def pattern(self) -> str:
        """The mechanisms as `headgate train` takes them."""
        return json.dumps([asdict(spec) for spec in self.mechanism])

    def config(self, base: Config) -> Config:
        """The study's settings with this mechanism."""
        return replace(base, model=replace(base.model, mechanism=self.mechanism))

    def options(self, model: ModelConfig) -> list[dict[str, Any]]:
        """Every option of each mechanism of the pattern, with its value in this model."""
        return [asdict(make_options(s.name, s.options, model.shared_options)) for s in self.mechanism]


def _ablation(spec: MechanismSpec) -> str | None:
    for name, options in MECHANISMS.get(spec.name).ablations.items():
        if dict(spec.options) == dict(options):
            return name
    return None


def parse_variants(names: Sequence[str], model: ModelConfig) -> tuple[Variant, ...]:
    """The baseline first, then the named ones or the four papers' mechanisms."""
    found = [Variant.parse(name) for name in names or on_shelf("papers")]
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


def with_ablations(text: str) -> tuple[str, ...]:
    """A mechanism and each of its ablations, as they are written; its own options apply to all of them."""
    parse_mechanisms(text)  # runs its file, if it names one
    written = split_mechanisms(text)
    if len(written) > 1:
        raise HeadgateError(f"{text!r} is a pattern over the layers; name one mechanism to ablate")
    (file, name, words) = written[0]
    ablations = MECHANISMS.get(name).ablations
    if not ablations:
        having = [other for other in MECHANISMS.names() if MECHANISMS.get(other).ablations]
        raise HeadgateError(f"{name} has no ablations; mechanisms that have some are {', '.join(having)}")
    head = f"{file}:{name}" if file else name
    return text, *(f"{head}:{','.join(filter(None, (ablation, words)))}" for ablation in ablations)
