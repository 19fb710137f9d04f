"""Who decides grouping and placement: the interface, and the choice of the platform's builder. Layer: L3.

The platform is asked through a name that is resolved on use: it lives in a higher layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from vllm.config.vllm import VllmConfig
from vllm.utils.registry import resolve_object
from vllm.v1.kv_cache_config_types import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_spec_base import KVCacheSpec

_PLATFORM = "vllm.platforms:current_platform"


class KVCacheConfigBuilder(ABC):
    """Groups the layers of the whole model, and plans one rank's memory for a given number of blocks."""

    @abstractmethod
    def get_kv_cache_groups(
        self, vllm_config: VllmConfig, kv_cache_spec: Mapping[str, KVCacheSpec]
    ) -> list[KVCacheGroupSpec]:
        """Groups in which every layer appears exactly once; `[]` without layers."""

    @abstractmethod
    def get_kv_cache_config_from_groups(
        self, vllm_config: VllmConfig, kv_cache_groups: Sequence[KVCacheGroupSpec], num_blocks: int
    ) -> KVCacheConfig:
        """The plan of one rank for exactly `num_blocks` blocks; memory grows linearly with that count."""


class _BuilderHost(Protocol):
    def get_kv_cache_config_builder_cls(self, vllm_config: VllmConfig) -> str: ...


def get_kv_cache_config_builder(vllm_config: VllmConfig) -> KVCacheConfigBuilder:
    """A fresh instance of the builder class that the current platform names by its dotted path.

    Raises ValueError if the path does not lead to a `KVCacheConfigBuilder`.
    """
    platform = cast(_BuilderHost, resolve_object(_PLATFORM))
    path = platform.get_kv_cache_config_builder_cls(vllm_config)
    builder_cls = resolve_object(path)
    if not (isinstance(builder_cls, type) and issubclass(builder_cls, KVCacheConfigBuilder)):
        raise ValueError(f"The platform's KV cache builder {path!r} is not a KVCacheConfigBuilder")
    return builder_cls()
