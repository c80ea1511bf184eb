"""What lets `trust_remote_code=True` load our folders wherever headgate is installed: a file in the folder
that names our classes, and the auto_map in its config.json that names the file."""

from pathlib import Path

from headgate.files import write_text

FILE = "modeling_headgate.py"
CLASSES = {
    "AutoConfig": "HeadgateConfig",
    "AutoModel": "HeadgateModel",
    "AutoModelForCausalLM": "HeadgateForCausalLM",
    "AutoModelForSequenceClassification": "HeadgateForSequenceClassification",
}
"""The classes of `headgate.model.hf`, for our own folders."""
USED = {
    "AutoModel": "SavedStatesWithMechanism",
    "AutoModelForCausalLM": "SavedWithMechanism",
    "AutoModelForSequenceClassification": "SavedClassifierWithMechanism",
}
"""For the folder of another family that was saved with a mechanism in it."""


def auto_map(classes: dict[str, str]) -> dict[str, str]:
    return {auto: f"{FILE.removesuffix('.py')}.{name}" for auto, name in classes.items()}


LOADER = '''"""Lets transformers load this folder with trust_remote_code=True; the model is in the package."""

try:
    from headgate.model.hf import (  # noqa: F401
        {names},
    )
except ImportError as error:
    raise ImportError("this model needs headgate: pip install --upgrade 'headgate[hf]'") from error
'''


def write_loader(folder: Path, classes: dict[str, str]) -> None:
    names = ",\n        ".join(sorted(classes.values()))
    write_text(folder / FILE, LOADER.format(names=names))
