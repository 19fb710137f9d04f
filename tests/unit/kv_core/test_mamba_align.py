"""Recurrent states in mode "align": columns, entries, copies, hand-over."""

from __future__ import annotations

import pytest

from tests.helpers.kv_core import admit, full, mamba, manager, request, step
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.invariants import check_invariants
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import MambaManager


def state_table(kv: KVCacheManager, request_id: str, group: int = 0) -> list[int]:
    return kv.get_block_ids(request_id)[group]


def hashed_columns(kv: KVCacheManager, request_id: str, group: int = 0) -> list[int]:
    table = state_table(kv, request_id, group)
    return [i for i, b in enumerate(table) if kv.block_pool.blocks[b].block_hash is not None]


def test_caching_needs_mode_align() -> None:
    pool = BlockPool(4, True, 4)
    for caching in (True, False):
        if caching:
            with pytest.raises(AssertionError, match="align"):
                MambaManager(mamba(4, "none"), pool, True, 0, 4)
        else:
            assert MambaManager(mamba(4, "none"), pool, False, 0, 4).has_positionally_stable_blocks
    assert not MambaManager(mamba(4), pool, True, 0, 4).has_positionally_stable_blocks


def test_mode_none_keeps_one_running_state_and_its_speculative_blocks() -> None:
    kv = manager(20, mamba(100, "none", num_speculative_blocks=2), enable_caching=False, max_model_len=100)
    req = request("r", range(50))
    admit(kv, req, 20)
    assert state_table(kv, "r") == [1, 2, 3]
    step(kv, req, 30)
    assert state_table(kv, "r") == [1, 2, 3]
    kv.free(req)
    check_invariants(kv, at_rest=True)


def test_only_running_state_and_its_source_are_real() -> None:
    kv = manager(20, mamba(16))
    req = request("r", range(50))
    admit(kv, req, 32)
    assert state_table(kv, "r") == [0, 1]
    step(kv, req, 16)
    assert state_table(kv, "r") == [0, 1, 2]
    step(kv, req, 2)
    assert state_table(kv, "r") == [0, 0, 2, 3]
    assert kv.block_pool.get_num_free_blocks() == 19 - 2
    assert hashed_columns(kv, "r") == [2]
    check_invariants(kv)


def test_retention_keeps_the_replay_boundary_only() -> None:
    for retention, columns in ((0, [48]), (None, [32, 48])):
        kv = manager(20, mamba(16), retention=retention)
        req = request("r", range(50))
        for num_new in (32, 16, 2):
            admit(kv, req, num_new) if num_new == 32 else step(kv, req, num_new)
        kv.free(req)
        found = [n for n in (32, 48) if kv.block_pool.get_cached_block(req.block_hashes[n // 16 - 1], [0])]
        assert found == columns


def test_a_hit_resumes_from_the_state_without_copying_it() -> None:
    kv = manager(20, mamba(16))
    first = request("a", range(50))
    admit(kv, first, 48)
    kv.free(first)
    kv.new_step_starts()
    second = request("b", range(50))
    assert admit(kv, second) == 48
    source, running = state_table(kv, "b")[2:]
    assert state_table(kv, "b")[:2] == [0, 0]
    assert source != running
    assert kv.take_kv_cache_block_copies() == []
    check_invariants(kv)


def test_a_state_hashed_in_this_step_can_be_hit_in_the_next() -> None:
    kv = manager(20, mamba(16))
    kv.new_step_starts()
    first = request("a", range(50))
    admit(kv, first, 48)
    second = request("b", range(50))
    blocks, hit, _ = kv.get_computed_blocks(second)
    assert hit == 48
    assert kv.allocate_slots(second, 2, hit, blocks) is None
    kv.new_step_starts()
    assert admit(kv, second) == 48


def test_decode_moves_to_a_new_column_at_each_block_end() -> None:
    kv = manager(20, mamba(4))
    req = request("r", range(4), hash_block=4)
    admit(kv, req)
    for token in range(9):
        req.append_output_token_ids(token)
        step(kv, req, 1)
    assert [b != 0 for b in state_table(kv, "r")] == [False, False, True, True]
    assert kv.block_pool.get_cached_block(req.block_hashes[2], [0]) is not None
    check_invariants(kv)


def test_a_column_left_in_the_middle_of_its_block_gets_no_hash() -> None:
    kv = manager(20, mamba(16))
    req = request("r", range(60))
    admit(kv, req, 20)  # a chunk that ends at 20, although the scheduler would not do that
    step(kv, req, 30)
    assert state_table(kv, "r")[1] != 0
    assert hashed_columns(kv, "r") == []


def test_speculative_blocks_follow_the_running_column() -> None:
    kv = manager(20, mamba(4, num_speculative_blocks=2))
    req = request("r", range(12), hash_block=4)
    admit(kv, req, 4)
    assert state_table(kv, "r") == [1, 2, 3]
    blocks = kv.allocate_slots(req, 8)
    assert blocks is not None
    req.num_computed_tokens = 12
    # Column 2 is the running one; the block that was in column 1 moved to the end.
    assert state_table(kv, "r") == [1, 0, 3, 2, 4]
    assert blocks.get_block_ids() == ([2, 4],)
    check_invariants(kv)
    kv.free(req)
    check_invariants(kv, at_rest=True)


def entries(kv: KVCacheManager, group: int) -> list[tuple[int, int]]:
    """(column, tokens) of the states of request r that can be found."""
    blocks = [kv.block_pool.blocks[block] for block in state_table(kv, "r", group)]
    return [(column, n) for column, block in enumerate(blocks) for _, n in kv.block_pool.get_keys(block)]


def leave_an_entry(num_rows: int, num_prompt: int, num_tokens: int) -> tuple[list[tuple[int, int]], ...]:
    """A request moves on by 8 tokens, drafts among them, from its state at 28, which has an entry: what can be found
    then, and what once 34 tokens are computed.
    """
    states = mamba(16, num_speculative_blocks=num_rows)
    kv = manager(40, full(16), states, scheduler_block=16, hash_block=4, retention=None)
    req = request("r", range(num_prompt), hash_block=4)
    admit(kv, req, 16)
    req.shared_prefix_boundary = 28
    req.append_output_token_ids(list(range(num_tokens - num_prompt)))
    step(kv, req, 12)
    assert (1, 28) in entries(kv, 1)
    assert step(kv, req, 8)
    found = entries(kv, 1)
    req.append_output_token_ids(list(range(max(0, 34 - num_tokens))))
    kv.cache_blocks(req, 34)
    check_invariants(kv)
    return found, entries(kv, 1)


def test_an_entry_inside_a_block_ends_when_drafts_may_bring_the_state_at_its_end_there() -> None:
    assert leave_an_entry(7, num_prompt=28, num_tokens=29) == ([], [(1, 32)])
    assert leave_an_entry(7, num_prompt=16, num_tokens=29) == ([], [(1, 32)])


def test_nothing_is_told_of_a_block_end_of_which_nobody_knows_whether_drafts_or_a_chunk_passed_it() -> None:
    assert leave_an_entry(7, num_prompt=29, num_tokens=29) == ([], [])


def test_a_chunk_of_a_prompt_brings_no_state_to_the_block_end_that_it_passes() -> None:
    assert leave_an_entry(7, num_prompt=42, num_tokens=42) == ([(1, 28)], [(1, 28)])
    assert leave_an_entry(0, num_prompt=42, num_tokens=42) == ([(1, 28)], [(1, 28)])


def test_lookahead_tokens_need_no_columns() -> None:
    kv = manager(20, mamba(4, num_speculative_blocks=1))
    req = request("r", range(4), hash_block=4)
    kv.allocate_slots(req, 4, num_lookahead_tokens=3)
    assert len(state_table(kv, "r")) == 2


def test_need_equals_what_is_taken() -> None:
    kv = manager(40, mamba(4, num_speculative_blocks=2))
    group = kv.coordinator.single_type_managers[0]
    req = request("r", range(40), hash_block=4)
    done = 0
    for end in (4, 7, 8, 16, 17, 30):
        need = group.get_num_blocks_to_allocate("r", end, [], done, 0, end)
        before = kv.block_pool.get_num_free_blocks()
        group.allocate_new_blocks("r", end, end)
        assert before - kv.block_pool.get_num_free_blocks() == need
        req.num_computed_tokens = done = end


class TestFineGrained:
    """Blocks of 16 tokens, hash units of 4: hits end on units."""

    @pytest.fixture
    def kv(self) -> KVCacheManager:
        kv = manager(40, full(16), mamba(16), scheduler_block=16, hash_block=4, retention=0)
        assert kv.coordinator.enable_partial_hash_hits
        assert kv.coordinator._cache_hit_alignment_tokens == 4
        return kv

    def prefill(self, kv: KVCacheManager, name: str, tokens: range | list[int], *chunks: int):
        req = request(name, tokens, hash_block=4)
        kv.new_step_starts()
        admit(kv, req, chunks[0])
        for num_new in chunks[1:]:
            kv.new_step_starts()
            assert step(kv, req, num_new)
        return req

    def test_prompt_tail_is_found_inside_a_block(self, kv: KVCacheManager) -> None:
        first = self.prefill(kv, "a", range(55), 48, 4, 3)
        kv.free(first)
        kv.new_step_starts()
        again = request("b", range(55), hash_block=4)
        assert kv.get_computed_blocks(again)[1] == 52

    def test_running_state_moves_its_entry_to_a_copy_before_it_is_overwritten(
        self, kv: KVCacheManager
    ) -> None:
        first = self.prefill(kv, "a", range(55), 48, 4)
        running = state_table(kv, "a", 1)[3]
        assert kv.block_pool.blocks[running].block_hash_num_tokens == 52
        kv.new_step_starts()
        assert step(kv, first, 3)
        ((source, keeper),) = kv.take_kv_cache_block_copies()
        assert source == running == state_table(kv, "a", 1)[3]
        assert kv.block_pool.blocks[running].block_hash is None
        assert kv.block_pool.blocks[keeper].block_hash_num_tokens == 52
        check_invariants(kv)
        kv.new_step_starts(num_steps_in_flight=1)
        assert kv.block_pool.blocks[keeper].ref_cnt == 1
        kv.new_step_starts()
        assert kv.block_pool.blocks[keeper].ref_cnt == 0
        kv.free(first)
        check_invariants(kv, at_rest=True)

    def test_an_entry_that_moved_is_taken_back_when_its_step_fails(self, kv: KVCacheManager) -> None:
        first = self.prefill(kv, "a", range(55), 48, 4)
        first.num_in_flight_tokens = 4  # the step that computes [48, 52) is still running
        kv.new_step_starts(1)
        assert step(kv, first, 3)
        ((_, keeper),) = kv.take_kv_cache_block_copies()
        kv.evict_unconfirmed(first, 48)
        assert kv.block_pool.blocks[keeper].block_hash is None
        kv.free(first)
        kv.new_step_starts()
        kv.new_step_starts()
        check_invariants(kv, at_rest=True)

    def test_a_confirmed_entry_that_moved_stays(self, kv: KVCacheManager) -> None:
        first = self.prefill(kv, "a", range(55), 48, 4, 3)
        ((_, keeper),) = kv.take_kv_cache_block_copies()
        kv.new_step_starts()
        first.append_output_token_ids(1)
        assert step(kv, first, 1)
        kv.evict_unconfirmed(first, 52)
        kv.evict_unconfirmed(first, 0)
        assert kv.block_pool.blocks[keeper].block_hash is not None

    def test_hit_inside_a_block_copies_the_shared_tails(self, kv: KVCacheManager) -> None:
        first = self.prefill(kv, "a", range(55), 48, 4, 3)
        kv.take_kv_cache_block_copies()
        kv.new_step_starts()
        kv.new_step_starts()
        tail_row = kv.get_block_ids("a")[0][3]
        again = request("b", range(55), hash_block=4)
        need_before = kv.block_pool.get_num_free_blocks()
        assert admit(kv, again) == 52
        copies = kv.take_kv_cache_block_copies()
        targets = [kv.get_block_ids("b")[g][3] for g in (0, 1)]
        assert [c.dst_block_id for c in copies] == targets
        assert copies[0].src_block_id == tail_row
        # Two copies; the state's source lay in the free queue and is held until the copy has run.
        assert need_before - kv.block_pool.get_num_free_blocks() == 3
        check_invariants(kv)
        kv.new_step_starts()
        assert kv.block_pool.get_num_free_blocks() == need_before - 2
        kv.free(first)
        kv.free(again)
        check_invariants(kv, at_rest=True)

    def test_a_tail_written_in_this_step_cannot_be_copied_yet(self, kv: KVCacheManager) -> None:
        self.prefill(kv, "a", range(55), 48, 4)
        second = request("b", range(55), hash_block=4)
        blocks, hit, _ = kv.get_computed_blocks(second)
        assert hit == 52
        assert kv.allocate_slots(second, 3, hit, blocks) is None
        kv.new_step_starts()
        assert admit(kv, second) == 52

    def test_state_is_registered_only_where_a_chunk_ended(self, kv: KVCacheManager) -> None:
        first = self.prefill(kv, "a", range(55), 48, 7)
        assert [
            n for b in state_table(kv, "a", 1) for _, n in kv.block_pool.get_keys(kv.block_pool.blocks[b])
        ] == [48]
        kv.free(first)
        kv.new_step_starts()
        assert kv.get_computed_blocks(request("b", range(55), hash_block=4))[1] == 48

    def test_sub_block_states_are_offered_once_they_will_not_change(self, kv: KVCacheManager) -> None:
        first = self.prefill(kv, "a", range(55), 48)
        boundary = state_table(kv, "a", 1)[2]
        assert kv.take_boundary_state_offloads() == {"a": [(1, boundary, 48)]}
        kv.new_step_starts()
        step(kv, first, 4)
        assert kv.take_boundary_state_offloads() == {}
        kv.new_step_starts()
        step(kv, first, 3)
        ((_, keeper),) = kv.take_kv_cache_block_copies()
        assert kv.take_boundary_state_offloads() == {"a": [(1, keeper, 52)]}
        assert kv.take_boundary_state_offloads() == {}

    def test_a_running_state_of_a_twin_is_not_offered_either(self, kv: KVCacheManager) -> None:
        twins = [request(name, range(55), hash_block=4) for name in "ab"]
        kv.new_step_starts()
        for req in twins:  # looked up before either was computed: no hit
            assert kv.allocate_slots(req, 48) is not None
            req.num_computed_tokens = 48
        kv.take_boundary_state_offloads()
        for chunk in (4, 3):
            kv.new_step_starts()
            for req in twins:
                step(kv, req, chunk)
            running = {state_table(kv, req.request_id, 1)[-1] for req in twins}
            offered = kv.take_boundary_state_offloads()
            assert bool(offered) == (chunk == 3), "offered once one has moved to its copy"
            assert running.isdisjoint(block for states in offered.values() for _, block, _ in states)

    def test_a_state_beyond_what_is_confirmed_is_no_state_of_that_prefix(self, kv: KVCacheManager) -> None:
        first = self.prefill(kv, "a", range(55), 48)
        kv.new_step_starts()
        assert step(kv, first, 7)  # in flight when the request is aborted
        kv.coordinator.cache_frontier(first, 52)
        running = kv.block_pool.blocks[state_table(kv, "a", 1)[-1]]
        assert 52 not in [covered for _, covered in kv.block_pool.get_keys(running)]

    def test_tails_are_named_at_finish(self, kv: KVCacheManager) -> None:
        first = self.prefill(kv, "a", range(55), 48, 4)
        row, state = kv.get_block_ids("a")[0][3], state_table(kv, "a", 1)[3]
        assert kv.finalize_partial_tail_offloads(first) == [(0, row, 52), (1, state, 52)]

    def test_junction_is_registered_inside_a_block(self, kv: KVCacheManager) -> None:
        req = request("a", range(100), hash_block=4)
        req.shared_prefix_boundary = 20
        kv.new_step_starts()
        kv.allocate_slots(req, 16)
        req.num_computed_tokens = 16
        kv.new_step_starts()
        step(kv, req, 4)
        keys = [kv.block_pool.get_keys(kv.block_pool.blocks[kv.get_block_ids("a")[g][1]]) for g in (0, 1)]
        assert [[n for _, n in k] for k in keys] == [[20], [20]]


def test_boundary_states_that_were_evicted_are_not_offered() -> None:
    kv = manager(20, mamba(16))
    req = request("r", range(50))
    admit(kv, req, 32)
    kv.evict_blocks(state_table(kv, "r"))
    assert kv.take_boundary_state_offloads() == {}
    step(kv, req, 16)
    kv.free(req)
    assert kv.take_boundary_state_offloads() == {}


class TestCheckpoint:
    """The backend exports a state in the middle of the last prefill chunk."""

    def test_second_last_column_takes_it(self) -> None:
        kv = manager(20, mamba(16, num_prefill_checkpoint_blocks=1), retention=0)
        group = kv.coordinator.single_type_managers[0]
        req = request("r", range(50))
        admit(kv, req, 50)
        table = state_table(kv, "r")
        assert [b != 0 for b in table] == [False, False, True, True]
        assert group._checkpoints == {"r": (48, 2)}
        assert hashed_columns(kv, "r") == [2]
        kv.new_step_starts()
        req.append_output_token_ids(1)
        step(kv, req, 1)
        assert state_table(kv, "r")[2] == 0
        kv.free(req)
        assert group._checkpoints == {}
        check_invariants(kv, at_rest=True)
        assert kv.get_computed_blocks(request("s", range(50)))[1] == 48

    def test_never_overwrites_the_source_of_the_chunk(self) -> None:
        kv = manager(20, mamba(16, num_prefill_checkpoint_blocks=1))
        req = request("r", range(50))
        admit(kv, req, 48)
        step(kv, req, 2)
        assert kv.coordinator.single_type_managers[0]._checkpoints == {}

    def test_inside_a_block_it_is_found_by_its_own_position(self) -> None:
        kv = manager(
            40,
            full(16),
            mamba(16, num_prefill_checkpoint_blocks=1),
            scheduler_block=16,
            hash_block=4,
            retention=0,
        )
        req = request("r", range(55), hash_block=4)
        kv.new_step_starts()
        admit(kv, req, 32)
        kv.new_step_starts()
        step(kv, req, 23)
        group = kv.coordinator.single_type_managers[1]
        assert group._checkpoints == {"r": (52, 2)}
        kept = kv.block_pool.blocks[state_table(kv, "r", 1)[2]]
        assert [n for _, n in kv.block_pool.get_keys(kept)] == [52]
        kv.free(req)
        check_invariants(kv, at_rest=True)
        kv.new_step_starts()
        assert kv.get_computed_blocks(request("s", range(55), hash_block=4))[1] == 52
