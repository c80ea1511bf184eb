"""Loads the C++ kernels that setup.py built: the library for this CPU's instruction set, through ctypes.

ctypes releases the GIL during a call. HEADGATE_NATIVE=avx512|avx2|plain, set before the start, asks for one
library, =off for none; a library that the CPU cannot run is refused, never tried.
"""

import ctypes
import os
from pathlib import Path

import torch

from headgate.errors import HeadgateError

_FOLDER = Path(__file__).parent
_LEVELS = ("plain", "avx2", "avx512")  # in the order of headgate_instruction_set
_SANITIZE = "sanitize"  # built by `make sanitize` for the CPU it runs on


class _Missing(Exception):
    """Why there is no library."""


def unavailable() -> str | None:
    """Why the kernels cannot be used, in one sentence; None if they can."""
    return _reason


def instruction_set() -> str | None:
    """Which build is used: avx512, avx2, plain, or none of them."""
    return _level


def library() -> ctypes.CDLL:
    """The loaded library; only where `unavailable()` is None."""
    assert _library is not None, _reason
    return _library


def threads() -> int:
    """How many threads a kernel may use: torch's setting at this moment."""
    return torch.get_num_threads()


def _choose(wanted: str) -> str:
    """The best level that is built and that the CPU can run."""
    if wanted == "off":
        raise _Missing("switched off by HEADGATE_NATIVE=off")
    if wanted not in ("", *_LEVELS, _SANITIZE):
        raise HeadgateError(f"HEADGATE_NATIVE={wanted!r} is unknown; known are {', '.join(_LEVELS)}, off")
    built = [level for level in (*_LEVELS, _SANITIZE) if _file(level).exists()]
    if wanted == _SANITIZE and _SANITIZE in built:
        return _SANITIZE
    if "plain" not in built:
        note = _FOLDER / "build.txt"
        compiles = "pip install --no-binary headgate headgate compiles it where there is a C++ compiler"
        raise _Missing(f"not built: {note.read_text().strip() if note.exists() else compiles}")
    # The plain library runs anywhere, so it may be asked what else does.
    able = _LEVELS[: ctypes.CDLL(str(_file("plain"))).headgate_instruction_set() + 1]
    if wanted and wanted not in able:
        raise _Missing(f"HEADGATE_NATIVE={wanted} asks for instructions that this CPU does not have")
    if wanted and wanted not in built:
        raise _Missing(f"not built: HEADGATE_NATIVE={wanted}")
    return wanted or next(level for level in reversed(able) if level in built)


def _file(level: str) -> Path:
    return _FOLDER / f"kernels_{level}.so"


def _open(level: str) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(_file(level)))
    except OSError as error:
        raise _Missing(f"not loaded: {error}") from error
    loaded.headgate_set_team(ctypes.c_void_p(_torch_team()))
    return loaded


def _torch_team() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch uses, so that its threads are used here
    too.

    Importing torch loads the runtime into the process, usually into its global namespace; if it is not there,
    its file is found among the mapped ones. None if there is no such runtime: the library then starts
    threads.
    """
    maps = Path("/proc/self/maps")
    mapped = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    runtimes = sorted(p for p in mapped if Path(p).name.startswith(("libgomp", "libiomp5", "libomp")))
    for name in (None, *runtimes):
        try:
            function = ctypes.CDLL(name).GOMP_parallel
        except (AttributeError, OSError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


_library: ctypes.CDLL | None = None
_level: str | None = None
_reason: str | None = None
try:
    _level = _choose(os.environ.get("HEADGATE_NATIVE", ""))
    _library = _open(_level)
except _Missing as missing:
    _level, _reason = None, str(missing)
