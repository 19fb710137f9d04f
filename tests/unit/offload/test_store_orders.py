"""The blocks of a store order are lists to whoever reads them, and packed on the way there."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, replace

from vllm.v1.core.block_ops import pack_block_ids, python_pack_block_ids, unpack_block_ids
from vllm.v1.core.kv_cache_block import KVCacheBlock, PythonBlock
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata

HIGHEST = 2**31 - 1


def blocks(*block_ids: int) -> list[KVCacheBlock]:
    return [KVCacheBlock(block_id) for block_id in block_ids]


def test_ids_survive_packing() -> None:
    for ids in ([], [0], [7, 7, 1], [HIGHEST, 3, -1]):
        assert unpack_block_ids(pack_block_ids(blocks(*ids))) == ids
        assert python_pack_block_ids(map(PythonBlock, ids)) == pack_block_ids(blocks(*ids))  # type: ignore[arg-type]


def test_an_order_with_packed_stores_is_as_one_with_lists() -> None:
    order = SimpleCPUOffloadMetadata(3, [9], [8], store_event=4, need_flush=True)
    order.add_stores(blocks(5, 300), blocks(1, 2))
    order.add_stores(blocks(HIGHEST), blocks(4))
    expected = replace(order, store_gpu_blocks=[5, 300, HIGHEST], store_cpu_blocks=[1, 2, 4])
    for arrived in (order, pickle.loads(pickle.dumps(order)), copy.deepcopy(order), copy.copy(order)):
        assert arrived.store_gpu_blocks == [5, 300, HIGHEST]
        assert arrived.store_cpu_blocks == [1, 2, 4]
        assert arrived.store_gpu_blocks is arrived.store_gpu_blocks
        assert arrived == expected
        assert repr(arrived) == repr(expected)
        assert asdict(arrived) == asdict(expected)
    again = pickle.loads(pickle.dumps(order))  # after it was read
    assert again == expected


def test_a_store_may_be_added_after_the_order_was_read() -> None:
    order = SimpleCPUOffloadMetadata()
    assert (order.store_gpu_blocks, order.store_cpu_blocks) == ([], [])
    order.add_stores(blocks(5), blocks(1))
    assert (order.store_gpu_blocks, order.store_cpu_blocks) == ([5], [1])
    order.add_stores(blocks(6), blocks(2))
    assert (order.store_gpu_blocks, order.store_cpu_blocks) == ([5, 6], [1, 2])
    assert SimpleCPUOffloadMetadata().store_gpu_blocks == []


def test_a_store_is_added_behind_blocks_that_were_given_as_lists() -> None:
    order = SimpleCPUOffloadMetadata(store_event=1, store_gpu_blocks=[7, 8], store_cpu_blocks=[3, 4])
    order.add_stores(blocks(5), blocks(1))
    assert (order.store_gpu_blocks, order.store_cpu_blocks) == ([7, 8, 5], [3, 4, 1])
    order.store_gpu_blocks.append(9)  # lists to whoever reads them, so also to whoever changes them
    order.store_cpu_blocks.append(0)
    order.add_stores(blocks(6), blocks(2))
    order.add_stores(blocks(10), blocks(5))
    assert (order.store_gpu_blocks, order.store_cpu_blocks) == ([7, 8, 5, 9, 6, 10], [3, 4, 1, 0, 2, 5])
    again = pickle.loads(pickle.dumps(order))
    assert again == order


def test_an_order_travels_blocks() -> None:
    ids = range(1 << 20, (1 << 20) + 1000)
    order, lists = SimpleCPUOffloadMetadata(), SimpleCPUOffloadMetadata()
    order.add_stores(blocks(*ids), blocks(*ids))
    lists.store_gpu_blocks, lists.store_cpu_blocks = list(ids), list(ids)
    plain = len(pickle.dumps(SimpleCPUOffloadMetadata()))
    assert len(pickle.dumps(order)) - plain < 8200
    assert len(pickle.dumps(lists)) - plain > 9900
