"""What a KV kind answers, and the bookkeeping that all kinds share. Layer: L3.

A kind answers six questions, and the core never asks what kind it is: the longest hit for these hashes
(`find_longest_cache_hit`) · blocks needed for n tokens (`get_num_blocks_to_allocate`) · blocks now skippable
(`get_num_skipped_tokens`) · which full blocks to cache (`reachable_block_mask`, `cache_blocks`) · which slots a position
may read (the complement of the skipped ones) · what to transfer (`has_positionally_stable_blocks`, boundary states).

Owns the block table of every request in one KV cache group. Must not know other groups, budgets or connectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from vllm.utils.checks import check
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_hash import BlockHash
from vllm.v1.core.block_hasher import HashableRequest
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock, trim_null_head
from vllm.v1.core.kv_kinds.tails import effective_block_size
from vllm.v1.kv_cache_interface import KVCacheSpec

UNLIMITED_SLOTS = 1 << 62
"""More tokens than any request has."""

BoundaryState = tuple[int, int, int]
"""(group id, block id, prefix tokens) of a state or tail that can be handed to another tier by exact id."""


class CacheableRequest(HashableRequest, Protocol):
    """What a kind reads of a request when it caches blocks."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def shared_prefix_boundary(self) -> int: ...


class SingleTypeKVCacheManager(ABC):
    """Block tables of one group. All counts of tokens include cached ones; `block_size` includes context parallelism.

    `req_to_blocks[id][i]` covers tokens `[i * block_size, (i+1) * block_size)`; the null block stands where nothing is
    kept. `num_cached_block[id]`: leading blocks whose hashing is settled (hashed, or left out on purpose).
    """

    supports_fine_grained_hash_lookup: ClassVar[bool] = False
    """A hit may end inside a block."""
    retains_longer_hit: ClassVar[bool] = False
    """Any shorter prefix of a hit is a hit too, so it can be trimmed without searching again."""
    can_give_back_a_block: ClassVar[bool] = True
    """With the EAGLE drop a search gives its last matched block back; a kind that cannot be rewound does not."""
    supports_prefix_lookup: ClassVar[bool] = True
    """Blocks may be found by hash at all."""
    supports_retention: ClassVar[bool] = False
    """Not every block is needed for a hit, so that it can be chosen which ones stay cached."""
    counts_encoder_tokens: ClassVar[bool] = False
    """The blocks hold encoder outputs: sizes count those tokens, not the request's."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        scheduler_block_size: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        needs_kv_cache_zeroing: bool = False,
        max_admission_blocks_per_request: int | None = None,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.block_pool = block_pool
        self.enable_caching = enable_caching
        self.kv_cache_group_id = kv_cache_group_id
        self.scheduler_block_size = scheduler_block_size
        self.dcp_world_size = dcp_world_size
        self.pcp_world_size = pcp_world_size
        self.max_admission_blocks_per_request = max_admission_blocks_per_request
        self.block_size = effective_block_size(kv_cache_spec, dcp_world_size)
        self.caches = enable_caching and self.supports_prefix_lookup and kv_cache_spec.prefix_cacheable
        self.use_eagle = False
        self.hits_are_dropped = False
        """Some group gives the last matched block back, which shortens hits of this one too."""
        self.cache_hit_alignment_tokens = scheduler_block_size
        self.records_new_block_ids = needs_kv_cache_zeroing and kv_cache_spec.uses_slot_mapping
        self.new_block_ids: list[int] = []
        self.req_to_blocks: defaultdict[str, list[KVCacheBlock]] = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}
        self._null_block = block_pool.null_block
        self._num_skipped: dict[str, int] = {}  # columns below are null already
        self._pending_copies: list[Lease] = []
        self._fresh_ids: set[int] = set()  # hashed in the step being scheduled: bytes not there yet

    @classmethod
    def admission_cap(
        cls, kv_cache_spec: KVCacheSpec, max_in_flight_tokens: int, max_model_len: int
    ) -> int | None:
        """The most blocks a request ever holds at once, where that is less than its length asks for; else None."""
        return None

    # 1. The longest hit

    @classmethod
    @abstractmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest prefix of at most `max_length` tokens from which every listed group can go on.

        `block_hashes` has one hash per block, or one per hash unit where hits end inside blocks
        (`alignment_tokens` < block size). Returns one block list per group, null where the kind needs nothing, and the
        length in tokens, a multiple of `alignment_tokens`. Nothing is touched.
        """

    # 2. Blocks needed

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks that leave the free queue when the request grows to `num_tokens`: new ones, and hits nobody holds.

        `total_computed_tokens` includes local hits and external tokens; `num_tokens_main_model` leaves out lookahead.
        A need beyond the pool's size says "not in this step". Changes nothing.
        """
        if self._reads_unwritten_block(new_computed_blocks, num_local_computed_tokens):
            return self.impossible_need
        num_held = len(self.req_to_blocks.get(request_id, ()))
        num_skipped = self._num_null_columns(total_computed_tokens)
        needed = cdiv(num_tokens, self.block_size) - max(num_held + len(new_computed_blocks), num_skipped)
        adopted = new_computed_blocks[max(0, num_skipped - num_held) :]
        idle = sum(block.ref_cnt == 0 and not block.is_null for block in adopted)
        if self._ends_inside_block(new_computed_blocks, num_local_computed_tokens):
            idle += 1  # the copy of the shared tail
        total = max(0, needed) + idle
        cap = self.max_admission_blocks_per_request
        if apply_admission_cap and cap is not None:
            return min(total, max(0, cap - max(0, num_held - num_skipped)))
        return total

    @property
    def hits_end_inside_blocks(self) -> bool:
        """Hits of this group are aligned finer than its blocks."""
        return self.supports_fine_grained_hash_lookup and self.cache_hit_alignment_tokens < self.block_size

    @property
    def impossible_need(self) -> int:
        """More blocks than the pool has: the request must wait for the next step."""
        return self.block_pool.num_gpu_blocks + 1

    # 3. Blocks to skip

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no later position reads once `num_computed_tokens` are computed."""
        return 0

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Replace blocks that only hold skipped tokens by the null block and free them, the last one first."""
        skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        self._null_columns(request_id, self._num_skipped.get(request_id, 0), skipped)

    def _null_columns(self, request_id: str, start: int, stop: int) -> None:
        if stop <= start:
            return
        blocks = self.req_to_blocks[request_id]
        stop = min(stop, len(blocks))
        removed: list[KVCacheBlock] = []
        for i in range(stop - 1, start - 1, -1):
            if not blocks[i].is_null:
                removed.append(blocks[i])
                blocks[i] = self._null_block
        self._num_skipped[request_id] = max(stop, start)
        self.block_pool.free_blocks(removed)

    # 4. Growing a table

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int = 0,
    ) -> None:
        """Adopt the blocks of a local hit: phase one, which only touches. The table must be empty."""
        if not new_computed_blocks:
            return
        blocks = self.req_to_blocks[request_id]
        check(not blocks, f"request {request_id} holds {len(blocks)} blocks and adopts a hit")
        total = num_local_computed_tokens + num_external_computed_tokens
        num_skipped = self.get_num_skipped_tokens(total) // self.block_size
        adopted = list(new_computed_blocks)
        for i in range(min(num_skipped, len(adopted))):
            adopted[i] = self._null_block
        self.block_pool.touch(adopted)
        blocks += adopted
        self.num_cached_block[request_id] = min(len(adopted), num_local_computed_tokens // self.block_size)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> list[KVCacheBlock]:
        """Complete the table up to all computed tokens: phase two, after every group has touched its hits.

        A shared tail that the request will write into is replaced by a copy; blocks for external tokens are
        allocated. Returns the blocks allocated for external tokens.
        """
        blocks = self.req_to_blocks[request_id]
        if self._ends_inside_block(blocks, num_local_computed_tokens):
            self._copy_on_write(blocks, len(blocks) - 1)
        total = num_local_computed_tokens + num_external_computed_tokens
        self._pad_skipped(blocks, total)
        missing = cdiv(total, self.block_size) - len(blocks)
        if missing <= 0:
            return []
        fresh = self._new_blocks(missing, record_for_zeroing)
        blocks += fresh
        return fresh

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        total_computed_tokens: int = 0,
        prefill_end: int = 0,
    ) -> list[KVCacheBlock]:
        """Extend the table to `num_tokens` tokens; returns the columns appended to it."""
        blocks = self.req_to_blocks[request_id]
        missing = cdiv(num_tokens, self.block_size) - len(blocks)
        if missing <= 0:
            return []
        fresh = self._new_blocks(missing)
        blocks += fresh
        return fresh

    def num_slots(self, request_id: str) -> int:
        """Tokens up to which a decoding request grows, token by token, without a call of `allocate_new_blocks`."""
        return len(self.req_to_blocks.get(request_id, ())) * self.block_size

    def _new_blocks(self, num_blocks: int, record_for_zeroing: bool = True) -> list[KVCacheBlock]:
        fresh = self.block_pool.get_new_blocks(num_blocks)
        if self.records_new_block_ids and record_for_zeroing:
            self.new_block_ids += [block.block_id for block in fresh]
        return fresh

    def _pad_skipped(self, blocks: list[KVCacheBlock], num_computed_tokens: int) -> None:
        """Append null columns where no block is needed although the tokens count as computed."""
        blocks += [self._null_block] * (self._num_null_columns(num_computed_tokens) - len(blocks))

    def _num_null_columns(self, num_computed_tokens: int) -> int:
        """Leading columns that need no block when a request starts with that many computed tokens.

        Tokens that will be replayed are computed once more and need their slots.
        """
        replayed_from = num_computed_tokens - self.kv_cache_spec.prefix_replay_tokens
        skipped = min(self.get_num_skipped_tokens(num_computed_tokens), max(0, replayed_from))
        return skipped // self.block_size

    def _ends_inside_block(self, blocks: Sequence[KVCacheBlock], num_local_computed_tokens: int) -> bool:
        """The hit's last block is used in part, so that the request will write into the rest of it."""
        return (
            num_local_computed_tokens % self.block_size != 0
            and len(blocks) == cdiv(num_local_computed_tokens, self.block_size)
            and not blocks[-1].is_null
        )

    def _copy_on_write(self, blocks: list[KVCacheBlock], column: int) -> None:
        """Replace a shared block of the table by a copy of its own. Both are held until the copy was executed."""
        shared = blocks[column]
        (own,) = self.block_pool.get_new_blocks(1)
        blocks[column] = own
        self.block_pool.touch((own,))
        self._pending_copies.append(
            Lease.adopt(self.block_pool, (shared, own), f"copy-on-write of group {self.kv_cache_group_id}")
        )

    def _reads_unwritten_block(
        self, new_computed_blocks: Sequence[KVCacheBlock], num_local_computed_tokens: int
    ) -> bool:
        """The hit must be copied before the forward that writes it."""
        return (
            bool(self._fresh_ids)
            and self._ends_inside_block(new_computed_blocks, num_local_computed_tokens)
            and new_computed_blocks[-1].block_id in self._fresh_ids
        )

    # 5. Caching

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        retention_interval: int | None = None,
        reachable_boundaries: Sequence[int] = (),
        dcp_world_size: int = 1,
        final_segment_end_block: int | None = None,
    ) -> list[bool] | None:
        """Which blocks of `[start_block, end_block)` a later hit can use; None = all of them.

        Hits end on multiples of `alignment_tokens`. `retention_interval`: None keeps what every such end needs, 0 only
        what the `reachable_boundaries` (tokens) need, n > 0 also what multiples of n need.
        """
        return None

    def has_blocks_to_cache(self, request: CacheableRequest, num_tokens: int) -> bool:
        """Whether `cache_blocks` could do anything now; cheap, for it is asked in every step."""
        if not self.caches:
            return False
        settled = self.num_cached_block.get(request.request_id, 0)
        if num_tokens // self.block_size > settled:
            return True
        return self.hits_end_inside_blocks and num_tokens % self.block_pool.hash_block_size == 0

    def cache_blocks(
        self,
        request: CacheableRequest,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int] = (),
    ) -> None:
        """Hash the request's blocks that are full with `num_tokens` tokens, as far as hashes exist.

        `replay_boundaries`: prefix lengths (tokens) at which the request is likely to be continued from the cache.
        """
        if not self.caches:
            return
        num_hashed = min(num_tokens, len(request.block_hashes) * self.block_pool.hash_block_size)
        num_cached = self.num_cached_block.get(request.request_id, 0)
        num_full = min(num_hashed // self.block_size, len(self.req_to_blocks[request.request_id]))
        boundaries = self._boundaries(request, replay_boundaries)
        if num_cached < num_full:
            mask = self.reachable_block_mask(
                num_cached,
                num_full,
                self.cache_hit_alignment_tokens,
                self.kv_cache_spec,
                self.use_eagle,
                retention_interval,
                boundaries,
                self.dcp_world_size,
            )
            self._cache_full(request, num_cached, num_full, mask)
            self.num_cached_block[request.request_id] = num_full
        if self.hits_end_inside_blocks:
            self._cache_partial(request, num_tokens, boundaries)

    def _cache_full(
        self, request: CacheableRequest, start: int, stop: int, mask: Sequence[bool] | None
    ) -> None:
        blocks = self.req_to_blocks[request.request_id]
        self.block_pool.cache_full_blocks(
            request, blocks, start, stop, self.block_size, self.kv_cache_group_id, mask
        )
        if self.hits_end_inside_blocks:
            self._mark_fresh(blocks[start:stop])

    def _cache_partial(  # noqa: B027 (kinds whose hits end on blocks have nothing to do)
        self, request: CacheableRequest, num_tokens: int, boundaries: Sequence[int]
    ) -> None:
        """Register prefixes that end inside a block, for kinds that can go on from there."""

    def _boundaries(self, request: CacheableRequest, replay_boundaries: Sequence[int]) -> list[int]:
        """Prefix lengths at which a later request probably goes on: replays, and where shared prefixes fork."""
        boundaries = list(replay_boundaries)
        junction = request.shared_prefix_boundary
        if junction > 0:
            boundaries.append(junction)
            if self.use_eagle or self.hits_are_dropped:
                boundaries.append(max(0, junction - self.cache_hit_alignment_tokens))
        return boundaries

    # 6. Release and hand-over

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """Column i of a table keeps its block until it is skipped, so that consumers may go by position."""
        return True

    def pop_blocks_for_free(self, request_id: str) -> Sequence[KVCacheBlock]:
        """Forget the request and return its blocks without the leading null ones, in table order.

        The references now belong to the caller.
        """
        self.num_cached_block.pop(request_id, None)
        self._num_skipped.pop(request_id, None)
        return trim_null_head(self.req_to_blocks.pop(request_id, []))

    def free(self, request_id: str) -> None:
        """Forget the request and free its blocks, the last one first."""
        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Let go of the blocks that hold no token before `num_tokens`, the last one first.

        For kinds whose earlier blocks are all there still.
        """
        blocks = self.req_to_blocks.get(request_id, [])
        kept = cdiv(num_tokens, self.block_size)
        removed = blocks[kept:]
        del blocks[kept:]
        self.block_pool.free_blocks(reversed(removed))
        if request_id in self.num_cached_block:
            self.num_cached_block[request_id] = min(self.num_cached_block[request_id], kept)

    def evict_after(self, request_id: str, num_tokens: int) -> None:
        """Drop the hashes of the request's blocks that cover more than `num_tokens` tokens.

        They are hashed again once the tokens are computed again.
        """
        evicted: list[int] = []
        for i, block in enumerate(self.req_to_blocks.get(request_id, ())):
            covered = max(
                (n or (i + 1) * self.block_size for _, n in self.block_pool.get_keys(block)), default=0
            )
            if covered > num_tokens and not block.is_null:
                evicted.append(block.block_id)
        self.block_pool.evict_blocks(evicted)
        if request_id in self.num_cached_block:
            settled = min(self.num_cached_block[request_id], num_tokens // self.block_size)
            self.num_cached_block[request_id] = settled

    def largest_hashed_prefix(self, request_id: str) -> int:
        """Tokens covered by the furthest cache entry among the request's blocks."""
        for block in reversed(self.req_to_blocks.get(request_id, [])):
            if block.block_hash is not None:
                return max(covered or 0 for _, covered in self.block_pool.get_keys(block))
        return 0

    def take_new_block_ids(self) -> list[int]:
        """Blocks handed out since the last call whose bytes the worker must zero."""
        taken, self.new_block_ids = self.new_block_ids, []
        return taken

    def take_pending_cow_copies(self) -> list[Lease]:
        """Copies ordered since the last call, each as the lease on its (source, target) blocks."""
        taken, self._pending_copies = self._pending_copies, []
        return taken

    def take_pending_boundary_state_offloads(self) -> dict[str, list[BoundaryState]]:
        """States hashed since the last call, by request, for tiers that must go by exact block ids."""
        return {}

    def finalize_partial_tail_offload(self, request: CacheableRequest) -> list[BoundaryState]:
        """At finish: the request's entries that end inside a block, by exact block id."""
        if not (self.caches and self.supports_fine_grained_hash_lookup):
            return []
        found: list[BoundaryState] = []
        settled = self.num_cached_block.get(request.request_id, 0)
        for block in self.req_to_blocks.get(request.request_id, [])[max(0, settled - 1) :]:
            for _, covered in self.block_pool.get_keys(block):
                if covered is not None and covered % self.block_size:
                    found.append((self.kv_cache_group_id, block.block_id, covered))
        return found

    def new_step_starts(self) -> None:
        """A scheduling step begins: what was hashed before counts as written."""
        self._fresh_ids.clear()

    def entries_by_request(self) -> dict[str, list[str]]:
        """For recounts: names of the further tables of this kind → request ids in them."""
        return {"skipped columns": list(self._num_skipped)}

    def _mark_fresh(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._fresh_ids.update(block.block_id for block in blocks)
