"""Which manager serves which spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.helpers.kv_plans import BF16, full, window
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupRole, KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec


@pytest.fixture(autouse=True)
def _restore_registry() -> Iterator[None]:
    tables = (
        KVCacheSpecRegistry._managers,
        KVCacheSpecRegistry._uniform_bases,
        KVCacheSpecRegistry._role_managers,
    )
    saved = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, saved, strict=True):
        table.clear()
        table.update(content)


@dataclass(frozen=True, kw_only=True)
class DerivedSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class ForeignSpec(KVCacheSpec):
    pass


class Manager:
    pass


def derived() -> DerivedSpec:
    return DerivedSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=BF16)


def test_latents_share_the_uniform_base_of_full_attention() -> None:
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=BF16)
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(latent) is FullAttentionSpec
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(window()) is type(window())
    assert full().is_uniform_with_collection({"a": latent})
    assert not full().is_uniform_with_collection({"a": latent, "b": window()})


def test_subclasses_inherit_the_entry_of_their_base() -> None:
    assert KVCacheSpecRegistry.get_manager_reference(derived()) == KVCacheSpecRegistry.get_manager_reference(
        full()
    )


def test_own_entry_and_role_win() -> None:
    KVCacheSpecRegistry.register(DerivedSpec, Manager)
    assert KVCacheSpecRegistry.get_manager_class(derived()) is Manager
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(derived()) is DerivedSpec

    class RoleManager:
        pass

    KVCacheSpecRegistry.register_role_manager(KVCacheGroupRole.HISPARSE_INDEXER, RoleManager)
    assert KVCacheSpecRegistry.get_manager_class(derived(), KVCacheGroupRole.HISPARSE_INDEXER) is RoleManager
    assert KVCacheSpecRegistry.get_manager_class(derived(), KVCacheGroupRole.DEFAULT) is Manager


def test_decorator_registers_with_a_base() -> None:
    cls = register_kv_cache_spec(manager_class=Manager, uniform_type_base_spec=FullAttentionSpec)(ForeignSpec)
    assert cls is ForeignSpec
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(ForeignSpec(16)) is FullAttentionSpec


def test_unknown_kinds_are_named_with_their_layer() -> None:
    with pytest.raises(ValueError, match=r"layer9.*ForeignSpec"):
        KVCacheSpecRegistry.check_kv_cache_spec_registry({"a": full(), "layer9": ForeignSpec(16)})
    with pytest.raises(ValueError, match="ForeignSpec"):
        KVCacheSpecRegistry.get_uniform_type_base_spec(ForeignSpec(16))


def test_a_target_that_is_no_class_is_refused() -> None:
    KVCacheSpecRegistry.register(ForeignSpec, "vllm.utils.math_utils:cdiv")
    with pytest.raises(ValueError, match="not a class"):
        KVCacheSpecRegistry.get_manager_class(ForeignSpec(16))
