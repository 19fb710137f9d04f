"""The native offload and what specs from outside build on (interface section 14)."""

from __future__ import annotations

_BASE = "vllm.v1.kv_offload.base"
_CONFIG = "vllm.v1.kv_offload.config"
_FACTORY = "vllm.v1.kv_offload.factory:OffloadingSpecFactory"
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"

EXPORTS = {
    _BASE: "OffloadKey, make_offload_key, get_offload_block_hash, get_offload_group_idx, Medium, Locality, TierMatcher, "
    "TierFilter, ReqContext, LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY, "
    "OffloadPolicy.CHUNK_LEVEL, OffloadPolicy.REQUEST_LEVEL, RequestOffloadingContext, ScheduleEndContext, "
    "LoadStoreSpec, BlockIDsLoadStoreSpec, GPULoadStoreSpec, PrepareStoreOutput, OffloadingEvent, "
    "OffloadingKVEventsConfig, OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingHistogramMetadata, "
    "CanonicalKVCaches, CanonicalKVCacheRef, CanonicalPageMapping, CopyRun, TransferResult, OffloadingManager, "
    "OffloadingWorker, OffloadingSpec",
    _CONFIG: "OffloadingConfig, OffloadingGroupConfig, OffloadingModelConfig, OffloadingCacheConfig, "
    "OffloadingParallelConfig",
    "vllm.v1.kv_offload.factory": "OffloadingSpecFactory",
    "vllm.v1.kv_offload.cpu.manager": "CPUOffloadingManager",
    f"{_V1}.common": "OffloadingConnectorMetadata, TransferJob, OffloadingWorkerMetadata, TransferStats, "
    "DirectionalTransferStats",
    f"{_V1}.config": "build_offloading_config, get_offloading_group_ids, get_sliding_window_size_in_chunks",
    f"{_V1}.events": "OffloadingEventsTracker, OffloadingEventGroupSpec",
    f"{_V1}.scheduler": "OffloadingConnectorScheduler, SchedulerOffloadConfig, GroupOffloadConfig, RequestOffloadState",
    f"{_V1}.worker": "OffloadingConnectorWorker",
}

SIGNATURES = {
    f"{_BASE}:ReqContext": "req_id, kv_transfer_params=None, kv_hints=None, load_tier_filter=_",
    f"{_BASE}:RequestOffloadingContext": "policy=CHUNK_LEVEL",
    f"{_BASE}:ScheduleEndContext": "new_req_ids, preempted_req_ids",
    f"{_BASE}:GPULoadStoreSpec": "block_ids, group_sizes, block_indices",
    f"{_BASE}:PrepareStoreOutput": "keys_to_store, store_spec, evicted_keys",
    f"{_BASE}:OffloadingEvent": (
        "keys, medium, removed, locality=None, ownership=None, removal_expected=False, metadata_only=False"
    ),
    f"{_BASE}:OffloadingKVEventsConfig": "enable_kv_cache_events, self_describing_kv_events",
    f"{_BASE}:OffloadingCounterMetadata": "documentation, labelnames=(), ...",
    f"{_BASE}:OffloadingGaugeMetadata": "documentation, labelnames=(), ...",
    f"{_BASE}:OffloadingHistogramMetadata": "documentation, labelnames=(), ...",
    f"{_BASE}:CanonicalKVCaches": "tensors, group_data_refs",
    f"{_BASE}:make_offload_key": "block_hash, group_idx",
    f"{_BASE}:get_offload_block_hash": "key",
    f"{_BASE}:get_offload_group_idx": "key",
    f"{_BASE}:TransferResult": "job_id, success, transfer_size=None, transfer_time=None",
    f"{_BASE}:OffloadingManager.lookup": "key, _ctx",
    f"{_BASE}:OffloadingManager.prepare_load": "keys, _ctx",
    f"{_BASE}:OffloadingManager.prepare_store": "keys, _ctx",
    f"{_BASE}:OffloadingManager.complete_store": "keys, _ctx, success=True",
    f"{_BASE}:OffloadingManager.on_new_request": "_ctx",
    f"{_BASE}:OffloadingManager.get_load_source": "key, _ctx",
    f"{_BASE}:OffloadingManager.touch": "keys, _ctx",
    f"{_BASE}:OffloadingManager.complete_load": "keys, _ctx",
    f"{_BASE}:OffloadingManager.on_request_finished": "_ctx",
    f"{_BASE}:OffloadingManager.on_schedule_end": "_ctx",
    f"{_BASE}:OffloadingManager.take_events": "",
    f"{_BASE}:OffloadingManager.has_pending_work": "",
    f"{_BASE}:OffloadingManager.reset_cache": "",
    f"{_BASE}:OffloadingManager.on_reset_flushed": "",
    f"{_BASE}:OffloadingManager.get_stats": "",
    f"{_BASE}:OffloadingManager.config_info": "",
    f"{_BASE}:OffloadingManager.shutdown": "",
    f"{_BASE}:OffloadingSpec.get_manager": "",
    f"{_BASE}:OffloadingSpec.get_worker": "kv_caches",
    f"{_BASE}:OffloadingSpec.build_metric_definitions": "extra",
    f"{_BASE}:OffloadingSpec.config_info_keys": "extra",
    f"{_BASE}:OffloadingWorker.get_finished": "",
    f"{_BASE}:OffloadingWorker.submit_store": "job_id, _src, _dst",
    f"{_BASE}:OffloadingWorker.submit_load": "job_id, _src, _dst, expedited=False",
    f"{_BASE}:OffloadingWorker.wait": "job_ids",
    f"{_CONFIG}:OffloadingConfig": (
        "kw | groups, worker_kv_bytes_per_block, enable_kv_cache_events, extra_config, engine_id, model, cache, parallel, "
        "replicated_layout=False, canonical_layout=False, kv_cache_layout=None"
    ),
    f"{_CONFIG}:OffloadingGroupConfig": "tokens_per_block, layer_names, group_id, sliding_window_size_in_chunks=None",
    f"{_CONFIG}:OffloadingModelConfig": "name, dtype, max_model_len=0",
    f"{_CONFIG}:OffloadingCacheConfig": "tokens_per_hash, blocks_per_chunk",
    f"{_CONFIG}:OffloadingParallelConfig": (
        "kw | rank, world_size, tp_size, pp_size, pcp_size, dcp_size, data_parallel_index, data_parallel_size, "
        "data_parallel_rank_local, is_parallelism_agnostic"
    ),
    f"{_FACTORY}.register_spec": "name, module_path, class_name",
    f"{_FACTORY}.get_spec_cls": "_extra",
    f"{_FACTORY}.create_spec": "config",
    "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager": "kw | num_chunks, enable_events=_",
    f"{_V1}.common:OffloadingConnectorMetadata": "load_jobs, store_jobs, jobs_to_flush=None",
    f"{_V1}.common:TransferJob": "req_id, src_spec, dst_spec, sync=False",
    f"{_V1}.common:OffloadingWorkerMetadata": "completed_jobs=_, transfer_stats=_",
    f"{_V1}.common:OffloadingWorkerMetadata.mark_completed": "_job",
    f"{_V1}.common:TransferStats": "load=_, store=_",
    f"{_V1}.common:DirectionalTransferStats": "bytes=0, time=0.0, sizes=[]",
    f"{_V1}.config:build_offloading_config": "vllm_config, kv_cache_config",
    f"{_V1}.config:get_offloading_group_ids": "_cfg",
    f"{_V1}.config:get_sliding_window_size_in_chunks": "spec, tokens_per_chunk",
    f"{_V1}.scheduler:SchedulerOffloadConfig.from_spec": "spec, vllm_config, kv_cache_config",
    f"{_V1}.events:OffloadingEventGroupSpec": "kv_cache_spec_kind, kv_cache_spec_sliding_window",
    f"{_V1}.scheduler:OffloadingConnectorScheduler": "spec, vllm_config, kv_cache_config",
    f"{_V1}.worker:OffloadingConnectorWorker": "kw | spec, vllm_config, kv_cache_config",
}

MEMBERS = {
    f"{_BASE}:OffloadingManager": "lookup, prepare_load, prepare_store, on_new_request, get_load_source, touch, "
    "complete_load, complete_store, on_request_finished, take_events, on_schedule_end, has_pending_work, reset_cache, "
    "on_reset_flushed, get_stats, config_info, shutdown, lock",
    f"{_BASE}:OffloadingWorker": "submit_store, submit_load, get_finished, wait",
    f"{_BASE}:OffloadingSpec": "get_manager, get_worker, build_metric_definitions, config_info_keys",
    f"{_V1}.common:OffloadingWorkerMetadata": "mark_completed",
    f"{_V1}.scheduler:SchedulerOffloadConfig": "from_spec",
}

ABSTRACT = {
    f"{_BASE}:OffloadingManager": "lookup, prepare_load, prepare_store, on_new_request",
    f"{_BASE}:OffloadingWorker": "submit_store, submit_load, get_finished, wait",
    f"{_BASE}:OffloadingSpec": "get_manager, get_worker",
}

# The values are nobody's business: members are compared by identity.
ENUM_NAMES = {
    f"{_BASE}:LookupResult": "MISS, HIT, HIT_PENDING, RETRY",
    f"{_BASE}:OffloadPolicy": "CHUNK_LEVEL, REQUEST_LEVEL",
    f"{_BASE}:Medium": "CPU, STORAGE",
    f"{_BASE}:Locality": "LOCAL, REMOTE",
}
