"""Public names of small scheduler helpers; re-exports, and one list helper.

Layer: L5 (scheduler).
"""

from __future__ import annotations

from typing import TypeVar

from vllm.v1.core.sched.stop import check_sequence_repetition, check_stop

T = TypeVar("T")


def remove_all(items: list[T], to_remove: set[T]) -> list[T]:
    """``items`` without ``to_remove``.  One item is removed in place, more make a new list; use the result."""
    if not to_remove:
        return items
    if len(to_remove) == 1:
        (item,) = to_remove
        if item in items:
            items.remove(item)
        return items
    return [item for item in items if item not in to_remove]


__all__ = ["check_sequence_repetition", "check_stop", "remove_all"]
