"""Block tables of the requests on this worker, per KV cache group. Layer: L6.

Owns: which physical block holds which part of a request. Rows are the worker's request slots. Must not know: tokens,
steps, devices (tables live in host memory; the step's inputs copy what they need).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class BlockTable:
    """The table of one group: int32 `[slots, width]`, 0 where there is no block."""

    def __init__(self, num_slots: int, width: int) -> None:
        self.ids: Int32Array = np.zeros((num_slots, width), dtype=np.int32)
        self.lengths: Int64Array = np.zeros(num_slots, dtype=np.int64)

    def replace(self, slot: int, block_ids: Sequence[int]) -> None:
        """The row of `slot` is exactly `block_ids` from now on."""
        self.clear(slot)
        self.append(slot, block_ids)

    def append(self, slot: int, block_ids: Sequence[int]) -> None:
        """Add blocks at the end of a row."""
        if not block_ids:
            return
        start = int(self.lengths[slot])
        end = start + len(block_ids)
        if end > self.ids.shape[1]:
            self._widen(end)
        self.ids[slot, start:end] = block_ids
        self.lengths[slot] = end

    def clear(self, slot: int) -> None:
        """Forget the row of a slot."""
        self.ids[slot, : self.lengths[slot]] = 0
        self.lengths[slot] = 0

    def _widen(self, needed: int) -> None:
        width = max(needed, 2 * self.ids.shape[1])
        wider = np.zeros((self.ids.shape[0], width), dtype=np.int32)
        wider[:, : self.ids.shape[1]] = self.ids
        self.ids = wider

    def add_slots(self, count: int) -> None:
        """Make room for more requests."""
        self.ids = np.concatenate([self.ids, np.zeros((count, self.ids.shape[1]), dtype=np.int32)])
        self.lengths = np.concatenate([self.lengths, np.zeros(count, dtype=np.int64)])


class MultiGroupBlockTable:
    """One table per group, changed together."""

    def __init__(self, num_slots: int, widths: Sequence[int]) -> None:
        self.tables = [BlockTable(num_slots, max(1, width)) for width in widths]

    def __getitem__(self, group: int) -> BlockTable:
        return self.tables[group]

    def __len__(self) -> int:
        return len(self.tables)

    def check(self, req_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """`ValueError` unless there is one list per group."""
        if len(block_ids) != len(self.tables):
            raise ValueError(
                f"request {req_id}: block ids of {len(block_ids)} groups given, the KV cache has {len(self.tables)}"
            )

    def replace(self, slot: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Set the rows of a slot."""
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.replace(slot, ids)

    def append(self, slot: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Extend the rows of a slot."""
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.append(slot, ids)

    def clear(self, slot: int) -> None:
        """Forget the rows of a slot."""
        for table in self.tables:
            table.clear(slot)

    def add_slots(self, count: int) -> None:
        """Make room for more requests."""
        for table in self.tables:
            table.add_slots(count)
