"""`current_platform`: the device facts of this process, found on first use. Layer: L6.

Importing this package loads neither torch nor a driver.
"""

from __future__ import annotations

from vllm.platforms.interface import CpuArchEnum, Platform, PlatformEnum, UnspecifiedPlatform
from vllm.platforms.resolve import resolve_current_platform

__all__ = ["CpuArchEnum", "Platform", "PlatformEnum", "UnspecifiedPlatform", "current_platform"]


def __getattr__(name: str) -> Platform:
    if name == "current_platform":
        return resolve_current_platform()
    raise AttributeError(f"module 'vllm.platforms' has no attribute {name!r}")
