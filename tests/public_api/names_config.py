"""Top level, parameters, outputs, errors and configuration (interface sections 2 and 3)."""

from __future__ import annotations

EXPORTS = {
    "vllm": "LLM, SamplingParams, PoolingParams, TokensPrompt, TextPrompt, CompletionOutput, RequestOutput, envs, __version__",
    "vllm.envs": "disable_envs_cache",
    "vllm.logger": "init_logger",
    "vllm.sampling_params": "SamplingParams, StructuredOutputsParams, RepetitionDetectionParams, RequestOutputKind, "
    "SamplingType, BeamSearchParams, validate_thinking_token_budget",
    "vllm.pooling_params": "PoolingParams",
    "vllm.lora.request": "LoRARequest",
    "vllm.inputs": "TokensPrompt, TextPrompt",
    "vllm.inputs.engine": "embeds_input",
    "vllm.outputs": "CompletionOutput, RequestOutput, PoolingRequestOutput, EmbeddingRequestOutput, "
    "ClassificationRequestOutput, ScoringRequestOutput, RequestError, SamplingMask, WeightVersionSpan",
    "vllm.logprobs": "Logprob, FlatLogprobs, SampleLogprobs, PromptLogprobs, create_sample_logprobs",
    "vllm.exceptions": "VLLMError, VLLMClientError, VLLMServerError, VLLMValidationError, GenerationError, "
    "RetryableRequestError, GracefulHTTPError, QueueOverflowError, MaxQueuedTokensError, VLLMNotFoundError, "
    "VLLMUnprocessableEntityError",
    "vllm.v1.engine.exceptions": "EngineGenerateError, EngineDeadError",
    "vllm.config": "VllmConfig, ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, DeviceConfig, LoadConfig, "
    "ObservabilityConfig, KVTransferConfig, KVEventsConfig, SpeculativeConfig, LoRAConfig, AttentionConfig, "
    "ECTransferConfig, MultiModalConfig, DiffusionConfig, ReasoningConfig, set_current_vllm_config, "
    "get_current_vllm_config",
    "vllm.config.cache": "CacheConfig, MambaCacheMode, KV_CACHE_DTYPES, KVCacheDTypeHandler, register_kv_cache_dtype, "
    "get_kv_cache_dtype_handler, is_known_kv_cache_dtype",
    "vllm.config.scheduler": "SchedulerConfig, SchedulerPolicy, RunnerType",
    "vllm.config.kv_events": "KVEventsConfig",
    "vllm.config.kv_transfer": "KVTransferConfig",
    "vllm.engine.arg_utils": "EngineArgs, AsyncEngineArgs",
    "vllm.usage.usage_lib": "UsageContext",
}

SIGNATURES = {
    "vllm.sampling_params:SamplingParams": (
        "kw | n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, temperature=1.0, "
        "watermarking=None, top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=None, stop_token_ids=None, ignore_eos=False, "
        "max_tokens=16, min_tokens=0, logprobs=None, prompt_logprobs=None, prompt_logprob_token_ids=None, "
        "prompt_logprob_start=None, logprob_token_ids=None, flat_logprobs=False, detokenize=True, "
        "skip_special_tokens=True, spaces_between_special_tokens=True, include_stop_str_in_output=False, "
        "output_kind=CUMULATIVE, stream_interval=None, skip_clone=False, structured_outputs=None, logit_bias=None, "
        "allowed_token_ids=None, extra_args=None, bad_words=None, skip_reading_prefix_cache=None, "
        "thinking_token_budget=None, repetition_detection=None, routed_experts_prompt_start=0, "
        "trace_decode_token_ids=None"
    ),
    "vllm.sampling_params:SamplingParams.update_from_generation_config": "_config, eos_token_id=None",
    "vllm.sampling_params:SamplingParams.update_from_tokenizer": "_tokenizer",
    "vllm.sampling_params:SamplingParams.clone": "",
    "vllm.sampling_params:SamplingParams.verify": (
        "model_config, speculative_config, structured_outputs_config, tokenizer"
    ),
    "vllm.sampling_params:StructuredOutputsParams": (
        "json=None, regex=None, choice=None, grammar=None, json_object=None, ..."
    ),
    "vllm.sampling_params:RepetitionDetectionParams": "max_pattern_size=0, min_pattern_size=0, min_count=0",
    "vllm.sampling_params:BeamSearchParams": (
        "beam_width, max_tokens, ignore_eos=False, temperature=0.0, length_penalty=1.0, "
        "include_stop_str_in_output=False, structured_outputs=None, skip_special_tokens=True, watermarking=None, "
        "allowed_token_ids=None"
    ),
    "vllm.sampling_params:validate_thinking_token_budget": "_value",
    "vllm.pooling_params:PoolingParams": "kw | task=None",
    "vllm.lora.request:LoRARequest": "lora_name, lora_int_id, lora_path=_, ...",
    "vllm.inputs.engine:embeds_input": "_embeds, *, prompt_token_ids=None, is_token_ids=None",
    "vllm.outputs:CompletionOutput": (
        "index, text, token_ids, cumulative_logprob, logprobs, routed_experts=None, finish_reason=None, "
        "stop_reason=None, lora_request=None, sampling_mask=None, spec_decode_metrics=None, weight_versions=None"
    ),
    "vllm.outputs:RequestOutput": (
        "request_id, prompt, prompt_token_ids, prompt_logprobs, outputs, finished, metrics=None, lora_request=None, "
        "encoder_prompt=None, encoder_prompt_token_ids=None, num_cached_tokens=None, num_cache_creation_tokens=None, *, "
        "kv_transfer_params=None, ec_transfer_params=None, prompt_token_id_logprobs=None"
    ),
    "vllm.outputs:RequestOutput.add": "_next, aggregate",
    "vllm.outputs:PoolingRequestOutput": (
        "request_id, outputs, prompt_token_ids, num_cached_tokens, finished, *, error=None, late_chunking=None"
    ),
    "vllm.outputs:EmbeddingRequestOutput.from_base": "_base",
    "vllm.outputs:ClassificationRequestOutput.from_base": "_base",
    "vllm.outputs:ScoringRequestOutput.from_base": "_base",
    "vllm.outputs:RequestError": "code, message, retryable=False",
    "vllm.outputs:RequestError.to_exception": "",
    "vllm.outputs:SamplingMask": "token_ids",
    "vllm.outputs:WeightVersionSpan": "version, start, end",
    "vllm.logprobs:Logprob": "logprob, rank=None, decoded_token=None",
    "vllm.logprobs:create_sample_logprobs": "flat_logprobs",
    "vllm.exceptions:VLLMValidationError": "message, *, parameter=None, value=None",
    "vllm.config:ModelConfig": 'model="Qwen/Qwen3-0.6B", ...',
    "vllm.config.model:ModelConfig": (
        'kw | model="Qwen/Qwen3-0.6B", runner="auto", convert="auto", tokenizer=None, tokenizer_mode="auto", '
        'trust_remote_code=False, dtype="auto", seed=0, max_model_len=None, quantization=None, enforce_eager=False, '
        "skip_tokenizer_init=False, hf_overrides={}, served_model_name=None, max_logprobs=20, "
        'logprobs_mode="raw_logprobs", enable_trace_replay=False'
    ),
    "vllm.config:SchedulerConfig": (
        "kw | max_model_len, is_encoder_decoder, runner_type='generate', max_num_batched_tokens=2048, "
        "max_num_scheduled_tokens=None, max_num_seqs=128, max_num_active_seqs=None, long_prefill_token_threshold=0, "
        "long_prefill_token_threshold_adaptive=False, max_num_queued_reqs=None, max_num_queued_tokens=None, "
        "enable_chunked_prefill=True, is_multimodal_model=False, policy='fcfs', disable_chunked_mm_input=False, "
        "scheduler_cls=None, disable_hybrid_kv_cache_manager=None, scheduler_reserve_full_isl=True, watermark=0.0, "
        "prefill_schedule_interval=1, async_scheduling=None, stream_interval=1"
    ),
    "vllm.config:CacheConfig": (
        "kw | block_size=None, gpu_memory_utilization=0.92, cache_dtype='auto', num_gpu_blocks_override=None, "
        "sliding_window=None, enable_prefix_caching=True, prefix_caching_hash_algo='sha256', prefix_match_unit=None, "
        "prefix_cache_retention_interval=0, mamba_block_size=None, mamba_cache_mode='none', mamba_cache_dtype='auto', "
        "mamba_ssm_cache_dtype='auto', enable_mamba_shared_prefix_checkpoint=False, swa_bounded_replay=True, "
        "kv_cache_memory_bytes=None, kv_offloading_size=None, kv_offloading_backend='native'"
    ),
    "vllm.config:ParallelConfig": (
        "kw | pipeline_parallel_size=1, tensor_parallel_size=1, prefill_context_parallel_size=1, "
        "decode_context_parallel_size=1, data_parallel_size=1, data_parallel_rank=0, "
        "distributed_executor_backend=None, cp_kv_cache_interleave_size=1, worker_cls='auto'"
    ),
    "vllm.config:DeviceConfig": "device='auto'",
    "vllm.config:KVTransferConfig": (
        "kw | kv_connector=None, engine_id=_, kv_buffer_device=_, kv_role=None, kv_port=14579, "
        "kv_connector_extra_config={}, kv_connector_module_path=None, enable_permute_local_kv=False, "
        "kv_load_failure_policy='fail'"
    ),
    "vllm.config:KVEventsConfig": (
        "kw | enable_kv_cache_events=False, publisher=None, endpoint='tcp://*:5557', replay_endpoint=None, "
        "buffer_steps=10000, hwm=100000, max_queue_size=100000, topic=''"
    ),
    "vllm.config:ObservabilityConfig": "kw | per_request_spec_decode_metrics='none'",
    "vllm.config:LoRAConfig": "kw | max_loras=_",
    "vllm.config:SpeculativeConfig": (
        "kw | model=None, method=None, num_speculative_tokens=_, target_model_config=None, "
        "target_parallel_config=None, disable_eagle_block_drop=False, disable_lookahead_block_hashes=False"
    ),
    "vllm.config:AttentionConfig": "kw | backend=None, hisparse_config=None",
    "vllm.config:VllmConfig": (
        "kw | model_config=None, cache_config=_, parallel_config=_, scheduler_config=_, device_config=_, load_config=_, "
        "attention_config=_, lora_config=None, speculative_config=None, structured_outputs_config=_, "
        "observability_config=_, kv_transfer_config=None, kv_events_config=None, ec_transfer_config=None, "
        "diffusion_config=None, reasoning_config=None, additional_config={}, instance_id='', shutdown_timeout=0"
    ),
    "vllm.config:VllmConfig.adjust_dcp_kv_cache_interleave_size": "kv_cache_groups",
    "vllm.config:set_current_vllm_config": "_config, ...",
    "vllm.config.cache:register_kv_cache_dtype": "name",
    "vllm.config.cache:get_kv_cache_dtype_handler": "name",
    "vllm.config.cache:is_known_kv_cache_dtype": "name",
    "vllm.config:KVTransferConfig.get_from_extra_config": "key, default",
    "vllm.config:KVTransferConfig.has_connector": "name",
    "vllm.engine.arg_utils:EngineArgs.add_cli_args": "parser",
    "vllm.engine.arg_utils:EngineArgs.from_cli_args": "args",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": "usage_context=None, ...",
    "vllm.engine.arg_utils:EngineArgs": "kw | mamba_cache_mode=None",
    "vllm.logger:init_logger": "name",
}

MEMBERS = {
    "vllm.sampling_params:SamplingParams": "from_optional, sampling_type, eos_token_id, all_stop_token_ids, "
    "bad_words_token_ids, num_logprobs, output_text_buffer_length",
    "vllm.sampling_params:StructuredOutputsParams": "whitespace_pattern, structural_tag, disable_any_whitespace, "
    "disable_additional_properties",
    "vllm.outputs:CompletionOutput": "finished",
    "vllm.config:ModelConfig": "hf_config, hf_text_config, original_max_model_len, dtype, is_encoder_decoder, is_hybrid, "
    "is_attention_free, use_mla, is_multimodal_model, multimodal_config, architectures, registry, "
    "supports_kv_cache_grouping, get_total_num_kv_heads, get_num_kv_heads, get_total_num_hidden_layers, "
    "get_num_layers, get_head_size, get_hidden_size, get_vocab_size, get_sliding_window",
    "vllm.config:SchedulerConfig": "default_factory, get_scheduler_cls, max_num_encoder_input_tokens, encoder_cache_size",
    "vllm.config:CacheConfig": "kv_cache_layout, num_gpu_blocks, num_cpu_blocks, simple_cpu_offload_num_blocks, "
    "effective_attention_block_size, hash_block_size, cache_hit_alignment_tokens, kv_cache_size_tokens, "
    "kv_cache_max_concurrency, get_resolved_kv_cache_layout",
    "vllm.config:ParallelConfig": "world_size, data_parallel_index",
    "vllm.config:DeviceConfig": "device_type",
    "vllm.config:KVTransferConfig": "is_kv_transfer_instance, is_kv_producer, is_kv_consumer",
    "vllm.config:SpeculativeConfig": "use_eagle, use_eagle_block_drop, needs_eagle_block_drop",
    "vllm.config:VllmConfig": "max_concurrent_batches, max_in_flight_tokens, num_speculative_tokens, "
    "num_lookahead_tokens, num_prefill_lookahead_tokens, num_hash_lookahead_tokens, use_v2_model_runner, "
    "is_mm_encoder_only",
    "vllm.config.cache:KVCacheDTypeHandler": "name, torch_dtype, quant_mode",
    "vllm.logprobs:FlatLogprobs": "append, extend",
    "vllm.v1.engine.exceptions:EngineDeadError": "ENGINE_DEAD_MESSAGE, CLIENT_MESSAGE",
}

ENUMS = {
    "vllm.sampling_params:RequestOutputKind": {"CUMULATIVE": 0, "DELTA": 1, "FINAL_ONLY": 2},
    "vllm.sampling_params:SamplingType": {"GREEDY": 0, "RANDOM": 1, "RANDOM_SEED": 2},
}

CONSTANTS = {
    "vllm:__version__": "0.33.0",
    "vllm.config:SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS": 2048,
    "vllm.config:SchedulerConfig.DEFAULT_MAX_NUM_SEQS": 128,
    "vllm.config:CacheConfig.DEFAULT_BLOCK_SIZE": 16,
}
