"""KV event types: wire layout, hashing, aggregation."""

from __future__ import annotations

import msgspec
import pytest

from vllm.distributed.kv_event_types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventCodec,
    KVCacheEvent,
    KVConnectorKVEvents,
    KVEventAggregator,
    KVEventBatch,
)


def stored(**changes: object) -> BlockStored:
    fields: dict[str, object] = {
        "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 2,
        "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    return BlockStored(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_batch_on_the_wire() -> None:
    batch = KVEventBatch(
        1.5,
        [
            stored(group_idx=0, kv_cache_spec_kind="full_attention"),
            BlockRemoved([b"x"], "GPU", 0),
            AllBlocksCleared(),
        ],
        0,
    )
    assert msgspec.msgpack.decode(EventCodec().encode(batch)) == [
        1.5,
        [
            {
                "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
                "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {"type": "BlockRemoved", "block_hashes": [b"x"], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]  # fmt: skip


def test_the_fields_keep_their_order() -> None:
    assert BlockStored.__struct_fields__ == (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership",
        "session_id", "lookahead_token_ids",
    )  # fmt: skip
    assert BlockRemoved.__struct_fields__ == ("block_hashes", "medium", "group_idx", "locality", "ownership")
    assert KVEventBatch.__struct_fields__ == ("ts", "events", "data_parallel_rank")


def test_the_rank_is_always_on_the_wire() -> None:
    assert msgspec.msgpack.decode(EventCodec().encode(EventBatch(2.0, []))) == [2.0, [], None]


def test_decoding_ignores_unknown_keys() -> None:
    payload = msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared", "new_key": 3}], None])
    assert EventCodec().decode(payload).events == [AllBlocksCleared()]


def test_what_was_encoded_is_decoded() -> None:
    event = stored(
        extra_keys=[("lora", ("img", -3), b"d"), None], lookahead_token_ids=[[5], [6]], medium="CPU"
    )
    batch = KVEventBatch(1.0, [event], 3)
    assert EventCodec().decode(EventCodec().encode(batch)).data_parallel_rank == 3


def test_callers_may_bring_their_own_events() -> None:
    class Mine(msgspec.Struct, tag=True):
        value: int

    class MyBatch(EventBatch):
        events: list[Mine]

    assert msgspec.msgpack.decode(EventCodec().encode(MyBatch(1.0, [Mine(4)]))) == [
        1.0, [{"type": "Mine", "value": 4}], None,
    ]  # fmt: skip


def test_events_are_keys() -> None:
    assert len({stored(), stored(), stored(lora_name="a"), stored(medium="CPU")}) == 3
    assert len({BlockRemoved([1], "GPU"), BlockRemoved([1], "GPU"), BlockRemoved([1], "CPU")}) == 2
    assert hash(stored(extra_keys=[["a", ["b", 1]]])) == hash(stored(extra_keys=[("a", ("b", 1))]))


def test_the_aggregator_knows_what_all_workers_reported() -> None:
    aggregator = KVEventAggregator(2)
    common, single = stored(), BlockRemoved([9], "CPU")
    aggregator.add_events([common, single])
    aggregator.add_events([common])
    assert aggregator.get_common_events() == [common]
    assert aggregator.get_all_events() == [common, single]
    aggregator.increment_workers()
    assert aggregator.get_number_of_workers() == 3
    assert aggregator.get_common_events() == []
    aggregator.reset_workers()
    assert aggregator.get_common_events() == [single]
    aggregator.clear_events()
    assert aggregator.get_all_events() == []


def test_the_aggregator_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="greater than zero, got 0"):
        KVEventAggregator(0)
    with pytest.raises(TypeError, match="must be a list, got tuple"):
        KVEventAggregator(1).add_events(())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive, got -1"):
        KVEventAggregator(1).increment_workers(-1)


class _Events(KVConnectorKVEvents):
    def __init__(self, events: list[KVCacheEvent]) -> None:
        self.aggregator = KVEventAggregator(1)
        self.aggregator.add_events(events)

    def add_events(self, events: list[KVCacheEvent]) -> None:
        self.aggregator.add_events(events)

    def aggregate(self) -> _Events:
        return self

    def increment_workers(self, count: int = 1) -> None:
        self.aggregator.increment_workers(count)

    def get_all_events(self) -> list[KVCacheEvent]:
        return self.aggregator.get_all_events()

    def get_number_of_workers(self) -> int:
        return self.aggregator.get_number_of_workers()

    def clear_events(self) -> None:
        self.aggregator.clear_events()


def test_events_of_two_connectors_merge() -> None:
    one, two = _Events([stored()]), _Events([AllBlocksCleared()])
    assert one.merge(two) is one
    assert one.get_all_events() == [stored(), AllBlocksCleared()]
