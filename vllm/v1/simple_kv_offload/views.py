"""What outside code reads of the offload manager, as views computed on demand. Layer L4.

Owns nothing and decides nothing; no part of the manager may depend on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.core.block_index import StoredBlockInfo
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.simple_kv_offload.load_side import Load, LoadSide
from vllm.v1.simple_kv_offload.lookup import Promises
from vllm.v1.simple_kv_offload.records import (
    BlockStoreMeta,
    BoundaryStoreStats,
    LoadRequestState,
    TransferMeta,
)
from vllm.v1.simple_kv_offload.reporting import StatsReporter
from vllm.v1.simple_kv_offload.store_policy import (
    BlockTable,
    StoreRequestState,
    select_new,
    stable_groups,
)
from vllm.v1.simple_kv_offload.store_side import StoreSide
from vllm.v1.simple_kv_offload.tier import Tier
from vllm.v1.simple_kv_offload.tier_plan import estimate_lazy_target_blocks
from vllm.v1.simple_kv_offload.transfer import Candidate, StagedKey, Transfer, TransferState

MetaByKey = dict[BlockHashWithGroupId, BlockStoreMeta]


class ManagerViews(ABC):
    """The names under which outside code knows the state of `SimpleCPUOffloadScheduler`."""

    tier: Tier
    promises: Promises
    reporter: StatsReporter
    fa_gidx: int
    target_free: int
    lazy_cursor_id: int | None
    expected_worker_count: int

    @property
    @abstractmethod
    def store_side(self) -> StoreSide:
        """The store half."""

    @property
    @abstractmethod
    def load_side(self) -> LoadSide:
        """The load half."""

    @abstractmethod
    def plan_stores(self, scheduler_output: SchedulerOutput) -> None:
        """Plan what the policy wants copied in this step."""

    @staticmethod
    def _estimate_lazy_target_blocks(
        kv_cache_config: KVCacheConfig, max_num_batched_tokens: int, cp_world_size: int = 1
    ) -> int:
        return estimate_lazy_target_blocks(kv_cache_config, max_num_batched_tokens, cp_world_size)

    # -- the tier -----------------------------------------------------------------------------

    @property
    def cpu_kv_cache_config(self) -> KVCacheConfig:
        """The device's plan with the tier's number of blocks."""
        return self.tier.config

    @property
    def num_cpu_blocks(self) -> int:
        """Slots of the tier, the null slot included."""
        return self.tier.num_blocks

    @property
    def cpu_coordinator(self) -> KVCacheCoordinator:
        """The coordinator that searches the tier."""
        return self.tier.coordinator

    @property
    def cpu_block_pool(self) -> BlockPool:
        """The tier's slots."""
        return self.tier.pool

    @property
    def prefix_cacheable_group_ids(self) -> tuple[int, ...]:
        """The groups that take part."""
        return self.tier.group_ids

    @property
    def group_block_sizes(self) -> Sequence[int]:
        """Tokens per block of every group."""
        return self.tier.coordinator.group_block_sizes

    @property
    def fa_block_size(self) -> int:
        """Tokens per block of the first full-attention group."""
        return self.group_block_sizes[self.fa_gidx]

    @property
    def enable_kv_cache_events(self) -> bool:
        """Whether the tier reports events."""
        return self.tier.pool.enable_kv_cache_events

    @property
    def kv_event_medium(self) -> str:
        """The medium named in events."""
        return self.tier.medium

    # -- stores -------------------------------------------------------------------------------

    @property
    def boundary_store_stats(self) -> BoundaryStoreStats:
        """The tally of the state hand-offs."""
        return self.store_side.boundary.stats

    @property
    def _reqs_to_store(self) -> dict[str, StoreRequestState]:
        return self.store_side.states

    @property
    def _store_event_to_blocks(self) -> dict[int, TransferMeta]:
        return self._running_stores(TransferState.SUBMITTED)

    @property
    def _abandoned_store_event_to_blocks(self) -> dict[int, TransferMeta]:
        return self._running_stores(TransferState.ABANDONED)

    @property
    def _store_event_to_reqs(self) -> dict[int, list[str]]:
        found = {
            event: [transfer.request_id for transfer in transfers if transfer.request_id is not None]
            for event, transfers in self.store_side.table
        }
        return {event: req_ids for event, req_ids in found.items() if req_ids}

    @property
    def _store_event_pending_counts(self) -> dict[int, int]:
        return self.store_side.table.reports

    @property
    def _pending_finished_stores(self) -> list[TransferMeta]:
        return [_meta([transfer]) for transfer in self.store_side.planned]

    @property
    def _in_flight_store_gpu_blocks(self) -> set[int]:
        live = [*self.store_side.planned, *self.store_side.table.transfers]
        return {block.block_id for transfer in live for block in transfer.device_blocks}

    @property
    def _expected_worker_count(self) -> int:
        return self.expected_worker_count

    @property
    def _target_free(self) -> int:
        return self.target_free

    @property
    def _cursor(self) -> KVCacheBlock | None:
        if self.lazy_cursor_id is None:
            return None
        return self.store_side.stores.device.blocks[self.lazy_cursor_id]

    @property
    def _info_labelvalues(self) -> tuple[str, ...]:
        return self.reporter.info_labelvalues

    def prepare_store_specs(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[list[int], list[int], list[str]]:
        """Plan this step's stores: device blocks, tier slots, and the requests they belong to."""
        self.plan_stores(scheduler_output)
        meta = _meta(self.store_side.planned)
        owners = [transfer.request_id for transfer in self.store_side.planned]
        return meta.gpu_block_ids, meta.cpu_block_ids, [req_id for req_id in owners if req_id is not None]

    def _select_eager_blocks_to_store(
        self, state: StoreRequestState, block_ids_by_group: BlockTable
    ) -> tuple[list[int], list[int], list[MetaByKey] | None]:
        chosen = self.store_side.new_selection(state)
        groups = stable_groups(self.tier)
        advance = select_new(self.store_side.stores, state, block_ids_by_group, groups, chosen)
        block_ids = [candidate.block.block_id for candidate in chosen.candidates]
        if not self.enable_kv_cache_events:
            return block_ids, advance, None
        return block_ids, advance, [_candidate_meta(candidate) for candidate in chosen.candidates]

    def _process_store_completion(
        self,
        gpu_block_ids: Sequence[int],
        cpu_block_ids: Sequence[int],
        block_meta: Sequence[MetaByKey] | None = None,
    ) -> None:
        device, tier = self.store_side.stores.device, self.tier
        sources = [device.blocks[block_id] for block_id in gpu_block_ids]
        slots = [tier.pool.blocks[block_id] for block_id in cpu_block_ids]
        for i, (source, slot) in enumerate(zip(sources, slots, strict=True)):
            known = block_meta[i] if block_meta is not None else {}
            keys = [StagedKey(key, tokens, _info(known.get(key))) for key, tokens in device.get_keys(source)]
            tier.commit(slot, keys)
        tier.pool.free_blocks(slots)
        device.free_blocks(sources)

    def _running_stores(self, state: TransferState) -> dict[int, TransferMeta]:
        found = {
            event: [transfer for transfer in transfers if transfer.state is state]
            for event, transfers in self.store_side.table
        }
        return {event: _meta(transfers) for event, transfers in found.items() if transfers}

    # -- loads --------------------------------------------------------------------------------

    @property
    def _reqs_to_load(self) -> dict[str, LoadRequestState]:
        return {req_id: _load_state(load) for req_id, load in self.load_side.loads.items()}

    @property
    def _abandoned_reqs_to_load(self) -> dict[str, LoadRequestState]:
        return {req_id: _load_state(load) for req_id, load in self.load_side.abandoned.items()}

    @property
    def _load_event_to_reqs(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for req_id, load in self.load_side.loads.items():
            if load.event is not None:
                found.setdefault(load.event, []).append(req_id)
        return found

    @property
    def _pending_cpu_hits(self) -> dict[str, tuple[tuple[Sequence[KVCacheBlock], ...], int]]:
        return {req_id: (promise.blocks, promise.num_tokens) for req_id, promise in self.promises}


def _meta(transfers: Iterable[Transfer]) -> TransferMeta:
    listed = list(transfers)
    return TransferMeta(
        [block.block_id for transfer in listed for block in transfer.device_blocks],
        [block.block_id for transfer in listed for block in transfer.tier_blocks],
    )


def _load_state(load: Load) -> LoadRequestState:
    return LoadRequestState(load.request, _meta([load.transfer]), load.event, load.finished)


def _candidate_meta(candidate: Candidate) -> MetaByKey:
    return {
        staged.key: BlockStoreMeta(
            token_ids=list(staged.info.token_ids),
            parent_block_hash=staged.info.parent_block_hash,
            lora_id=staged.info.lora_id,
            lora_name=staged.info.lora_name,
            extra_keys=staged.info.extra_keys,
            block_size=staged.info.block_size,
        )
        for staged in candidate.keys
        if staged.info is not None
    }


def _info(meta: BlockStoreMeta | None) -> StoredBlockInfo | None:
    if meta is None:
        return None
    return StoredBlockInfo(
        token_ids=meta.token_ids,
        parent_block_hash=meta.parent_block_hash,
        block_size=len(meta.token_ids) if meta.block_size is None else meta.block_size,
        lora_id=meta.lora_id,
        lora_name=meta.lora_name,
        extra_keys=meta.extra_keys,
    )
