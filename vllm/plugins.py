"""Plugins of outside packages, found by entry-point group. Layer: L0.

Owns which plugins are wanted (`VLLM_PLUGINS`) and that a broken one harms nothing else. Must not know what they do.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

GENERAL_GROUP: Final = "vllm.general_plugins"


# A plugin is a function or class of a foreign package.
def load_plugins_by_group(group: str) -> dict[str, Callable[..., Any]]:
    """The group's plugins by name, loaded but not called; one that cannot be loaded is logged and left out."""
    wanted = envs.VLLM_PLUGINS
    found: dict[str, Callable[..., Any]] = {}
    for entry in importlib.metadata.entry_points(group=group):
        if wanted is not None and entry.name not in wanted:
            continue
        try:
            found[entry.name] = entry.load()
        except Exception:  # a foreign package at the edge of the process must not stop the others
            logger.exception("Plugin %s of group %s cannot be loaded; it is left out", entry.name, group)
    return found


@cache
def load_general_plugins() -> None:
    """Call every general plugin, once per process. They register what they bring: models, connectors, dtypes."""
    for name, plugin in load_plugins_by_group(GENERAL_GROUP).items():
        try:
            plugin()
        except Exception:  # as above
            logger.exception("Plugin %s failed; it is ignored", name)
