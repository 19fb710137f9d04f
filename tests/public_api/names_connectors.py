"""Events, connectors and the simple CPU offload (interface sections 11 to 13)."""

from __future__ import annotations

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_CONNECTOR = f"{_BASE}:KVConnectorBase_V1"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
_KC_UTILS = "vllm.distributed.kv_transfer.kv_connector.utils"
_EVENTS = "vllm.distributed.kv_events"
_MIXIN = "vllm.v1.worker.kv_connector_model_runner_mixin"
_SO = "vllm.v1.simple_kv_offload"

_BASE_NAMES = (
    "KVConnectorBase_V1, KVConnectorRole, KVConnectorMetadata, KVConnectorWorkerMetadata, "
    "KVConnectorHandshakeMetadata, KVConnectorTransferResults, SupportsHMA, supports_hma"
)

EXPORTS = {
    _EVENTS: "MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE, KVCacheEvent, BlockStored, BlockRemoved, AllBlocksCleared, "
    "EventBatch, KVEventBatch, KVEventAggregator, KVConnectorKVEvents, EventPublisher, NullEventPublisher, "
    "ZmqEventPublisher, EventPublisherFactory",
    _V1: _BASE_NAMES,
    _BASE: _BASE_NAMES,
    "vllm.distributed.kv_transfer.kv_connector.base": "KVConnectorBase_V1",
    "vllm.distributed.kv_transfer": "get_kv_transfer_group, has_kv_transfer_group, ensure_kv_transfer_initialized, "
    "ensure_kv_transfer_shutdown, is_v1_kv_transfer_group",
    "vllm.distributed.kv_transfer.kv_transfer_state": "ensure_kv_transfer_initialized, ensure_kv_transfer_shutdown, "
    "get_kv_transfer_group, has_kv_transfer_group",
    "vllm.distributed.kv_transfer.kv_connector.factory": "KVConnectorFactory",
    _KC_UTILS: "KVOutputAggregator, yield_req_data",
    f"{_V1}.metrics": "KVConnectorStats, KVConnectorLogging, KVConnectorPromMetrics",
    f"{_V1}.multi_connector": "MultiConnector, MultiKVConnectorMetadata, MultiKVConnectorWorkerMetadata, "
    "MultiKVConnectorStats, MultiKVConnectorPromMetrics",
    f"{_V1}.example_connector": "ExampleConnector, ExampleConnectorMetadata, ReqMeta",
    _MIXIN: "KVConnectorModelRunnerMixin, get_kv_transfer_group, has_kv_transfer_group, get_forward_context, "
    "set_forward_context",
    "vllm.v1.worker.gpu.kv_connector": "ActiveKVConnector",
    "vllm.forward_context": "ForwardContext, get_forward_context, set_forward_context",
    f"{_V1}.simple_cpu_offload_connector": "SimpleCPUOffloadConnector, DEFAULT_CPU_CAPACITY_BYTES, "
    "VALID_KV_OFFLOAD_BACKENDS",
    f"{_V1}.offloading_connector": "OffloadingConnector",
    f"{_V1}.offloading.metrics": "OffloadingConnectorStats, OffloadPromMetrics, KV_OFFLOAD_CONFIG_INFO, "
    "get_connector_metric_definitions",
    "vllm.v1.kv_offload.base": "OffloadKey, make_offload_key, get_offload_block_hash, get_offload_group_idx, Medium.CPU, "
    "Medium.STORAGE, Locality.LOCAL, Locality.REMOTE, TierMatcher, TierFilter",
    f"{_SO}.manager": "SimpleCPUOffloadScheduler, StoreRequestState, LoadRequestState, TransferMeta, BlockStoreMeta, "
    "BoundaryStoreStats",
    f"{_SO}.metadata": "SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata, INVALID_JOB_ID",
    f"{_SO}.sizing": "sync_num_offload_blocks_across_workers, gpu_total_bytes, dist",
    f"{_SO}.worker": "SimpleCPUOffloadWorker, PIN_MEMORY",
    f"{_SO}.copy_backend": "DmaCopyBackend",
    f"{_SO}.disk_backend": "DiskBackend",
    f"{_SO}.cuda_mem_ops": "BatchMemcpyParams, build_params, copy_blocks, pin_tensor, "
    "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_ANY",
    f"{_SO}.metrics": "MetricName, OUTCOME_TO_FIELD, INFO_LABELS, SimpleCPUOffloadStats, SimpleCPUOffloadPromMetrics",
}

_LAUNCH = "src_blocks, dst_blocks, is_store, event_idx, events_list, wait_event=None"
_PROM = "vllm_config, metric_types, labelnames, per_engine_labelvalues"

SIGNATURES = {
    f"{_EVENTS}:BlockStored": (
        "block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys=None, "
        "group_idx=None, kv_cache_spec_kind=None, kv_cache_spec_sliding_window=None, locality=None, ownership=None, "
        "session_id=None, lookahead_token_ids=None"
    ),
    f"{_EVENTS}:BlockRemoved": "block_hashes, medium, group_idx=None, locality=None, ownership=None",
    f"{_EVENTS}:EventBatch": "ts, events, data_parallel_rank=None",
    f"{_EVENTS}:KVEventBatch": "ts, events, data_parallel_rank=None",
    f"{_EVENTS}:KVEventAggregator": "num_workers",
    f"{_EVENTS}:KVEventAggregator.add_events": "_events",
    f"{_EVENTS}:KVEventAggregator.increment_workers": "_n=1",
    f"{_EVENTS}:EventPublisher": "data_parallel_rank=0",
    f"{_EVENTS}:EventPublisherFactory.create": "config, data_parallel_rank=0",
    f"{_EVENTS}:EventPublisherFactory.register_publisher": "name, _ctor",
    f"{_EVENTS}:ZmqEventPublisher": (
        "data_parallel_rank, endpoint='tcp://*:5557', replay_endpoint=None, buffer_steps=10000, hwm=100000, "
        "max_queue_size=100000, topic=''"
    ),
    f"{_EVENTS}:ZmqEventPublisher.offset_endpoint_port": "endpoint, _rank",
    f"{_EVENTS}:ZmqEventPublisher.publish": "_batch",
    f"{_BASE}:supports_hma": "_connector",
    f"{_CONNECTOR}": "vllm_config, role, kv_cache_config",
    f"{_CONNECTOR}.supports_sleep_mode": "kv_transfer_config",
    f"{_CONNECTOR}.register_kv_caches": "kv_caches",
    f"{_CONNECTOR}.set_host_xfer_buffer_ops": "copy_operation",
    f"{_CONNECTOR}.handle_preemptions": "_metadata",
    f"{_CONNECTOR}.start_load_kv": "forward_context, ...",
    f"{_CONNECTOR}.wait_for_layer_load": "layer_name",
    f"{_CONNECTOR}.save_kv_layer": "layer_name, kv_layer, attn_metadata, ...",
    f"{_CONNECTOR}.get_finished": "finished_req_ids",
    f"{_CONNECTOR}.get_transfer_results": "finished_req_ids",
    f"{_CONNECTOR}.get_num_new_matched_tokens": "request, num_computed_tokens",
    f"{_CONNECTOR}.update_state_after_alloc": "request, blocks, num_external_tokens",
    f"{_CONNECTOR}.build_connector_meta": "scheduler_output",
    f"{_CONNECTOR}.update_connector_output": "connector_output",
    f"{_CONNECTOR}.request_finished": "request, block_ids",
    f"{_CONNECTOR}.get_required_kvcache_layout": "vllm_config",
    f"{_CONNECTOR}.build_prom_metrics": _PROM,
    f"{_BASE}:SupportsHMA.request_finished_all_groups": "request, block_ids",
    f"{_BASE}:KVConnectorTransferResults": "kw | finished_sending=_, finished_recving=_, failed_recving=_",
    f"{_FACTORY}.register_connector": "name, module_path, class_name",
    f"{_FACTORY}.create_connector": "config, role, kv_cache_config",
    f"{_FACTORY}.get_connector_class_by_name": "_name",
    f"{_FACTORY}.get_connector_class": "kv_transfer_config",
    f"{_FACTORY}.supports_hma_config": "kv_transfer_config",
    f"{_KC_UTILS}:KVOutputAggregator": "expected_finished_count",
    f"{_KC_UTILS}:KVOutputAggregator.from_connector": "connector, world_size",
    f"{_KC_UTILS}:KVOutputAggregator.aggregate": "outputs, output_rank=0",
    f"{_KC_UTILS}:KVOutputAggregator.ft_defer_kv_connector_outputs": "_outputs",
    f"{_KC_UTILS}:yield_req_data": "scheduler_output",
    f"{_V1}.metrics:KVConnectorStats": "data={}",
    f"{_V1}.metrics:KVConnectorLogging": "kv_transfer_config",
    f"{_V1}.metrics:KVConnectorLogging.observe": "_data",
    f"{_V1}.metrics:KVConnectorLogging.log": "_log_fn=_",
    f"{_V1}.metrics:KVConnectorLogging.reset": "",
    f"{_V1}.metrics:KVConnectorPromMetrics": _PROM,
    f"{_V1}.metrics:KVConnectorPromMetrics.observe": "_data, engine_idx=0",
    f"{_V1}.multi_connector:MultiConnector": "vllm_config, role, kv_cache_config",
    f"{_V1}.multi_connector:MultiConnector.all_children_support_hma": "_config",
    f"{_V1}.multi_connector:MultiKVConnectorMetadata": "metadata, extra_async_saves=None",
    f"{_V1}.multi_connector:MultiKVConnectorWorkerMetadata": "metadata",
    f"{_V1}.multi_connector:MultiKVConnectorStats": "data=_",
    f"{_V1}.multi_connector:MultiKVConnectorPromMetrics": f"{_PROM}, prom_metrics",
    f"{_V1}.example_connector:ExampleConnector": "vllm_config, role, kv_cache_config",
    f"{_V1}.example_connector:ExampleConnectorMetadata": "requests=[]",
    f"{_V1}.example_connector:ReqMeta": "token_ids, slot_mapping, is_store, mm_hashes",
    f"{_MIXIN}:KVConnectorModelRunnerMixin.kv_connector_no_forward": "scheduler_output, vllm_config",
    f"{_MIXIN}:KVConnectorModelRunnerMixin.maybe_get_kv_connector_output": "scheduler_output, defer_finalize=False",
    f"{_MIXIN}:KVConnectorModelRunnerMixin.finalize_kv_connector": "",
    "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.no_forward": "scheduler_output",
    "vllm.forward_context:ForwardContext": "no_compile_layers, attn_metadata, slot_mapping, ...",
    "vllm.distributed.kv_transfer:ensure_kv_transfer_initialized": "vllm_config, kv_cache_config",
    f"{_V1}.simple_cpu_offload_connector:SimpleCPUOffloadConnector": "vllm_config, role, kv_cache_config",
    f"{_V1}.simple_cpu_offload_connector:SimpleCPUOffloadConnector.get_aligned_num_cpu_blocks": "",
    f"{_V1}.simple_cpu_offload_connector:SimpleCPUOffloadConnector.get_boundary_store_stats": "",
    f"{_V1}.offloading_connector:OffloadingConnector": "vllm_config, role, kv_cache_config",
    f"{_V1}.offloading.metrics:OffloadingConnectorStats": "data=_",
    f"{_V1}.offloading.metrics:OffloadPromMetrics": _PROM,
    f"{_V1}.offloading.metrics:get_connector_metric_definitions": "",
    "vllm.v1.kv_offload.base:make_offload_key": "block_hash, group_idx",
    "vllm.v1.kv_offload.base:get_offload_block_hash": "_key",
    "vllm.v1.kv_offload.base:get_offload_group_idx": "_key",
    f"{_SO}.manager:SimpleCPUOffloadScheduler": (
        "vllm_config, kv_cache_config, cpu_capacity_bytes, scheduler_block_size, hash_block_size, lazy_offload=False, "
        "disk_capacity_bytes=0, use_page_cache=False, num_cpu_blocks=None, aligned_num_cpu_blocks=None"
    ),
    f"{_SO}.manager:SimpleCPUOffloadScheduler.bind_gpu_block_pool": "_pool",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.get_num_new_matched_tokens": "request, num_computed_tokens",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.update_state_after_alloc": "request, blocks, num_external_tokens",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.build_connector_meta": "scheduler_output",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.prepare_store_specs": "scheduler_output",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.update_connector_output": "connector_output",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.request_finished": "request, block_ids",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.request_finished_all_groups": "request, block_ids",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.has_pending_stores": "",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.take_events": "",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.get_stats": "",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.get_boundary_store_stats": "",
    f"{_SO}.manager:SimpleCPUOffloadScheduler.reset": "",
    f"{_SO}.manager:StoreRequestState": "request, block_ids, num_stored_blocks, store_events=set(), finished=False",
    f"{_SO}.manager:LoadRequestState": "request, transfer_meta, load_event=None, finished=False",
    f"{_SO}.manager:TransferMeta": "gpu_block_ids, cpu_block_ids, block_meta=None",
    f"{_SO}.manager:BlockStoreMeta": (
        "token_ids, parent_block_hash, lora_id, lora_name, extra_keys, block_size=None"
    ),
    f"{_SO}.manager:BoundaryStoreStats": (
        "published=0, stored=0, dropped_cpu_full=0, dropped_request_gone=0, skipped_already_cached=0, "
        "skipped_in_flight=0, dropped_null_block=0, dropped_not_hashed=0"
    ),
    f"{_SO}.metadata:SimpleCPUOffloadMetadata": (
        "load_event=-1, load_gpu_blocks=[], load_cpu_blocks=[], load_event_to_reqs={}, store_event=-1, "
        "store_gpu_blocks=[], store_cpu_blocks=[], need_flush=False, ..."
    ),
    f"{_SO}.metadata:SimpleCPUOffloadWorkerMetadata": "completed_store_events, ...",
    f"{_SO}.metadata:SimpleCPUOffloadWorkerMetadata.aggregate": "other",
    f"{_SO}.sizing:sync_num_offload_blocks_across_workers": "_n",
    f"{_SO}.sizing:gpu_total_bytes": "kv_cache_config",
    f"{_SO}.worker:SimpleCPUOffloadWorker": (
        "vllm_config, kv_cache_config, cpu_capacity_bytes, kv_offload_backend='cpu', disk_path=None, "
        "disk_capacity_bytes=0, disk_buffer_slots=2, use_page_cache=False, num_cpu_blocks=None"
    ),
    f"{_SO}.copy_backend:DmaCopyBackend": "",
    f"{_SO}.copy_backend:DmaCopyBackend.init": "gpu_caches, cpu_caches, device, load_stream, store_stream",
    f"{_SO}.copy_backend:DmaCopyBackend.launch_copy": _LAUNCH,
    f"{_SO}.copy_backend:DmaCopyBackend.shutdown": "",
    f"{_SO}.disk_backend:DiskBackend": "",
    f"{_SO}.disk_backend:DiskBackend.init": (
        "gpu_caches, device, load_stream, store_stream, disk_path, num_disk_slots, total_block_bytes, "
        "num_buffer_slots=2, use_page_cache=False"
    ),
    f"{_SO}.disk_backend:DiskBackend.launch_copy": _LAUNCH,
    f"{_SO}.disk_backend:DiskBackend.shutdown": "",
    f"{_SO}.cuda_mem_ops:BatchMemcpyParams": (
        "src_bases, dst_bases, bpb, num_layers, attrs, attrs_idx, num_attrs, fail_idx, stream_handle, ..."
    ),
    f"{_SO}.cuda_mem_ops:build_params": "_src, _dst, _stream, src_access_order=3",
    f"{_SO}.cuda_mem_ops:copy_blocks": "_src_ids, _dst_ids, params",
    f"{_SO}.cuda_mem_ops:pin_tensor": "_tensor",
    f"{_SO}.metrics:SimpleCPUOffloadStats": "data={}",
    f"{_SO}.metrics:SimpleCPUOffloadStats.increase_counter": "name, value=1, labelvalues=()",
    f"{_SO}.metrics:SimpleCPUOffloadStats.set_gauge": "name, value, labelvalues=()",
    f"{_SO}.metrics:SimpleCPUOffloadPromMetrics": _PROM,
}

MEMBERS = {
    f"{_EVENTS}:KVEventAggregator": "get_common_events, get_all_events, clear_events, reset_workers, "
    "get_number_of_workers",
    f"{_EVENTS}:KVConnectorKVEvents": "add_events, aggregate, increment_workers, get_all_events, "
    "get_number_of_workers, clear_events, merge",
    f"{_EVENTS}:EventPublisher": "publish, shutdown, get_publisher_config",
    _CONNECTOR: "unregister_kv_caches, restore_kv_caches, role, supports_divergent_local_hybrid_hits, "
    "requires_kv_delivery, get_mem_pool_context, bind_connector_metadata, clear_connector_metadata, "
    "has_connector_metadata, finish_forward, wait_for_save, get_block_ids_with_load_errors, get_kv_connector_stats, "
    "get_kv_connector_kv_cache_events, build_connector_worker_meta, get_handshake_metadata, reset_capture_state, "
    "shutdown, bind_kv_cache_manager, bind_gpu_block_pool, on_new_request, get_loaded_kv_cache_group_ids, "
    "get_external_cache_hit_sources, register_finished_partial_tail, take_events, has_pending_block_frees, "
    "has_pending_push_work, reset_cache, get_finished_count, set_xfer_handshake_metadata, "
    "set_xfer_handshake_metadata_pp_aware, requires_piecewise_for_cudagraph, build_kv_connector_stats",
    f"{_V1}.metrics:KVConnectorStats": "to_dict, reset, aggregate, reduce, is_empty",
    f"{_V1}.multi_connector:MultiConnector": "sub_connectors",
    f"{_V1}.multi_connector:MultiKVConnectorStats": "__getitem__",
    f"{_SO}.metrics:SimpleCPUOffloadStats": "aggregate, reduce, is_empty, reset",
}

ENUMS = {
    f"{_BASE}:KVConnectorRole": {"SCHEDULER": 0, "WORKER": 1},
}

METRIC_NAMES = {
    "SAVE_OUTCOMES": "vllm:simple_kv_offload_save_outcomes_total",
    "LOAD_BLOCKS": "vllm:simple_kv_offload_load_blocks_total",
    "USED_BLOCKS": "vllm:simple_kv_offload_used_blocks",
    "PENDING_STORE_BLOCKS": "vllm:simple_kv_offload_pending_store_blocks",
    "INFO": "vllm:simple_kv_offload_info",
}

ABSTRACT_METHODS = {
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
}

CONSTANTS = {
    f"{_EVENTS}:MEDIUM_GPU": "GPU",
    f"{_EVENTS}:MEDIUM_CPU": "CPU",
    f"{_EVENTS}:MEDIUM_STORAGE": "STORAGE",
    f"{_EVENTS}:ZmqEventPublisher.END_SEQ": b"\xff" * 8,
    f"{_SO}.metadata:INVALID_JOB_ID": -1,
    f"{_SO}.cuda_mem_ops:CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": 1,
    f"{_SO}.cuda_mem_ops:CU_MEMCPY_SRC_ACCESS_ORDER_ANY": 3,
    f"{_SO}.metrics:INFO_LABELS": ["backend", "page_cache", "lazy_offload", "capacity_blocks"],
    f"{_V1}.simple_cpu_offload_connector:DEFAULT_CPU_CAPACITY_BYTES": 8 * 2**30,
}
