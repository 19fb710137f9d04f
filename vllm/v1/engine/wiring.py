"""Composition root of the engine core: the only place that builds its object graph.  Layer L7.

Owns the order of construction — executor, KV specs, plan, block sizes, scheduler with connector and publisher — and
writes what was resolved into `vllm_config.cache_config`. Holds no state of its own and must not know how a step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vllm import envs
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger
from vllm.model_executor.model_loader.loader import check_parallel
from vllm.utils.clock import Clock, MonotonicClock
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_hash import init_none_hash
from vllm.v1.core.block_hasher import get_request_block_hasher
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.core.kv_cache_sharing import merge_kv_sharing, note_kv_sharing
from vllm.v1.core.kv_cache_sizes import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    resolve_cache_hit_alignment_tokens,
    resolve_effective_attention_block_size,
    resolve_kv_cache_block_sizes,
    smallest_cacheable_block_size,
)
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.engine.host_memory import check_host_memory
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpecKind, iter_layer_specs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import BlockHasher
from vllm.v1.structured_output import StructuredOutputManager

logger = init_logger(__name__)

# Told the name of the phase that begins; start-up may take long and has to say what it does.
Progress = Callable[[str], None]


@dataclass(slots=True)
class EngineParts:
    """What an engine core consists of."""

    executor: Executor
    scheduler: SchedulerInterface
    structured_output_manager: StructuredOutputManager
    kv_cache_config: KVCacheConfig
    block_hasher: BlockHasher | None


def build_engine(
    vllm_config: VllmConfig,
    executor_class: type[Executor],
    log_stats: bool,
    progress: Progress,
    clock: Clock | None = None,
) -> EngineParts:
    """Build everything; on a failure what was built is shut down again and the error goes on.

    Raises ValueError naming the setting for a configuration that cannot work (too little memory, unknown connector …).
    """
    clock = clock or MonotonicClock()
    started = clock.monotonic()
    # A mistyped setting should not be told only after minutes of loading.
    KVConnectorFactory.check_config(vllm_config)
    check_host_memory(vllm_config)
    parallel_config = vllm_config.parallel_config
    if parallel_config.tensor_parallel_size > 1 and parallel_config.worker_cls == "auto":
        check_parallel(vllm_config)
    progress("loading the model")
    executor = executor_class(vllm_config)
    try:
        progress("sizing and allocating the KV cache")
        kv_cache_config = _build_kv_cache(vllm_config, executor)
        progress("building the scheduler")
        # A hard grammar takes long to compile; the library lets other threads run meanwhile.
        grammar_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        structured_output_manager = StructuredOutputManager(vllm_config, run=grammar_thread.submit)
        scheduler = _build_scheduler(
            vllm_config, kv_cache_config, structured_output_manager, log_stats, clock
        )
    except BaseException:
        executor.shutdown()
        raise
    try:
        _join_connector(vllm_config, executor, scheduler)
    except BaseException:
        scheduler.shutdown()
        executor.shutdown()
        raise
    logger.info("Engine core is ready after %.1f s.", clock.monotonic() - started)
    hasher = _build_hasher(vllm_config)
    return EngineParts(executor, scheduler, structured_output_manager, kv_cache_config, hasher)


def _build_kv_cache(vllm_config: VllmConfig, executor: Executor) -> KVCacheConfig:
    """Plan and allocate the KV cache; returns the scheduler's view of it."""
    specs = executor.get_kv_cache_specs()
    sharing = merge_kv_sharing(executor.get_kv_sharing_layers(), specs)
    layout = _choose_layout(vllm_config, executor)
    vllm_config.cache_config.kv_cache_layout = layout.name
    groups = get_global_kv_cache_groups(vllm_config, specs)
    vllm_config.adjust_dcp_kv_cache_interleave_size(groups)
    executor.set_kv_cache_layout(layout.name, vllm_config.parallel_config.cp_kv_cache_interleave_size)
    memory = executor.determine_available_memory() if any(specs) else [0] * len(specs)
    model_config = vllm_config.model_config
    assert model_config is not None
    length_before = model_config.max_model_len
    configs = get_kv_cache_configs(vllm_config, specs, memory, groups)
    if model_config.max_model_len != length_before:
        executor.collective_rpc("update_max_model_len", args=(model_config.max_model_len,))
    kv_cache_config = generate_scheduler_kv_cache_config(configs)
    note_kv_sharing(kv_cache_config, sharing)
    _note_sizes(vllm_config, kv_cache_config)
    for config in (kv_cache_config, *configs):
        config.hash_block_size = vllm_config.cache_config.hash_block_size
        config.cache_hit_alignment_tokens = vllm_config.cache_config.cache_hit_alignment_tokens
    executor.initialize_from_config(configs)
    vllm_config.cache_config.simple_cpu_offload_num_blocks = executor.get_simple_cpu_offload_num_blocks()
    return kv_cache_config


def _choose_layout(vllm_config: VllmConfig, executor: Executor) -> KVCacheLayout:
    supported = executor.get_supported_kv_cache_layouts()
    wanted, said_by = vllm_config.cache_config.kv_cache_layout, "kv_cache_layout"
    if wanted is None:
        wanted, said_by = envs.VLLM_KV_CACHE_LAYOUT, "VLLM_KV_CACHE_LAYOUT"
    if wanted is not None:
        layout = KVCacheLayout.from_name(str(wanted))
        if layout not in supported:
            names = ", ".join(layout.name for layout in supported)
            raise ValueError(
                f"{said_by}={wanted!r} is not supported by the attention backends; supported: {names}"
            )
        return layout
    if not supported:
        raise ValueError("the workers support no common KV cache layout")
    return supported[0]


def _note_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Write what was resolved into the cache config, where the front end and the metrics read it."""
    cache_config = vllm_config.cache_config
    cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    cache_config.num_cpu_blocks = 0
    _note_state_distance(cache_config, kv_cache_config)
    block_size = smallest_cacheable_block_size(kv_cache_config)
    if block_size is not None:
        cache_config.block_size = block_size
    cache_config.effective_attention_block_size = resolve_effective_attention_block_size(
        kv_cache_config, vllm_config.parallel_config.decode_context_parallel_size
    )
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    cache_config.hash_block_size = hash_block_size
    cache_config.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
        kv_cache_config, vllm_config, scheduler_block_size, hash_block_size
    )
    tokens, concurrency = get_kv_cache_capacity(vllm_config, kv_cache_config)
    cache_config.kv_cache_size_tokens = tokens
    cache_config.kv_cache_max_concurrency = concurrency
    logger.info(
        "KV cache: %d tokens; %.2f requests of %d tokens fit at once.",
        tokens,
        concurrency,
        vllm_config.model_config.max_model_len if vllm_config.model_config is not None else 0,
    )


def _note_state_distance(cache_config: CacheConfig, kv_cache_config: KVCacheConfig) -> None:
    """What is reported is the distance that the model has chosen, which may not be the one wished for."""
    specs = [spec for g in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(g.kv_cache_spec)]
    distances = [spec.block_size for spec in specs if spec.kv_cache_spec_kind is KVCacheSpecKind.MAMBA]
    if not distances:
        return
    distance, wish = max(distances), cache_config.mamba_block_size
    if wish not in (None, distance, cache_config.block_size):  # the block size is what it is without a wish
        logger.warning(
            "mamba_block_size=%d has no effect: states are kept every %d tokens, as large as a block of this model",
            wish,
            distance,
        )
    cache_config.mamba_block_size = distance


def _build_scheduler(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    structured_output_manager: StructuredOutputManager,
    log_stats: bool,
    clock: Clock,
) -> SchedulerInterface:
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    scheduler_class = vllm_config.scheduler_config.get_scheduler_cls()
    scheduler: SchedulerInterface = scheduler_class(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=structured_output_manager,
        block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
        include_finished_set=vllm_config.parallel_config.data_parallel_size > 1,
        log_stats=log_stats,
    )
    return scheduler


def _join_connector(vllm_config: VllmConfig, executor: Executor, scheduler: SchedulerInterface) -> None:
    """Let the workers' halves of the connector and the scheduler's half know each other."""
    connector = scheduler.get_kv_connector()
    if connector is None:
        return
    executor.init_kv_output_aggregator(connector)
    metadata = executor.get_kv_connector_handshake_metadata()
    known = {rank: entry for per_worker in metadata if per_worker for rank, entry in per_worker.items()}
    if known:
        connector.set_xfer_handshake_metadata(known)
    logger.info("KV connector %s is in use.", type(connector).__name__)


def _build_hasher(vllm_config: VllmConfig) -> BlockHasher | None:
    """Hashes are needed where something looks blocks up by content: the prefix cache or a connector."""
    cache_config = vllm_config.cache_config
    if not cache_config.enable_prefix_caching and vllm_config.kv_transfer_config is None:
        return None
    hash_fn = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    assert cache_config.hash_block_size is not None
    return get_request_block_hasher(
        cache_config.hash_block_size, hash_fn, vllm_config.num_hash_lookahead_tokens
    )
