"""Planted bugs. Each must be caught within 100 seeds: this tests the tester."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Mutant = Callable[[], AbstractContextManager[object]]

MUTANTS: dict[str, Mutant] = {"none": nullcontext}
