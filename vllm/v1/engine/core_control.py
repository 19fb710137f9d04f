"""Pause, sleep and cache resets of an engine core.  Layer L7.

Owns what a paused or sleeping core promises, and the honest result of a reset. Must not know sockets. An operation that
has to wait for running requests, or for copies that hold blocks, returns a future, which `tick` completes; the core calls
`tick` once per loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from vllm.logger import init_logger
from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.engine.exceptions import UtilityRefusedError
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.cache_hit_source import CacheHitSource

logger = init_logger(__name__)

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES = ("abort", "wait", "keep")
MEMORY_TAGS = frozenset({"weights", "kv_cache"})
WAKE_TAGS = ("weights", "kv_cache", "scheduling")
SLEEP_LEVELS = (0, 1, 2)
# Copies end, or fail, long before: what holds a block for so long will not give it back.
CLEAR_TIMEOUT_S = 60.0


class CoreControl:
    """The control operations of one core.

    ::

        running ──pause(keep|abort)──► paused ──resume──► running
           └──pause(wait)──► draining ──(no request left)──► paused
        paused ──sleep(level)──► asleep ──wake_up, resume──► running

    Nothing is scheduled while memory is away: whoever resumes, or wakes up the last of it, gets a running core.
    `abort_all` ends every request and tells the clients; `finish_steps` completes the steps in flight.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        executor: Executor,
        abort_all: Callable[[], None],
        finish_steps: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._abort_all = abort_all
        self._finish_steps = finish_steps
        self._clock = clock or MonotonicClock()
        self._draining: tuple[Future[None], bool] | None = None
        self._clearing: tuple[Future[None], float] | None = None
        self._asleep: frozenset[str] = frozenset()  # memory that was given back

    # -- pause ---------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[None] | None:
        """Stop scheduling. "abort" ends all requests, "keep" freezes them, "wait" lets them end first.

        `clear_cache` then empties every cache. A future is returned if requests or copies have to end first; it fails
        with a RuntimeError that says what holds blocks, or that the engine was resumed meanwhile.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode={mode!r} must be one of {', '.join(PAUSE_MODES)}")
        if mode == "wait" and self._scheduler.has_unfinished_requests():
            return self._drain(clear_cache)
        if mode == "abort":
            self._abort_all()
        self._freeze()
        return self.clear_caches() if clear_cache else None

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
        if self._clearing is not None:
            self._clear_again(*self._clearing)
        if self._draining is None or self._scheduler.has_unfinished_requests():
            return
        future, clear_cache = self._draining
        self._draining = None
        try:
            self._freeze()
        except Exception as error:  # the failure belongs to the caller of pause, not to the loop
            future.set_exception(error)
            return
        if clear_cache:
            self._clear_again(future, self._clock.monotonic() + CLEAR_TIMEOUT_S)
        else:
            future.set_result(None)

    def _freeze(self) -> None:
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self._finish_steps()

    def clear_caches(self) -> Future[None] | None:
        """Empty prefix cache, connector, multimodal and encoder caches of a paused core.

        Nothing cached can be found any more on return. A future: copies under way still hold blocks; it completes when
        every block is free.
        """
        cleared: Future[None] = Future()
        self._clear_again(cleared, self._clock.monotonic() + CLEAR_TIMEOUT_S)
        if not cleared.done():
            return cleared
        cleared.result()
        return None

    def _clear_again(self, future: Future[None], deadline: float) -> None:
        """One try; the next `tick` makes another if blocks are still held. Failures belong to the future."""
        if self._clearing is not None and self._clearing[0] is not future:
            self._clearing[0].cancel()
        self._clearing = None
        try:
            result = self.reset_prefix_cache_detailed(reset_running_requests=True, reset_connector=True)
            if result["success"]:
                self.reset_mm_cache()
                self.reset_encoder_cache()
                future.set_result(None)
            elif self._clock.monotonic() < deadline:
                self._clearing = (future, deadline)
            else:
                reason = result["reason"] or "blocks are in use"
                raise RuntimeError(f"The caches could not be emptied: {reason}")
        except Exception as error:
            future.set_exception(error)

    def resume(self) -> None:
        """Schedule again; a sleeping core takes its memory back first."""
        self._take_back(MEMORY_TAGS)
        waiting = [pending[0] for pending in (self._draining, self._clearing) if pending is not None]
        self._draining = self._clearing = None
        for future in waiting:
            future.set_exception(RuntimeError("the pause was given up because the engine was resumed"))
        self._scheduler.set_pause_state(PauseState.UNPAUSED)

    def is_paused(self) -> bool:
        return self._scheduler.pause_state != PauseState.UNPAUSED

    # -- caches --------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """True if nothing that was cached can be found any more and no block is held."""
        return bool(self.reset_prefix_cache_detailed(reset_running_requests, reset_connector)["success"])

    def reset_prefix_cache_detailed(
        self,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        tiers: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Like `reset_prefix_cache`, with the reason if it is not a success: `{success, reason, …}`.

        `tiers` empties these alone, and all below the device too with `reset_connector`. ValueError, and no change, for
        a tier that is not there. What the answer says holds after a restart too.
        """
        chosen = None if tiers is None else self._chosen_tiers(tiers, reset_connector)
        if reset_running_requests:
            self._finish_steps()
        try:
            if chosen is None:
                success = self._scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
            else:
                success = self._scheduler.reset_tiers(chosen, reset_running_requests)
            result = {"success": success, "reason": None, **(self._scheduler.reset_prefix_cache_report or {})}
        except RuntimeError as error:  # blocks that even preemption cannot free
            result = {"success": False, "reason": str(error)}
        finally:
            self._scheduler.flush_events()
        problem = self.carry_out_withdrawal()
        if problem is not None:
            reasons = [result["reason"], f"the next engine may find it again: {problem}"]
            result |= {"success": False, "reason": "; ".join(reason for reason in reasons if reason)}
        return result

    def _chosen_tiers(self, names: Sequence[str], all_below: bool) -> list[CacheHitSource]:
        there = self._scheduler.cache_tiers
        unknown = [name for name in names if name not in there]
        if unknown or not names:
            told = "names none" if not names else f"names {', '.join(map(repr, unknown))}"
            raise ValueError(f"tiers {told}; this engine has {', '.join(there)}")
        return [tier for tier in there if tier in names or (all_below and tier is not CacheHitSource.DEVICE)]

    def carry_out_withdrawal(self) -> str | None:
        """Have the workers forget for good what the connector has just taken back; what stands in the way, or None."""
        connector = self._scheduler.get_kv_connector()
        withdrawal = None if connector is None else connector.take_withdrawal()
        if withdrawal is None:
            return None
        try:
            return self._executor.apply_kv_withdrawal(withdrawal)
        except Exception as error:  # the workers' failure is an answer, not the end of the core
            logger.exception("Withdrawn KV may be found again by the next engine")
            return f"{type(error).__name__}: {error}"

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
        if level > 0:
            self._executor.check_sleep(level)
        return self._sleep_after(self.pause(mode, clear_cache=level > 0), level)

    def _sleep_after(self, paused: Future[None] | None, level: int) -> Future[None] | None:
        """Fall asleep, now or when `paused` is complete."""
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
            self._asleep = MEMORY_TAGS

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back: all, or what `tags` name. Goes on scheduling when none is away, or by "scheduling"."""
        unknown = sorted(set(tags or ()) - set(WAKE_TAGS))
        if unknown:
            raise ValueError(f"tags={unknown} must be from {', '.join(WAKE_TAGS)}")
        was_asleep = self.is_sleeping()
        if tags is not None and "scheduling" not in tags:
            self._take_back(MEMORY_TAGS.intersection(tags))
            if self.is_sleeping() or not was_asleep:
                return
        self.resume()

    def _take_back(self, tags: frozenset[str]) -> None:
        missing = self._asleep & tags
        if missing:
            self._executor.wake_up(None if missing == self._asleep else sorted(missing))
            self._asleep -= missing

    def is_sleeping(self) -> bool:
        """True from `sleep` (level 1 or 2) until everything was taken back."""
        return bool(self._asleep)

    def release_kv_cache_memory(self) -> Future[None] | None:
        """Drop the KV cache's memory; the engine must be paused, and nothing may be running. A future as in `pause`."""
        if not self.is_paused() or self.is_draining:
            raise UtilityRefusedError("release_kv_cache_memory needs a completed pause")
        self._executor.check_sleep(1)
        return self._sleep_after(self.clear_caches(), 1)
