"""The engine core: arrivals, schedule, execute, apply.  Layer L7.

Owns one step and what happens when it fails. Must not know sockets, text or tokenizers. ONE thread uses a core; whatever
comes from outside waits until the top of a step (aborts also between the model's run and its result).
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from enum import IntEnum
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMError
from vllm.logger import init_logger
from vllm.outputs import RequestError
from vllm.plugins import load_general_plugins
from vllm.utils.clock import Clock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core_control import CoreControl, PauseMode
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.wiring import Progress, build_engine
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)

# A step without any request that fails this often in a row will fail for ever: the core gives up.
FAILED_STEPS_MAX = 16

Outputs = dict[int, EngineCoreOutputs]
StepFuture = Future[ModelRunnerOutput | None]


class EngineShutdownState(IntEnum):
    """How far a core has got with ending."""

    RUNNING = 0
    REQUESTED = 1
    SHUTTING_DOWN = 2


class EngineCore:
    """Scheduler and executor of one engine, and the loop body that joins them.

    `step_fn` is `step`, or `step_with_batch_queue` where several steps may be in flight. Both return the messages per
    client index and whether the model ran. Raises from the constructor are configuration errors.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        executor_fail_callback: Callable[[], None] | None = None,
        progress: Progress = logger.info,
        clock: Clock | None = None,
    ) -> None:
        load_general_plugins()
        self.vllm_config = vllm_config
        self.log_stats = log_stats
        parts = build_engine(vllm_config, executor_class, log_stats, progress, clock)
        self.model_executor = parts.executor
        self.scheduler = parts.scheduler
        self.structured_output_manager = parts.structured_output_manager
        self.kv_cache_config = parts.kv_cache_config
        self.request_block_hasher = parts.block_hasher
        if executor_fail_callback is not None:
            self.model_executor.register_failure_callback(executor_fail_callback)
        self.batch_queue_size = self.model_executor.max_concurrent_batches
        self.batch_queue: deque[tuple[StepFuture, SchedulerOutput]] | None = None
        self.step_fn: Callable[[], tuple[Outputs | None, bool]] = self.step
        if self.batch_queue_size > 1:
            self.batch_queue = deque()
            self.step_fn = self.step_with_batch_queue
        self.aborts_queue: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self.control = CoreControl(
            self.scheduler, self.model_executor, self.abort_everything, self._finish_steps, clock
        )
        self._use_drafts = vllm_config.speculative_config is not None
        self._held_back: list[Request] = []
        self._side_outputs: list[Outputs] = []
        self._failed_steps = 0
        self._weight_version: str | None = None

    # -- requests ------------------------------------------------------------------------------------------------

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:
        """The core's form of a request (full blocks hashed, grammar requested) and its data-parallel wave."""
        prepared = Request.from_engine_core_request(request, self.request_block_hasher)
        if prepared.structured_output_request is not None:
            self.structured_output_manager.grammar_init(prepared)
        return prepared, request.current_wave

    def add_request(self, request: Request, wave: int = 0) -> None:
        """Queue a request, or hand an open session its next input.

        Raises ValueError for an id in use (the request that has it goes on) or unusable values.
        """
        if not isinstance(request.request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request.request_id).__name__}")
        if self.control.is_draining:
            self._held_back.append(request)
            return
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; unknown and finished ids are ignored. No output follows."""
        ids = list(request_ids)
        self._held_back = [request for request in self._held_back if request.request_id not in ids]
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def abort_everything(self) -> None:
        """End every request; their clients are told."""
        ended = self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._tell_ended([*ended, *self._held_back], FinishReason.ABORT)
        self._held_back = []

    def _tell_ended(
        self, requests: Iterable[Request], reason: FinishReason, error: RequestError | None = None
    ) -> None:
        outputs: Outputs = {}
        for request in requests:
            message = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            message.outputs.append(
                EngineCoreOutput(request.request_id, [], finish_reason=reason, error=error)
            )
        if outputs:
            self._side_outputs.append(outputs)

    def take_side_outputs(self) -> list[Outputs]:
        """Messages that came up outside a step: ends of requests, results of steps finished for a pause or reset."""
        taken, self._side_outputs = self._side_outputs, []
        return taken

    # -- one step ------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """True if another step is needed: requests, ends to report, transfers under way, steps in flight."""
        return bool(self.batch_queue) or self.scheduler.has_requests()

    def step(self) -> tuple[Outputs, bool]:
        """Schedule, run, apply: one step, finished on return."""
        return self._step() if self.scheduler.has_requests() else ({}, False)

    def hear_late_ends(self) -> Outputs:
        """A step without requests, where copies that were given up may have ended: nobody else asks the workers."""
        waits = self.scheduler.awaits_late_ends() and not self.has_work() and not self.is_sleeping()
        return self._step()[0] if waits else {}

    def _step(self) -> tuple[Outputs, bool]:
        scheduler_output = self.scheduler.schedule()
        result: ModelRunnerOutput | Exception
        try:
            result = self._run(scheduler_output)
        except Exception as error:  # whatever the model raised ends this step's requests, not the engine
            result = error
        self.process_aborts_queue()
        outputs = self._apply(scheduler_output, result)
        self._fetch_drafts()
        return outputs, scheduler_output.total_num_scheduled_tokens > 0

    def _run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        future: StepFuture = self.model_executor.execute_model(scheduler_output, non_block=True)  # type: ignore[assignment]
        grammar = self.scheduler.get_grammar_bitmask(scheduler_output)
        result = future.result()
        if result is None:
            result = self.model_executor.sample_tokens(grammar)  # type: ignore[assignment]
        if result is None:
            raise RuntimeError("the executor returned no output for a step")
        return result

    def step_with_batch_queue(self) -> tuple[Outputs | None, bool]:
        """Schedule and submit one step while older ones run; apply the oldest once the queue is full or it is done.

        None in the first place: nothing was applied, the next step can be scheduled at once.
        """
        batch_queue = self.batch_queue
        assert batch_queue is not None
        assert len(batch_queue) < self.batch_queue_size
        model_ran = False
        deferred: SchedulerOutput | None = None
        if self.scheduler.has_requests():
            scheduler_output = self.scheduler.schedule()
            model_ran = scheduler_output.total_num_scheduled_tokens > 0
            if scheduler_output.pending_structured_output_tokens:
                # The masks depend on tokens of the steps before: sample once these are applied.
                deferred = scheduler_output
                executed = self._submit_forward(scheduler_output)
            else:
                batch_queue.append((self._submit(scheduler_output), scheduler_output))
            has_room = deferred is None and len(batch_queue) < self.batch_queue_size
            if model_ran and has_room and not batch_queue[0][0].done():
                return None, True
        if not batch_queue and deferred is None:
            return None, False
        outputs = self._apply_oldest() if batch_queue else {}
        if deferred is not None:
            batch_queue.append((self._submit_sampling(deferred, executed), deferred))
        return outputs, model_ran

    def _submit(self, scheduler_output: SchedulerOutput) -> StepFuture:
        return self._submit_sampling(scheduler_output, self._submit_forward(scheduler_output))

    def _submit_forward(self, scheduler_output: SchedulerOutput) -> StepFuture:
        try:
            return self.model_executor.execute_model(scheduler_output, non_block=True)  # type: ignore[return-value]
        except Exception as error:
            return _failed(error)

    def _submit_sampling(self, scheduler_output: SchedulerOutput, executed: StepFuture) -> StepFuture:
        """Queue the second half of a step behind the first; a step that has no second half answers by itself."""
        if scheduler_output.total_num_scheduled_tokens == 0 or (
            executed.done() and executed.exception() is not None
        ):
            return executed
        try:
            grammar = self.scheduler.get_grammar_bitmask(scheduler_output)
            sampled: StepFuture = self.model_executor.sample_tokens(grammar, non_block=True)  # type: ignore[assignment]
        except Exception as error:
            return _failed(error)
        return _joined(executed, sampled)

    def _apply_oldest(self) -> Outputs:
        assert self.batch_queue
        future, scheduler_output = self.batch_queue.popleft()
        result: ModelRunnerOutput | Exception
        try:
            done = future.result()
            result = done if done is not None else RuntimeError("the executor returned no output for a step")
        except Exception as error:
            result = error
        self.process_aborts_queue()
        return self._apply(scheduler_output, result)

    def _finish_steps(self) -> None:
        """Complete every step in flight; what they gave goes out with the side outputs."""
        while self.batch_queue:
            outputs = self._apply_oldest()
            if outputs:
                self._side_outputs.append(outputs)

    def process_aborts_queue(self) -> None:
        """Aborts that arrived while the model ran, so that the result of a request nobody waits for is dropped.

        Each of them is among the arrivals too, which put it in its place among the other messages.
        """
        ids: list[str] = []
        while not self.aborts_queue.empty():
            ids += self.aborts_queue.get_nowait()
        if ids:
            self.abort_requests(ids)

    # -- results and failures ------------------------------------------------------------------------------------

    def _apply(self, scheduler_output: SchedulerOutput, result: ModelRunnerOutput | Exception) -> Outputs:
        """What the clients are told of a step. An error is told when what it made suspect is gone for good."""
        if isinstance(result, Exception):
            outputs = self._fail_step(scheduler_output, result)
        else:
            self._failed_steps = 0
            outputs = self.scheduler.update_from_output(scheduler_output, result)
        problem = self.control.carry_out_withdrawal()
        if problem is not None:
            logger.error("The next engine may find KV of a request that failed: %s", problem)
        if self._weight_version is not None:
            for message in outputs.values():
                message.weight_version = self._weight_version
        return outputs

    def _fail_step(self, scheduler_output: SchedulerOutput, error: Exception) -> Outputs:
        """End the requests of a failed step with an error; raise EngineDeadError if no later step can work."""
        ids = list(scheduler_output.num_scheduled_tokens)
        logger.error(
            "Step with %d requests and %d tokens failed; these requests end with an error: %s",
            len(ids),
            scheduler_output.total_num_scheduled_tokens,
            ids[:20],
            exc_info=error,
        )
        self._failed_steps += 1
        if self.model_executor.is_failed or (not ids and self._failed_steps >= FAILED_STEPS_MAX):
            raise EngineDeadError() from error
        message = f"The step failed: {type(error).__name__}: {error}"
        return self.scheduler.fail_step(scheduler_output, RequestError("step_failed", message))

    def _fetch_drafts(self) -> None:
        if self._use_drafts and not self.vllm_config.scheduler_config.async_scheduling:
            drafts = self.model_executor.take_draft_token_ids()
            if drafts is not None:
                self.scheduler.update_draft_token_ids(drafts)

    # -- between steps -------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once per loop: complete a pause that waited, and let in what it held back."""
        self.control.tick()
        if self._held_back and not self.control.is_draining:
            held, self._held_back = self._held_back, []
            for request in held:
                try:
                    self.scheduler.add_request(request)
                except (ValueError, TypeError, VLLMError) as error:
                    logger.exception("A request was refused.")
                    self._tell_ended(
                        [request], FinishReason.ERROR, RequestError("invalid_request", str(error))
                    )

    def go_idle(self) -> None:
        """Nothing is left to do for now: publish events that wait for a next step."""
        self.scheduler.flush_events()

    # -- control (utility calls) ---------------------------------------------------------------------------------

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[None] | None:
        """See `CoreControl.pause`."""
        return self.control.pause(mode, clear_cache)

    def resume_scheduler(self) -> None:
        self.control.resume()

    def is_scheduler_paused(self) -> bool:
        return self.control.is_paused()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[None] | None:
        return self.control.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.control.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.control.is_sleeping()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `CoreControl.reset_prefix_cache`."""
        return self.control.reset_prefix_cache(reset_running_requests, reset_connector)

    def get_kv_cache_group_metadata(self) -> list[dict[str, Any]]:
        """Every group, also those without a prefix cache: `{group_idx, kind, block_size, sliding_window}`."""
        return [
            {
                "group_idx": index,
                "kind": str(get_kv_cache_spec_kind(group.kv_cache_spec).value),
                "block_size": group.kv_cache_spec.block_size,
                "sliding_window": get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            }
            for index, group in enumerate(self.kv_cache_config.kv_cache_groups)
        ]

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return ("generate",)

    def set_weight_version(self, version: str | None) -> None:
        self._weight_version = version

    def get_weight_version(self) -> str | None:
        return self._weight_version

    def shutdown(self) -> None:
        """Release scheduler, connector and workers. Idempotent; the core must not be used afterwards."""
        ends = [self.scheduler.shutdown, self.model_executor.shutdown]
        if self.model_executor.is_failed:
            # Workers that are ended by force leave what they shared with others to who goes last.
            ends.reverse()
        try:
            ends[0]()
        finally:
            ends[1]()


def _failed(error: Exception) -> StepFuture:
    future: StepFuture = Future()
    future.set_exception(error)
    return future


def _joined(executed: StepFuture, sampled: StepFuture) -> StepFuture:
    """The result of a step of two calls: that of the first if it already is the output, else that of the second."""
    joined: StepFuture = Future()

    def join(_: StepFuture) -> None:
        try:
            first = executed.result()
            joined.set_result(first if first is not None else sampled.result())
        except Exception as error:
            joined.set_exception(error)

    sampled.add_done_callback(join)
    return joined


__all__ = ["EngineCore", "EngineShutdownState"]
