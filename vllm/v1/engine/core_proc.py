"""The engine core as a process of its own.  Layer L7.

Owns the loop around `EngineCore`: arrivals from the sockets, outputs to them, utility calls, signals and the orderly end.
Must not know how the process was started or what a client does with the outputs. When the core cannot go on, every client
is sent `ENGINE_CORE_DEAD`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from vllm.config import VllmConfig
from vllm.exceptions import VLLMError
from vllm.logger import init_logger
from vllm.outputs import RequestError
from vllm.v1.engine.core_io import ENGINE_CORE_DEAD, Arrival, CoreAddresses, CoreSockets
from vllm.v1.engine.core_loop import EngineCore, EngineShutdownState, Outputs
from vllm.v1.engine.core_ready import ready_response
from vllm.v1.engine.core_utilities import utility_methods
from vllm.v1.engine.exceptions import EngineDeadError, UtilityRefusedError
from vllm.v1.engine.serial import Frame, MsgpackDecoder, MsgpackEncoder
from vllm.v1.engine.wiring import Progress
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)

logger = init_logger(__name__)

# While nothing can be computed but something is under way (a transfer, a grammar), the loop looks again after a pause
# that starts at the first value and doubles up to the second: quick at first, no load in the long run.
IDLE_TICK_MIN_S = 0.001
IDLE_TICK_MAX_S = 0.02
PAUSED_TICK_MAX_S = 0.1
LATE_ENDS_TICK_S = 1.0
"""How often an engine without requests asks for the ends of copies that were given up, while there are such."""


class EngineCoreProc:
    """One core with its sockets. `run` returns after `request_shutdown`, or raises what made the core give up."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        engine_index: int,
        progress: Progress,
    ) -> None:
        self.engine_index = engine_index
        self.shutdown_state = EngineShutdownState.RUNNING
        # First: workers may die, and another thread tell so, before there is anything else.
        self._sockets: CoreSockets | None = None
        self._executor_dead = False
        self.core = EngineCore(vllm_config, executor_class, log_stats, self._executor_failed, progress)
        self._encoder = MsgpackEncoder()
        self._request_decoder = MsgpackDecoder(EngineCoreRequest)
        self._decoder = MsgpackDecoder()
        self._abort_decoder = MsgpackDecoder(list[str])  # used by the input thread only
        self._tick_s = IDLE_TICK_MIN_S
        self._drain_until = 0.0
        self._utilities = utility_methods(self.core)

    # -- sockets -------------------------------------------------------------------------------------------------

    def connect(self, addresses: CoreAddresses) -> None:
        """Open the sockets; requests may arrive from now on."""
        identity = self.engine_index.to_bytes(2, "little")
        ready = msgspec.msgpack.encode(ready_response(self.core, self.engine_index))
        self._sockets = CoreSockets(addresses, identity, ready, self._note_abort)
        self.core.scheduler.wake_for_events(self._sockets.wake)
        if self._executor_dead:  # while nobody could hear of it
            self._executor_failed()

    def _note_abort(self, frames: Sequence[Frame]) -> None:
        self.core.aborts_queue.put(self._abort_decoder.decode(frames))

    def _executor_failed(self) -> None:
        self._executor_dead = True
        if self._sockets is not None:
            self._sockets.arrivals.put(Arrival(EngineCoreRequestType.EXECUTOR_FAILED, ()))

    def request_shutdown(self) -> None:
        """End in an orderly way. May be called from a signal handler, and more than once."""
        if self.shutdown_state is EngineShutdownState.RUNNING:
            self.shutdown_state = EngineShutdownState.REQUESTED
            self.core.model_executor.end_after(self.core.vllm_config.shutdown_timeout)
        if self._sockets is not None:
            self._sockets.wake()

    def send_dead(self) -> None:
        """Tell every client that nothing will come any more."""
        if self._sockets is not None:
            self._sockets.broadcast(ENGINE_CORE_DEAD)

    def close(self) -> None:
        """Release core and sockets; what is queued for the clients is sent first."""
        try:
            self.core.shutdown()
        finally:
            if self._sockets is not None:
                self._sockets.close()

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until shutdown. Raises EngineDeadError or the defect that stopped the core."""
        assert self._sockets is not None
        pause: float | None = None
        while not self._may_end():
            self._take_arrivals(pause)
            self.core.tick()
            ran = self._step()
            self._send_side_outputs()
            pause = self._next_pause(ran)

    def _step(self) -> bool:
        if not self.core.has_work():
            self._send(self.core.hear_late_ends())
            return False
        outputs, ran = self.core.step_fn()
        self._send(outputs)
        return ran or outputs is None

    def _next_pause(self, ran: bool) -> float | None:
        """How long to wait for arrivals before the next step: 0 not at all, None until something arrives."""
        if self.shutdown_state is not EngineShutdownState.RUNNING:
            return IDLE_TICK_MIN_S if not ran else 0.0
        if ran or self.core.batch_queue:
            self._tick_s = IDLE_TICK_MIN_S
            return 0.0
        if not self.core.has_work():
            self._tick_s = IDLE_TICK_MIN_S
            self.core.go_idle()
            return LATE_ENDS_TICK_S if self.core.scheduler.awaits_late_ends() else None
        pause = self._tick_s
        longest = PAUSED_TICK_MAX_S if self.core.is_scheduler_paused() else IDLE_TICK_MAX_S
        self._tick_s = min(2 * pause, longest)
        return pause

    def _take_arrivals(self, pause: float | None) -> None:
        """Apply everything that has arrived; with nothing there, wait for up to `pause` seconds."""
        assert self._sockets is not None
        arrivals = self._sockets.arrivals
        try:
            arrival = arrivals.get_nowait() if pause == 0.0 else arrivals.get(timeout=pause)
            while True:
                self._tick_s = IDLE_TICK_MIN_S
                self._apply_arrival(arrival)
                arrival = arrivals.get_nowait()
        except queue.Empty:
            return

    def _apply_arrival(self, arrival: Arrival) -> None:
        if arrival.kind is EngineCoreRequestType.ADD:
            self._add(arrival.frames)
        elif arrival.kind is EngineCoreRequestType.ABORT:
            # What a running step would have been told must not outlive this message: the id may be used again.
            self.core.process_aborts_queue()
            self.core.abort_requests(self._decoder.decode(arrival.frames))
        elif arrival.kind is EngineCoreRequestType.UTILITY:
            self._call_utility(arrival.frames)
        elif arrival.kind is EngineCoreRequestType.EXECUTOR_FAILED:
            raise EngineDeadError("The workers cannot go on; see the log above for the root cause.")

    # -- requests ------------------------------------------------------------------------------------------------

    def _add(self, frames: Sequence[Frame]) -> None:
        """Queue a request. One that cannot be used ends with an error; the others never notice."""
        request: EngineCoreRequest | None = None
        try:
            request = self._request_decoder.decode(frames)
            if self.shutdown_state is not EngineShutdownState.RUNNING:
                self._refuse(
                    request, RequestError("shutting_down", "The server is shutting down", retryable=True)
                )
                return
            self.core.add_request(*self.core.preprocess_add_request(request))
        except (ValueError, TypeError, VLLMError, msgspec.DecodeError) as error:
            logger.exception("A request was refused.")
            if request is None:
                request = self._whose(frames)
            if request is not None:
                self._refuse(request, RequestError("invalid_request", str(error)))

    def _whose(self, frames: Sequence[Frame]) -> EngineCoreRequest | None:
        """Only the id and the client of a request that cannot be read: somebody waits for its answer."""
        try:
            values = self._decoder.decode(frames)
            named = dict(zip(EngineCoreRequest.__struct_fields__, values, strict=False))
            request_id, client_index = named["request_id"], named.get("client_index", 0)
        except (ValueError, TypeError, LookupError, msgspec.DecodeError):
            return None
        if not isinstance(request_id, str) or not isinstance(client_index, int):
            return None
        nothing: list[None] = [None] * 4
        return EngineCoreRequest(request_id, *nothing, 0.0, None, None, None, client_index=client_index)

    def _refuse(self, request: EngineCoreRequest, error: RequestError) -> None:
        output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=error)
        self._send({request.client_index: EngineCoreOutputs(outputs=[output])})

    # -- utility calls -------------------------------------------------------------------------------------------

    def _call_utility(self, frames: Sequence[Frame]) -> None:
        """Answer a call `(client, call id, method, arguments)`; any exception becomes the failure message."""
        client_index, call_id, method, args = self._decoder.decode(frames)
        if self.shutdown_state is not EngineShutdownState.RUNNING:
            # Ctrl-C reaches both processes: the front end may ask while the core has begun to end. That is no fault.
            self._answer(
                client_index, UtilityOutput(call_id, _describe(RuntimeError("Server shutting down")))
            )
            return
        try:
            function = self._utilities.get(method)
            if function is None:
                raise ValueError(
                    f"unknown utility method {method!r}; known: {', '.join(sorted(self._utilities))}"
                )
            result = function(*args)
        except (UtilityRefusedError, ValueError) as error:
            logger.info("Utility call %s was refused: %s", method, error)
            self._answer(client_index, UtilityOutput(call_id, _describe(error)))
            return
        except Exception as error:
            logger.exception("Utility call %s failed.", method)
            self._answer(client_index, UtilityOutput(call_id, _describe(error)))
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._answer_later(client_index, call_id, done))
        else:
            self._answer(client_index, UtilityOutput(call_id, result=result))

    def _answer_later(self, client_index: int, call_id: int, done: Future[Any]) -> None:
        if done.cancelled():
            self._answer(client_index, UtilityOutput(call_id, "cancelled by a later call"))
            return
        error = done.exception()
        if error is not None:
            self._answer(client_index, UtilityOutput(call_id, _describe(error)))
        else:
            self._answer(client_index, UtilityOutput(call_id, result=done.result()))

    def _answer(self, client_index: int, output: UtilityOutput) -> None:
        try:
            self._send({client_index: EngineCoreOutputs(utility_output=output)})
        except TypeError as error:
            failure = UtilityOutput(output.call_id, f"the result cannot be sent: {error}")
            self._send({client_index: EngineCoreOutputs(utility_output=failure)})

    # -- outputs -------------------------------------------------------------------------------------------------

    def _send(self, outputs: Outputs | None) -> None:
        assert self._sockets is not None
        for client_index, message in (outputs or {}).items():
            message.engine_index = self.engine_index
            hand_over_arrays(message)
            self._sockets.send(client_index, self._encoder.encode(message))

    def _send_side_outputs(self) -> None:
        for outputs in self.core.take_side_outputs():
            self._send(outputs)

    # -- the end -------------------------------------------------------------------------------------------------

    def _may_end(self) -> bool:
        """Drain for up to `shutdown_timeout` seconds, then abort what is left."""
        if self.shutdown_state is EngineShutdownState.RUNNING:
            return False
        now = time.monotonic()
        if self.shutdown_state is EngineShutdownState.REQUESTED:
            self.shutdown_state = EngineShutdownState.SHUTTING_DOWN
            self._drain_until = now + self.core.vllm_config.shutdown_timeout
        if self.core.scheduler.has_unfinished_requests() and now < self._drain_until:
            return False
        self.core.abort_everything()
        self._send_side_outputs()
        return True


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def hand_over_arrays(message: EngineCoreOutputs) -> None:
    """Turn tensors among the outputs into arrays.

    To read a tensor a front end would have to load torch first, for seconds in which none of its streams goes on.
    """
    for output in message.outputs:
        tensors = output.new_prompt_logprobs_tensors
        if tensors is not None:
            output.new_prompt_logprobs_tensors = tensors._replace(
                logprob_token_ids=np.asarray(tensors.logprob_token_ids),
                logprobs=np.asarray(tensors.logprobs),
                selected_token_ranks=np.asarray(tensors.selected_token_ranks),
            )
