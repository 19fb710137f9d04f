"""The scheduler's view: prefix hits, order of reuse, reset."""

from __future__ import annotations

import random

import pytest

from tests.helpers.kv_core import (
    admit,
    free_ids,
    full,
    image,
    lora,
    mamba,
    manager,
    request,
    ring,
    window,
)
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core.block_hash import (
    get_block_hash,
    get_group_id,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.block_hasher import hash_block_tokens
from vllm.v1.core.invariants import check_invariants

COMMON = [i for i in range(3) for _ in range(16)]


@pytest.mark.parametrize("hash_fn", [sha256, sha256_cbor])
def test_prefill_shares_the_common_prefix(hash_fn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.core.block_hash.NONE_HASH", hash_fn("root"))
    kv = manager(11, full(16))
    first = request("0", [*COMMON, *[3] * 7], hash_fn=hash_fn)
    blocks, hit, _ = kv.get_computed_blocks(first)
    assert (blocks.blocks, hit) == (((),), 0)
    taken = kv.allocate_slots(first, 55, 0, blocks)
    assert taken is not None
    assert taken.get_block_ids() == ([1, 2, 3, 4],)
    parent = None
    for block_id in (1, 2, 3):
        parent = hash_block_tokens(hash_fn, parent, COMMON[16 * block_id - 16 : 16 * block_id])
        block = kv.block_pool.blocks[block_id]
        assert block.block_hash is not None
        assert (get_block_hash(block.block_hash), get_group_id(block.block_hash)) == (parent, 0)
        assert block.ref_cnt == 1
    assert kv.block_pool.blocks[4].block_hash is None

    second = request("1", [*COMMON, *[3] * 5], hash_fn=hash_fn)
    blocks, hit, _ = kv.get_computed_blocks(second)
    assert (blocks.get_block_ids(), hit) == (([1, 2, 3],), 48)
    taken = kv.allocate_slots(second, 5, hit, blocks)
    assert taken is not None
    assert taken.get_block_ids() == ([5],)
    assert [b.ref_cnt for b in blocks.blocks[0]] == [2, 2, 2]
    kv.free(first)
    kv.free(second)
    assert kv.block_pool.get_num_free_blocks() == 10
    check_invariants(kv, at_rest=True)


def test_fresh_order_after_one_request() -> None:
    kv = manager(11, full(16))
    req = request("a", range(55))
    admit(kv, req)
    kv.free(req)
    assert free_ids(kv) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]


def test_hybrid_prefill_draws_all_groups_from_one_pool() -> None:
    kv = manager(21, full(16), window(16, 32), window(16, 32))
    first = request("0", [*COMMON, *[3] * 7])
    blocks, hit, _ = kv.get_computed_blocks(first)
    assert hit == 0
    taken = kv.allocate_slots(first, 55, 0, blocks)
    assert taken is not None
    assert taken.get_block_ids() == ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    again, hit, _ = kv.get_computed_blocks(request("1", [*COMMON, *[3] * 5]))
    assert (again.get_block_ids(), hit) == (([1, 2, 3], [0, 6, 7], [0, 10, 11]), 48)


def test_losing_one_block_of_a_group_shortens_the_common_hit() -> None:
    kv = manager(40, full(16), window(16, 32), window(16, 32))
    first = request("0", [*COMMON, *[3] * 16, 4])
    admit(kv, first)
    hashes = first.block_hashes
    cases = [
        ([(0, 1)], 16),
        ([(0, 0)], 0),
        ([(1, 0), (2, 0)], 64),
        ([(1, 3)], 48),
        ([(1, 2), (2, 3)], 32),
        ([(1, 1), (1, 2), (2, 0)], 0),
    ]
    cache = kv.block_pool.cached_block_hash_to_block
    for number, (lost, expected) in enumerate(cases):
        saved = cache._cache.copy()
        for group, index in lost:
            cache._cache.pop(make_block_hash_with_group_id(hashes[index], group))
        probe = request(str(number + 1), [*COMMON, *[3] * 16, 5])
        assert kv.get_computed_blocks(probe)[1] == expected, lost
        cache._cache = saved


def test_pfx_09_a_fully_cached_prompt_still_computes_something() -> None:
    for length in (1, 15, 16, 17, 32, 33, 7681):
        kv = manager(600, full(16))
        first = request("a", range(length))
        admit(kv, first)
        kv.free(first)
        second = request("b", range(length))
        _, hit, _ = kv.get_computed_blocks(second)
        assert hit == (length - 1) // 16 * 16
        assert hit < length


def test_pfx_09_with_a_state_group_at_least_one_token_is_left() -> None:
    for length in (63, 64, 65, 128, 129):
        kv = manager(100, full(16), mamba(64), scheduler_block=64, hash_block=16)
        first = request("a", range(length))
        done = 0
        for end in [*range(16, length, 16), length]:
            admit(kv, first, end) if done == 0 else kv.allocate_slots(first, end - done)
            first.num_computed_tokens = done = end
            kv.new_step_starts()
        kv.free(first)
        assert kv.get_computed_blocks(request("b", range(length)))[1] <= length - 1


def test_the_limit_of_a_hit_can_be_lowered_but_not_raised() -> None:
    kv = manager(20, full(16))
    admit(kv, request("a", range(64)))
    probe = request("b", range(64))
    assert kv.get_computed_blocks(probe)[1] == 48
    assert kv.get_computed_blocks(probe, max_cache_hit_length=40)[1] == 32
    assert kv.get_computed_blocks(probe, max_cache_hit_length=1000)[1] == 48


def test_eagle_on_one_group_keeps_one_block_less() -> None:
    kv = manager(20, full(16), use_eagle=True)
    req = request("a", [0] * 48)
    admit(kv, req)
    kv.free(req)
    blocks, hit, _ = kv.get_computed_blocks(request("b", [0] * 48))
    assert (len(blocks.blocks[0]), hit) == (1, 16)


def test_eagle_on_a_window_needs_the_dropped_block_too() -> None:
    kv = manager(10, window(16, 16), use_eagle=True)
    req = request("a", [0] * 37)
    admit(kv, req)
    kv.free(req)
    assert kv.get_computed_blocks(request("b", [0] * 37))[1] == 16
    first = make_block_hash_with_group_id(req.block_hashes[0], 0)
    kv.block_pool.cached_block_hash_to_block._cache.pop(first)
    assert kv.get_computed_blocks(request("c", [0] * 37))[1] == 0


def test_lookahead_hashing_limits_the_hit() -> None:
    kv = manager(20, full(4), use_eagle=True, num_hash_lookahead_tokens=3)
    admit(kv, request("a", range(20), hash_block=4, lookahead=3))
    assert kv.get_computed_blocks(request("b", range(20), hash_block=4, lookahead=3))[1] == 16
    assert kv.get_computed_blocks(request("c", range(18), hash_block=4, lookahead=3))[1] == 12


def test_media_and_salt_are_part_of_the_prefix() -> None:
    kv = manager(40, full(16))
    with_cat = {"mm_features": [image("cat", 2, 4)]}
    admit(kv, request("a", range(33), **with_cat))
    assert kv.get_computed_blocks(request("b", range(33), **with_cat))[1] == 32
    assert kv.get_computed_blocks(request("c", range(33)))[1] == 0
    admit(kv, request("d", range(33), cache_salt="s"))
    assert kv.get_computed_blocks(request("e", range(33), cache_salt="s"))[1] == 32
    assert kv.get_computed_blocks(request("f", range(33), cache_salt="t"))[1] == 0


def test_pfx_06_and_07_other_identities_never_hit() -> None:
    kv = manager(60, full(16))
    admit(kv, request("a", range(33), lora_request=lora("X", 1, "/f1")))
    assert kv.get_computed_blocks(request("b", range(33), cache_salt="X"))[1] == 0
    assert kv.get_computed_blocks(request("c", range(33), lora_request=lora("X", 2, "/f2")))[1] == 0


def test_reading_the_cache_can_be_skipped_and_caching_be_off() -> None:
    kv = manager(20, full(16))
    admit(kv, request("a", range(33)))
    probe = request("b", range(33))
    probe.skip_reading_prefix_cache = True
    assert kv.get_computed_blocks(probe) == (kv.empty_kv_cache_blocks, 0, 0)
    assert kv.get_computed_blocks_for_connector(probe)[1:] == (0, 0, False)
    off = manager(20, full(16), enable_caching=False)
    admit(off, request("a", range(33)))
    assert off.get_computed_blocks(request("b", range(33)))[1] == 0
    assert len(off.block_pool.cached_block_hash_to_block) == 0


def test_hits_are_not_evicted_by_the_allocation_that_uses_them() -> None:
    kv = manager(4, full(16))
    first = request("a", range(33))
    admit(kv, first)
    kv.free(first)
    second = request("b", [*range(32), *range(100, 116)])
    assert admit(kv, second) == 32
    assert kv.get_block_ids("b") == ([1, 2, 3],)


def test_pfx_15_a_refused_reset_changes_nothing() -> None:
    kv = manager(10, full(16), log_stats=True)
    req = request("a", range(33))
    admit(kv, req)
    assert kv.reset_prefix_cache() is False
    assert kv.get_computed_blocks(request("b", range(33)))[1] == 32
    kv.free(req)
    assert kv.reset_prefix_cache() is True
    assert kv.get_computed_blocks(request("c", range(33)))[1] == 0
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert stats.reset


def test_pfx_20_aborted_requests_leave_no_blocks_behind() -> None:
    kv = manager(30, full(4), window(4, 8), mamba(4), ring(4))
    for number in range(1000):
        req = request(str(number), range(number, number + 20), hash_block=4)
        assert kv.allocate_slots(req, 4, delay_cache_blocks=True) is not None
        kv.free(req)
    check_invariants(kv, at_rest=True)
    assert len(kv.block_pool.cached_block_hash_to_block) == 0
    again = request("again", range(999, 1019), hash_block=4)
    assert admit(kv, again) == 0, "nothing of what was never computed is found"


def test_pfx_05_a_long_shared_prefix_hits_on_a_model_of_several_groups() -> None:
    kv = manager(
        6000, full(16), window(16, 1024), full(32), scheduler_block=32, hash_block=16, max_model_len=32768
    )
    system = list(range(16007))
    hits = []
    for turn in range(3):
        req = request(str(turn), [*system, *range(100000 + 1000 * turn, 100000 + 1000 * turn + 90)])
        hit = admit(kv, req)
        assert hit is not None
        hits.append(hit)
        kv.free(req)
    assert hits == [0, 16000, 16000]


def test_pfx_04_reuse_degrades_by_session_and_not_all_at_once() -> None:
    kv = manager(1200, full(16), window(16, 128), retention=0)
    prefixes = [list(range(1000 * s, 1000 * s + 640)) for s in range(32)]

    def send(session: int, turn: int) -> float:
        req = request(f"{session}.{turn}", [*prefixes[session], 10**6 + session, turn])
        blocks, hit, junction = kv.get_computed_blocks(req)
        req.shared_prefix_boundary = junction
        done = hit
        first = True
        while done < req.num_tokens:
            end = min(req.num_tokens, done + 256)
            if first:
                assert kv.allocate_slots(req, end - done, hit, blocks) is not None
            else:
                assert kv.allocate_slots(req, end - done) is not None
            req.num_computed_tokens = done = end
            first = False
        kv.free(req)
        return hit / 640

    for turn in range(4):  # 23 sessions fill 92 % of the pool's blocks
        rates = [send(session, turn) for session in range(23)]
        if turn:
            assert min(rates) >= 0.9
    # 32 sessions want 28 % more than there is; the least recent ones lose, and they alone.
    order = random.Random(4)
    rates = [send(order.randrange(32), turn) for turn in range(4, 324)][64:]
    assert sum(rate >= 0.9 for rate in rates) >= 0.7 * len(rates)


def test_junctions_are_reported_and_then_kept() -> None:
    kv = manager(400, full(16), window(16, 32), retention=0)
    shared = list(range(160))
    admit(kv, request("a", [*shared, *range(1000, 1100)]))
    second = request("b", [*shared, *range(2000, 2100)])
    _, hit, junction = kv.get_computed_blocks(second)
    assert (hit, junction) == (0, 160)
    admit(kv, second)
    third = request("c", [*shared, *range(3000, 3100)])
    assert kv.get_computed_blocks(third)[1] == 160


def test_junctions_of_states_are_asked_for() -> None:
    for asked, expected in ((False, 0), (True, 64)):
        kv = manager(60, full(16), mamba(16), retention=0, enable_mamba_shared_prefix_checkpoint=asked)
        first = request("a", [*range(64), *range(500, 600)])
        admit(kv, first)
        kv.new_step_starts()
        probe = request("b", [*range(64), *range(700, 800)])
        assert kv.get_computed_blocks(probe)[1:] == (0, expected)


@pytest.fixture(autouse=True)
def _root() -> None:
    init_none_hash(sha256)
