"""Collects batch changes between steps, and groups processors by when they run. Layer: L6.

Owns: `BatchUpdateBuilder`, `LogitsProcessors`. Must not know: processors' rules, the runner's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from vllm.v1.sample.logits_processor.interface import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MovedRequest,
    RemovedRequest,
)


class BatchUpdateBuilder:
    """Collects removed, added and moved rows until the processors are told.

    All removals come first. Rows given back by `pop_removed` (smallest first) are reused for additions or filled by
    moves, and no longer count as removed.
    """

    def __init__(
        self,
        removed: list[RemovedRequest] | None = None,
        added: list[AddedRequest] | None = None,
        moved: list[MovedRequest] | None = None,
    ) -> None:
        self._removed: list[RemovedRequest] = removed or []
        self._is_removed_sorted = False
        self.added: list[AddedRequest] = added or []
        self.moved: list[MovedRequest] = moved or []
        # Set by every removal, also when the row is reused at once.
        self.batch_changed = bool(self._removed or self.added or self.moved)

    def _sort_removed(self) -> None:
        if not self._is_removed_sorted:
            self._removed.sort(reverse=True)
            self._is_removed_sorted = True

    @property
    def removed(self) -> list[RemovedRequest]:
        """Unused rows, largest first. Reading it ends the time of removals for this step."""
        self._sort_removed()
        return self._removed

    def removed_append(self, index: int) -> None:
        """A row lost its request. `RuntimeError` once `removed` was read in this step."""
        if self._is_removed_sorted:
            raise RuntimeError(f"row {index} cannot be removed after the removed rows of this step were read")
        self._removed.append(index)
        self.batch_changed = True

    def has_removed(self) -> bool:
        """Whether an unused row is left."""
        return bool(self._removed)

    def peek_removed(self) -> int | None:
        """The smallest unused row, or None."""
        if not self._removed:
            return None
        self._sort_removed()
        return self._removed[-1]

    def pop_removed(self) -> int | None:
        """Takes the smallest unused row for reuse, or None."""
        if not self._removed:
            return None
        self._sort_removed()
        return self._removed.pop()

    def reset(self) -> bool:
        """Forget everything; True if anything had changed."""
        changed = bool(self.batch_changed or self._removed or self.added or self.moved)
        self._removed = []
        self._is_removed_sorted = False
        self.added = []
        self.moved = []
        self.batch_changed = False
        return changed

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """The collected changes, or None if there are none; then start over."""
        update = None
        if self._removed or self.added or self.moved:
            update = BatchUpdate(batch_size, self.removed, self.added, self.moved)
        self.reset()
        return update


class LogitsProcessors:
    """Processors, split into those that can change the greedy choice and those that cannot."""

    def __init__(self, logitsprocs: Iterable[LogitsProcessor] | None = None) -> None:
        self.argmax_invariant: list[LogitsProcessor] = []
        self.non_argmax_invariant: list[LogitsProcessor] = []
        for processor in logitsprocs or ():
            group = self.argmax_invariant if processor.is_argmax_invariant() else self.non_argmax_invariant
            group.append(processor)

    @property
    def all(self) -> Iterator[LogitsProcessor]:
        """Every processor."""
        return chain(self.argmax_invariant, self.non_argmax_invariant)
