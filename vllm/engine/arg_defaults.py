"""Default limits of a step, by device and by the kind of program. Layer: L1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vllm.platforms import Platform
from vllm.usage.usage_lib import UsageContext

_GB: Final = 10**9


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Most tokens and most requests of one step."""

    tokens: int
    seqs: int


def default_limits(platform: Platform, usage: UsageContext | None, world_size: int) -> StepLimits:
    """The limits where the user gives none: larger on larger devices, and larger offline than in a server."""
    offline = usage is UsageContext.LLM_CLASS
    if platform.is_cpu() or platform.is_unspecified():
        return (
            StepLimits(4096 * world_size, 256 * world_size)
            if offline
            else StepLimits(2048 * world_size, 128 * world_size)
        )
    memory = platform.get_device_total_memory()
    if memory >= 160 * _GB:
        return StepLimits(16384, 1024)
    if memory >= 70 * _GB and "a100" not in platform.get_device_name().lower():
        return StepLimits(16384 if offline else 8192, 1024)
    return StepLimits(8192 if offline else 2048, 256)
