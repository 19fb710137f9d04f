"""Tables from a name to "module:attribute", resolved on use, and entry points of outside packages. Layer: L0.

The only place where a module is loaded by a name that is data. Tables hold strings, so that an optional dependency
loads when it is chosen and not before, and so that a table never imports upward.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping


def resolve_object(target: str) -> object:
    """The attribute named by "module:attribute" (or "module.attribute").

    Raises ValueError for a malformed target, ImportError or AttributeError if it does not exist.
    """
    module_name, separator, attribute = target.partition(":")
    if not separator:
        module_name, _, attribute = target.rpartition(".")
    if not module_name or not attribute:
        raise ValueError(f"Not an importable name: {target!r} (expected 'module:attribute')")
    value: object = importlib.import_module(module_name)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


class Registry:
    """A table of named targets, such as the connectors or the queue policies.

    `what` names one entry in messages. `entry_point_group`, if given, is searched for names that the table lacks.
    """

    def __init__(self, what: str, entries: Mapping[str, str], entry_point_group: str | None = None) -> None:
        self._what = what
        self._targets = dict(entries)
        self._entry_point_group = entry_point_group

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def names(self) -> list[str]:
        """The names in the table, sorted."""
        return sorted(self._targets)

    def register(self, name: str, target: str) -> None:
        """Add `name`. Raises ValueError if it is taken."""
        if name in self._targets:
            raise ValueError(f"{self._what} {name!r} is already registered as {self._targets[name]!r}")
        self._targets[name] = target

    def find(self, name: str) -> str | None:
        """The target of `name`, not loaded, or None if neither the table nor an entry point has it."""
        return self._targets.get(name) or self._find_entry_point(name)

    def resolve(self, name: str) -> object:
        """The object behind `name`. Raises ValueError listing the known names if there is none."""
        target = self.find(name)
        if target is None:
            raise ValueError(f"Unknown {self._what} {name!r}; known: {', '.join(self.names())}")
        return resolve_object(target)

    def _find_entry_point(self, name: str) -> str | None:
        if self._entry_point_group is None:
            return None
        for entry in importlib.metadata.entry_points(group=self._entry_point_group, name=name):
            return entry.value
        return None
