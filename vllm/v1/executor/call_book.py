"""Calls to several ranks whose answers are not all in: when a call is over, and whether the ranks agree.  Layer L7.

Owns the rules of agreement. It must not know processes, sockets or clocks: times are told to it, in seconds of any
monotonic clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm.config.error_text import error_text
from vllm.v1.executor.worker_channel import Method, Reply

# Ranks that fail alike fail at the same point, hence within moments of each other.
AGREE_WITHIN_S = 10.0
# Before the first step nothing is lost by an early end, and somebody waits for it.
AGREE_AT_START_WITHIN_S = 2.0

STEP_METHODS = frozenset({"execute_model", "sample_tokens", "execute_dummy_batch"})
# After these, ranks of different outcome hold different things: nothing sound can follow.
_MUST_AGREE = STEP_METHODS | {
    "init_device",
    "load_model",
    "initialize_from_config",
    "compile_or_warm_up_model",
    "update_max_model_len",
    "set_kv_cache_layout",
    "sleep",
    "wake_up",
}


class WorkersFailedError(RuntimeError):
    """The workers of an engine cannot go on: one has died, hangs, or is out of step with the others."""


@dataclass(slots=True)
class OpenCall:
    """A call that was sent to all ranks. Times are None until they apply: `head_since`, when it became the oldest."""

    call_id: int
    method: Method
    future: Future[list[Any]] = field(default_factory=Future)
    replies: dict[int, Reply] = field(default_factory=dict)
    head_since: float | None = None
    first_error_at: float | None = None

    @property
    def name(self) -> str:
        """What was called, in words."""
        return self.method if isinstance(self.method, str) else getattr(self.method, "__name__", "a function")


class CallBook:
    """The open calls in the order they were made. Ranks answer in that order, so calls end in it.

    `step_timeout_s`: how long a step may take. Safe to use from several threads.
    """

    def __init__(self, num_ranks: int, step_timeout_s: float) -> None:
        self._num_ranks = num_ranks
        self._step_timeout_s = step_timeout_s
        self._has_stepped = False
        self._open: deque[OpenCall] = deque()
        self._next_id = 0
        self._lock = threading.Lock()

    def open(self, method: Method, now: float) -> OpenCall:
        """Enter the next call."""
        with self._lock:
            call = OpenCall(self._next_id, method)
            call.future.set_running_or_notify_cancel()  # nobody can take it back: the workers have it
            self._next_id += 1
            self._has_stepped |= method in STEP_METHODS
            self._open.append(call)
            if self._open[0] is call:
                call.head_since = now
            return call

    def note(self, call_id: int, reply: Reply, now: float) -> WorkersFailedError | None:
        """Enter a rank's reply; the last one ends the call. An error means that no later call can work."""
        with self._lock:
            call = next((call for call in self._open if call.call_id == call_id), None)
            if call is None:
                return WorkersFailedError(f"rank {reply.rank} answered a call that nobody made: {call_id}")
            call.replies[reply.rank] = reply
            if reply.error is not None and call.first_error_at is None:
                call.first_error_at = now
            if len(call.replies) < self._num_ranks:
                return None
            self._open.remove(call)
            if self._open and self._open[0].head_since is None:
                self._open[0].head_since = now
        return self._settle(call)

    def _settle(self, call: OpenCall) -> WorkersFailedError | None:
        replies = [call.replies[rank] for rank in range(self._num_ranks)]
        failed = [reply for reply in replies if reply.error is not None]
        in_step = len({reply.operations for reply in replies}) == 1
        agreed = in_step and len(failed) in (0, self._num_ranks)
        if agreed and not failed:
            call.future.set_result([reply.value for reply in replies])
            return None
        if agreed:
            call.future.set_exception(_error_of(failed[0]))
            return None
        error = _disagreement(call, failed, self._num_ranks, in_step)
        call.future.set_exception(error)
        return error if not in_step or call.method in _MUST_AGREE else None

    def overdue(self, now: float) -> WorkersFailedError | None:
        """Why the ranks cannot go on, judged by the time: a step that hangs, or an error that only some ranks have."""
        with self._lock:
            for call in self._open:
                waited = None if call.first_error_at is None else now - call.first_error_at
                if waited is not None and waited >= self._patience_s(call):
                    failed = [reply for reply in call.replies.values() if reply.error is not None]
                    return _disagreement(call, failed, self._num_ranks, True)
            head = self._open[0] if self._open else None
        if head is None or head.head_since is None or head.method not in STEP_METHODS:
            return None
        if now - head.head_since < self._step_timeout_s:
            return None
        missing = sorted(set(range(self._num_ranks)) - set(head.replies))
        return WorkersFailedError(
            f"{head.name} was not done after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS={self._step_timeout_s:g} s; "
            f"no answer from rank {', '.join(map(str, missing))}"
        )

    def _patience_s(self, call: OpenCall) -> float:
        """How long ranks may take to share the error of one: calls from outside may differ, if they only end."""
        if not self._has_stepped:
            return AGREE_AT_START_WITHIN_S
        return AGREE_WITHIN_S if call.method in _MUST_AGREE else self._step_timeout_s

    def fail_all(self, error: Exception) -> None:
        """End every open call with the error."""
        with self._lock:
            open_calls, self._open = list(self._open), deque()
        for call in open_calls:
            call.future.set_exception(error)

    def oldest(self) -> str | None:
        """What the workers are at, in words; None if nothing."""
        with self._lock:
            return self._open[0].name if self._open else None


def _disagreement(
    call: OpenCall, failed: Sequence[Reply], num_ranks: int, in_step: bool
) -> WorkersFailedError:
    """The error of a call that some ranks have carried out and others not, with what the first of those said."""
    if not failed:
        return WorkersFailedError(f"{call.name}: the ranks are out of step with each other")
    told = "; ".join(f"rank {reply.rank}: {error_text(_error_of(reply))}" for reply in failed)
    how_many = (
        f"{len(failed)} of {num_ranks} ranks"
        if len(failed) < num_ranks or in_step
        else "all ranks, not alike"
    )
    error = WorkersFailedError(f"{call.name} failed on {how_many}: {told}")
    error.__cause__ = failed[0].error
    return error


def _error_of(reply: Reply) -> Exception:
    assert reply.error is not None
    return reply.error
