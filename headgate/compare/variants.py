"""What a study compares: a mechanism, or a pattern of them over the layers, under a label.

Written as everywhere else (`grammar.parse_mechanisms`); a label of your own may follow after @, as in
`sparse-geometric:gate=log@log gate`. An option whose name has a dot is a setting of the recipe for this
variant alone: `full:train.first_context=512@growing`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headgate import config
from headgate.config import Config, ModelConfig
from headgate.errors import HeadgateError
from headgate.files import SEAL
from headgate.grammar import MechanismSpec, parse_mechanisms, split_mechanisms
from headgate.mechanisms.contract import MECHANISMS, make_options, on_shelf

BASELINE = "full"
FIXED = {
    "model.mechanism": "is what it is named by",
    "model.vocab_size": "is that of the data",
    "train.steps": "is the study's budget, the same for all",
}
"""Settings that a variant cannot have of its own, and why."""
PACE = {
    f"train.{name}"
    for name in (
        "context",
        "first_context",
        "batch_size",
        "accumulation",
        "documents",
        "packing",
        "optimizer",
        "precision",
    )
}
"""Settings that change what a step has to do."""


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
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the recipe for this variant alone, by dotted name."""

    @classmethod
    def parse(cls, text: str) -> "Variant":
        body, at, label = text.partition("@")
        written = parse_mechanisms(body)
        settings = {key: value for spec in written for key, value in spec.options.items() if "." in key}
        specs = (
            tuple(replace(s, options=_without(settings, s.options)) for s in written) if settings else written
        )
        for setting in settings.keys() & FIXED.keys():
            raise HeadgateError(f"variant {text!r} sets {setting}, which {FIXED[setting]}; leave it out")
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
        ablation = _ablation(specs[0]) if len(specs) == 1 and not settings else None
        plain = "+".join(written.without_file for written in split_mechanisms(body))
        return cls(label.strip() if at else plain, specs, ablation, settings=settings)

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

    @property
    def meaning(self) -> str:
        """What two variants of one label must agree in."""
        return " ".join([self.pattern, *self.words])

    @property
    def own_pace(self) -> bool:
        """Whether its training steps take another time than the recipe's would with this mechanism."""
        return not PACE.isdisjoint(self.settings)

    @property
    def words(self) -> tuple[str, ...]:
        """Its settings, as `headgate train` takes them."""
        return tuple(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in self.settings.items())

    def config(self, base: Config) -> Config:
        """The study's settings with this mechanism, and its own; it is trained on as many tokens."""
        own = config.override(base, self.words)
        if own.train.tokens != base.train.tokens:
            steps = max(1, round(own.train.steps * base.train.tokens / own.train.tokens))
            every = max(1, round(own.train.evaluate_every * steps / own.train.steps))
            own = replace(own, train=replace(own.train, steps=steps, evaluate_every=every))
        return replace(own, model=replace(own.model, mechanism=self.mechanism))

    def options(self, model: ModelConfig) -> list[dict[str, Any]]:
        """Every option of each mechanism of the pattern, with its value in this model."""
        return [asdict(make_options(s.name, s.options, model.shared_options)) for s in self.mechanism]


def _without(settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in settings}


def _ablation(spec: MechanismSpec) -> str | None:
    for name, options in MECHANISMS.get(spec.name).ablations.items():
        if dict(spec.options) == dict(options):
            return name
    return None


def parse_variants(names: Sequence[str], model: ModelConfig) -> tuple[Variant, ...]:
    """The baseline first, then the named ones or the four papers' mechanisms."""
    found = [Variant.parse(name) for name in names or on_shelf("papers")]
    if not any(is_baseline(variant) for variant in found):
        found.insert(0, Variant.parse(BASELINE))
    found.sort(key=lambda variant: not is_baseline(variant))
    for n, variant in enumerate(found):
        variant.options(model)  # options that no mechanism takes are refused before anything runs
        for other in found[:n]:
            if other.label == variant.label:
                raise HeadgateError(
                    f"variant {variant.label!r} is named twice; leave one out, or give it a label: "
                    f"{variant.label}@another"
                )
    return tuple(found)


def is_baseline(variant: Variant) -> bool:
    return variant.mechanism == (MechanismSpec(BASELINE),) and not variant.settings


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
