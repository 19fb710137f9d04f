"""Pause, sleep and cache resets of an engine core.  Layer L7.

Owns what a paused or sleeping core promises, and the honest result of a reset. Must not know sockets. An operation that
has to wait for running requests returns a future, which `tick` completes; the core calls `tick` once per loop.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.executor.abstract import Executor

logger = init_logger(__name__)

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES = ("abort", "wait", "keep")
WAKE_TAGS = ("weights", "kv_cache", "scheduling")
SLEEP_LEVELS = (0, 1, 2)


class CoreControl:
    """The control operations of one core.

    ::

        running ──pause(keep|abort)──► paused ──resume──► running
           └──pause(wait)──► draining ──(no request left)──► paused
        paused ──sleep(level)──► asleep ──wake_up──► running

    `abort_all` ends every request and tells the clients; `finish_steps` completes the steps in flight.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        executor: Executor,
        abort_all: Callable[[], None],
        finish_steps: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._abort_all = abort_all
        self._finish_steps = finish_steps
        self._draining: tuple[Future[None], bool] | None = None
        self._sleep_level = 0

    # -- pause ---------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[None] | None:
        """Stop scheduling. "abort" ends all requests, "keep" freezes them, "wait" lets them end first (then a future
        is returned). `clear_cache` then empties every cache; RuntimeError naming the one that is not empty."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode={mode!r} must be one of {', '.join(PAUSE_MODES)}")
        if mode == "wait" and self._scheduler.has_unfinished_requests():
            return self._drain(clear_cache)
        if mode == "abort":
            self._abort_all()
        self._freeze(clear_cache)
        return None

    def _drain(self, clear_cache: bool) -> Future[None]:
        """Requests that came before the pause are all served; the core holds back what comes after it."""
        future: Future[None] = Future()
        if self._draining is not None:
            self._draining[0].cancel()
        self._draining = (future, clear_cache)
        return future

    @property
    def is_draining(self) -> bool:
        """True while a pause waits for requests to end: new ones must not enter the scheduler."""
        return self._draining is not None

    def tick(self) -> None:
        """Complete a pause that waited, if nothing is left to wait for."""
        if self._draining is None or self._scheduler.has_unfinished_requests():
            return
        future, clear_cache = self._draining
        self._draining = None
        try:
            self._freeze(clear_cache)
        except Exception as error:  # the failure belongs to the caller of pause, not to the loop
            future.set_exception(error)
        else:
            future.set_result(None)

    def _freeze(self, clear_cache: bool) -> None:
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self._finish_steps()
        if clear_cache:
            self.clear_caches()

    def clear_caches(self) -> None:
        """Empty prefix cache, connector, multimodal and encoder caches. RuntimeError naming what stayed."""
        result = self.reset_prefix_cache_detailed(reset_running_requests=True, reset_connector=True)
        if not result["success"]:
            raise RuntimeError(f"The caches could not be emptied: {result['reason'] or 'blocks are in use'}")
        self.reset_mm_cache()
        self.reset_encoder_cache()

    def resume(self) -> None:
        """Schedule again."""
        if self._draining is not None:
            future, _ = self._draining
            self._draining = None
            future.set_exception(RuntimeError("the pause was given up because the engine was resumed"))
        self._scheduler.set_pause_state(PauseState.UNPAUSED)

    def is_paused(self) -> bool:
        return self._scheduler.pause_state != PauseState.UNPAUSED

    # -- caches --------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """True if nothing that was cached can be found any more and no block is held."""
        return bool(self.reset_prefix_cache_detailed(reset_running_requests, reset_connector)["success"])

    def reset_prefix_cache_detailed(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> dict[str, Any]:
        """Like `reset_prefix_cache`, with the reason if it is not a success: `{success, reason, …}`. Never raises."""
        if reset_running_requests:
            self._finish_steps()
        try:
            success = self._scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
        except RuntimeError as error:  # blocks that even preemption cannot free
            return {"success": False, "reason": str(error)}
        finally:
            self._scheduler.flush_events()
        return {"success": success, "reason": None, **(self._scheduler.reset_prefix_cache_report or {})}

    def reset_mm_cache(self) -> None:
        """Forget multimodal inputs."""
        self._executor.reset_mm_cache()

    def reset_encoder_cache(self) -> None:
        """Forget encoder outputs."""
        self._scheduler.reset_encoder_cache()

    # -- sleep ---------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[None] | None:
        """Pause, and give memory back: 0 nothing, 1 weights go to the host and the KV cache is dropped, 2 both go."""
        if level not in SLEEP_LEVELS:
            raise ValueError(f"level={level} must be one of {SLEEP_LEVELS}")
        paused = self.pause(mode, clear_cache=level > 0)
        if paused is None:
            self._fall_asleep(level)
            return None
        asleep: Future[None] = Future()

        def follow(done: Future[None]) -> None:
            try:
                done.result()
                self._fall_asleep(level)
            except Exception as error:
                asleep.set_exception(error)
            else:
                asleep.set_result(None)

        paused.add_done_callback(follow)
        return asleep

    def _fall_asleep(self, level: int) -> None:
        if level > 0:
            self._executor.sleep(level)
        self._sleep_level = level

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back and, without tags or with "scheduling", go on scheduling."""
        unknown = sorted(set(tags or ()) - set(WAKE_TAGS))
        if unknown:
            raise ValueError(f"tags={unknown} must be from {', '.join(WAKE_TAGS)}")
        memory_tags = None if tags is None else [tag for tag in tags if tag != "scheduling"]
        if self._sleep_level > 0 and (memory_tags is None or memory_tags):
            self._executor.wake_up(memory_tags)
        if tags is None or "scheduling" in tags:
            self._sleep_level = 0
            self.resume()

    def is_sleeping(self) -> bool:
        """True from `sleep` (level 1 or 2) until everything was taken back."""
        return self._sleep_level > 0 and self._executor.is_sleeping

    def release_kv_cache_memory(self) -> None:
        """Drop the KV cache's memory; the engine must be paused, and nothing may be running."""
        if not self.is_paused() or self.is_draining:
            raise RuntimeError("release_kv_cache_memory needs a completed pause")
        self.clear_caches()
        self._fall_asleep(1)
