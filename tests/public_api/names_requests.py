"""Requests, messages, step data, statistics (interface sections 4 and 5)."""

from __future__ import annotations

EXPORTS = {
    "vllm.v1.request": "Request, RequestStatus, FinishReason",
    "vllm.v1.engine": "EngineCoreRequest, EngineCoreOutput, EngineCoreOutputs, EngineCoreEvent, EngineCoreEventType, "
    "EngineCoreRequestType, FinishReason, UtilityOutput",
    "vllm.v1.utils": "ConstantList, tensor_data",
    "vllm.v1.core.sched.output": "NewRequestData, CachedRequestData, SchedulerOutput, KVConnectorBlockState, "
    "ScheduledEncoderInputStats, GrammarOutput",
    "vllm.v1.outputs": "ModelRunnerOutput, KVConnectorOutput, EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, "
    "SamplingMaskLists, LogprobsLists, LogprobsTensors, SamplerOutput, AsyncModelRunnerOutput, "
    "KVConnectorWorkerMetadata",
    "vllm.v1.metrics.stats": "PrefixCacheStats, CachingMetrics, SchedulerStats, KV_FETCH_STAGES, PrefillStats, "
    "IterationStats, RequestStateStats, FinishedRequestStats, RequestSpecDecodeMetrics",
    "vllm.v1.metrics.cache_hit_source": "CacheHitSource",
    "vllm.v1.serial_utils": "",
}

SIGNATURES = {
    "vllm.v1.request:Request": (
        "request_id, prompt_token_ids, sampling_params, pooling_params, client_index=0, arrival_time=None, "
        "prompt_embeds=None, prompt_is_token_ids=None, mm_features=None, lora_request=None, cache_salt=None, "
        "priority=0, trace_headers=None, block_hasher=None, resumable=False, session_id=None, reasoning_ended=None, "
        "reasoning_parser_kwargs=None, abort_immediately=False, kv_hints=None"
    ),
    "vllm.v1.request:Request.append_output_token_ids": "_tokens",
    "vllm.v1.request:Request.update_block_hashes": "",
    "vllm.v1.request:Request.is_finished": "",
    "vllm.v1.request:Request.get_finished_reason": "",
    "vllm.v1.request:Request.record_event": "_type, timestamp=None",
    "vllm.v1.request:Request.take_events": "",
    "vllm.v1.request:Request.take_prefill_stats": "",
    "vllm.v1.request:Request.get_num_encoder_embeds": "_index",
    "vllm.v1.request:Request.from_engine_core_request": "_request, block_hasher",
    "vllm.v1.request:RequestStatus.is_finished": "status",
    "vllm.v1.request:RequestStatus.get_finished_reason": "status",
    "vllm.v1.engine:EngineCoreRequest": (
        "request_id, prompt_token_ids, mm_features, sampling_params, pooling_params, arrival_time, lora_request, "
        "cache_salt, data_parallel_rank, prompt_embeds=None, prompt_is_token_ids=None, client_index=0, current_wave=0, "
        "priority=0, trace_headers=None, resumable=False, external_req_id=None, reasoning_ended=None, "
        "reasoning_parser_kwargs=None, abort_immediately=False, session_id=None, kv_hints=None"
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id, new_token_ids, new_logprobs=None, new_prompt_logprobs_tensors=None, pooling_output=None, "
        "finish_reason=None, stop_reason=None, events=None, kv_transfer_params=None, ec_transfer_params=None, "
        "trace_headers=None, prefill_stats=None, routed_experts=None, num_nans_in_logits=0, mm_cache_miss_hashes=None, "
        "new_sampling_mask=None, spec_decode_metrics=None, prompt_token_id_logprobs=None, error=None"
    ),
    "vllm.v1.engine:EngineCoreOutputs": (
        "engine_index=0, outputs=[], scheduler_stats=None, timestamp=0.0, utility_output=None, finished_requests=None, "
        "wave_complete=None, start_wave=None, weight_version=None"
    ),
    "vllm.v1.engine:UtilityOutput": "call_id, failure_message=None, result=None",
    "vllm.v1.engine:EngineCoreEvent": "type, timestamp",
    "vllm.v1.engine:EngineCoreEvent.new_event": "_type, timestamp=None",
    "vllm.v1.core.sched.output:NewRequestData": (
        "req_id, prompt_token_ids, mm_features, sampling_params, pooling_params, block_ids, num_computed_tokens, "
        "lora_request, prompt_embeds=None, prompt_is_token_ids=None, prefill_token_ids=None, replay_start=0"
    ),
    "vllm.v1.core.sched.output:NewRequestData.from_request": (
        "request, block_ids, prefill_token_ids=None, uses_mrope=False"
    ),
    "vllm.v1.core.sched.output:NewRequestData.anon_repr": "",
    "vllm.v1.core.sched.output:CachedRequestData": (
        "req_ids, resumed_req_ids, new_token_ids, all_token_ids, new_block_ids, num_computed_tokens, num_output_tokens"
    ),
    "vllm.v1.core.sched.output:CachedRequestData.make_empty": "",
    "vllm.v1.core.sched.output:CachedRequestData.is_context_phase": "req_id",
    "vllm.v1.core.sched.output:CachedRequestData.anon_repr": "",
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs, scheduled_cached_reqs, num_scheduled_tokens, total_num_scheduled_tokens, "
        "scheduled_spec_decode_tokens, scheduled_encoder_inputs, finished_req_ids, free_encoder_mm_hashes, "
        "encoder_input_updates={}, scheduled_encoder_input_stats=None, preempted_req_ids=None, "
        "has_structured_output_requests=False, pending_structured_output_tokens=False, num_invalid_spec_tokens=None, "
        "kv_connector_metadata=None, has_sync_kv_loads=False, aux_output_connector_metadata=None, "
        "ec_connector_metadata=None, ec_manager_metadata=None, new_block_ids_to_zero=None, kv_cache_block_copies=None, "
        "kv_connector_block_state=None, num_spec_tokens_to_schedule=0, num_common_prefix_blocks=[], skip_drafts=False"
    ),
    "vllm.v1.core.sched.output:SchedulerOutput.make_empty": "",
    "vllm.v1.core.sched.output:KVConnectorBlockState": "req_ids, resolve_block_ids, boundary_state_offloads",
    "vllm.v1.core.sched.output:KVConnectorBlockState.get_block_ids": "_req_id",
    "vllm.v1.core.sched.output:ScheduledEncoderInputStats": "num_inputs=0, output_tokens=0",
    "vllm.v1.core.sched.output:GrammarOutput": (
        "structured_output_request_ids, grammar_bitmask, num_acceptable_drafts=None"
    ),
    "vllm.v1.outputs:ModelRunnerOutput": (
        "req_ids, req_id_to_index, sampled_token_ids=[], logprobs=None, prompt_logprobs_dict={}, "
        "prompt_token_id_logprobs_dict={}, pooler_output=None, kv_connector_output=None, ec_connector_output=None, "
        "num_nans_in_logits=None, cudagraph_stats=None, aux_output_connector_output=None, sampling_masks=None"
    ),
    "vllm.v1.outputs:ModelRunnerOutput.with_kv_conn_output_only": "_output",
    "vllm.v1.outputs:KVConnectorOutput": (
        "kw | finished_sending=None, finished_recving=None, kv_connector_stats=None, kv_cache_events=None, "
        "kv_connector_worker_meta=None, invalid_block_ids=set(), failed_recving=set(), expected_finished_count=0"
    ),
    "vllm.v1.outputs:KVConnectorOutput.is_empty": "",
    "vllm.v1.outputs:DraftTokenIds": "req_ids, draft_token_ids",
    "vllm.v1.outputs:SamplingMaskLists": "token_ids, offsets=None, cu_num_generated_tokens=None",
    "vllm.v1.outputs:LogprobsLists": (
        "logprob_token_ids, logprobs, sampled_token_ranks, cu_num_generated_tokens=None"
    ),
    "vllm.v1.outputs:LogprobsLists.slice_request": "_index, _number",
    "vllm.v1.outputs:LogprobsTensors": (
        "logprob_token_ids, logprobs, selected_token_ranks, cu_num_generated_tokens=None, "
        "cu_num_generated_tokens_tensor=None"
    ),
    "vllm.v1.outputs:SamplerOutput": "sampled_token_ids, logprobs_tensors, ...",
    "vllm.v1.metrics.stats:PrefixCacheStats": (
        "reset=False, requests=0, queries=0, hits=0, preempted_requests=0, preempted_queries=0, preempted_hits=0, "
        "hits_by_source={}"
    ),
    "vllm.v1.metrics.stats:PrefixCacheStats.record": "num_tokens, num_hits, preempted, hits_by_source=None",
    "vllm.v1.metrics.stats:CachingMetrics": "max_recent_requests=1000",
    "vllm.v1.metrics.stats:CachingMetrics.observe": "stats",
    "vllm.v1.metrics.stats:CachingMetrics.reset": "",
    "vllm.v1.metrics.stats:RequestSpecDecodeMetrics.new": "_num_spec_tokens",
    "vllm.v1.metrics.cache_hit_source:CacheHitSource.outermost": "sources",
}

MEMBERS = {
    "vllm.v1.engine:EngineCoreRequest": "params",
    "vllm.v1.engine:EngineCoreOutput": "finished",
    "vllm.v1.core.sched.output:NewRequestData": "prompt_len",
    "vllm.v1.core.sched.output:CachedRequestData": "num_reqs",
    "vllm.v1.outputs:AsyncModelRunnerOutput": "get_output, get_kv_connector_output",
    "vllm.v1.metrics.stats:CachingMetrics": "empty, hit_rate",
    "vllm.v1.metrics.stats:SchedulerStats": "num_running_reqs, num_waiting_reqs, num_skipped_waiting_reqs, "
    "num_kv_fetch_reqs_by_stage, kv_cache_usage, prefix_cache_stats, connector_prefix_cache_stats, "
    "kv_cache_eviction_events, spec_decoding_stats, kv_connector_stats",
    "vllm.v1.metrics.stats:PrefillStats": "num_prompt_tokens, num_computed_tokens, num_cached_tokens, "
    "num_local_cached_tokens, num_external_cached_tokens, num_cache_creation_tokens",
}

# The numbers of `RequestStatus` are not fixed, their order is.
STATUS_ORDER = [
    "WAITING",
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
    "WAITING_FOR_REMOTE_KVS",
    "WAITING_FOR_STREAMING_REQ",
    "RUNNING",
    "PREEMPTED",
    "FINISHED_STOPPED",
    "FINISHED_LENGTH_CAPPED",
    "FINISHED_ABORTED",
    "FINISHED_IGNORED",
    "FINISHED_ERROR",
    "FINISHED_REPETITION",
]

ENUMS = {
    "vllm.v1.engine:FinishReason": {"STOP": 0, "LENGTH": 1, "ABORT": 2, "ERROR": 3, "REPETITION": 4},
    "vllm.v1.engine:EngineCoreEventType": {"QUEUED": 1, "SCHEDULED": 2, "PREEMPTED": 3},
    "vllm.v1.engine:EngineCoreRequestType": {
        "ADD": b"\x00",
        "ABORT": b"\x01",
        "START_DP_WAVE": b"\x02",
        "UTILITY": b"\x03",
        "EXECUTOR_FAILED": b"\x04",
        "WAKEUP": b"\x05",
    },
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": {
        "DEVICE": "device",
        "HOST": "host",
        "P2P": "p2p",
        "DISK": "disk",
        "EXTERNAL_UNSPECIFIED": "external_unspecified",
    },
}


CONSTANTS = {
    "vllm.v1.metrics.stats:KV_FETCH_STAGES": ("waiting_to_start", "in_progress", "completed_waiting"),
}
