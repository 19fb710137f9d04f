"""KV specs, planning, hashing, blocks, managers and the scheduler (interface sections 6 to 10)."""

from __future__ import annotations

PLANNING_NAMES = (
    "get_global_kv_cache_groups, get_kv_cache_configs, get_kv_cache_groups, get_kv_cache_groups_from_builder, "
    "get_kv_cache_config_from_groups, estimate_max_model_len, check_enough_kv_cache_memory, max_memory_usage_bytes, "
    "is_kv_cache_spec_uniform, is_kv_cache_type_attention_free, create_kv_cache_group_specs, "
    "unify_kv_cache_spec_page_size, unify_hybrid_kv_cache_specs, get_uniform_page_size, may_override_num_blocks, "
    "validate_kv_cache_layout, kv_cache_groups_tp_replicas"
)

EXPORTS = {
    "vllm.v1.kv_cache_interface": "KVCacheSpec, AttentionSpec, FullAttentionSpec, MLAAttentionSpec, "
    "HiddenStateCacheSpec, RSWASpec, SinkFullAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec, "
    "ChunkedLocalAttentionSpec, CircularBufferSpec, MambaSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec, "
    "HiSparseHotSpec, HiSparseResidentSpec, UniformTypeKVCacheSpecs, KVCacheTensor, KVCacheGroupSpec, "
    "KVCacheGroupRole, KVCacheConfig, KVCacheLayout, KVQuantMode, KVCacheSpecKind, SparseCacheRole, iter_layer_specs, "
    "is_full_attention_spec, get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window, replace_as, get_kv_quant_mode, "
    "is_quantized_kv_cache, get_mamba_prefill_checkpoint_position, is_mamba_prefill_checkpoint_valid, "
    "compute_layout_strides, create_kv_cache_views, KpoolTailSpec",
    "vllm.v1.kv_cache_layout": "KVCacheLayout",
    "vllm.v1.kv_cache_spec_registry": "KVCacheSpecRegistry, register_kv_cache_spec",
    "vllm.v1.worker.utils": "allocate_kv_cache, add_kv_sharing_layers_to_kv_cache_groups, AttentionGroup",
    "vllm.v1.core.kv_cache_planning": PLANNING_NAMES + ", DefaultKVCacheConfigBuilder",
    "vllm.v1.core.kv_cache_config_builder": "KVCacheConfigBuilder, get_kv_cache_config_builder",
    "vllm.v1.core.kv_cache_utils": "generate_scheduler_kv_cache_config, get_max_concurrency_for_kv_cache_config, "
    "get_kv_cache_capacity, resolve_kv_cache_block_sizes, resolve_cache_hit_alignment_tokens, "
    "resolve_dcp_kv_block_size, resolve_dcp_kv_cache_spec, partial_hash_hits_enabled, init_none_hash, NONE_HASH, "
    "DEFAULT_NONE_HASH_SEED, get_none_hash_seed, resolve_none_hash_seed, get_request_block_hasher, hash_block_tokens, "
    "generate_block_hash_extra_keys, to_event_extra_keys, BlockHash, BlockHashWithGroupId, "
    "make_block_hash_with_group_id, get_block_hash, get_group_id, maybe_convert_block_hash, ExternalBlockHash, "
    "BlockHashListWithBlockSize, resolve_block_hashes, KVCacheBlock, KVCacheBlockCopy, FreeKVCacheBlockQueue, "
    "null_head_len, trim_null_head, tensor_data, get_request_eagle_block_hasher, " + PLANNING_NAMES,
    "vllm.v1.attention.backends.utils": "resolve_kv_cache_layout",
    "vllm.v1.attention.backends.mla.indexer": "KpoolTailBackend",
    "vllm.utils.hashing": "sha256, sha256_cbor, xxhash, xxhash_cbor, get_hash_fn_by_name",
    "vllm.v1.core.block_pool": "BlockPool, BlockHashToBlockMap",
    "vllm.v1.core.kv_cache_metrics": "KVCacheMetricsCollector, BlockMetricsState",
    "vllm.v1.core.kv_cache_manager": "KVCacheManager, KVCacheBlocks",
    "vllm.v1.core.kv_cache_coordinator": "get_kv_cache_coordinator, KVCacheCoordinator, "
    "KVCacheCoordinatorNoPrefixCache, UnitaryKVCacheCoordinator, HybridKVCacheCoordinator, replay_boundaries",
    "vllm.v1.core.single_type_kv_cache_manager": "SingleTypeKVCacheManager, FullAttentionManager, "
    "SlidingWindowManager, ChunkedLocalAttentionManager, MambaManager, CircularBufferManager, RSWAManager, "
    "CrossAttentionManager, SinkFullAttentionManager, register_all_kvcache_specs, get_manager_for_kv_cache_spec",
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
    "vllm.v1.core.sched.interface": "SchedulerInterface, PauseState",
    "vllm.v1.core.sched.request_queue": "SchedulingPolicy, create_request_queue, FCFSRequestQueue, "
    "PriorityRequestQueue, RequestQueue",
    "vllm.v1.core.sched.utils": "check_stop, check_sequence_repetition, remove_all",
    "vllm.v1.structured_output": "StructuredOutputManager",
}

_FOUR = "kw | block_size, num_kv_heads, head_size, dtype"
_MANAGER = (
    "kv_cache_spec, block_pool, enable_caching, kv_cache_group_id, scheduler_block_size, dcp_world_size=1, "
    "pcp_world_size=1, needs_kv_cache_zeroing=False, max_admission_blocks_per_request=None"
)
_COORDINATOR = (
    "kv_cache_config, max_model_len, max_in_flight_tokens, use_eagle, enable_caching, enable_kv_cache_events, "
    "dcp_world_size, pcp_world_size, scheduler_block_size, hash_block_size, metrics_collector=None, "
    "num_hash_lookahead_tokens=0, num_prefill_lookahead=0, allow_partial_hash_hits=True"
)
_SCHEDULER = (
    "kw | vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size=None, mm_registry=_, "
    "include_finished_set=False, log_stats=False"
)
_SPECS = "vllm.v1.kv_cache_interface"
_PLANNING = "vllm.v1.core.kv_cache_planning"
_UTILS = "vllm.v1.core.kv_cache_utils"
_KINDS = "vllm.v1.core.single_type_kv_cache_manager"
_QUEUES = "vllm.v1.core.sched.request_queue"
_SCHED = "vllm.v1.core.sched.interface:SchedulerInterface"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_QUEUE = f"{_UTILS}:FreeKVCacheBlockQueue"
_KVM = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_ONE_KIND = f"{_KINDS}:SingleTypeKVCacheManager"

SPEC_SIGNATURES = {
    f"{_SPECS}:FullAttentionSpec": (
        f"{_FOUR}, head_size_v=_, dcp_sharded=True, page_size_padded=None, sliding_window=None, "
        "attention_chunk_size=None, kv_quant_mode=_, num_head_slots=None, state_content_bytes=None, is_draft=False, "
        "non_causal=False, max_tp_shards=None, tokens_per_state=1, block_stride_alignment=None"
    ),
    f"{_SPECS}:SlidingWindowSpec": (
        f"{_FOUR}, sliding_window, extra_retained_tokens=0, dcp_sharded=True, page_size_padded=None, is_draft=False"
    ),
    f"{_SPECS}:ChunkedLocalAttentionSpec": f"{_FOUR}, attention_chunk_size",
    f"{_SPECS}:MLAAttentionSpec": (
        f"{_FOUR}, cache_dtype_str=None, topk_buffer_width=None, alignment=None, model_version=None, "
        "cache_role=SPARSE, is_index_group_leader=False, non_causal_multi_token_decode=False, head_size_v=0, "
        "tokens_per_state=1, max_tp_shards=None, state_content_bytes=None, block_stride_alignment=None"
    ),
    f"{_SPECS}:SlidingWindowMLASpec": (
        f"{_FOUR}, sliding_window, cache_dtype_str=None, alignment=None, model_version=None, bounded_replay=False, "
        "head_size_v=0, max_tp_shards=None"
    ),
    f"{_SPECS}:CircularBufferSpec": f"{_FOUR}, head_size_v=_, dcp_sharded=_",
    f"{_SPECS}:MambaSpec": "block_size, shapes, dtypes, ...",
    f"{_SPECS}:RSWASpec": f"{_FOUR}, rswa_window",
    f"{_SPECS}:SinkFullAttentionSpec": f"{_FOUR}, sink_len=None",
    f"{_SPECS}:CrossAttentionSpec": _FOUR,
    f"{_SPECS}:EncoderOnlyAttentionSpec": _FOUR,
    f"{_SPECS}:HiddenStateCacheSpec": _FOUR,
    f"{_SPECS}:HiSparseHotSpec": "kw | block_size, page_size, blocks_per_request",
    f"{_SPECS}:HiSparseResidentSpec": "kw | block_size, page_size",
    f"{_SPECS}:UniformTypeKVCacheSpecs": "block_size, kv_cache_specs, ...",
    f"{_SPECS}:UniformTypeKVCacheSpecs.is_uniform_type": "_specs",
    f"{_SPECS}:UniformTypeKVCacheSpecs.from_specs": "_specs",
    f"{_SPECS}:KVCacheTensor": "size, layers, layer_stride, block_stride, offset=0, host_resident=False",
    f"{_SPECS}:KVCacheGroupSpec": (
        "layer_names, kv_cache_spec, is_eagle_group=False, host_resident=False, enable_kv_transfer=True, role=DEFAULT"
    ),
    f"{_SPECS}:KVCacheConfig": (
        "num_blocks, kv_cache_tensors, kv_cache_groups, prefix_cache_retention_interval=None, kv_cache_layout=None, "
        "hash_block_size=None, cache_hit_alignment_tokens=None, hisparse_host_num_blocks=None, "
        "hisparse_host_block_stride=None, hisparse_shared_host_pool=False, kv_tp_replicas=1"
    ),
    f"{_SPECS}:KVCacheConfig.select_transfer_block_ids": "block_ids",
    f"{_SPECS}:KVCacheConfig.num_blocks_of": "tensor",
    f"{_SPECS}:KVCacheSpec.merge": "specs",
    f"{_SPECS}:KVCacheSpec.max_memory_usage_bytes": "vllm_config",
    f"{_SPECS}:KVCacheSpec.max_num_blocks_per_req": "vllm_config, max_len",
    f"{_SPECS}:KVCacheSpec.copy_with_new_block_size": "_block_size",
    f"{_SPECS}:KVCacheSpec.get_num_kernel_states": "_n",
    f"{_SPECS}:KVCacheSpec.is_uniform_with_collection": "_specs",
    f"{_SPECS}:KVCacheSpec.get_block_stride_alignment": "",
    f"{_SPECS}:SlidingWindowSpec.max_admission_blocks_per_request": "max_in_flight_tokens, max_model_len",
    f"{_SPECS}:ChunkedLocalAttentionSpec.max_admission_blocks_per_request": "max_in_flight_tokens, max_model_len",
    f"{_SPECS}:HiSparseResidentSpec.max_admission_blocks_per_request": "max_in_flight_tokens, max_model_len",
    f"{_SPECS}:get_mamba_prefill_checkpoint_position": (
        "num_tokens, hash_block_size, drop_eagle_block, num_hash_lookahead_tokens=0"
    ),
    f"{_SPECS}:replace_as": "spec, cls, *, drop=(), ...",
    f"{_SPECS}:get_kv_quant_mode": "_dtype",
    f"{_SPECS}:iter_layer_specs": "spec",
    f"{_SPECS}:is_full_attention_spec": "spec",
    f"{_SPECS}:get_kv_cache_spec_kind": "spec",
    f"{_SPECS}:get_kv_cache_spec_sliding_window": "spec",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": (
        "spec_cls, manager_class, uniform_type_base_spec=None"
    ),
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register_role_manager": "role, manager_class",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.get_manager_class": "spec, role=None",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.get_uniform_type_base_spec": "spec",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.check_kv_cache_spec_registry": "_specs",
    "vllm.v1.kv_cache_spec_registry:register_kv_cache_spec": "manager_class, uniform_type_base_spec=None",
    "vllm.v1.worker.utils:allocate_kv_cache": "kv_cache_config, device, layout, kernel_block_sizes=None",
    "vllm.v1.worker.utils:add_kv_sharing_layers_to_kv_cache_groups": (
        "shared_kv_cache_layers, kv_cache_groups, runner_only_attn_layers=None"
    ),
    "vllm.v1.worker.utils:AttentionGroup": "backend, layer_names, kv_cache_spec, kv_cache_group_id, ...",
}

PLANNING_SIGNATURES = {
    f"{_PLANNING}:get_global_kv_cache_groups": "vllm_config, kv_cache_specs",
    f"{_PLANNING}:get_kv_cache_configs": "vllm_config, kv_cache_specs, available_memory, global_kv_cache_groups",
    f"{_PLANNING}:get_kv_cache_groups": "vllm_config, _specs",
    f"{_PLANNING}:get_kv_cache_groups_from_builder": "builder, vllm_config, _specs",
    f"{_PLANNING}:get_kv_cache_config_from_groups": "vllm_config, _groups, available_memory",
    f"{_PLANNING}:estimate_max_model_len": "vllm_config, _specs, available_memory",
    f"{_PLANNING}:check_enough_kv_cache_memory": "vllm_config, _specs, available_memory",
    f"{_PLANNING}:max_memory_usage_bytes": "vllm_config, _specs",
    f"{_PLANNING}:is_kv_cache_spec_uniform": "_specs",
    f"{_PLANNING}:is_kv_cache_type_attention_free": "_specs",
    f"{_PLANNING}:create_kv_cache_group_specs": "_specs, _names",
    f"{_PLANNING}:unify_kv_cache_spec_page_size": "_specs",
    f"{_PLANNING}:unify_hybrid_kv_cache_specs": "_specs",
    f"{_PLANNING}:get_uniform_page_size": "_specs",
    f"{_PLANNING}:may_override_num_blocks": "vllm_config, _n",
    f"{_PLANNING}:validate_kv_cache_layout": "_layout, _groups",
    f"{_PLANNING}:kv_cache_groups_tp_replicas": "_groups, tp_size, dcp_size=1",
    f"{_PLANNING}:DefaultKVCacheConfigBuilder.get_kv_cache_groups": "vllm_config, _specs",
    f"{_PLANNING}:DefaultKVCacheConfigBuilder.get_kv_cache_config_from_groups": "vllm_config, _groups, num_blocks",
    "vllm.v1.core.kv_cache_config_builder:get_kv_cache_config_builder": "vllm_config",
    f"{_UTILS}:generate_scheduler_kv_cache_config": "_configs",
    f"{_UTILS}:get_max_concurrency_for_kv_cache_config": "vllm_config, _config",
    f"{_UTILS}:get_kv_cache_capacity": "vllm_config, _config",
    f"{_UTILS}:resolve_kv_cache_block_sizes": "kv_cache_config, vllm_config",
    f"{_UTILS}:resolve_cache_hit_alignment_tokens": "_config, vllm_config, _scheduler, _hash",
    f"{_UTILS}:resolve_dcp_kv_block_size": "_spec, _dcp",
    f"{_UTILS}:resolve_dcp_kv_cache_spec": "_spec, _dcp",
    f"{_UTILS}:partial_hash_hits_enabled": "_groups, hash_block_size, _dcp=1, manager_classes=None",
}

BLOCK_SIGNATURES = {
    "vllm.utils.hashing:get_hash_fn_by_name": "_name",
    f"{_UTILS}:init_none_hash": "_fn",
    f"{_UTILS}:resolve_none_hash_seed": "_fn",
    f"{_UTILS}:get_none_hash_seed": "",
    f"{_UTILS}:get_request_block_hasher": "_hash_block_size, _fn, num_hash_lookahead_tokens=0",
    f"{_UTILS}:hash_block_tokens": "_fn, _parent, _tokens, extra_keys=None",
    f"{_UTILS}:generate_block_hash_extra_keys": "_request, _start, _end, _start_mm_idx",
    f"{_UTILS}:to_event_extra_keys": "_keys",
    f"{_UTILS}:make_block_hash_with_group_id": "_hash, _group",
    f"{_UTILS}:get_block_hash": "key",
    f"{_UTILS}:get_group_id": "key",
    f"{_UTILS}:maybe_convert_block_hash": "_hash",
    f"{_UTILS}:BlockHashListWithBlockSize": "_hashes, hash_block_size, _target",
    f"{_UTILS}:resolve_block_hashes": (
        "_hashes, hash_block_size, block_size, *, supports_fine_grained_hash_lookup=False, alignment_tokens=None"
    ),
    f"{_UTILS}:KVCacheBlock": "block_id, ref_cnt=0, *, pool=None, is_null=False",
    f"{_UTILS}:KVCacheBlock.set_block_hash": "_hash, num_tokens=None",
    f"{_UTILS}:KVCacheBlock.reset_hash": "",
    f"{_UTILS}:KVCacheBlockCopy": "src_block_id, dst_block_id",
    _QUEUE: "blocks",
    f"{_QUEUE}.popleft": "",
    f"{_QUEUE}.popleft_n": "_n",
    f"{_QUEUE}.remove": "block",
    f"{_QUEUE}.append": "block",
    f"{_QUEUE}.append_n": "blocks",
    f"{_QUEUE}.prepend_n": "blocks",
    f"{_QUEUE}.get_all_free_blocks": "",
    f"{_QUEUE}.iter_blocks_after": "cursor",
    f"{_UTILS}:null_head_len": "blocks",
    f"{_UTILS}:trim_null_head": "blocks",
    f"{_UTILS}:tensor_data": "_tensor",
    _POOL: (
        "num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events=False, metrics_collector=None, "
        "num_hash_lookahead_tokens=0, medium='GPU'"
    ),
    f"{_POOL}.get_cached_block": "_hash, _group_ids",
    f"{_POOL}.get_new_blocks": "_n",
    f"{_POOL}.touch": "blocks",
    f"{_POOL}.free_blocks": "_ordered",
    f"{_POOL}.cache_full_blocks": (
        "request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask=None"
    ),
    f"{_POOL}.cache_partial_block": (
        "request, block, num_tokens, kv_cache_group_id, block_size, replace_existing_hashes=False"
    ),
    f"{_POOL}.move_block_hashes": "_src, _dst",
    f"{_POOL}.evict_blocks": "_ids",
    f"{_POOL}.reset_prefix_cache": "",
    f"{_POOL}.unpin_blocks": "blocks, on_reuse",
    f"{_POOL}.is_block_writable": "_block",
    f"{_POOL}.take_events": "",
    f"{_POOL}.get_num_free_blocks": "",
    f"{_POOL}.get_usage": "",
    "vllm.v1.core.block_pool:BlockHashToBlockMap": "",
    "vllm.v1.core.block_pool:BlockHashToBlockMap.get_one_block": "key",
    "vllm.v1.core.block_pool:BlockHashToBlockMap.contain": "key, block_id",
    "vllm.v1.core.block_pool:BlockHashToBlockMap.insert": "key, block",
    "vllm.v1.core.block_pool:BlockHashToBlockMap.pop": "key, block_id",
    "vllm.v1.core.kv_cache_metrics:KVCacheMetricsCollector": "sample_rate=0.01",
    "vllm.v1.core.kv_cache_metrics:BlockMetricsState": "",
}

MANAGER_SIGNATURES = {
    _KVM: (
        "kv_cache_config, max_model_len, scheduler_block_size, hash_block_size, max_in_flight_tokens=None, "
        "enable_caching=True, use_eagle=False, num_hash_lookahead_tokens=0, num_prefill_lookahead=0, log_stats=False, "
        "enable_kv_cache_events=False, dcp_world_size=1, pcp_world_size=1, metrics_collector=None, watermark=0.0, "
        "enable_mamba_shared_prefix_checkpoint=False"
    ),
    f"{_KVM}.get_computed_blocks": "request, max_cache_hit_length=None",
    f"{_KVM}.get_computed_blocks_for_connector": "request, max_cache_hit_length=None",
    f"{_KVM}.allocate_slots": (
        "request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=None, num_lookahead_tokens=0, "
        "num_external_computed_tokens=0, delay_cache_blocks=False, num_encoder_tokens=0, full_sequence_must_fit=False, "
        "reserved_blocks=0, has_scheduled_reqs=True, skip_zeroing_group_ids=()"
    ),
    f"{_KVM}.free": "request",
    f"{_KVM}.cache_blocks": "request, _n",
    f"{_KVM}.reset_prefix_cache": "",
    f"{_KVM}.evict_blocks": "_ids",
    f"{_KVM}.get_blocks": "_request_id",
    f"{_KVM}.get_block_ids": "_request_id",
    f"{_KVM}.get_block_ids_for_computed_tokens": "_request_id, _n",
    f"{_KVM}.truncate_computed_blocks": "_blocks, _n",
    f"{_KVM}.estimate_cached_tokens": "request",
    f"{_KVM}.take_events": "",
    f"{_KVM}.take_new_block_ids": "",
    f"{_KVM}.take_kv_cache_block_copies": "",
    f"{_KVM}.take_boundary_state_offloads": "",
    f"{_KVM}.finalize_partial_tail_offloads": "request",
    f"{_KVM}.remove_skipped_blocks": "_id, _processed, _num_prompt",
    f"{_KVM}.make_prefix_cache_stats": "",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids": "allow_none=False, *, group_ids=None",
    "vllm.v1.core.kv_cache_coordinator:get_kv_cache_coordinator": _COORDINATOR,
    "vllm.v1.core.kv_cache_coordinator:UnitaryKVCacheCoordinator": _COORDINATOR,
    "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator": _COORDINATOR,
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinatorNoPrefixCache": _COORDINATOR.replace(
        "enable_caching, ", ""
    ),
    "vllm.v1.core.kv_cache_coordinator:replay_boundaries": "num_prompt_tokens, scheduler_block_size, use_eagle",
    **{
        f"{_KINDS}:{name}": _MANAGER
        for name in (
            "FullAttentionManager",
            "SlidingWindowManager",
            "ChunkedLocalAttentionManager",
            "MambaManager",
            "CircularBufferManager",
            "RSWAManager",
            "CrossAttentionManager",
            "SinkFullAttentionManager",
        )
    },
    f"{_KINDS}:FullAttentionManager.find_longest_cache_hit": (
        "block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block, alignment_tokens, "
        "dcp_world_size=1, pcp_world_size=1"
    ),
    f"{_KINDS}:SlidingWindowManager.reachable_block_mask": (
        "start_block, end_block, alignment_tokens, kv_cache_spec, use_eagle, retention_interval=None, "
        "reachable_boundaries=(), dcp_world_size=1, final_segment_end_block=None"
    ),
    f"{_KINDS}:register_all_kvcache_specs": "vllm_config",
    f"{_KINDS}:get_manager_for_kv_cache_spec": (
        "_spec, max_in_flight_tokens, max_model_len, role=None, *, block_pool, enable_caching, kv_cache_group_id, "
        "scheduler_block_size, ..."
    ),
    f"{_ONE_KIND}.get_num_blocks_to_allocate": (
        "request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_local_computed_tokens, "
        "num_tokens_main_model, apply_admission_cap=False, prefill_end=0"
    ),
    f"{_ONE_KIND}.cache_blocks": "request, num_tokens, retention_interval=None, *, replay_boundaries",
    "vllm.v1.core.sched.scheduler:Scheduler": _SCHEDULER,
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": _SCHEDULER,
    f"{_SCHED}.schedule": "throttle_prefills=False",
    f"{_SCHED}.update_from_output": "scheduler_output, model_runner_output",
    f"{_SCHED}.get_grammar_bitmask": "scheduler_output",
    f"{_SCHED}.update_draft_token_ids": "_drafts",
    f"{_SCHED}.update_draft_token_ids_in_output": "_drafts, scheduler_output",
    f"{_SCHED}.add_request": "request",
    f"{_SCHED}.has_request": "request_id",
    f"{_SCHED}.finish_requests": "_ids, _status",
    f"{_SCHED}.set_pause_state": "_state",
    f"{_SCHED}.reset_prefix_cache": "reset_running_requests=False, reset_connector=False",
    f"{_SCHED}.reset_encoder_cache": "",
    "vllm.v1.core.sched.scheduler:Scheduler.reset_connector_cache": "",
    "vllm.v1.core.sched.scheduler:Scheduler.shutdown": "",
    f"{_QUEUES}:create_request_queue": "policy",
    "vllm.v1.core.sched.utils:check_stop": "request, max_model_len",
    "vllm.v1.core.sched.utils:check_sequence_repetition": "token_ids, params",
    "vllm.v1.core.sched.utils:remove_all": "_list, _items",
    "vllm.v1.structured_output:StructuredOutputManager": "vllm_config",
}

SIGNATURES = {**SPEC_SIGNATURES, **PLANNING_SIGNATURES, **BLOCK_SIGNATURES, **MANAGER_SIGNATURES}

_QUEUE_METHODS = (
    "add_request, pop_request, peek_request, prepend_request, prepend_requests, remove_request, remove_requests, "
    "__bool__, __len__, __iter__"
)

MEMBERS = {
    f"{_SPECS}:KVCacheSpec": "prefix_cacheable, prefix_replay_tokens, num_heads, tokens_per_state, "
    "state_content_size_bytes, page_size_bytes, num_states, block_table_token_alignment, has_layer_views, "
    "uses_slot_mapping, is_draft",
    f"{_SPECS}:AttentionSpec": "real_page_size_bytes, unpadded_page_size_bytes",
    f"{_SPECS}:SlidingWindowSpec": "num_retained_tokens",
    f"{_SPECS}:UniformTypeKVCacheSpecs": "first_spec",
    f"{_SPECS}:KVQuantMode": "is_per_token_head, is_nvfp4, is_turboquant, is_ultraquant, is_octave, is_custom_mode",
    f"{_SPECS}:MambaSpec": "mamba_cache_mode, page_size_padded, num_speculative_blocks, num_prefill_checkpoint_blocks, "
    "prefill_checkpoint_alignment, tp_replicated, mamba_type",
    f"{_SPECS}:KVCacheConfig": "transfer_group_ids, transfer_groups, prefix_cacheable_group_ids, "
    "prefix_cacheable_groups, transfer_group_index_by_layer, host_group_ids, has_mamba_layers, "
    "has_mixed_precision_kv_cache, needs_kv_cache_zeroing",
    "vllm.v1.kv_cache_layout:KVCacheLayout": "is_layer_compact, is_block_compact, is_block_contiguous, "
    "is_block_outermost, stride_order, layer_view_order",
    "vllm.v1.core.kv_cache_metrics:KVCacheMetricsCollector": "should_sample_block, on_block_allocated, "
    "on_block_accessed, on_block_evicted, reset, drain_events",
    "vllm.v1.core.kv_cache_metrics:BlockMetricsState": "record_access, get_lifetime_seconds, get_idle_time_seconds, "
    "get_reuse_gaps_seconds",
    _KVM: "record_blocks_for_zeroing, pop_blocks_for_free, new_step_starts, usage, record_prefix_cache_stats, "
    "create_kv_cache_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "__add__, get_unhashed_block_ids, "
    "get_unhashed_block_ids_all_groups, new_empty",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": "find_longest_cache_hit, get_num_blocks_to_allocate, "
    "allocate_new_computed_blocks, allocate_new_blocks, cache_blocks, get_num_cacheable_tokens, free, "
    "pop_blocks_for_free, remove_skipped_blocks, get_blocks, reset_prefix_cache, new_step_starts, "
    "find_longest_cache_hit_per_group",
    _ONE_KIND: "add_local_computed_blocks, allocate_external_computed_blocks, allocate_new_blocks, "
    "get_num_skipped_tokens, remove_skipped_blocks, free, pop_blocks_for_free, take_new_block_ids, "
    "take_pending_cow_copies, take_pending_boundary_state_offloads, finalize_partial_tail_offload, new_step_starts, "
    "supports_fine_grained_hash_lookup, retains_longer_hit, has_positionally_stable_blocks",
    f"{_POOL}": "emit_cached_block_events",
    _SCHED: "get_num_unfinished_requests, has_unfinished_requests, has_finished_requests, has_requests, pause_state, "
    "get_request_counts, get_kv_cache_usage, make_stats, shutdown, get_kv_connector, get_ec_connector, "
    "get_kv_event_publisher_config",
    f"{_QUEUES}:FCFSRequestQueue": _QUEUE_METHODS,
    f"{_QUEUES}:PriorityRequestQueue": _QUEUE_METHODS,
}

ENUMS = {
    f"{_SPECS}:KVCacheSpecKind": {
        kind.upper(): kind
        for kind in (
            "full_attention",
            "mla_attention",
            "sink_full_attention",
            "sliding_window",
            "sliding_window_mla",
            "chunked_local_attention",
            "mamba",
            "cross_attention",
            "encoder_only_attention",
            "unknown",
        )
    },
    f"{_SPECS}:SparseCacheRole": {"SPARSE": "sparse", "INDEXER": "indexer"},
    f"{_SPECS}:KVCacheGroupRole": {
        "DEFAULT": "default",
        "HISPARSE_SOURCE": "hisparse_source",
        "HISPARSE_INDEXER": "hisparse_indexer",
    },
    "vllm.v1.core.sched.interface:PauseState": {"UNPAUSED": 0, "PAUSED_NEW": 1, "PAUSED_ALL": 2},
    f"{_QUEUES}:SchedulingPolicy": {"FCFS": "fcfs", "PRIORITY": "priority"},
}

QUANT_MODES = {
    "NONE": 0,
    "FP8_PER_TENSOR": 1,
    "INT8_PER_TOKEN_HEAD": 2,
    "FP8_PER_TOKEN_HEAD": 3,
    "INT4_PER_TOKEN_HEAD": 4,
    "NVFP4": 5,
    "TURBOQUANT_K8V4": 6,
    "TURBOQUANT_4BIT_NC": 7,
    "TURBOQUANT_K3V4_NC": 8,
    "TURBOQUANT_3BIT_NC": 9,
    "NVFP4_DS_MLA": 10,
    "ULTRAQUANT_4BIT": 11,
    "OCTAVE_K3V4": 12,
    "CUSTOM": 12,
    "OCTAVE_K3V3": 13,
    "OCTAVE_K3V3_COMPACT": 14,
}
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]

CONSTANTS = {f"{_UTILS}:DEFAULT_NONE_HASH_SEED": "vllm-none-hash"}
