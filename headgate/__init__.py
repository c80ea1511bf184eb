"""headgate: does this attention mechanism beat plain attention, by how much, at what cost?

The public names are loaded on first use, so importing the package, as the command line does, costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from headgate.errors import HeadgateError
from headgate.version import __version__

if TYPE_CHECKING:
    from headgate import ops
    from headgate.mechanisms.contract import Past, build_mechanism, probe, skipping
    from headgate.model.decoder import Decoder, build_model, load
    from headgate.registry import use_file
    from headgate.report.notebook import read_study

    def mechanisms() -> list[str]: ...


__all__ = [
    "Decoder",
    "HeadgateError",
    "Past",
    "__version__",
    "build_mechanism",
    "build_model",
    "load",
    "mechanisms",
    "ops",
    "probe",
    "read_study",
    "skipping",
    "use_file",
]

_HOME = {
    "Decoder": "headgate.model.decoder",
    "Past": "headgate.mechanisms.contract",
    "build_mechanism": "headgate.mechanisms.contract",
    "build_model": "headgate.model.decoder",
    "load": "headgate.model.decoder",
    "probe": "headgate.mechanisms.contract",
    "read_study": "headgate.report.notebook",
    "skipping": "headgate.mechanisms.contract",
    "use_file": "headgate.registry",
}


def __getattr__(name: str) -> Any:
    if name in ("mechanisms", "ops"):
        return importlib.import_module(f"headgate.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'headgate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
