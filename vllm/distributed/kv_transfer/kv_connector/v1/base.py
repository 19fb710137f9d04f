"""The public contract of KV connectors, in a scheduler half and a worker half.

A connector class is instantiated once per role and process. The scheduler calls the methods of
`SchedulerHalf`, the worker those of `WorkerHalf`; the order inside a step is documented in the two
classes. It must not know any concrete connector. Layer L4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_event_types import KVCacheEvent, KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.prom_metrics import KVConnectorPromMetrics
from vllm.utils.checks import check
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_report import ExternalHit, TierReport
from vllm.v1.kv_connector_types import (
    CopyBlocksOp,
    HostPool,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

# Tensors, forward contexts and attention metadata belong to the device side; here they are opaque.
Opaque = Any


class WorkerHalf(ABC):
    """What the worker calls, in the order of one step.

    ``handle_preemptions`` → ``bind_connector_metadata`` → [``start_load_kv`` if the step has sync
    loads] → forward (``wait_for_layer_load`` / ``save_kv_layer`` per layer) → ``finish_forward`` →
    [``start_load_kv`` otherwise] → ``wait_for_save`` → ``get_transfer_results`` →
    ``get_block_ids_with_load_errors`` → stats → events → worker metadata → ``clear_connector_metadata``.
    """

    _connector_metadata: KVConnectorMetadata | None = None

    # -- life cycle ---------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Opaque] | None:
        """A context in which the KV caches are allocated, or None."""
        return None

    def register_kv_caches(self, kv_caches: dict[str, Opaque]) -> None:
        """Called once with ``layer name → tensor`` after the caches were allocated."""
        return

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Called once with the op that copies blocks between device and host buffer."""
        return

    def unregister_kv_caches(self) -> None:
        """Let go of the caches before they are freed for sleep. Idempotent."""
        return

    def restore_kv_caches(self) -> None:
        """Take the caches back after wake-up. Idempotent."""
        return

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What peers need to reach this worker, asked once."""
        return None

    def apply_withdrawal(self, withdrawal: KVConnectorMetadata) -> str | None:
        """Carry out what ``take_withdrawal`` of the scheduler half gave; returns what stands in the way, None if done.

        Called between steps, behind all that were submitted. On return no later engine finds what was withdrawn.
        """
        return None

    def reset_capture_state(self) -> None:
        """Forget what a graph capture recorded."""
        return

    # -- one step -----------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """First call of a step, before any block of a preempted request is written again."""
        return

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Set the orders of this step."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """The step is over; its orders are void."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        """True between bind and clear."""
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        metadata = self._connector_metadata
        check(metadata is not None, "no connector metadata is bound for this step")
        assert metadata is not None
        return metadata

    @abstractmethod
    def start_load_kv(self, forward_context: Opaque, **kwargs: Opaque) -> None:
        """Start the loads of this step; before the forward iff the step has sync loads."""

    @property
    def has_layer_calls(self) -> bool:
        """False: the next two do nothing, so that nobody need call them for every layer of every step."""
        return True

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block until a sync load of this layer is usable."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: Opaque, attn_metadata: Opaque, **kwargs: Opaque
    ) -> None:
        """The layer's KV of this step is (being) written; start saving it if wanted."""

    def finish_forward(self) -> None:
        """The forward was submitted."""
        return

    @abstractmethod
    def wait_for_save(self) -> None:
        """Called once per step, also on empty ones, after target and draft forward."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ids whose (sending, receiving) ended since the last call."""
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Like ``get_finished``, with failed loads told apart."""
        sending, recving = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sending, recving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Device blocks whose load failed (single-group models only)."""
        return set()

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        """Events this worker saw in the step."""
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The worker's report of this step to the scheduler half."""
        return None


class SchedulerHalf(ABC):
    """What the scheduler calls.

    Per request: ``on_new_request`` → ``get_num_new_matched_tokens`` (any number of times) →
    ``get_loaded_kv_cache_group_ids`` → ``update_state_after_alloc`` (again with 0 when an async
    request is admitted) → ``request_finished[_all_groups]`` exactly once, before its blocks are
    freed. Per step: ``build_connector_meta`` once; per processed step: ``update_connector_output``,
    ``take_events``.
    """

    # Where external hits are booked unless a connector knows better.
    _cache_hit_source: CacheHitSource = CacheHitSource.EXTERNAL_UNSPECIFIED

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Called once after the manager was built."""
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Gives connectors that hold device blocks the pool they belong to."""
        return

    def on_new_request(self, request: Request) -> None:
        """A request joined the scheduler."""
        return

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens available beyond the local, block-aligned hit, and whether they load asynchronously.

        None asks the scheduler to come back later. The scheduler may repeat the call.
        """

    @abstractmethod
    def get_loaded_kv_cache_group_ids(self, request: Request) -> Sequence[int]:
        """The groups that a load restores; their new blocks are not zeroed."""

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """All blocks of the request after allocation, and how many offered tokens were accepted."""

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Splits accepted tokens by where they come from; the values sum up to the argument."""
        return {self._cache_hit_source: num_external_tokens} if num_external_tokens else {}

    def get_cache_hit_sources(self) -> tuple[CacheHitSource, ...]:
        """The tiers that this connector looks in, from the inner one outwards."""
        return (self._cache_hit_source,)

    def peek_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit | None:
        """What ``get_num_new_matched_tokens`` would offer now, without promising, holding or counting anything.

        The request is not part of the scheduler. None: this connector cannot tell without doing so.
        """
        return None

    def get_tier_reports(self) -> Sequence[TierReport]:
        """The tiers that this connector keeps, from the inner one outwards; from counters, without scans."""
        return ()

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The orders of this step; resets the per-step state, leaves the argument alone."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The combined report of all workers of a processed step."""
        return

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Opaque] | None]:
        """The request ended. True delays the release of its blocks until ``finished_sending``.

        The dictionary, if any, reaches the client as ``kv_transfer_params``.
        """
        return False, None

    def register_finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], tails: Sequence[tuple[int, int, int]]
    ) -> bool:
        """Before ``request_finished``, producers only: ``(group, block, tokens)`` of partial tails."""
        return False

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Events since the last call."""
        return ()

    def present_events(self) -> Iterable[KVCacheEvent]:
        """All that ``take_events`` has told of and that is there still, for a consumer that comes late."""
        return ()

    def has_pending_block_frees(self) -> bool:
        """True: blocks will come back by themselves, so wait rather than preempt."""
        return False

    def given_up_blocks(self) -> Collection[int]:
        """Device blocks that copies which were given up may write still: they come back when such a copy ends, or never."""
        return ()

    def awaits_late_ends(self) -> bool:
        """True: the workers are to be asked now and then even if nothing runs, as copies that were given up may end."""
        return False

    def has_pending_push_work(self) -> bool:
        """True keeps the engine stepping with empty batches."""
        return False

    def reset_cache(self) -> bool | None:
        """Drop the external cache. False = failed; None counts as success."""
        return None

    def reset_tiers(self, tiers: Collection[CacheHitSource]) -> bool | None:
        """Drop what these tiers hold, of those that ``get_cache_hit_sources`` names, and leave the others as they are.

        Answers as ``reset_cache``. Copies under way from or to an emptied tier bring nothing into any tier. Without
        an override only all tiers of the connector can be dropped together: False, and no change, for a part of them.
        """
        own = self.get_cache_hit_sources()
        if all(source in tiers for source in own):
            return self.reset_cache()
        return False if any(source in tiers for source in own) else None

    def load_source(self, request: Request) -> CacheHitSource:
        """The tier that a load under way of this request reads."""
        return self._cache_hit_source

    def take_withdrawal(self) -> KVConnectorMetadata | None:
        """What the workers must forget for good before a reset is answered, or the end of a request after an error.

        None: nothing such. Asked after both; what nobody asks for leaves with the next step.
        """
        return None

    def get_finished_count(self) -> int | None:
        """Completions expected per request; None stands for the world size."""
        return None

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Handshake metadata by tensor-parallel rank, after the workers registered."""
        return

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[int, dict[int, KVConnectorHandshakeMetadata]]
    ) -> None:
        """The same by pipeline rank; a plain connector knows only rank 0."""
        if any(pp_rank > 0 for pp_rank in metadata):
            raise ValueError(
                f"{type(self).__name__} does not support pipeline parallelism: "
                f"handshake metadata came from pipeline ranks {sorted(metadata)}"
            )
        if 0 in metadata:
            self.set_xfer_handshake_metadata(metadata[0])


class SupportsHMA(ABC):
    """Mark and contract of connectors that work with several KV cache groups."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Opaque] | None]:
        """``request_finished`` with the block ids of every group; called instead of it."""


def supports_hma(connector: object) -> bool:
    """True if the connector class or instance handles several KV cache groups."""
    if isinstance(connector, type):
        return issubclass(connector, SupportsHMA)
    return isinstance(connector, SupportsHMA)


class KVConnectorBase_V1(SchedulerHalf, WorkerHalf, ABC):
    """Base of all connectors; ``cls(vllm_config, role, kv_cache_config)``."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        if vllm_config.kv_transfer_config is None:
            raise ValueError("kv_transfer_config must be set to build a KV connector")
        self._vllm_config = vllm_config
        self._kv_transfer_config: KVTransferConfig = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role
        self._connector_metadata = None

    @property
    def role(self) -> KVConnectorRole:
        """Which half this instance is."""
        return self._role

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True if a deeper local hit of some groups may be combined with a load of the others."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """True if KV must reach its consumer; best-effort caches return False."""
        return bool(self._kv_transfer_config.is_kv_producer)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> Sequence[int]:
        """All prefix-cacheable groups."""
        if self._kv_cache_config is None:
            return ()
        return tuple(self._kv_cache_config.prefix_cacheable_group_ids)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counters since the last call, in either half."""
        return None

    def shutdown(self) -> None:
        """End threads, release memory and files. Idempotent, in either half."""
        return

    @classmethod
    def supports_hma_config(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether this class, configured like this, handles several KV cache groups."""
        return supports_hma(cls)

    @classmethod
    def check_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse with ``ValueError`` what is wrong with the connector's settings, before a model is loaded for it."""
        return

    @classmethod
    def host_pools(cls, vllm_config: VllmConfig) -> Sequence[HostPool]:
        """Host memory that an engine will have for it, as far as that is known before a model is loaded."""
        return ()

    @classmethod
    def remove_leftovers(cls, vllm_config: VllmConfig) -> None:
        """Remove what outlives a process and was to go with it: the engine of this configuration was killed.

        Called by who killed it; none of its processes is left.
        """
        return

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether the connector survives the caches being freed and restored."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Name of the KV layout the connector insists on, or None."""
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Opaque]) -> bool:
        """True if its per-layer calls cannot be inside one captured graph."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Opaque] | None = None) -> KVConnectorStats | None:
        """Rebuild the connector's statistics object from its payload."""
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[Opaque, Opaque],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """The sink of this connector's statistics, or None if it has none."""
        return None


__all__ = [
    "CopyBlocksOp",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "supports_hma",
]
