"""Finds the platform of this process, once. Layer: L6.

Owns: the order of precedence (environment, one outside plugin, built-ins) and the cache of the answer. Must not know:
what a platform does. A built-in is active by clues that touch no driver, so that a forked child may still open one.
"""

from __future__ import annotations

import importlib.metadata
import os
from functools import cache
from pathlib import Path

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, UnspecifiedPlatform
from vllm.plugins import load_plugins_by_group
from vllm.utils.registry import resolve_object

logger = init_logger(__name__)

PLUGIN_GROUP = "vllm.platform_plugins"
CPU_PLATFORM = "vllm.platforms.cpu:CpuPlatform"
CUDA_PLATFORM = "vllm.platforms.cuda:CudaPlatform"


def cuda_is_likely() -> bool:
    """Whether an NVIDIA driver, a visible device and a CUDA build of torch are present, without opening any of them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return False
    if not (Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()):
        return False
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return not version.partition("+")[2].startswith(("cpu", "rocm", "xpu"))


def plugin_targets() -> dict[str, str]:
    """Active outside platforms: plugin name → "module.Class". A plugin that fails is logged and skipped."""
    found: dict[str, str] = {}
    for name, plugin in load_plugins_by_group(PLUGIN_GROUP).items():
        try:
            target = plugin()
        except Exception:  # a foreign package at the edge of the process must not stop the others
            logger.exception("Platform plugin %s failed; it is ignored", name)
            continue
        if target is not None:
            found[name] = str(target)
    return found


def choose_target(target_device: str | None, plugins: dict[str, str], cuda_likely: bool) -> str | None:
    """The platform class to use, or None. Raises RuntimeError if several plugins are active."""
    if target_device == "cpu":
        return CPU_PLATFORM
    if len(plugins) > 1:
        raise RuntimeError(f"Only one platform plugin can be active, found: {', '.join(sorted(plugins))}")
    if plugins:
        return next(iter(plugins.values()))
    if target_device not in (None, "cuda"):
        return None
    return CUDA_PLATFORM if cuda_likely else CPU_PLATFORM


@cache
def resolve_current_platform() -> Platform:
    """The platform of this process; the answer never changes while it runs."""
    target = choose_target(envs.VLLM_TARGET_DEVICE, plugin_targets(), cuda_is_likely())
    if target is None:
        return UnspecifiedPlatform()
    platform_class = resolve_object(target)
    if not (isinstance(platform_class, type) and issubclass(platform_class, Platform)):
        raise TypeError(f"{target} must be a subclass of vllm.platforms.Platform, got {platform_class!r}")
    logger.info_once("Platform: %s", platform_class.__name__)
    return platform_class()
