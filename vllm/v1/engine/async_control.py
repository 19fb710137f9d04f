"""Control calls of the asyncio engine: each is one utility call of the core.  Layer L7.

Owns their names and defaults. Must not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.loggers import StatLoggerManager


def joined_resets(answers: Sequence[dict[str, Any]], common_tiers: Collection[str] = ()) -> dict[str, Any]:
    """What the resets of several engines did, in one answer: a success if all are, numbers added up.

    Of `common_tiers`, which are one pool of all engines, each tells the same: numbers are those of who saw most.
    With more than one engine each one's answer is in `engines` too.
    """
    if len(answers) == 1:
        return dict(answers[0])
    joined = _joined(answers)
    by_tier: dict[str, list[dict[str, Any]]] = {}
    for answer in answers:
        for tier in answer.get("tiers", ()):
            by_tier.setdefault(tier["tier"], []).append(tier)
    joined["tiers"] = [
        _joined(parts, max if tier in common_tiers else sum) for tier, parts in by_tier.items()
    ]
    return {**joined, "engines": list(answers)}


def _joined(
    answers: Sequence[dict[str, Any]], of_numbers: Callable[[list[Any]], Any] = sum
) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for answer in answers for name in answer):
        values = [answer.get(name) for answer in answers]
        known = [value for value in values if value is not None]
        if name == "reason":
            told = [f"engine {engine}: {why}" for engine, why in enumerate(values) if why]
            joined[name] = "; ".join(told) or None
        elif not known or isinstance(known[0], str | list | tuple):
            joined[name] = known[0] if known else None
        else:
            joined[name] = all(known) if isinstance(known[0], bool) else of_numbers(known)
    return joined


class AsyncControl:
    """Mixed into `AsyncLLM`. A failure in the core is a RuntimeError with the core's message."""

    vllm_config: VllmConfig
    engine_core: AsyncMPClient
    logger_manager: StatLoggerManager | None
    output_processor: OutputProcessor

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return tuple(await self.engine_core.call_utility_async("get_supported_tasks"))

    async def get_kv_cache_group_metadata(self) -> list[dict[str, Any]]:
        """Every KV cache group: `{group_idx, kind, block_size, sliding_window}`."""
        return list(await self.engine_core.call_utility_async("get_kv_cache_group_metadata"))

    async def get_kv_cache_reports(self) -> list[dict[str, Any] | None]:
        """Per engine the fields of `KVCacheReport`: pools, groups, hits (with `tokens_reported`) and transfers."""
        reports = await self.engine_core.call_each_async("get_kv_cache_report")
        add = self.output_processor.with_reported
        return [None if report is None else add(report, i) for i, report in enumerate(reports)]

    # -- caches --------------------------------------------------------------------------------------------------

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """True if nothing cached can be found any more and no block is held."""
        return bool(
            await self.engine_core.call_utility_async(
                "reset_prefix_cache", reset_running_requests, reset_connector
            )
        )

    async def reset_prefix_cache_detailed(
        self,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        tiers: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """The same with the reason: `{"success": bool, "reason": str | None, "tiers": […], …}`, of all engines.

        `tiers` empties these alone, and all below the device too with `reset_connector`. UtilityRefusedError, and no
        change, for a tier that is not there.
        """
        answers = await self.engine_core.call_each_async(
            "reset_prefix_cache_detailed", reset_running_requests, reset_connector, tiers
        )
        transfer = self.vllm_config.kv_transfer_config
        is_common = transfer is not None and transfer.has_option("shared_pool")
        return joined_resets(answers, [CacheHitSource.HOST] if is_common else ())

    async def reset_mm_cache(self) -> None:
        await self.engine_core.call_utility_async("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self.engine_core.call_utility_async("reset_encoder_cache")

    # -- pause and sleep -----------------------------------------------------------------------------------------

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling: "abort" ends all requests, "wait" lets them end first, "keep" freezes them."""
        await self.engine_core.call_utility_async("pause_scheduler", mode, clear_cache)

    async def resume_generation(self) -> None:
        await self.engine_core.call_utility_async("resume_scheduler")
        await self._record_sleep_state(0)

    async def is_paused(self) -> bool:
        return bool(await self.engine_core.call_utility_async("is_scheduler_paused"))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause and give memory back: 0 nothing, 1 the KV cache, 2 the weights too."""
        await self.engine_core.call_utility_async("sleep", level, mode)
        await self._record_sleep_state(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self.engine_core.call_utility_async("wake_up", tags)
        await self._record_sleep_state(0)

    async def is_sleeping(self) -> bool:
        return bool(await self.engine_core.call_utility_async("is_sleeping"))

    async def release_kv_cache_memory(self) -> None:
        await self.engine_core.call_utility_async("release_kv_cache_memory")
        await self._record_sleep_state(1)

    async def _record_sleep_state(self, level: int) -> None:
        """Let the metrics show the level that a call has just led to, unless it led only part of the way."""
        if self.logger_manager is not None and await self.is_sleeping() == (level > 0):
            self.logger_manager.record_sleep_state(level)

    # -- workers -------------------------------------------------------------------------------------------------

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method on every worker."""
        return list(
            await self.engine_core.call_utility_async("collective_rpc", method, timeout, args, kwargs)
        )

    async def start_profile(self) -> None:
        await self.engine_core.call_utility_async("profile", True)

    async def stop_profile(self) -> None:
        await self.engine_core.call_utility_async("profile", False)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return bool(await self.engine_core.call_utility_async("add_lora", lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        return bool(await self.engine_core.call_utility_async("remove_lora", lora_id))

    async def list_loras(self) -> set[int]:
        return set(await self.engine_core.call_utility_async("list_loras"))

    async def pin_lora(self, lora_id: int) -> bool:
        return bool(await self.engine_core.call_utility_async("pin_lora", lora_id))
