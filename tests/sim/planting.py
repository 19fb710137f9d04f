"""How a mutant is planted; the mutants themselves are in mutants*.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

Mutant = Callable[[], AbstractContextManager[object]]


def replaced(owner: type, name: str, make: Callable[[Any], Any]) -> Mutant:
    """A mutant that replaces one method by `make(the original)`."""

    def plant() -> AbstractContextManager[object]:
        return patch.object(owner, name, make(getattr(owner, name)))

    return plant
