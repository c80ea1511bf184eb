"""The attention mechanisms, one file each. `headgate.mechanisms()` lists their names."""

import sys
import types

from headgate.mechanisms.contract import MECHANISMS, Heads, Mechanism, MechanismOptions, Past, register

__all__ = ["MECHANISMS", "Heads", "Mechanism", "MechanismOptions", "Past", "register"]


class _Callable(types.ModuleType):
    """The public function `headgate.mechanisms` and this folder share a name, so the module answers calls."""

    def __call__(self) -> list[str]:
        return MECHANISMS.names()


sys.modules[__name__].__class__ = _Callable
