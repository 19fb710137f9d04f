"""Small questions about the device that public callers ask without a platform object. Layer: L6."""

from __future__ import annotations

from vllm.platforms import current_platform


def is_pin_memory_available() -> bool:
    """Whether page-locked host memory speeds up copies to the current device."""
    return bool(current_platform.is_pin_memory_available())


__all__ = ["is_pin_memory_available"]
