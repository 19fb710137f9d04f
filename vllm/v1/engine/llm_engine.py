"""LLMEngine: the synchronous front end, driven by calls of `step`.  Layer L7.

Owns a client of the core and the front end's processors. Must not know HTTP or asyncio. One thread uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.utils.clock import MonotonicClock
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.intake import RequestIntake
from vllm.v1.engine.output_collector import Output
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.loggers import StatLoggerFactory, StatLoggerManager
from vllm.v1.metrics.reader import Metric, get_metrics_snapshot
from vllm.v1.metrics.stats import IterationStats


class LLMEngine:
    """`add_request`, then `step` until `has_unfinished_requests` is False. `engine_core` is the client."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: list[StatLoggerFactory] | None = None,
        multiprocess_mode: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.cache_config = vllm_config.cache_config
        self.log_stats = log_stats
        self.tokenizer = tokenizer_from_config(vllm_config.model_config)
        self.intake = RequestIntake(vllm_config, self.tokenizer, log_stats)
        self.input_processor = self.intake.input_processor
        self.output_processor = self.intake.output_processor
        self.engine_core: Any = EngineCoreClient.make_client(
            multiprocess_mode,
            False,
            vllm_config,
            executor_class or Executor.get_class(vllm_config),
            log_stats,
        )
        self.multiprocess_mode = multiprocess_mode
        # How the engine was paused last; only if it was, the core is asked before requests are taken.
        self._pause_mode: str | None = None
        self._clock = MonotonicClock()
        self.logger_manager: StatLoggerManager | None = None
        if log_stats:
            self.logger_manager = StatLoggerManager(vllm_config, [0], stat_loggers)
            self.logger_manager.log_engine_initialized()
        # An engine that nobody holds any more, or that is left at exit, takes its core with it.
        self._finalizer = weakref.finalize(self, self.engine_core.shutdown)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: list[StatLoggerFactory] | None = None,
        disable_log_stats: bool = False,
    ) -> LLMEngine:
        """An engine for a finished configuration; in a process of its own unless VLLM_ENABLE_V1_MULTIPROCESSING=0."""
        return cls(
            vllm_config,
            Executor.get_class(vllm_config),
            not disable_log_stats,
            usage_context,
            stat_loggers,
            envs.VLLM_ENABLE_V1_MULTIPROCESSING,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: list[StatLoggerFactory] | None = None,
        enable_multiprocessing: bool | None = None,
    ) -> LLMEngine:
        """An engine from flags; `enable_multiprocessing` None means VLLM_ENABLE_V1_MULTIPROCESSING."""
        vllm_config = engine_args.create_engine_config(usage_context)
        if enable_multiprocessing is None:
            enable_multiprocessing = envs.VLLM_ENABLE_V1_MULTIPROCESSING
        return cls(
            vllm_config,
            Executor.get_class(vllm_config),
            not engine_args.disable_log_stats,
            usage_context,
            stat_loggers,
            enable_multiprocessing,
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> str:
        """Check and queue a request; returns its internal id. Raises VLLMValidationError naming field and value."""
        text, request = self.intake.prepare(
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        messages = self.intake.follow(prompt_text or text, request, None)
        try:
            for message in messages:
                self.engine_core.add_request(message)
        except BaseException:
            self.abort_request([request.request_id], internal=True)
            raise
        return request.request_id

    def step(self) -> list[Output]:
        """Wait for one batch of results; returns the outputs that are due. Without requests there is nothing to wait for."""
        if not self.has_unfinished_requests():
            return []
        outputs = self.engine_core.get_output()
        stats = IterationStats(self._clock.time()) if self.log_stats else None
        processed = self.output_processor.process_outputs(
            outputs.outputs, outputs.timestamp, stats, outputs.weight_version
        )
        self.output_processor.update_scheduler_stats(outputs.scheduler_stats)
        self.engine_core.abort_requests(processed.reqs_to_abort)
        if self.logger_manager is not None and (outputs.outputs or outputs.scheduler_stats is not None):
            self.logger_manager.record(outputs.scheduler_stats, stats, 0, self.intake.admission.rejections)
            self.logger_manager.log_if_due()
        if not self.has_unfinished_requests():
            self.engine_core.settle()
        return processed.request_outputs

    def abort_request(self, request_ids: Sequence[str], internal: bool = False) -> None:
        """End requests by the callers' ids (or by internal ones)."""
        self.engine_core.abort_requests(self.output_processor.abort_requests(request_ids, internal))

    def get_num_unfinished_requests(self) -> int:
        return self.output_processor.get_num_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    # -- control -------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The tokenizer. Raises ValueError with `skip_tokenizer_init`."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: skip_tokenizer_init is set")
        return self.tokenizer

    def get_supported_tasks(self) -> tuple[str, ...]:
        return tuple(self.engine_core.call_utility("get_supported_tasks"))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """True if nothing cached can be found any more and no block is held."""
        return bool(
            self.engine_core.call_utility("reset_prefix_cache", reset_running_requests, reset_connector)
        )

    def reset_prefix_cache_detailed(
        self,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        tiers: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """As `AsyncLLM.reset_prefix_cache_detailed`; ValueError, or UtilityRefusedError from a core process, for unknown tiers."""
        args = (reset_running_requests, reset_connector, tiers)
        return dict(self.engine_core.call_utility("reset_prefix_cache_detailed", *args))

    def lookup_kv_cache(self, prompt: Any, cache_salt: str | None = None) -> dict[str, Any]:
        """How much of the prompt a request added now would find cached, and where (`CacheLookup`); changes nothing."""
        _, request = self.input_processor.process_inputs(
            "lookup", prompt, SamplingParams(max_tokens=1), cache_salt=cache_salt
        )
        return dict(self.engine_core.call_utility("lookup_kv_cache", request.prompt_token_ids, cache_salt))

    def get_kv_cache_report(self) -> dict[str, Any]:
        """Pools, groups, hits and transfers of the engine: the fields of `KVCacheReport`, and `tokens_reported` of each tier."""
        return self.output_processor.with_reported(self.engine_core.call_utility("get_kv_cache_report"), 0)

    def reset_mm_cache(self) -> None:
        self.engine_core.call_utility("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        self.engine_core.call_utility("reset_encoder_cache")

    def check_running(self) -> None:
        """Raise RuntimeError if the engine sleeps or is paused: who waited for a request would wait for ever."""
        if self._pause_mode is None:
            return
        if not self.is_paused():
            self._pause_mode = None
        else:
            state = "asleep" if self.is_sleeping() else "paused"
            raise RuntimeError(f"the engine is {state} and answers no request: call wake_up() first")

    def check_kept(self) -> None:
        """Raise as `check_running` if requests were left as they are by a pause; aborted ones give their last output."""
        if self._pause_mode == "keep" and self.has_unfinished_requests():
            self.check_running()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._pause_mode = mode
        self.engine_core.call_utility("sleep", level, mode)
        self._record_sleep_state(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.engine_core.call_utility("wake_up", tags)
        self._record_sleep_state(0)

    def is_sleeping(self) -> bool:
        return bool(self.engine_core.call_utility("is_sleeping"))

    def release_kv_cache_memory(self) -> None:
        self._pause_mode = self._pause_mode or "abort"
        self.engine_core.call_utility("release_kv_cache_memory")
        self._record_sleep_state(1)

    def _record_sleep_state(self, level: int) -> None:
        """Let the metrics show the level that a call has just led to, unless it led only part of the way."""
        if self.logger_manager is not None and self.is_sleeping() == (level > 0):
            self.logger_manager.record_sleep_state(level)

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self._pause_mode = mode
        self.engine_core.call_utility("pause_scheduler", mode, clear_cache)

    def resume_generation(self) -> None:
        self.engine_core.call_utility("resume_scheduler")
        self._record_sleep_state(0)

    def is_paused(self) -> bool:
        return bool(self.engine_core.call_utility("is_scheduler_paused"))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method on every worker. Callables cross processes only with VLLM_ALLOW_INSECURE_SERIALIZATION=1."""
        return list(self.engine_core.call_utility("collective_rpc", method, timeout, args, kwargs))

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """`func(model)` on every worker."""
        return self.collective_rpc("apply_model", args=(func,))

    def start_profile(self) -> None:
        self.engine_core.call_utility("profile", True)

    def stop_profile(self) -> None:
        self.engine_core.call_utility("profile", False)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        return bool(self.engine_core.call_utility("add_lora", lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        return bool(self.engine_core.call_utility("remove_lora", lora_id))

    def list_loras(self) -> set[int]:
        return set(self.engine_core.call_utility("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        return bool(self.engine_core.call_utility("pin_lora", lora_id))

    # -- statistics ----------------------------------------------------------------------------------------------

    def do_log_stats(self) -> None:
        """Log the statistics line now."""
        if self.logger_manager is not None:
            self.logger_manager.log()

    def get_metrics(self) -> list[Metric]:
        """The current metrics. Raises ValueError where statistics are off."""
        if self.logger_manager is None:
            raise ValueError("metrics need statistics: set disable_log_stats=False")
        return get_metrics_snapshot()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core. Idempotent."""
        self.engine_core.shutdown(timeout)
        if self.logger_manager is not None:
            self.logger_manager.close()
