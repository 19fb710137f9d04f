"""Planted bugs, each the smallest form of something that has gone wrong in an engine of this kind.

Each must be caught within 100 seeds: this tests the tester. A mutant that survives shows a blind spot.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

from tests.sim.encoder import ENCODER_MUTANTS
from tests.sim.kinds import KIND_MUTANTS
from tests.sim.mutants_drafts import DRAFT_MUTANTS
from tests.sim.mutants_outside import OUTSIDE_MUTANTS
from tests.sim.mutants_policy import POLICY_MUTANTS
from tests.sim.mutants_sched import SCHED_MUTANTS
from tests.sim.planting import Mutant, replaced
from tests.sim.retention import pinned_blocks_are_kept_back, places_are_never_left
from tests.sim.shared_mutants import SHARED_POOL_MUTANTS
from tests.sim.tier_resets import TIER_RESET_MUTANTS
from tests.sim.worker import SimWorker
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core import block_hasher
from vllm.v1.core.block_index import BlockIndex
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.block_retention import BlockRetention
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_kinds.circular import HiSparseHotManager
from vllm.v1.core.kv_kinds.mamba import MambaManager
from vllm.v1.core.kv_kinds.sliding_window import SlidingWindowManager
from vllm.v1.simple_kv_offload.disk_tier import Moves
from vllm.v1.simple_kv_offload.load_side import LoadSide
from vllm.v1.simple_kv_offload.lookup import Promises
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.store_side import StoreSide
from vllm.v1.simple_kv_offload.tier import Tier
from vllm.v1.simple_kv_offload.transfer import StoreTable, Transfer


class _Gone:
    """In the place of a lease that was let go too early: the blocks are known, but nothing holds them."""

    def __init__(self, lease: Any) -> None:
        self.blocks = list(lease.blocks)
        self.evicted = lease.evicted
        lease.release()

    def release(self, *_: Any, **__: Any) -> None:
        """Nothing is left to release."""


def _no_lease_on_a_hit() -> AbstractContextManager[object]:
    """Hits of requests are adopted without a reference."""

    def mutate(original: Any) -> Any:
        def adopt(self: Any, *args: Any, **kwargs: Any) -> None:
            with patch.object(BlockPool, "touch", lambda *_: None):
                original(self, *args, **kwargs)

        return adopt

    return patch.object(
        SingleTypeKVCacheManager,
        "add_local_computed_blocks",
        mutate(SingleTypeKVCacheManager.add_local_computed_blocks),
    )


def _no_lease_below(original: Any) -> Any:
    """OFF-01: what a lookup promises may be evicted before it is taken."""

    def lookup(self: Any, request: Any, local_tokens: int) -> int:
        tokens = original(self, request, local_tokens)
        promise = self._by_request.get(request.request_id)
        if promise is not None:
            promise.lease.release()
            promise.lease = Lease(self._tier.pool, (), "nothing")
        return int(tokens)

    return lookup


def _release_before_the_copy_ends(original: Any) -> Any:
    """XFER-04: the blocks of a copy are let go when it is submitted."""

    def submit(self: Any) -> None:
        original(self)
        for side in ("_device", "_tier"):
            object.__setattr__(self, side, _Gone(getattr(self, side)))

    return submit


def _commit_before_the_copy_ends(original: Any) -> Any:
    """Content is findable below as soon as its copy is submitted."""

    def submit(self: Any) -> Any:
        answer = original(self)
        for transfer in answer[1] if answer else ():
            for slot, keys in zip(transfer.tier_blocks, transfer.keys, strict=True):
                self._tier.commit(slot, keys)
            transfer.keys = [() for _ in transfer.keys]
        return answer

    return submit


def _commit_without_index(original: Any) -> Any:
    """A block gets its hash but nobody can find it."""

    def add(self: Any, key: Any, block: Any, num_tokens: Any) -> None:
        original(self, key, block, num_tokens)
        if block.block_id % 3 == 0:
            self.map.pop(key, block.block_id)

    return add


def _skip_compute_done(original: Any) -> Any:
    """Stores do not wait for the step that computes their blocks."""

    def execute(self: Any, step: Any, rng: Any) -> None:
        self.submit_copies(step, rng)
        for lanes in self.lanes:
            lanes.finish_all()
        with patch.object(SimWorker, "submit_copies", lambda *_: None):
            original(self, step, rng)

    return execute


def _copy_reads_late(original: Any) -> Any:
    """XFER-04, seen from the device: blocks go to others while the copy still has to read them."""

    def store(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for transfer in self.planned[-1:]:
            transfer._device = _Gone(transfer._device)

    return store


def _lose_an_event(original: Any) -> Any:
    """Some removals are not announced."""

    def report(self: Any, key: Any) -> None:
        if key[0] % 4:
            original(self, key)

    return report


def _double_an_event(original: Any) -> Any:
    """Some removals are announced twice."""

    def report(self: Any, key: Any) -> None:
        original(self, key)
        if key[0] % 4 == 0:
            original(self, key)

    return report


def _late_consumers_are_told_less(original: Any) -> Any:
    """Who asks what is cached now does not hear of all of it."""

    def present(self: Any) -> Any:
        return original(self)[1:]

    return present


def _wrong_parent(original: Any) -> Any:
    """EVT-04: the parent in an event is the block written last, not the one before."""

    def report(self: Any, hashes: Any, infos: Any, group_id: int) -> None:
        original(self, hashes, infos, group_id)
        event = self.events[-1]
        if len(self.events) > 1 and hasattr(self.events[-2], "token_ids"):
            event.parent_block_hash = self.events[-2].block_hashes[-1]

    return report


def _leak_on_deferral(original: Any) -> Any:
    """A promise that is asked for again is forgotten instead of released."""

    def withdraw(self: Any, request_id: str) -> None:
        self._by_request.pop(request_id, None)

    del original
    return withdraw


def _failed_store_counts_as_done(original: Any) -> Any:
    """STORE-02: rejected puts are taken for stored."""

    def report(self: Any, counts: Any, *, ok: bool) -> None:
        original(self, counts, ok=True)

    return report


def _one_rank_is_enough(original: Any) -> Any:
    """XFER-06 turned round: a store is done as soon as the first rank says so."""

    def init(self: Any, expected_reports: int) -> None:
        original(self, 1)

    return init


def _tier_stays_warm(original: Any) -> Any:
    """PFX-14: a reset leaves the lower tier findable."""

    def invalidate(self: Any) -> int:
        if self.medium != "GPU":
            return self.num_gpu_blocks - 1 - self.get_num_free_blocks()
        return int(original(self))

    return invalidate


def _device_stays_warm(original: Any) -> Any:
    """PFX-15: a reset that is refused leaves old entries findable."""

    def invalidate(self: Any) -> int:
        if self.medium == "GPU":
            return self.num_gpu_blocks - 1 - self.get_num_free_blocks()
        return int(original(self))

    return invalidate


def _salt_is_ignored() -> AbstractContextManager[object]:
    """PFX-06: requests with different salts share blocks."""
    original = block_hasher.generate_block_hash_extra_keys

    def keys(request: Any, start: int, end: int, index: int) -> Any:
        found, following = original(request, start, end, index)
        kept = tuple(k for k in found or () if k[0] != "cache_salt")
        return (kept or None), following

    return patch.object(block_hasher, "generate_block_hash_extra_keys", keys)


def _adapter_is_ignored() -> AbstractContextManager[object]:
    """STORE-06: requests with different adapters share blocks."""
    original = block_hasher.generate_block_hash_extra_keys

    def keys(request: Any, start: int, end: int, index: int) -> Any:
        found, following = original(request, start, end, index)
        kept = tuple(k for k in found or () if k[0] != "lora")
        return (kept or None), following

    return patch.object(block_hasher, "generate_block_hash_extra_keys", keys)


def _window_slides_too_early(original: Any) -> Any:
    """XFER-02: blocks leave the window by what is scheduled, not by what has been computed."""

    def skipped(self: Any, num_computed_tokens: int) -> int:
        return int(original(self, num_computed_tokens + 2))

    return skipped


def _state_is_hit_before_it_exists(original: Any) -> Any:
    """A state hashed in this very step is read by another request of the step."""
    del original
    return lambda self, blocks: None


def _running_state_is_overwritten(original: Any) -> Any:
    """PFX-08 for states: a cached state is written in place."""
    del original
    return lambda self, blocks, column: None


def _scratch_is_shared(original: Any) -> Any:
    """A request gets the scratch that another one fills in every step; references are counted right."""

    def allocate(self: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        others = [blocks for other, blocks in self.req_to_blocks.items() if other != request_id and blocks]
        if self.req_to_blocks[request_id] or not others:
            return original(self, request_id, *args, **kwargs)
        self.block_pool.touch(others[0])
        self.req_to_blocks[request_id] += others[0]
        return list(others[0])

    return allocate


def _nothing_stored_at_the_end(original: Any) -> Any:
    """OFF-04: what is not stored when a request ends is lost."""
    del original

    def finish(self: Any, request: Any, block_ids: Any) -> None:
        self.forget_request(request.request_id)

    return finish


def _nothing_left_to_compute() -> AbstractContextManager[object]:
    """PFX-09: a prompt that is cached whole leaves no token to compute."""
    stack = ExitStack()
    for coordinator in (UnitaryKVCacheCoordinator, HybridKVCacheCoordinator):
        original = coordinator.find_longest_cache_hit

        def find(self: Any, block_hashes: Any, limit: int, original: Any = original) -> Any:
            return original(self, block_hashes, limit + 1)

        stack.enter_context(patch.object(coordinator, "find_longest_cache_hit", find))
    return stack


def _damage_is_not_followed(original: Any) -> Any:
    """PFX-20: what a failed step was to compute stays findable."""
    del original
    return lambda self, block_ids: None


def _hash_too_far(original: Any) -> Any:
    """Blocks get their hash up to three tokens before they are full."""

    def cache(self: Any, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        original(self, request, min(num_tokens + 3, request.num_tokens), *args, **kwargs)

    return cache


def _hole_in_what_is_stored(original: Any) -> Any:
    """OFF-22: the last block of every round of stores is left out."""

    def plan(self: Any, candidates: Any, request_id: Any, **more: Any) -> None:
        original(self, candidates[:-1], request_id, **more)

    return plan


def _load_while_storing() -> AbstractContextManager[object]:
    """A load picks slots into which stores are still copying."""
    plan, find = StoreSide.plan, Tier.find
    sides: dict[int, StoreSide] = {}

    def remember(self: Any, *args: Any, **more: Any) -> None:
        sides[id(self._tier)] = self
        plan(self, *args, **more)

    def find_running(self: Any, *args: Any) -> Any:
        index = self.pool.cached_block_hash_to_block
        running = sides[id(self)].table.transfers if id(self) in sides and self.shared is None else ()
        added = []
        for transfer in running:
            for slot, keys in zip(transfer.tier_blocks, transfer.keys, strict=True):
                added += [(staged.key, slot) for staged in keys if not self.contains(staged.key)]
        for key, slot in added:
            index.insert(key, slot)
        try:
            return find(self, *args)
        finally:
            for key, slot in added:
                index.pop(key, slot.block_id)

    stack = ExitStack()
    stack.enter_context(patch.object(StoreSide, "plan", remember))
    stack.enter_context(patch.object(Tier, "find", find_running))
    return stack


def _goes_idle_too_early(original: Any) -> Any:
    """OFF-20: the engine stops stepping although copies are under way."""
    del original
    return lambda self: False


def _lost_keys_are_moved(original: Any) -> Any:
    """TIER-01: the target of a move gets keys that its source has lost since the move was planned."""
    del original

    def commit(self: Any, transfer: Any) -> None:
        for slot, keys in zip(transfer.tier_blocks, transfer.keys, strict=True):
            self.target.commit(slot, [staged for staged in keys if not self.target.contains(staged.key)])

    return commit


def _source_of_a_load_is_let_go(original: Any) -> Any:
    """XFER-04 for loads: the slots below are let go when the load is planned, not when it has ended."""

    def start(self: Any, request: Any, pairs: Any, groups: Any, *, deliverable: bool) -> None:
        original(self, request, pairs, groups, deliverable=deliverable)
        transfer = self.loads[request.request_id].transfer
        transfer._tier = _Gone(transfer._tier)

    return start


def _only_the_chosen_connector_hears(original: Any) -> Any:
    """XFER-04 for several connectors: those that were not chosen keep what they promised."""
    del original

    def update(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        chosen = self._chosen(request) or self._connectors[0]
        chosen.update_state_after_alloc(request, blocks, num_external_tokens)

    return update


MUTANTS: dict[str, Mutant] = {
    "pinned blocks are kept back": replaced(BlockRetention, "_insert", pinned_blocks_are_kept_back),
    "places are never left": replaced(BlockRetention, "leave", places_are_never_left),
    **ENCODER_MUTANTS,
    **KIND_MUTANTS,
    **DRAFT_MUTANTS,
    **OUTSIDE_MUTANTS,
    **POLICY_MUTANTS,
    **SCHED_MUTANTS,
    **TIER_RESET_MUTANTS,
    "none": nullcontext,
    "no lease on a hit": _no_lease_on_a_hit,
    "no lease below": replaced(Promises, "lookup", _no_lease_below),
    "release before the copy ends": replaced(Transfer, "submit", _release_before_the_copy_ends),
    "commit before the copy ends": replaced(StoreSide, "submit", _commit_before_the_copy_ends),
    "commit without index": replaced(BlockIndex, "add", _commit_without_index),
    "skip compute done": replaced(SimWorker, "execute", _skip_compute_done),
    "copy reads late": replaced(StoreSide, "plan", _copy_reads_late),
    "lose an event": replaced(BlockIndex, "_report_removed", _lose_an_event),
    "double an event": replaced(BlockIndex, "_report_removed", _double_an_event),
    "late consumers are told less": replaced(BlockIndex, "present_events", _late_consumers_are_told_less),
    "wrong parent": replaced(BlockIndex, "_report_run", _wrong_parent),
    "load while storing": _load_while_storing,
    "leak on deferral": replaced(Promises, "withdraw", _leak_on_deferral),
    "failed store counts as done": replaced(StoreSide, "report", _failed_store_counts_as_done),
    "one rank is enough": replaced(StoreTable, "__init__", _one_rank_is_enough),
    "tier stays warm": replaced(BlockPool, "invalidate_prefix_cache", _tier_stays_warm),
    "device stays warm": replaced(BlockPool, "invalidate_prefix_cache", _device_stays_warm),
    "salt is ignored": _salt_is_ignored,
    "adapter is ignored": _adapter_is_ignored,
    "window slides too early": replaced(
        SlidingWindowManager, "get_num_skipped_tokens", _window_slides_too_early
    ),
    "state is hit before it exists": replaced(MambaManager, "_mark_fresh", _state_is_hit_before_it_exists),
    "running state is overwritten": replaced(MambaManager, "_make_writable", _running_state_is_overwritten),
    "scratch is shared": replaced(HiSparseHotManager, "allocate_new_blocks", _scratch_is_shared),
    "goes idle too early": replaced(SimpleCPUOffloadScheduler, "has_pending_work", _goes_idle_too_early),
    "nothing left to compute": _nothing_left_to_compute,
    "damage is not followed": replaced(KVCacheManager, "evict_blocks", _damage_is_not_followed),
    "hash too far": replaced(SingleTypeKVCacheManager, "cache_blocks", _hash_too_far),
    "hole in what is stored": replaced(StoreSide, "plan", _hole_in_what_is_stored),
    "lost keys are moved": replaced(Moves, "_commit", _lost_keys_are_moved),
    "source of a load is let go": replaced(LoadSide, "_start", _source_of_a_load_is_let_go),
    "only the chosen connector hears": replaced(
        MultiConnector, "update_state_after_alloc", _only_the_chosen_connector_hears
    ),
    **SHARED_POOL_MUTANTS,
    "nothing stored at the end": replaced(StoreSide, "finish_request", _nothing_stored_at_the_end),
}
