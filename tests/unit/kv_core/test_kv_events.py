"""Events of the block index: what is reported, with which tokens and parents."""

from __future__ import annotations

import msgspec
import pytest

from tests.helpers.kv_core import admit, config, full, image, lora, mamba, manager, request, step, window
from vllm.distributed.kv_event_types import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.block_hash import BlockHash, make_block_hash_with_group_id, maybe_convert_block_hash
from vllm.v1.core.block_index import StoredBlockInfo, describe_tokens
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager


def short(hashes: list[BlockHash]) -> list[int]:
    return [maybe_convert_block_hash(h) for h in hashes]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(10, True, 4, enable_kv_cache_events=True)


def test_one_event_lists_all_blocks_of_a_call(pool: BlockPool) -> None:
    req = request("r", range(1, 10), hash_block=4)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(req, blocks, 0, 2, 4, 0)
    (event,) = pool.take_events()
    assert event == BlockStored(
        block_hashes=short(req.block_hashes[:2]),
        parent_block_hash=None,
        token_ids=list(range(1, 9)),
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
    )
    for token in (10, 11, 12):
        req.append_output_token_ids(token)
    pool.cache_full_blocks(req, blocks, 2, 3, 4, 0)
    (event,) = pool.take_events()
    assert event.block_hashes == short(req.block_hashes[2:])
    assert event.parent_block_hash == short(req.block_hashes)[1]
    assert event.token_ids == [9, 10, 11, 12]
    assert pool.take_events() == []


def test_hashes_are_bytes_where_that_is_asked_for(pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    req = request("r", range(8), hash_block=4)
    pool.cache_full_blocks(req, pool.get_new_blocks(2), 0, 2, 4, 0)
    assert pool.take_events()[0].block_hashes == req.block_hashes


def test_evt_01_masked_blocks_split_the_event(pool: BlockPool) -> None:
    req = request("r", range(20), hash_block=4)
    blocks = pool.get_new_blocks(5)
    blocks[1] = pool.null_block
    pool.cache_full_blocks(req, blocks, 0, 5, 4, 2, [True, True, True, True, False])
    first, second = pool.take_events()
    hashes = short(req.block_hashes)
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ([hashes[0]], None, [0, 1, 2, 3])
    assert (second.block_hashes, second.parent_block_hash) == (hashes[2:4], hashes[1])
    assert second.token_ids == list(range(8, 16))
    assert first.group_idx == second.group_idx == 2


def test_evt_01_a_fully_masked_call_reports_nothing(pool: BlockPool) -> None:
    req = request("r", range(8), hash_block=4)
    pool.cache_full_blocks(req, pool.get_new_blocks(2), 0, 2, 4, 0, [False, False])
    assert pool.take_events() == []


def test_evt_01_holds_for_states_and_windows() -> None:
    kv = manager(40, full(4), window(4, 4), mamba(4), scheduler_block=4, enable_kv_cache_events=True)
    req = request("r", range(30), hash_block=4)
    assert admit(kv, req, 12) == 0
    for _ in range(4):
        step(kv, req, 4)
    hashes, groups = short(req.block_hashes), set()
    for event in kv.take_events():
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        first = hashes.index(event.block_hashes[0])
        assert event.block_hashes == hashes[first : first + len(event.block_hashes)]
        assert event.token_ids == list(range(4 * first, 4 * (first + len(event.block_hashes))))
        assert event.parent_block_hash == (hashes[first - 1] if first else None)
        groups.add(event.group_idx)
    assert groups == {0, 1, 2}


def test_evt_04_the_parent_is_always_the_block_before(pool: BlockPool) -> None:
    req = request("r", range(12), hash_block=4)
    other = request("o", range(8), hash_block=4)
    pool.cache_full_blocks(other, pool.get_new_blocks(2), 1, 2, 4, 0)  # block 1 is stored already
    pool.take_events()
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(req, blocks, 0, 3, 4, 0, [True, False, True])
    hashes = short(req.block_hashes)
    assert [(e.block_hashes, e.parent_block_hash) for e in pool.take_events()] == [
        ([hashes[0]], None),
        ([hashes[2]], hashes[1]),
    ]


def test_evt_12_blocks_that_a_load_brought_are_announced_before_those_computed_after_them() -> None:
    kv = manager(10, full(4), enable_kv_cache_events=True)
    req = request("r", range(12), hash_block=4)
    assert kv.allocate_slots(req, 0, num_external_computed_tokens=8, delay_cache_blocks=True) is not None
    assert kv.take_events() == []
    req.num_computed_tokens = 8
    kv.cache_blocks(req, 8)
    step(kv, req, 4)
    hashes = short(req.block_hashes)
    assert [(e.block_hashes, e.parent_block_hash) for e in kv.take_events()] == [
        (hashes[:2], None),
        (hashes[2:], hashes[1]),
    ]


def test_partial_entry_reports_its_hash_unit(pool: BlockPool) -> None:
    req = request("r", range(8), hash_block=4)
    pool.cache_partial_block(req, pool.get_new_blocks(1)[0], 8, 3, 16)
    (event,) = pool.take_events()
    assert (event.block_size, event.token_ids, event.group_idx) == (4, [4, 5, 6, 7], 3)
    assert (event.block_hashes, event.parent_block_hash) == (
        short(req.block_hashes[1:]),
        short(req.block_hashes)[0],
    )


def test_adapter_media_and_session_travel_with_the_event(pool: BlockPool) -> None:
    req = request(
        "r",
        range(8),
        hash_block=4,
        lora_request=lora("style", 3, "/s"),
        mm_features=[image("cat", 5, 2)],
        session_id="s1",
    )
    pool.cache_full_blocks(req, pool.get_new_blocks(2), 0, 2, 4, 0)
    (event,) = pool.take_events()
    assert (event.lora_id, event.lora_name, event.session_id) == (3, "style", "s1")
    assert event.extra_keys == [("style",), ("style", ("cat", 1))]


def test_lookahead_tokens_are_listed_per_hash() -> None:
    pool = BlockPool(10, True, 4, enable_kv_cache_events=True, num_hash_lookahead_tokens=2)
    req = request("r", range(10), hash_block=4, lookahead=2)
    pool.cache_full_blocks(req, pool.get_new_blocks(2), 0, 2, 4, 0)
    (event,) = pool.take_events()
    assert event.lookahead_token_ids == [[4, 5], [8, 9]]
    assert event.token_ids == list(range(8))
    assert event.extra_keys is None


def test_eviction_reports_each_hash(pool: BlockPool) -> None:
    req = request("r", range(16), hash_block=4)
    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(req, block, 4, 1, 16)
    pool.cache_partial_block(req, block, 8, 1, 16)
    pool.take_events()
    pool.evict_blocks([block.block_id])
    assert pool.take_events() == [
        BlockRemoved(block_hashes=[h], medium="GPU", group_idx=1) for h in short(req.block_hashes[:2])
    ]


def test_moving_entries_reports_nothing(pool: BlockPool) -> None:
    req = request("r", range(4), hash_block=4)
    source, target = pool.get_new_blocks(2)
    pool.cache_full_blocks(req, [source], 0, 1, 4, 0)
    key = make_block_hash_with_group_id(req.block_hashes[0], 0)
    info = pool.get_stored_info(source, key)
    pool.take_events()
    pool.move_block_hashes(source, target)
    assert pool.take_events() == []
    assert pool.get_stored_info(target, key) is info


def test_reuse_report_covers_full_real_blocks_only(pool: BlockPool) -> None:
    req = request("r", range(20), hash_block=4)
    blocks = [pool.null_block, *pool.get_new_blocks(3)]
    pool.emit_cached_block_events(req, blocks, 14, 4, 0)
    (event,) = pool.take_events()
    assert event.block_hashes == short(req.block_hashes[1:3])
    assert event.token_ids == list(range(4, 12))


def test_lower_tier_reports_content_that_arrived_with_all_its_fields() -> None:
    device = BlockPool(4, True, 4, enable_kv_cache_events=True)
    host = BlockPool(4, True, 4, enable_kv_cache_events=True, medium="CPU")
    req = request("r", range(8), hash_block=4, lora_request=lora("a", 1, "/a"), session_id="s")
    blocks = device.get_new_blocks(2)
    device.cache_full_blocks(req, blocks, 0, 2, 4, 0)
    (stored,) = device.take_events()
    (slot,) = host.get_new_blocks(1)
    for key, num_tokens in device.get_keys(blocks[1]):
        host.commit_staged(slot, key, num_tokens, device.get_stored_info(blocks[1], key))
    (event,) = host.take_events()
    assert (event.medium, event.locality, event.session_id) == ("CPU", "LOCAL", None)
    assert event.block_hashes == stored.block_hashes[1:]
    assert event.parent_block_hash == stored.block_hashes[0]
    assert (event.token_ids, event.block_size, event.lora_name) == ([4, 5, 6, 7], 4, "a")
    assert event.extra_keys == stored.extra_keys[1:]
    host.free_blocks([slot])
    host.evict_blocks([slot.block_id])
    (event,) = host.take_events()
    assert (event.medium, event.locality) == ("CPU", "LOCAL")


def test_content_without_known_tokens_is_a_placeholder() -> None:
    host = BlockPool(4, True, 4, enable_kv_cache_events=True, medium="STORAGE")
    (slot,) = host.get_new_blocks(1)
    host.commit_staged(slot, make_block_hash_with_group_id(BlockHash(b"x" * 32), 5), None, None)
    (event,) = host.take_events()
    assert (event.token_ids, event.parent_block_hash, event.block_size) == ([], None, 0)
    assert (event.medium, event.group_idx) == ("STORAGE", 5)


def test_clearing_names_the_tier_only_below_the_device() -> None:
    for medium, expected in (("GPU", None), ("CPU", "CPU")):
        pool = BlockPool(4, True, 4, enable_kv_cache_events=True, medium=medium)
        pool.reset_prefix_cache()
        assert pool.take_events() == [AllBlocksCleared(medium=expected)]


def test_nothing_is_remembered_with_events_off() -> None:
    pool = BlockPool(4, True, 4)
    req = request("r", range(4), hash_block=4)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(req, [block], 0, 1, 4, 0)
    assert pool.kv_event_queue == []
    assert pool.get_stored_info(block, block.block_hash) is None


def test_described_tokens_match_the_event() -> None:
    req = request("r", range(12), hash_block=4, cache_salt="s")
    info = describe_tokens(req, 0, 4, None)
    assert info == StoredBlockInfo([0, 1, 2, 3], None, 4, extra_keys=("s",))


def test_manager_adds_kind_and_window_of_the_group() -> None:
    kv = manager(20, full(4), window(4, 6), scheduler_block=4, enable_kv_cache_events=True)
    admit(kv, request("r", range(8), hash_block=4))
    kinds = {e.group_idx: (e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in kv.take_events()}
    assert kinds == {0: ("full_attention", None), 1: ("sliding_window", 6)}


def test_whole_hits_are_reported_on_request() -> None:
    kv = manager(20, full(4), enable_kv_cache_events=True)
    first = request("a", range(12), hash_block=4)
    admit(kv, first)
    kv.take_events()
    second = request("b", range(12), hash_block=4)
    second.kv_cache_report_mode = "full"
    assert admit(kv, second) == 8
    reuse, fresh = kv.take_events()
    assert (reuse.parent_block_hash, reuse.token_ids) == (None, list(range(8)))
    assert fresh.token_ids == [8, 9, 10, 11]


@pytest.mark.parametrize("count", [2, 3, 10])
def test_eviction_events_come_before_the_store_that_caused_them(count: int) -> None:
    kv = manager(count + 1, full(16), enable_kv_cache_events=True)
    first = request("0", range(16 * count))
    kv.allocate_slots(first, 16 * count)
    (stored,) = kv.take_events()
    kv.free(first)
    second = request("1", range(16 * count))
    kv.allocate_slots(second, 16 * count)
    events = kv.take_events()
    assert len(events) == count + 1
    assert all(isinstance(e, BlockRemoved) and e.block_hashes[0] in stored.block_hashes for e in events[:-1])
    assert events[-1] == stored


def test_evt_11_events_do_not_change_the_layout() -> None:
    for events in (False, True):
        kv = KVCacheManager(config(20, full(4), window(4, 6)), 100, 4, 4, enable_kv_cache_events=events)
        assert kv.block_pool.num_gpu_blocks == 20
        assert kv.num_kv_cache_groups == 2


def test_a_late_consumer_is_told_what_all_events_so_far_come_to(pool: BlockPool) -> None:
    first, other = request("a", range(12), hash_block=4), request("b", range(100, 108), hash_block=4)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(first, blocks, 0, 2, 4, 0)
    pool.cache_full_blocks(other, pool.get_new_blocks(2), 0, 2, 4, 1)
    pool.cache_full_blocks(first, blocks, 2, 3, 4, 0)
    twice = request("c", range(4), hash_block=4)
    pool.cache_full_blocks(twice, pool.get_new_blocks(1), 0, 1, 4, 0)
    pool.evict_blocks([blocks[1].block_id])
    pool.move_block_hashes(blocks[2], pool.get_new_blocks(1)[0])
    a, b = short(first.block_hashes), short(other.block_hashes)
    runs = [(e.block_hashes, e.parent_block_hash, e.token_ids, e.group_idx) for e in pool.present_events()]
    assert runs == [
        ([a[0]], None, [0, 1, 2, 3], 0),
        (b, None, list(range(100, 108)), 1),
        ([a[0]], None, [0, 1, 2, 3], 0),
        ([a[2]], a[1], [8, 9, 10, 11], 0),
    ]
    assert len(pool.take_events()) == 5, "asking takes nothing from those who listen"
    pool.invalidate_prefix_cache()
    assert pool.present_events() == []


def test_contents_of_unlike_marks_share_no_event_in_a_snapshot(pool: BlockPool) -> None:
    key = [make_block_hash_with_group_id(BlockHash(bytes([i]) * 8), 0) for i in range(3)]
    block_hashes = [BlockHash(bytes([i]) * 8) for i in range(3)]
    infos = [
        StoredBlockInfo([1, 2], None, 2, session_id="s"),
        StoredBlockInfo([3, 4], block_hashes[0], 2),
        StoredBlockInfo([5, 6, 7], block_hashes[1], 3),
    ]
    for block, one, info in zip(pool.get_new_blocks(3), key, infos, strict=True):
        pool.index.commit(block, one, None, info)
    assert pool.present_events() == pool.take_events()
    pool.index.commit(pool.get_new_blocks(1)[0], key[0], None, None)
    assert pool.present_events()[-1] == pool.take_events()[0], "what was told without tokens is told again so"


def test_events_survive_the_wire(pool: BlockPool) -> None:
    req = request("r", range(4), hash_block=4)
    pool.cache_full_blocks(req, pool.get_new_blocks(1), 0, 1, 4, 0)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(pool.take_events()[0]))
    assert decoded["type"] == "BlockStored"
    assert set(decoded) == {
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "group_idx",
    }
