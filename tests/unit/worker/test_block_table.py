"""Block tables of the worker."""

from __future__ import annotations

import pytest

from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable


def test_rows_grow_and_are_replaced() -> None:
    table = BlockTable(2, 4)
    table.append(1, [5, 6])
    table.append(1, [])
    table.append(1, [7])
    assert table.ids.tolist() == [[0, 0, 0, 0], [5, 6, 7, 0]]
    table.replace(1, [9])
    assert table.ids[1].tolist() == [9, 0, 0, 0]
    table.clear(1)
    assert not table.ids.any()


def test_a_row_may_outgrow_the_expected_width() -> None:
    table = BlockTable(1, 2)
    table.append(0, [1, 2, 3, 4, 5])
    assert table.ids[0, :5].tolist() == [1, 2, 3, 4, 5]


def test_groups_change_together_and_must_match() -> None:
    tables = MultiGroupBlockTable(2, [3, 1])
    tables.replace(0, ([1, 2], [8]))
    tables.append(0, ([3], []))
    assert tables[0].ids[0].tolist() == [1, 2, 3]
    assert tables[1].ids[0].tolist() == [8]
    with pytest.raises(ValueError, match="request r: block ids of 1 groups given, the KV cache has 2"):
        tables.check("r", ([1],))
    tables.add_slots(1)
    tables.append(2, ([4], [5]))
    assert tables[0].ids[2, 0] == 4
