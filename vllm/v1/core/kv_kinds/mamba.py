"""Recurrent state: one state stands for the whole prefix. Layer: L3.

Column i of a table holds the state after `(i + 1) * block_size` tokens, or the running state inside that block. Only
the running state, the one before it (the source of the next chunk), speculative blocks and a checkpoint are real. A
state that is cached is never written again: where the running state got a cache entry inside its block, the entry moves
to a copy first. Must not know what a state is, nor who splits the prefill into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from vllm.utils.checks import check
from vllm.utils.math_utils import cdiv, round_down
from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_kinds.base import BoundaryState, CacheableRequest, SingleTypeKVCacheManager
from vllm.v1.core.kv_kinds.tails import effective_block_size, partial_boundaries, tail_mask
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    MambaSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)

Checkpoint = tuple[int, int]
"""(prefix tokens, column) of a state that the backend exports in the middle of a chunk."""


class MambaManager(SingleTypeKVCacheManager):
    """States of one group. With caching on, the spec's mode must be "align"; without, one running state is kept."""

    supports_fine_grained_hash_lookup = True
    supports_retention = True
    can_give_back_a_block = False

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
        super().__init__(
            kv_cache_spec,
            block_pool,
            enable_caching,
            kv_cache_group_id,
            scheduler_block_size,
            dcp_world_size,
            pcp_world_size,
            needs_kv_cache_zeroing,
            max_admission_blocks_per_request,
        )
        self._spec = cast(MambaSpec, kv_cache_spec.kind_spec)
        check(
            not enable_caching or self._spec.mamba_cache_mode == "align",
            f"prefix caching of states needs mode 'align', got {self._spec.mamba_cache_mode!r}",
        )
        self.num_speculative_blocks = self._spec.num_speculative_blocks
        self._checkpoints: dict[str, Checkpoint] = {}
        self._allocated_block_reqs: set[str] = set()
        self._state_position: dict[
            str, int
        ] = {}  # tokens that the running state covers once the step has run
        self._unaligned_column: dict[str, int] = {}  # left behind in the middle of its block
        self._pending_boundaries: dict[str, list[tuple[BlockHashWithGroupId, int]]] = {}
        self._keepers: dict[str, list[tuple[KVCacheBlock, BlockHashWithGroupId, int]]] = {}

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """States wander between columns in mode "align"."""
        return self._spec.mamba_cache_mode != "align"

    @classmethod
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
        """The last aligned position whose state is cached. Never dropped: a state cannot be rewound."""
        block_size = effective_block_size(kv_cache_spec, dcp_world_size)
        unit = block_pool.hash_block_size if alignment_tokens < block_size else block_size
        last = round_down(min(max_length, len(block_hashes) * unit), alignment_tokens)
        for position in range(last, 0, -alignment_tokens):
            states = block_pool.get_cached_block(block_hashes[position // unit - 1], kv_cache_group_ids)
            if states is not None:
                head = [block_pool.null_block] * (cdiv(position, block_size) - 1)
                return tuple([*head, state] for state in states), position
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last token, whose block holds the state."""
        return max(0, num_computed_tokens - 1)

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
        """As the base says. A hit on a state hashed in this very step waits: the state does not exist yet."""
        if any(block.block_id in self._fresh_ids for block in new_computed_blocks if not block.is_null):
            return self.impossible_need
        blocks = self.req_to_blocks.get(request_id, [])
        owned = request_id in self._allocated_block_reqs
        spare = self.num_speculative_blocks
        num_columns = len(blocks) - (spare if owned else 0) + len(new_computed_blocks)
        need = sum(block.ref_cnt == 0 and not block.is_null for block in new_computed_blocks)
        need += self._ends_inside_block(new_computed_blocks, num_local_computed_tokens)
        if cdiv(total_computed_tokens, self.block_size) > num_columns:
            num_columns = cdiv(total_computed_tokens, self.block_size)
            need += 1  # the state that a load brings
        target = self._column_of(num_tokens_main_model)
        need += 0 if owned else spare
        if target >= num_columns:
            need += 1
        elif target < len(blocks) and blocks[target].block_hash is not None:
            need += 1  # the copy to which its entry moves
        checkpoint = self._plan_checkpoint(
            request_id, total_computed_tokens, num_tokens_main_model, prefill_end
        )
        return need + (checkpoint is not None)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int = 0,
    ) -> None:
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        if num_local_computed_tokens + num_external_computed_tokens:
            self._state_position[request_id] = num_local_computed_tokens + num_external_computed_tokens

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        total_computed_tokens: int = 0,
        prefill_end: int = 0,
    ) -> list[KVCacheBlock]:
        """Make column `(num_tokens_main_model - 1) // block_size` real and writable; speculative blocks follow it.

        Speculative blocks that end up before the running column move behind it. Lookahead tokens need no columns.
        """
        blocks = self.req_to_blocks[request_id]
        checkpoint = self._plan_checkpoint(
            request_id, total_computed_tokens, num_tokens_main_model, prefill_end
        )
        owned = request_id in self._allocated_block_reqs
        self._allocated_block_reqs.add(request_id)
        num_before = len(blocks)
        num_columns = num_before - (self.num_speculative_blocks if owned else 0)
        target = self._column_of(num_tokens_main_model)
        if target < num_columns:
            self._make_writable(request_id, target)
            if not owned:
                blocks += self._new_blocks(self.num_speculative_blocks)
        else:
            self._leave_column(request_id, num_columns - 1, total_computed_tokens - prefill_end)
            moved = blocks[num_columns : min(num_before, target)]
            blocks[num_columns : num_columns + len(moved)] = [self._null_block] * len(moved)
            blocks += [self._null_block] * (target - num_before)
            missing = target + 1 + self.num_speculative_blocks - len(blocks)
            blocks += [*moved, *self._new_blocks(missing - len(moved))]
        if num_tokens_main_model:
            self._state_position[request_id] = num_tokens_main_model
        if checkpoint is not None:
            self._allocate_checkpoint(request_id, checkpoint)
        return blocks[num_before:]

    def num_slots(self, request_id: str) -> int:
        """The state stays in its column up to the token before the block's end, which has to be noted.

        Only while it has no cache entry: the next step would overwrite it.
        """
        column = self._column_of(self._state_position.get(request_id, 0))
        blocks = self.req_to_blocks.get(request_id, ())
        if column >= len(blocks) or blocks[column].block_hash is not None:
            return 0
        return (column + 1) * self.block_size - 1

    def _column_of(self, num_tokens: int) -> int:
        """The column that holds the state after that many tokens."""
        return max(0, cdiv(num_tokens, self.block_size) - 1)

    def _make_writable(self, request_id: str, column: int) -> None:
        """Before the running state is overwritten, its cache entry moves to a copy of it.

        The table keeps its block, because columns of a running request cannot be replaced at the worker.
        """
        running = self.req_to_blocks[request_id][column]
        if running.block_hash is None:
            return
        (keeper,) = self.block_pool.get_new_blocks(1)
        entry = (keeper, running.block_hash, running.block_hash_num_tokens or 0)
        self._keepers.setdefault(request_id, []).append(entry)
        self.block_pool.move_block_hashes(running, keeper)
        self.block_pool.touch((running,))
        self._pending_copies.append(
            Lease.adopt(self.block_pool, (running, keeper), f"state kept by group {self.kv_cache_group_id}")
        )
        self._mark_fresh((keeper,))

    def _leave_column(self, request_id: str, column: int, num_decoded: int) -> None:
        """The running state moves on from the middle of its block, after `num_decoded` tokens that were decoded.

        A step with drafts has a state after each token, of which the worker brings the one at the block's end to the
        column: in this step or, where drafts are refused, in a later one. An entry for what is there now would lie. A
        chunk of a prompt leaves nothing there, and the column must never get the block's hash. Of a step that begins
        with the last token of the prompt it is not known which of the two it is.
        """
        if self._state_position.get(request_id, 0) % self.block_size == 0:
            return
        if self.num_speculative_blocks and num_decoded >= -1:
            self.block_pool.evict_blocks([self.req_to_blocks[request_id][column].block_id])
        if not self.num_speculative_blocks or num_decoded < 0:
            self._unaligned_column[request_id] = column

    # Checkpoints that the backend exports in the middle of the last prefill chunk

    def _plan_checkpoint(self, request_id: str, start: int, end: int, prefill_end: int) -> Checkpoint | None:
        """Where the state at the last cacheable prefix goes, if the chunk [start, end) passes over it.

        The second-last column takes it, unless that holds the state the chunk starts from.
        """
        if (
            not self.caches
            or self._spec.num_prefill_checkpoint_blocks == 0
            or not 0 < prefill_end <= end
            or request_id in self._checkpoints
        ):
            return None
        unit = self.block_pool.hash_block_size if self.hits_end_inside_blocks else self.block_size
        position = get_mamba_prefill_checkpoint_position(
            prefill_end,
            unit,
            self.use_eagle or self.hits_are_dropped,
            self.block_pool.num_hash_lookahead_tokens,
        )
        column = self._column_of(end) - 1
        source = self._column_of(start) if start else -1
        if column <= source or not is_mamba_prefill_checkpoint_valid(
            position, start, end, self._spec.prefill_checkpoint_alignment
        ):
            return None
        if position % self.block_size == 0 and position != (column + 1) * self.block_size:
            return None
        return position, column

    def _allocate_checkpoint(self, request_id: str, checkpoint: Checkpoint) -> None:
        blocks = self.req_to_blocks[request_id]
        check(blocks[checkpoint[1]].is_null, f"checkpoint column {checkpoint[1]} of {request_id} is in use")
        blocks[checkpoint[1]] = self._new_blocks(1)[0]
        self._checkpoints[request_id] = checkpoint

    # Caching

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
        """The one state before each end that a hit may have."""
        return tail_mask(
            range(start_block, end_block),
            effective_block_size(kv_cache_spec, dcp_world_size),
            alignment_tokens,
            before=1,
            after=0,
            retention=(retention_interval, reachable_boundaries, final_segment_end_block),
        )

    def _cache_full(
        self, request: CacheableRequest, start: int, stop: int, mask: Sequence[bool] | None
    ) -> None:
        blocks = self.req_to_blocks[request.request_id]
        wanted = [True] * (stop - start) if mask is None else list(mask)
        for column in self._columns_without_block_end(request.request_id):
            if start <= column < stop:
                wanted[column - start] = False
        super()._cache_full(request, start, stop, wanted)
        for column in range(start, stop):
            if wanted[column - start] and not blocks[column].is_null:
                self._note_boundary(request.request_id, blocks[column], (column + 1) * self.block_size)

    def _columns_without_block_end(self, request_id: str) -> list[int]:
        """Real columns whose state is not the one at the end of their block."""
        columns = [self._unaligned_column[request_id]] if request_id in self._unaligned_column else []
        position, column = self._checkpoints.get(request_id, (0, -1))
        if position % self.block_size:
            columns.append(column)
        return columns

    def _cache_partial(self, request: CacheableRequest, num_tokens: int, boundaries: Sequence[int]) -> None:
        """The state exists only where a chunk ends, or as a checkpoint; both may lie inside a block."""
        request_id = request.request_id
        blocks = self.req_to_blocks[request_id]
        wanted = partial_boundaries(boundaries, self.block_pool.hash_block_size, self.block_size)
        candidates = []
        # A step in flight takes the running state beyond what is confirmed: then it is no state of that prefix.
        if self._state_position.get(request_id) == num_tokens:
            candidates.append((num_tokens, num_tokens // self.block_size))
        if request_id in self._checkpoints:
            candidates.append(self._checkpoints[request_id])
        for position, column in candidates:
            if position not in wanted or column >= len(blocks) or position > num_tokens:
                continue
            registered = self.block_pool.cache_partial_block(
                request, blocks[column], position, self.kv_cache_group_id, self.block_size, True
            )
            if registered:
                self._note_boundary(request_id, blocks[column], position)

    # Hand-over

    def _note_boundary(self, request_id: str, block: KVCacheBlock, position: int) -> None:
        """A state got its entry: later requests must wait for the bytes, and other tiers may take them."""
        self._mark_fresh((block,))
        if block.block_hash is not None:
            self._pending_boundaries.setdefault(request_id, []).append((block.block_hash, position))

    def take_pending_boundary_state_offloads(self) -> dict[str, list[BoundaryState]]:
        """States hashed since the last call that are still cached and will not be overwritten, by exact block id.

        The entry of a running state is held back until it has moved to its copy, or the request finished. The block
        found under a key may be the running state of *another* request that computed the same prefix.
        """
        if not self._pending_boundaries:
            return {}
        running = {id(self._running_block(request_id)) for request_id in self._state_position}
        offered: dict[str, list[BoundaryState]] = {}
        kept: dict[str, list[tuple[BlockHashWithGroupId, int]]] = {}
        for request_id, entries in self._pending_boundaries.items():
            for key, position in entries:
                block = self.block_pool.cached_block_hash_to_block.get_one_block(key)
                if block is None:
                    continue
                if id(block) in running and position % self.block_size:
                    kept.setdefault(request_id, []).append((key, position))
                    continue
                state = (self.kv_cache_group_id, block.block_id, position)
                offered.setdefault(request_id, []).append(state)
        self._pending_boundaries = kept
        return offered

    def _running_block(self, request_id: str) -> KVCacheBlock | None:
        blocks = self.req_to_blocks.get(request_id)
        column = self._column_of(self._state_position.get(request_id, 0))
        return blocks[column] if blocks and column < len(blocks) else None

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        super().remove_skipped_blocks(request_id, total_computed_tokens, num_prompt_tokens)
        if request_id in self._keepers:  # what is confirmed can no longer turn out to be wrong
            unconfirmed = [entry for entry in self._keepers[request_id] if entry[2] > total_computed_tokens]
            self._keepers[request_id] = unconfirmed

    def evict_after(self, request_id: str, num_tokens: int) -> None:
        """Also takes back entries that have moved to a copy of a state that turns out not to have been computed."""
        super().evict_after(request_id, num_tokens)
        for keeper, key, covered in self._keepers.pop(request_id, ()):
            if covered > num_tokens and keeper.block_hash == key:
                self.block_pool.evict_blocks([keeper.block_id])

    def entries_by_request(self) -> dict[str, list[str]]:
        return {
            **super().entries_by_request(),
            "checkpoint": list(self._checkpoints),
            "state position": list(self._state_position),
            "unaligned column": list(self._unaligned_column),
            "pending boundaries": list(self._pending_boundaries),
            "kept states": list(self._keepers),
            "ownership": sorted(self._allocated_block_reqs),
        }

    def pop_blocks_for_free(self, request_id: str) -> Sequence[KVCacheBlock]:
        self._allocated_block_reqs.discard(request_id)
        for entries in (
            self._checkpoints,
            self._state_position,
            self._unaligned_column,
            self._pending_boundaries,
            self._keepers,
        ):
            entries.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)
