"""The KV kinds that the product knows, so that tests over all of them miss none that is added later."""

from __future__ import annotations

from vllm.utils.registry import resolve_object
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_spec_registry import _KINDS


def registered_kinds() -> dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]]:
    """Spec class → manager class of every line in the registry's table."""
    kinds = {}
    for name, (manager, _) in _KINDS.items():
        spec_class, manager_class = resolve_object(name), resolve_object(manager)
        assert isinstance(spec_class, type)
        assert isinstance(manager_class, type)
        kinds[spec_class] = manager_class
    return kinds
