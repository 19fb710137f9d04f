"""AsyncLLM: the asyncio front end of one engine core.  Layer L7.

Owns the client of the core, the input and output processors and the output loop. Knows nothing of
HTTP; one request is one async generator, and closing that generator aborts the request.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Any


class AsyncLLM:
    """Asyncio engine. Built by `from_engine_args` or `from_vllm_config`, inside a running loop or before it."""

    vllm_config: Any
    model_config: Any
    tokenizer: Any
    log_stats: bool

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: Any,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool = False,
        client_addresses: dict[str, str] | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> "AsyncLLM": ...

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> "AsyncLLM": ...

    # prompt: str | list[int] | TextPrompt | TokensPrompt | EngineCoreRequest. Raises VLLMValidationError
    # (naming the parameter and values) before anything reaches the core, EngineDeadError when the core is gone.
    # Yields RequestOutput by sampling_params.output_kind; the last one has finished=True.
    def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        cache_salt: str | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[Any, None]: ...

    async def abort(self, request_id: str | list[str], internal: bool = False) -> None: ...
    async def get_tokenizer(self) -> Any: ...
    async def get_supported_tasks(self) -> tuple[str, ...]: ...
    async def check_health(self) -> None: ...  # raises EngineDeadError
    async def do_log_stats(self) -> None: ...
    async def is_tracing_enabled(self) -> bool: ...
    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool: ...
    # PrefixCacheResetResult(success, reason, held_blocks): what reset_prefix_cache did and why not.
    async def reset_prefix_cache_detailed(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> Any: ...
    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None: ...
    async def resume_generation(self) -> None: ...
    async def is_paused(self) -> bool: ...
    async def sleep(self, level: int = 1, mode: str = "abort") -> None: ...
    async def wake_up(self, tags: list[str] | None = None) -> None: ...
    async def is_sleeping(self) -> bool: ...
    async def release_kv_cache_memory(self) -> None: ...
    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]: ...
    async def start_profile(self) -> None: ...
    async def stop_profile(self) -> None: ...
    # {"<dp rank>": KVEventsConfig fields}; {} when no engine publishes.
    async def get_kv_event_sources(self) -> dict[str, Any]: ...
    def shutdown(self, timeout: float | None = None) -> None: ...

    @property
    def is_running(self) -> bool: ...
    @property
    def is_stopped(self) -> bool: ...
    @property
    def errored(self) -> bool: ...
    @property
    def dead_error(self) -> BaseException: ...
