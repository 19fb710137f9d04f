"""Connectors that an outside module brings along, named by their path, and the defaults every connector inherits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.offload_rig import Rig, full, prompt, rig_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


class Least(KVConnectorBase):
    """Implements what it must and nothing else."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()


class WithoutPlan(Least):
    """Has the constructor of an older contract."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole) -> None:
        super().__init__(vllm_config, role)


def by_path(name: str) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_module_path=__name__)


def one_group() -> KVCacheConfig:
    return KVCacheConfig(16, [], [KVCacheGroupSpec(["layer0"], full())])


def test_a_module_path_wins_over_the_table() -> None:
    config = rig_config()
    config.kv_transfer_config = by_path("Least")
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, one_group())
    assert type(made).__name__ == "Least"
    assert made.role is KVConnectorRole.WORKER


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="WithoutPlan .* must accept 'kv_cache_config'"):
        KVConnectorFactory.get_connector_class(by_path("WithoutPlan"))
    with pytest.raises(ValueError, match="kv_connector must be set"):
        KVConnectorFactory.get_connector_class(KVTransferConfig())
    config = rig_config()
    config.kv_transfer_config = None
    with pytest.raises(ValueError, match="kv_transfer_config must be set to create"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, one_group())
    with pytest.raises(ValueError, match="kv_transfer_config must be set to build"):
        Least(config, KVConnectorRole.WORKER)


def test_the_defaults_ask_for_nothing_and_delay_nothing() -> None:
    config = rig_config()
    config.kv_transfer_config = by_path("Least")
    connector = Least(config, KVConnectorRole.SCHEDULER)
    request = Rig().make_request(prompt(9))
    assert connector.request_finished(request, []) == (False, None)
    assert not connector.register_finished_partial_tail(request, ([],), [])
    assert connector.get_external_cache_hit_sources(request, 0) == {}
    assert sum(connector.get_external_cache_hit_sources(request, 8).values()) == 8
    assert connector.get_loaded_kv_cache_group_ids(request) == (), "it was given no plan"
    assert connector.peek_matched_tokens(request, 0) is None
    assert connector.get_tier_reports() == ()
    assert connector.get_kv_connector_stats() is None
    assert connector.reset_cache() is None
    assert connector.supports_sleep_mode(config.kv_transfer_config)
    assert not connector.requires_piecewise_for_cudagraph({})
    assert connector.get_required_kvcache_layout(config) is None
    assert connector.build_prom_metrics(config, {}, [], {}) is None
