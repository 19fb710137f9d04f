"""Front end of the engine, executors, workers, platforms (interface section 16, engine description 12 to 15)."""

from __future__ import annotations

_ENGINE = "vllm.v1.engine"
_OUT = f"{_ENGINE}.output_processor"
_EXECUTOR = "vllm.v1.executor.abstract:Executor"
_WORKER = "vllm.v1.worker.worker_base:WorkerBase"

EXPORTS = {
    f"{_ENGINE}.detokenizer": "IncrementalDetokenizer, check_stop_strings",
    f"{_ENGINE}.logprobs": "LogprobsProcessor",
    _OUT: "OutputProcessor, OutputProcessorOutput, RequestOutputCollector, StreamingInputOutputCollector, RequestState",
    f"{_ENGINE}.parallel_sampling": "ParentRequest",
    f"{_ENGINE}.core": "EngineCore, EngineCoreProc, EngineShutdownState",
    f"{_ENGINE}.core_client": "EngineCoreClient, InprocClient, SyncMPClient, AsyncMPClient",
    f"{_ENGINE}.llm_engine": "LLMEngine",
    f"{_ENGINE}.async_llm": "AsyncLLM",
    "vllm.v1.executor.abstract": "Executor",
    "vllm.v1.executor.uniproc_executor": "UniProcExecutor",
    "vllm.v1.worker.worker_base": "WorkerBase, WorkerWrapperBase",
    "vllm.tokenizers": "TokenizerLike, get_tokenizer",
    "vllm.usage.usage_lib": "UsageContext",
    "vllm.platforms": "current_platform",
    "vllm.plugins": "load_plugins_by_group, load_general_plugins",
    "vllm.v1.attention.backend": "AttentionBackend",
}

SIGNATURES = {
    f"{_ENGINE}.detokenizer:IncrementalDetokenizer.from_new_request": "tokenizer, request",
    f"{_ENGINE}.detokenizer:IncrementalDetokenizer.update": "new_token_ids, stop_terminated",
    f"{_ENGINE}.detokenizer:IncrementalDetokenizer.get_next_output_text": "finished, delta",
    f"{_ENGINE}.detokenizer:IncrementalDetokenizer.num_output_tokens": "",
    f"{_ENGINE}.detokenizer:check_stop_strings": "output_text, new_char_count, stop, include_in_output",
    f"{_ENGINE}.logprobs:LogprobsProcessor": (
        "kw | tokenizer, logprobs, prompt_logprobs, cumulative_logprob, num_logprobs, num_prompt_logprobs"
    ),
    f"{_ENGINE}.logprobs:LogprobsProcessor.from_new_request": "tokenizer, request",
    f"{_ENGINE}.logprobs:LogprobsProcessor.update_from_output": "_output",
    f"{_ENGINE}.logprobs:LogprobsProcessor.pop_prompt_logprobs": "",
    f"{_OUT}:OutputProcessor": "tokenizer, *, log_stats, stream_interval=1, tracing_enabled=False, admission_stats=None",
    f"{_OUT}:OutputProcessor.add_request": "request, prompt, parent_req=None, request_index=0, queue=None",
    f"{_OUT}:OutputProcessor.process_outputs": (
        "_outputs, engine_core_timestamp=None, iteration_stats=None, weight_version=None"
    ),
    f"{_OUT}:OutputProcessor.abort_requests": "_ids, internal",
    f"{_OUT}:OutputProcessor.has_request": "_id",
    f"{_OUT}:OutputProcessor.propagate_error": "_error",
    f"{_OUT}:OutputProcessor.update_scheduler_stats": "_stats",
    f"{_OUT}:OutputProcessorOutput": "request_outputs, reqs_to_abort",
    f"{_OUT}:RequestOutputCollector": "output_kind, request_id",
    f"{_OUT}:RequestOutputCollector.put": "_output",
    f"{_OUT}:StreamingInputOutputCollector": "output_kind, request_id",
    f"{_OUT}:RequestState.from_new_request": (
        "tokenizer, request, prompt, parent_req, request_index, queue, log_stats, stream_interval"
    ),
    f"{_ENGINE}.parallel_sampling:ParentRequest": "request",
    f"{_ENGINE}.parallel_sampling:ParentRequest.get_child_info": "_index",
    f"{_ENGINE}.parallel_sampling:ParentRequest.get_outputs": "_child_id, _completion",
    f"{_ENGINE}.core:EngineCore": "vllm_config, executor_class, log_stats, ...",
    f"{_ENGINE}.core:EngineCore.preprocess_add_request": "_request",
    f"{_ENGINE}.core:EngineCore.add_request": "request, _wave=0",
    f"{_ENGINE}.core:EngineCore.abort_requests": "_ids",
    f"{_ENGINE}.core:EngineCore.step": "",
    f"{_ENGINE}.core:EngineCore.step_with_batch_queue": "",
    f"{_ENGINE}.core:EngineCore.pause_scheduler": "mode='abort', clear_cache=True",
    f"{_ENGINE}.core:EngineCore.wake_up": "tags=None",
    f"{_ENGINE}.core:EngineCore.sleep": "level=1, mode='abort'",
    f"{_ENGINE}.core:EngineCore.reset_prefix_cache": "reset_running_requests=False, reset_connector=False",
    f"{_ENGINE}.core:EngineCore.get_kv_cache_group_metadata": "",
    f"{_ENGINE}.core:EngineCore.shutdown": "",
    f"{_ENGINE}.core_client:EngineCoreClient.make_client": (
        "multiprocess_mode, asyncio_mode, vllm_config, executor_class, log_stats"
    ),
    f"{_EXECUTOR}.get_class": "vllm_config",
    f"{_EXECUTOR}.set_kv_cache_layout": "layout_name, cp_kv_cache_interleave_size",
    f"{_EXECUTOR}.get_simple_cpu_offload_num_blocks": "",
    f"{_EXECUTOR}.collective_rpc": "method, timeout=None, args=(), kwargs=None, non_block=False",
    f"{_EXECUTOR}.execute_model": "_scheduler_output, non_block=False",
    f"{_EXECUTOR}.sample_tokens": "_grammar, non_block=False",
    f"{_EXECUTOR}.initialize_from_config": "kv_cache_configs",
    f"{_EXECUTOR}.init_kv_output_aggregator": "connector",
    f"{_WORKER}": "vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False",
    f"{_ENGINE}.async_llm:AsyncLLM.from_engine_args": "_args, ...",
    f"{_ENGINE}.async_llm:AsyncLLM.generate": "prompt, sampling_params, request_id, ...",
    f"{_ENGINE}.async_llm:AsyncLLM.abort": "_id, ...",
    f"{_ENGINE}.async_llm:AsyncLLM.shutdown": "timeout=None",
    f"{_ENGINE}.async_llm:AsyncLLM.pause_generation": "mode='abort', clear_cache=True, ...",
    f"{_ENGINE}.async_llm:AsyncLLM.reset_prefix_cache": "reset_running_requests=False, reset_connector=False",
    f"{_ENGINE}.async_llm:AsyncLLM.sleep": "level=1, mode='abort'",
    f"{_ENGINE}.async_llm:AsyncLLM.wake_up": "tags=None",
    "vllm.tokenizers:get_tokenizer": "_name, ...",
}

MEMBERS = {
    f"{_ENGINE}.detokenizer:IncrementalDetokenizer": "output_token_ids",
    _OUT + ":OutputProcessor": "has_unfinished_requests, get_num_unfinished_requests, get_num_queued_tokens",
    _OUT + ":RequestOutputCollector": "get, get_nowait, close",
    _OUT + ":StreamingInputOutputCollector": "put, get, get_nowait, close",
    f"{_ENGINE}.parallel_sampling:ParentRequest": "n",
    f"{_ENGINE}.core:EngineCore": "resume_scheduler, is_scheduler_paused, is_sleeping, get_supported_tasks",
    f"{_EXECUTOR}": "compile_or_warm_up_model, determine_available_memory, get_kv_cache_specs, "
    "get_supported_kv_cache_layouts, get_kv_connector_handshake_metadata, take_draft_token_ids, execute_dummy_batch, "
    "check_health, register_failure_callback, supports_async_scheduling, uses_ray, supports_pp",
    _WORKER: "init_device, load_model, get_kv_cache_spec, set_kv_cache_layout, determine_available_memory, "
    "initialize_from_config, compile_or_warm_up_model, execute_model, sample_tokens, check_health, profile, sleep, "
    "wake_up, reset_mm_cache, get_model, apply_model, update_max_model_len, take_draft_token_ids, execute_dummy_batch, "
    "get_kv_connector_handshake_metadata, shutdown",
    f"{_ENGINE}.async_llm:AsyncLLM": "resume_generation, is_paused, is_sleeping, collective_rpc, check_health, "
    "do_log_stats, from_vllm_config, is_running, errored, dead_error, encode, release_kv_cache_memory, reset_mm_cache",
    "vllm.platforms.interface:Platform": "check_and_update_config, apply_config_platform_defaults, "
    "get_attn_backend_cls, register_custom_kv_cache_specs, support_hybrid_kv_cache, validate_request, "
    "pre_register_and_update, is_cuda, is_rocm, is_cpu, device_type, get_kv_cache_config_builder_cls",
}

ENUMS: dict[str, dict[str, object]] = {}

CONSTANTS: dict[str, object] = {}
