"""One seed's object graph: the real scheduler, KV manager, offload manager and events round fake edges."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

from tests.sim.clock import SimClock
from tests.sim.events import CapturingPublisher
from tests.sim.grammar import Grammars
from tests.sim.kinds import layer_names
from tests.sim.other_engine import SharedMemory
from tests.sim.outside import ShelfManager
from tests.sim.params import Outside, SimParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoRAConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder
from vllm.v1.core.kv_cache_sizes import (
    generate_scheduler_kv_cache_config,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import BlockHasher
from vllm.v1.simple_kv_offload.capacity import gpu_total_bytes
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

logging.getLogger("vllm").setLevel(logging.CRITICAL)
HASH_FN = get_hash_fn_by_name("sha256")


@dataclass
class World:
    """The real objects of one run, and the edges they were given."""

    params: SimParams
    config: VllmConfig
    kv_cache_config: KVCacheConfig
    scheduler: Scheduler
    connector: KVConnectorBase_V1 | None
    offloads: list[SimpleCPUOffloadScheduler]
    """The managers behind it, in their order."""
    aggregator: KVOutputAggregator
    publisher: CapturingPublisher
    clock: SimClock
    hasher: BlockHasher | None
    scheduler_block_size: int
    hash_block_size: int
    grammars: Grammars
    shared: SharedMemory | None = None
    shelf: ShelfManager | None = None
    """The manager from outside."""

    def close(self) -> None:
        """Let go of what lies outside this process."""
        if self.shared is not None and self.connector is not None:
            self.connector.shutdown()
            self.shared.close()


def _model_config(params: SimParams) -> SimpleNamespace:
    """What the core reads of a model; no file is touched."""
    return SimpleNamespace(
        model="sim",
        max_model_len=params.max_model_len,
        original_max_model_len=params.max_model_len,
        is_hybrid=False,
        is_attention_free=False,
        is_encoder_decoder=params.encoder_tokens > 0,
        is_multimodal_model=False,
        multimodal_config=None,
        runner_type="generate",
        skip_tokenizer_init=True,
        supports_kv_cache_grouping=False,
        enforce_eager=True,
        use_mla=False,
        dtype=None,
        quantization=None,
        uses_mrope=False,
    )


JOIN = "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector.join_shared_pool"
SIM_DISK_WAIT_S = 4.0
SIM_PROBE_EVERY = 2
STATS_EVERY = 4
"""Nothing checks the figures, and they change nothing: enough that some runs make them."""


def _transfer_config(params: SimParams) -> KVTransferConfig | None:
    if params.host_blocks == 0:
        return None
    if params.outside is not None:
        return _outside_config(params, params.outside)
    extra: dict[str, object] = {
        "cpu_bytes_to_use": 1 << 40,
        "num_cpu_blocks": params.host_blocks,
        "lazy_offload": params.lazy,
        "eviction_policy": params.eviction_policy,
        "store_threshold": params.store_threshold,
        "max_tracker_size": params.max_tracker_size,
        "decline_slow_tier": params.decline_slow_tier,
    }
    if params.disk:
        extra |= {
            "kv_offload_backend": "disk",
            "disk_path": "/nonexistent/sim",
            "disk_capacity_bytes": 1 << 40,
            "disk_persist": params.disk_persist,
        }
    if params.shared:
        extra["shared_pool"] = "sim"
    if params.disk_blocks:
        # Sizes in bytes are not known yet: `build_world` sets the capacity.
        extra |= {
            "disk_tier": True,
            "disk_path": "/nonexistent/sim",
            "disk_wait_s": SIM_DISK_WAIT_S,
            "disk_persist": params.disk_persist,
        }
    name = "SimpleCPUOffloadConnector"
    if params.second_host_blocks:
        second = {"num_cpu_blocks": params.second_host_blocks, "lazy_offload": params.second_lazy}
        name, extra = "MultiConnector", {"connectors": [_child(extra), _child(second)]}
    return KVTransferConfig(
        kv_connector=name,
        kv_role="kv_both",
        engine_id="sim",
        kv_connector_extra_config=extra,
        kv_load_failure_policy="recompute" if params.recompute_failed_loads else "fail",
    )


def _outside_config(params: SimParams, outside: Outside) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        engine_id="sim",
        kv_connector_extra_config={
            "spec_name": "ShelfSpec",
            "spec_module_path": "tests.sim.outside",
            "offload_prompt_only": outside.prompt_only,
            "self_describing_kv_events": outside.self_describing,
            "shelf_places": params.host_blocks,
            "shelf_is_whole": outside.is_whole,
            "shelf_tells_resets": outside.tells_resets,
        },
        kv_load_failure_policy="recompute" if params.recompute_failed_loads else "fail",
    )


def _child(extra: dict[str, object]) -> dict[str, object]:
    return {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 40, **extra},
    }


def _first_options(config: KVTransferConfig) -> dict[str, object]:
    """The options of the first offload connector."""
    options = config.kv_connector_extra_config
    return options["connectors"][0]["kv_connector_extra_config"] if "connectors" in options else options


def _offloads(connector: KVConnectorBase_V1 | None) -> list[SimpleCPUOffloadScheduler]:
    children = connector.sub_connectors if isinstance(connector, MultiConnector) else [connector]
    return [child.scheduler_manager for child in children if child is not None]


def _shelf(offloads: list[SimpleCPUOffloadScheduler]) -> ShelfManager | None:
    for offload in offloads:
        if isinstance(offload, OffloadingConnectorScheduler) and isinstance(
            offload.manager.inner, ShelfManager
        ):
            return offload.manager.inner
    return None


def _drafter(params: SimParams) -> SpeculativeConfig | None:
    if params.num_spec_tokens == 0:
        return None
    return SpeculativeConfig(
        method="mtp" if params.eagle else "draft_model", num_speculative_tokens=params.num_spec_tokens
    )


def _vllm_config(params: SimParams) -> VllmConfig:
    config = VllmConfig(
        model_config=_model_config(params),
        cache_config=CacheConfig(
            block_size=params.specs[0].block_size,
            enable_prefix_caching=params.prefix_caching,
            prefix_match_unit=params.match_unit,
            prefix_cache_retention_interval=params.retention,
            enable_mamba_shared_prefix_checkpoint=params.shared_prefix_checkpoint,
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=params.max_model_len,
            is_encoder_decoder=params.encoder_tokens > 0,
            max_num_batched_tokens=params.max_num_batched_tokens,
            max_num_seqs=params.max_num_seqs,
            long_prefill_token_threshold=params.long_prefill_threshold,
            enable_chunked_prefill=params.chunked_prefill,
            policy=params.policy,
            scheduler_reserve_full_isl=params.reserve_full_prompt,
            watermark=params.watermark,
            async_scheduling=params.async_scheduling,
        ),
        parallel_config=ParallelConfig(pipeline_parallel_size=params.pipeline_stages),
        device_config=DeviceConfig("cpu"),
        lora_config=LoRAConfig(max_loras=1),
        speculative_config=_drafter(params),
        kv_transfer_config=_transfer_config(params),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    config.cache_config.kv_cache_layout = "BLHNC"
    config.scheduler_config.max_num_encoder_input_tokens = params.encoder_tokens
    config.cache_config.num_gpu_blocks = params.device_blocks
    config.cache_config.kv_retention_share = params.kv_retention_share
    config.parallel_config.tensor_parallel_size = params.ranks
    config.parallel_config.decode_context_parallel_size = params.dcp
    config.parallel_config.world_size = params.ranks
    return config


def build_world(params: SimParams) -> World:
    """Build everything for one seed."""
    init_none_hash(HASH_FN)
    config = _vllm_config(params)
    groups = [
        KVCacheGroupSpec(layer_names(i, spec), spec, enable_kv_transfer=spec.transferable)
        for i, spec in enumerate(params.specs)
    ]
    kv_cache_config = DefaultKVCacheConfigBuilder().get_kv_cache_config_from_groups(
        config, groups, params.device_blocks
    )
    if params.seed % 2:  # else with all layers of a group, which the core may be given too
        kv_cache_config = generate_scheduler_kv_cache_config([kv_cache_config])
    block_size, hash_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
    alignment = resolve_cache_hit_alignment_tokens(kv_cache_config, config, block_size, hash_size)
    config.cache_config.hash_block_size = kv_cache_config.hash_block_size = hash_size
    config.cache_config.cache_hit_alignment_tokens = kv_cache_config.cache_hit_alignment_tokens = alignment
    if params.host_blocks:
        block_bytes = -(-gpu_total_bytes(kv_cache_config) // kv_cache_config.num_blocks)
        assert config.kv_transfer_config is not None
        extra = _first_options(config.kv_transfer_config)
        if params.disk_blocks:
            extra["disk_capacity_bytes"] = params.disk_blocks * block_bytes
        if params.pending_store_blocks:
            extra["max_pending_store_bytes"] = params.pending_store_blocks * block_bytes
    clock, publisher = SimClock(), CapturingPublisher()
    shared = SharedMemory(params, clock) if params.shared else None
    if shared is not None:
        assert config.kv_transfer_config is not None
        config.kv_transfer_config.engine_id = str(shared.path)
    grammars = Grammars(config)
    scheduler_cls = AsyncScheduler if params.async_scheduling else Scheduler
    with nullcontext() if shared is None else patch(JOIN, lambda *_: shared.attach()):
        scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=grammars,
            block_size=block_size,
            hash_block_size=hash_size,
            log_stats=params.seed % STATS_EVERY == 0,
            clock=clock,
            event_publisher=publisher,
        )
    offloads = _offloads(scheduler.connector)
    for manager in offloads:
        manager.speed.probe_every, manager.speed.samples_min = SIM_PROBE_EVERY, 1
        manager.clock = clock
        if manager.chain is not None:
            manager.chain.clock = clock
    uses_hashes = params.prefix_caching or params.host_blocks > 0
    return World(
        params=params,
        config=config,
        kv_cache_config=kv_cache_config,
        scheduler=scheduler,
        connector=scheduler.connector,
        offloads=offloads,
        aggregator=KVOutputAggregator(params.ranks),
        publisher=publisher,
        clock=clock,
        hasher=get_request_block_hasher(hash_size, HASH_FN) if uses_hashes else None,
        scheduler_block_size=block_size,
        hash_block_size=hash_size,
        grammars=grammars,
        shared=shared,
        shelf=_shelf(offloads),
    )
