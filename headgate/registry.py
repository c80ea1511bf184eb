"""Names for things that live one to a file: registered by decorator, found by scanning their package."""

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

from headgate.errors import HeadgateError, suggestion

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to entries. A duplicate raises; a miss names the closest entry.

    The first look scans: every module of `package` is imported, then every entry point of the group of that
    name, which is how another distribution adds entries without touching this one.
    """

    def __init__(self, kind: str, *, package: str | None = None) -> None:
        self.kind = kind
        self.package = package
        self._entries: dict[str, T] = {}
        self._scanned = package is None

    def register(self, name: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            if name in self._entries:
                raise HeadgateError(
                    f"{self.kind} {name!r} is registered already, by {self._entries[name]!r}; choose another"
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

    def scan(self) -> None:
        if self._scanned:
            return
        assert self.package is not None
        self._scanned = True  # first: the modules imported below may ask for entries themselves
        for module in pkgutil.iter_modules(importlib.import_module(self.package).__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        for entry_point in importlib.metadata.entry_points(group=self.package):
            entry_point.load()
