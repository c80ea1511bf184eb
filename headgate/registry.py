"""Names for things that live in one file each: registered by decorator, found by scanning their package."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from headgate import files
from headgate.errors import HeadgateError, suggestion

T = TypeVar("T")

FROM_FILE = "headgate_file_"
"""The prefix of the module name of a file that is not installed; the file's own name follows."""


class Registry(Generic[T]):
    """Maps names to entries. A duplicate raises; a miss names the closest entry.

    The first lookup scans three places: the modules of `package`, the entry points in the group of that name,
    through which other distributions add entries, and the files listed in the environment variable
    `files_variable`. `load_file` adds to that list, so that processes started from this one know the same
    names.
    """

    def __init__(self, kind: str, *, package: str | None = None, files_variable: str | None = None) -> None:
        self.kind = kind
        self.package = package
        self.files_variable = files_variable
        self._entries: dict[str, T] = {}
        self._scanned = package is None

    def register(self, name: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            if name in self._entries:
                raise HeadgateError(
                    f"{self.kind} {name!r} is already registered, by {self._entries[name]!r}; choose another"
                )
            self._entries[name] = entry
            return entry

        return add

    def unregister(self, name: str) -> None:
        del self._entries[name]

    def get(self, name: str) -> T:
        self.scan()
        try:
            return self._entries[name]
        except KeyError:
            raise HeadgateError(f"unknown {self.kind} {name!r}; {suggestion(name, self._entries)}") from None

    def names(self) -> list[str]:
        self.scan()
        return sorted(self._entries)

    @property
    def is_scanned(self) -> bool:
        """Whether everything that has a name has been imported."""
        return self._scanned

    def scan(self) -> None:
        if self._scanned:
            return
        import importlib.metadata  # slow to import, and `headgate --help` needs no names
        import pkgutil

        assert self.package is not None
        self._scanned = True  # first, because the modules imported below may ask for entries themselves
        for module in pkgutil.iter_modules(importlib.import_module(self.package).__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        for entry_point in importlib.metadata.entry_points(group=self.package):
            entry_point.load()
        for path in self._listed_files():
            self.load_file(path)

    def load_file(self, path: str | os.PathLike[str]) -> list[str]:
        """Run a Python file that registers entries; returns their names. A file runs once per process."""
        self.scan()
        file = Path(path).expanduser().resolve()
        names = self._names_from(file)
        if not names:
            if not file.is_file():
                found = files.kind(file)
                what = "does not exist" if found == "missing" else f"is {found}"
                raise HeadgateError(f"the file {str(path)!r} of a {self.kind} {what}; check its path")
            before = dict(self._entries)
            try:
                _run_file(file)
            except (Exception, SystemExit) as error:
                self._entries = before
                if isinstance(error, HeadgateError):
                    raise HeadgateError(f"{str(path)!r} cannot be used: {error}") from None
                raise HeadgateError(f"{str(path)!r} cannot be imported: {_where(error, file)}") from error
            names = self._names_from(file)
        if self.files_variable is not None and str(file) not in (listed := self._listed_files()):
            os.environ[self.files_variable] = os.pathsep.join([*listed, str(file)])
        return names

    def require_from_file(self, path: str, name: str) -> None:
        """Load the file and make sure that the entry called `name` comes from it."""
        names = self.load_file(path)
        if name not in names:
            known = (
                f"it registers {', '.join(names)}" if names else f'decorate a class with @register("{name}")'
            )
            raise HeadgateError(f"{path!r} registers no {self.kind} {name!r}; {known}")

    def _listed_files(self) -> list[str]:
        text = os.environ.get(self.files_variable, "") if self.files_variable else ""
        return [path for path in text.split(os.pathsep) if path]

    def _names_from(self, file: Path) -> list[str]:
        """The entries that the file defines, however it was imported."""
        names = []
        for name, entry in self._entries.items():
            module = sys.modules.get(getattr(entry, "__module__", ""))
            origin = getattr(module, "__file__", None)
            if origin is not None and Path(origin).resolve() == file:
                names.append(name)
        return sorted(names)


def _run_file(file: Path) -> None:
    import hashlib
    import importlib.util

    name = f"{FROM_FILE}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and docstrings are looked up through it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _where(error: BaseException, file: Path) -> str:
    """The error with the line of the file that raised it."""
    import traceback

    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)
    ]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    words = error.msg if isinstance(error, SyntaxError) else str(error)
    words = " ".join(words.split()) or "no message"
    return f"{type(error).__name__}: {words}" + (f", line {line}" if line is not None else "")


MECHANISMS: Registry[Any] = Registry(
    "mechanism", package="headgate.mechanisms", files_variable="HEADGATE_MECHANISM_FILES"
)
"""Defined here, where PyTorch is not needed, so that a config can be read without it; `mechanisms.contract`
gives the entries their type."""


def use_file(path: str | os.PathLike[str]) -> list[str]:
    """Load the mechanisms in a Python file that is not installed; returns their names.

    Processes started from this one know them too, through the variable HEADGATE_MECHANISM_FILES.
    """
    names = MECHANISMS.load_file(path)
    if not names:
        raise HeadgateError(f'{str(path)!r} registers no mechanism; decorate a class with @register("NAME")')
    return names
