"""Entry points (interface section 17 and the offline API)."""

from __future__ import annotations

_COMMON = "vllm.entrypoints.common"
_OPENAI = "vllm.entrypoints.openai"
_SERVE = "vllm.entrypoints.serve"

EXPORTS = {
    f"{_COMMON}.cli_args": "make_arg_parser, validate_parsed_serve_args, FrontendArgs, BaseFrontendArgs, "
    "LoRAParserAction",
    f"{_COMMON}.startup": "cli_env_setup, log_non_default_args, get_non_default_args",
    "vllm.utils.argparse_utils": "FlexibleArgumentParser, human_readable_int",
    "vllm.entrypoints.cli.main": "main",
    "vllm.entrypoints.llm": "LLM",
    f"{_OPENAI}.completion.protocol": "CompletionRequest, CompletionResponse, CompletionStreamResponse",
    f"{_OPENAI}.completion.serving": "OpenAIServingCompletion",
    f"{_OPENAI}.chat_completion.protocol": "ChatCompletionRequest, BatchChatCompletionRequest, ChatCompletionResponse",
    f"{_OPENAI}.chat_completion.serving": "OpenAIServingChat",
    f"{_OPENAI}.models.protocol": "BaseModelPath, LoRAModulePath",
    f"{_OPENAI}.models.serving": "OpenAIServingModels",
    f"{_SERVE}.engine.protocol": "ErrorResponse",
    f"{_SERVE}.exception_handling.error_response": "create_error_response",
    f"{_SERVE}.exception_handling.handlers.validation": "validation_exception_handler",
    f"{_SERVE}.utils.sse_keep_alive": "SSE_KEEP_ALIVE_COMMENT, with_sse_keep_alive",
    f"{_SERVE}.utils.request_logger": "RequestLogger",
    "vllm": "LLM, SamplingParams, PoolingParams, TextPrompt, TokensPrompt, PromptType, RequestOutput, "
    "CompletionOutput, PoolingOutput, PoolingRequestOutput, EmbeddingOutput, EmbeddingRequestOutput, "
    "ClassificationOutput, ClassificationRequestOutput, ScoringOutput, ScoringRequestOutput, LLMEngine, EngineArgs, "
    "AsyncLLMEngine, AsyncEngineArgs, ModelRegistry, __version__, __version_tuple__",
}

SIGNATURES = {
    f"{_COMMON}.cli_args:make_arg_parser": "parser",
    f"{_COMMON}.cli_args:validate_parsed_serve_args": "args",
    f"{_COMMON}.startup:cli_env_setup": "",
    f"{_COMMON}.startup:log_non_default_args": "args",
    f"{_COMMON}.startup:get_non_default_args": "args",
    "vllm.utils.argparse_utils:human_readable_int": "_value",
    f"{_OPENAI}.completion.protocol:CompletionRequest": (
        "kw | model=None, prompt=None, max_tokens=16, n=1, logprobs=None, echo=False, stream=False, "
        "stream_options=None, suffix=None, stop=[], seed=None, ignore_eos=False, response_format=None, "
        "use_beam_search=False, priority=0, skip_special_tokens=None, return_weight_versions=False, "
        "spaces_between_special_tokens=True, include_stop_str_in_output=False, min_tokens=0, stop_token_ids=[], "
        "truncate_prompt_tokens=None, allowed_token_ids=None, prompt_logprobs=None, logprob_token_ids=None, "
        "length_penalty=1.0, structured_outputs=None, session_id=None, return_token_ids=_, "
        "cache_salt=None, kv_transfer_params=None, ec_transfer_params=None, vllm_xargs=None, add_special_tokens=True, "
        "prompt_embeds=None"
    ),
    f"{_OPENAI}.completion.protocol:CompletionRequest.to_sampling_params": "max_tokens, default_sampling_params, ...",
    f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest": (
        "kw | messages, model=None, max_tokens=None, max_completion_tokens=None, skip_special_tokens=None, "
        "return_weight_versions=False, n=1, stream=False, top_logprobs=0, parallel_tool_calls=True, "
        "include_reasoning=True, echo=False, add_generation_prompt=True, continue_final_message=False, "
        "add_special_tokens=False, tools=None, documents=None, chat_template=None, chat_template_kwargs=None, "
        "priority=0, cache_salt=None, vllm_xargs=None"
    ),
    f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest.to_sampling_params": (
        "max_tokens, default_sampling_params, ..."
    ),
    f"{_OPENAI}.completion.serving:OpenAIServingCompletion": (
        "engine_client, models, *, online_renderer, request_logger, return_tokens_as_token_ids=False, ..."
    ),
    f"{_OPENAI}.completion.serving:OpenAIServingCompletion.create_completion": "request, raw_request=_",
    f"{_OPENAI}.chat_completion.serving:OpenAIServingChat": (
        "engine_client, models, response_role, *, online_renderer, request_logger, chat_template, "
        "chat_template_content_format, ..."
    ),
    f"{_OPENAI}.chat_completion.serving:OpenAIServingChat.create_chat_completion": "request, raw_request=_",
    f"{_OPENAI}.models.protocol:BaseModelPath": "name, model_path",
    f"{_OPENAI}.models.protocol:LoRAModulePath": "name, path, base_model_name=None",
    f"{_OPENAI}.models.serving:OpenAIServingModels": "engine_client, base_model_paths, ...",
    f"{_SERVE}.utils.sse_keep_alive:with_sse_keep_alive": "_gen, interval",
    f"{_SERVE}.utils.request_logger:RequestLogger": "kw | max_log_len",
    "vllm.entrypoints.llm:LLM": (
        "model, *, runner='auto', convert='auto', tokenizer=None, tokenizer_mode='auto', skip_tokenizer_init=False, "
        "trust_remote_code=False, allowed_local_media_path='', tensor_parallel_size=1, dtype='auto', "
        "quantization=None, revision=None, tokenizer_revision=None, chat_template=None, seed=0, "
        "gpu_memory_utilization=0.92, cpu_offload_gb=0, enforce_eager=False, hf_overrides=None, "
        "mm_processor_kwargs=None, pooler_config=None, structured_outputs_config=None, kv_cache_memory_bytes=None, "
        "compilation_config=None, logits_processors=None, ..."
    ),
    "vllm.entrypoints.llm:LLM.generate": (
        "prompts, sampling_params=None, *, use_tqdm=True, lora_request=None, priority=None, tokenization_kwargs=None, "
        "mm_processor_kwargs=None"
    ),
    "vllm.entrypoints.llm:LLM.chat": (
        "messages, sampling_params=None, use_tqdm=True, lora_request=None, chat_template=None, "
        "chat_template_content_format='auto', add_generation_prompt=True, continue_final_message=False, tools=None, "
        "chat_template_kwargs=None, ..."
    ),
    "vllm.entrypoints.llm:LLM.beam_search": "prompts, params, ...",
    "vllm.entrypoints.llm:LLM.collective_rpc": "method, timeout=None, args=(), kwargs=None",
    "vllm.entrypoints.llm:LLM.apply_model": "_fn",
    "vllm.entrypoints.llm:LLM.reset_prefix_cache": "reset_running_requests=False, reset_connector=False",
    "vllm.entrypoints.llm:LLM.sleep": "level=1, mode='abort'",
    "vllm.entrypoints.llm:LLM.wake_up": "tags=None",
    "vllm.entrypoints.llm:LLM.from_engine_args": "engine_args",
}

MEMBERS = {
    "vllm.entrypoints.llm:LLM": "enqueue, enqueue_chat, wait_for_completion, encode, embed, classify, score, "
    "get_tokenizer, get_default_sampling_params, get_world_size, reset_mm_cache, release_kv_cache_memory, "
    "start_profile, stop_profile, get_metrics",
}

ENUMS: dict[str, dict[str, object]] = {}

CONSTANTS: dict[str, object] = {}
