"""AsyncLLM: the asyncio front end of one engine.  Layer L7.

Owns the client of the core, the front end's processors and the task that hands outputs to their readers. Must not know
HTTP. One request is one async generator; closing that generator, or cancelling its task, aborts the request. May be built
before an event loop runs; everything asynchronous then happens in one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.transformers_utils.tokenizer import tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.utils.clock import MonotonicClock
from vllm.v1.core.block_hash import describe_hashing
from vllm.v1.engine.async_control import AsyncControl
from vllm.v1.engine.async_core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.intake import RequestIntake
from vllm.v1.engine.output_collector import RequestOutputCollector
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.metrics.loggers import StatLoggerFactory, StatLoggerManager
from vllm.v1.metrics.stats import IterationStats

logger = init_logger(__name__)

# Texts longer than this, and constraints that have to be compiled, are prepared in a thread: the loop must not stall.
INLINE_TEXT_MAX = 2048
# Outputs processed before other tasks get a turn.
OUTPUT_CHUNK = 128
# Samples of one request sent before other tasks get a turn.
SEND_CHUNK = 64


class AsyncLLM(AsyncControl):
    """Asyncio engine; see the module. Control calls (pause, sleep, resets …) come from `AsyncControl`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        log_requests: bool = False,
        stat_loggers: list[StatLoggerFactory] | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.log_stats = log_stats
        self.log_requests = log_requests
        self.tokenizer: Any = None
        self._clock = MonotonicClock()
        self._handler: asyncio.Task[None] | None = None
        self._stats_task: asyncio.Task[None] | None = None
        self._closed = False
        self._handler_failed = False
        # The tokenizer is opened while the core starts.
        self.engine_core = AsyncMPClient(vllm_config, executor_class, log_stats, self._open_front_end)
        # A constraint can take long to check: long texts do not wait behind it.
        self._tokenizer_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._grammar_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self.logger_manager: StatLoggerManager | None = None
        if log_stats:
            engines = list(range(self.engine_core.num_cores))
            self.logger_manager = StatLoggerManager(
                vllm_config, engines, stat_loggers, resolved=self.engine_core.resolved
            )
            self.logger_manager.log_engine_initialized()
        self._finalizer = weakref.finalize(self, self.engine_core.shutdown)

    def _open_front_end(self) -> None:
        self.tokenizer = tokenizer_from_config(self.vllm_config.model_config)
        # Other requests wait while one output is handled: a wide position is read by who wants it.
        self.intake = RequestIntake(
            self.vllm_config, self.tokenizer, self.log_stats, packs_wide_logprobs=True
        )
        self.input_processor = self.intake.input_processor
        self.output_processor = self.intake.output_processor
        transfer = self.vllm_config.kv_transfer_config
        if self.log_stats and transfer is not None and transfer.kv_connector is not None:
            # Its metrics are shown here, and loading it takes as long as the core's own start. What is wrong with it
            # is for the core to tell.
            with contextlib.suppress(Exception):
                KVConnectorFactory.get_connector_class(transfer)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: list[StatLoggerFactory] | None = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool = False,
        client_addresses: dict[str, str] | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> AsyncLLM:
        """An engine for a finished configuration. Several clients of one core are not offered: ValueError."""
        if client_count != 1 or client_addresses is not None:
            raise ValueError(f"client_count={client_count}: an engine core has exactly one front end here")
        return cls(vllm_config, None, not disable_log_stats, usage_context, enable_log_requests, stat_loggers)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: list[StatLoggerFactory] | None = None,
    ) -> AsyncLLM:
        """An engine from flags."""
        return cls.from_vllm_config(
            engine_args.create_engine_config(usage_context),
            start_engine_loop,
            usage_context,
            stat_loggers,
            engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
        )

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        cache_salt: str | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, by `sampling_params.output_kind`; the last one is `finished`.

        `prompt`: text, token ids, a prompt mapping or an `EngineCoreRequest`. Raises VLLMValidationError naming field and
        values before the core hears of the request, QueueOverflowError or MaxQueuedTokensError if too much waits,
        GenerationError if this request failed, EngineDeadError if the engine did.
        """
        collector: RequestOutputCollector | None = None
        finished = False
        try:
            collector = await self.add_request(
                request_id,
                prompt,
                sampling_params,
                prompt_text=prompt_text,
                lora_request=lora_request,
                tokenization_kwargs=tokenization_kwargs,
                trace_headers=trace_headers,
                priority=priority,
                data_parallel_rank=data_parallel_rank,
                session_id=session_id,
                cache_salt=cache_salt,
                reasoning_ended=reasoning_ended,
            )
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                assert isinstance(output, RequestOutput)
                yield output
        finally:
            if collector is not None:
                collector.close()
                if not finished:
                    self._abort_now([collector.request_id], internal=True)

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        prompt_text: str | None = None,
        **options: Any,
    ) -> RequestOutputCollector:
        """Check and queue a request; returns where its outputs arrive. Options as in `generate`."""
        self._check_alive()
        self._start()
        thread = self._thread_for(prompt, params)
        if thread is None:
            text, request = self.intake.prepare(request_id, prompt, params, **options)
        else:
            text, request = await asyncio.get_running_loop().run_in_executor(
                thread, lambda: self.intake.prepare(request_id, prompt, params, **options)
            )
        kind = (
            request.sampling_params.output_kind if request.sampling_params else RequestOutputKind.FINAL_ONLY
        )
        collector = RequestOutputCollector(kind, request.request_id)
        slices = self.intake.follow_in_slices(prompt_text or text, request, collector)
        messages = next(slices)  # refusals come here, before anything is followed
        try:
            for further in slices:
                messages += further
                await asyncio.sleep(0)
            await self._send(messages)
        except BaseException:
            self._abort_now([request.request_id], internal=True)
            raise
        if self.log_requests:
            logger.info(
                "Added request %s (%d prompt tokens).", request_id, len(request.prompt_token_ids or ())
            )
        return collector

    def _thread_for(self, prompt: Any, params: SamplingParams | PoolingParams) -> ThreadPoolExecutor | None:
        """Where a request is prepared that would hold the loop up; None for all others."""
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            return self._grammar_thread
        text = (
            prompt.get("prompt") if isinstance(prompt, dict) and "prompt_token_ids" not in prompt else prompt
        )
        return self._tokenizer_thread if isinstance(text, str) and len(text) > INLINE_TEXT_MAX else None

    async def _send(self, messages: Iterable[EngineCoreRequest]) -> None:
        for number, message in enumerate(messages, 1):
            # It may have been aborted, or the engine have died, while others had their turn.
            if self.output_processor.is_followed(message.request_id):
                await self.engine_core.add_request_async(message)
            if number % SEND_CHUNK == 0:
                await asyncio.sleep(0)

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Pooling is not offered by generative models: VLLMNotImplementedError."""
        yield self.intake.prepare(request_id, prompt, pooling_params, **options)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests by the callers' ids (or by internal ones). Their readers get a last output, reason "abort".

        Ids of no request are ignored. Raises VLLMValidationError for what is no id.
        """
        ids = (
            [request_id]
            if isinstance(request_id, str) or not isinstance(request_id, Iterable)
            else list(request_id)
        )
        for each in ids:
            if not isinstance(each, str):
                raise VLLMValidationError(
                    f"request_id must be a text or a list of texts, got {each!r}",
                    parameter="request_id",
                    value=each,
                )
        self._abort_now(ids, internal)

    def _abort_now(self, request_ids: list[str], internal: bool) -> None:
        ids = self.output_processor.abort_requests(request_ids, internal)
        if ids and not self.errored and not self._closed:
            self.engine_core.abort_requests_now(ids)

    async def lookup_kv_cache(
        self, prompt: Any, *, cache_salt: str | None = None, lora_request: LoRARequest | None = None
    ) -> list[dict[str, Any] | None]:
        """Per engine, how much of the prompt a request sent now would find cached, and where (`CacheLookup`).

        Nothing is queued, counted or touched. Refuses what `generate` would refuse; None for an engine that cannot tell.
        """
        self._check_alive()
        params = SamplingParams(max_tokens=1)
        _, request = self.intake.input_processor.process_inputs(
            "lookup", prompt, params, lora_request=lora_request, cache_salt=cache_salt
        )
        return await self.engine_core.call_each_async(
            "lookup_kv_cache", request.prompt_token_ids, request.cache_salt, lora_request
        )

    # -- outputs -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the tasks, in the loop that is running now; a new loop takes over from one that has ended."""
        loop = asyncio.get_running_loop()
        if self._handler is not None and self._handler.get_loop() is loop:
            return
        self._handler = loop.create_task(self._handle_outputs(), name="engine-outputs")
        if self.logger_manager is not None:
            self._stats_task = loop.create_task(self._log_stats_for_ever(), name="engine-stats")

    async def _handle_outputs(self) -> None:
        """Hand the core's outputs to their readers until the core is gone; then all readers get the error."""
        try:
            while True:
                await self._handle(await self.engine_core.get_output_async())
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("Outputs of the engine core can no longer be handled.")
            self._handler_failed = True
            self.output_processor.propagate_error(error)

    async def _handle(self, outputs: EngineCoreOutputs) -> None:
        stats = IterationStats(self._clock.time()) if self.log_stats and outputs.outputs else None
        for start in range(0, len(outputs.outputs), OUTPUT_CHUNK):
            if start:
                await asyncio.sleep(0)
            processed = self.output_processor.process_outputs(
                outputs.outputs[start : start + OUTPUT_CHUNK],
                outputs.timestamp,
                stats,
                outputs.weight_version,
                engine_index=outputs.engine_index,
            )
            if processed.reqs_to_abort:
                self.engine_core.abort_requests_now(processed.reqs_to_abort)
        self.output_processor.update_scheduler_stats(outputs.scheduler_stats)
        if self.logger_manager is not None:
            rejections = self.intake.admission.rejections
            self.logger_manager.record(outputs.scheduler_stats, stats, outputs.engine_index, rejections)

    async def _log_stats_for_ever(self) -> None:
        while True:
            await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
            await self.do_log_stats()
            await self._refresh_shared_figures()

    async def _refresh_shared_figures(self) -> None:
        """An idle engine tells nothing by itself, while other engines change the pool that it shares with them."""
        prometheus = None if self.logger_manager is None else self.logger_manager.prometheus
        if prometheus is None or not prometheus.wants_cache_reports:
            return
        try:
            for engine, report in enumerate(await self.get_kv_cache_reports()):
                if report is not None:
                    prometheus.record_cache_report(report, engine)
        except (EngineDeadError, RuntimeError) as error:
            logger.debug("The KV cache cannot be asked for its figures: %s", error)

    async def do_log_stats(self) -> None:
        """Log the statistics line now (it is logged every VLLM_LOG_STATS_INTERVAL seconds anyway)."""
        if self.logger_manager is not None:
            self.logger_manager.log()

    # -- state ---------------------------------------------------------------------------------------------------

    async def get_tokenizer(self) -> Any:
        """The tokenizer. Raises VLLMValidationError with `skip_tokenizer_init`."""
        if self.tokenizer is None:
            raise VLLMValidationError("there is no tokenizer: skip_tokenizer_init is set")
        return self.tokenizer

    async def get_vllm_config(self) -> VllmConfig:
        return self.vllm_config

    async def is_tracing_enabled(self) -> bool:
        return False

    async def get_kv_event_sources(self) -> dict[str, dict[str, Any]]:
        """Data-parallel rank (as text) → resolved KVEventsConfig, and how the hashes in its events are made
        (`block_hashes`: `HashFacts`, None where nothing is hashed); empty if no core publishes events.
        """
        cache = self.vllm_config.cache_config
        hashing = None
        is_hashed = cache.enable_prefix_caching or self.vllm_config.kv_transfer_config is not None
        if is_hashed and cache.hash_block_size is not None:
            lookahead = self.vllm_config.num_hash_lookahead_tokens
            hashing = describe_hashing(cache.prefix_caching_hash_algo, cache.hash_block_size, lookahead)
        return {
            str(index): {**ready.kv_events_config, "block_hashes": hashing}
            for index, ready in enumerate(self.engine_core.readies)
            if ready.kv_events_config is not None
        }

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is gone."""
        self._check_alive()

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDeadError("The engine was shut down.")
        if self.errored:
            raise self.dead_error

    @property
    def is_running(self) -> bool:
        return not self._closed and not self.errored

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        """True once the core is gone for good."""
        return self.engine_core.dead_error is not None or self._handler_failed

    @property
    def dead_error(self) -> Exception:
        return self.engine_core.dead_error or EngineDeadError()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core and the tasks; readers that still wait get an EngineDeadError. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for task in (self._handler, self._stats_task):
            if task is not None and not task.get_loop().is_closed():
                task.cancel()
        self.output_processor.propagate_error(EngineDeadError("The engine was shut down."))
        self.engine_core.shutdown(timeout)
        self._tokenizer_thread.shutdown(wait=False)
        self._grammar_thread.shutdown(wait=False)
        if self.logger_manager is not None:
            self.logger_manager.close()
