"""The platform names the class that groups and places KV caches."""

from __future__ import annotations

import pytest

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
from vllm.v1.core.kv_cache_planner import DefaultKVCacheConfigBuilder


class Mine(DefaultKVCacheConfigBuilder):
    """A platform's own."""


def choose(monkeypatch: pytest.MonkeyPatch, path: str) -> object:
    platform = type(current_platform)
    monkeypatch.setattr(platform, "get_kv_cache_config_builder_cls", lambda *args: path, raising=False)
    return get_kv_cache_config_builder(None)  # type: ignore[arg-type]


def test_a_platform_may_bring_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(choose(monkeypatch, f"{__name__}:Mine")).__name__ == "Mine"


def test_a_path_to_something_else_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'builtins:int' is not a KVCacheConfigBuilder"):
        choose(monkeypatch, "builtins:int")
