"""Attributes that outside code reads from objects it has made (interface sections 5, 9, 15 and 16)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.public_api.by_hand import kv_config, manager, request
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import CachingMetrics, PrefixCacheStats, RequestSpecDecodeMetrics
from vllm.v1.sample.logits_processor import BatchUpdateBuilder, LogitsProcessors


def _first_group() -> object:
    return manager(kv_config()).coordinator.single_type_managers[0]


def _parent() -> ParentRequest:
    params = request("a", [1], n=3).sampling_params
    return ParentRequest(SimpleNamespace(request_id="a", external_req_id="a", sampling_params=params))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (
            lambda: manager(kv_config()),
            "block_pool coordinator enable_caching use_eagle log_stats prefix_cache_stats kv_cache_config "
            "num_kv_cache_groups empty_kv_cache_blocks max_model_len watermark_blocks usage",
        ),
        (
            _first_group,
            "req_to_blocks num_cached_block block_size kv_cache_spec kv_cache_group_id use_eagle "
            "cache_hit_alignment_tokens max_admission_blocks_per_request new_block_ids records_new_block_ids",
        ),
        (
            lambda: manager(kv_config()).coordinator,
            "single_type_managers block_pool scheduler_block_size group_block_sizes eagle_group_ids "
            "drop_eagle_group_ids enable_partial_hash_hits retention_interval",
        ),
        (CachingMetrics, "empty hit_rate aggregated_requests aggregated_query_total aggregated_query_hit"),
        (BatchUpdateBuilder, "batch_changed"),
        (LogitsProcessors, "argmax_invariant non_argmax_invariant all"),
        (lambda: OutputProcessor(None, log_stats=False), "request_states parent_requests external_req_ids"),
        (_parent, "n child_requests"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_an_object_shows(make: object, names: str) -> None:
    made = make()  # type: ignore[operator]
    assert [name for name in names.split() if not hasattr(made, name)] == []


def test_hits_are_added_up() -> None:
    metrics = CachingMetrics()
    metrics.observe(PrefixCacheStats(requests=2, queries=10, hits=4))
    totals = (metrics.aggregated_requests, metrics.aggregated_query_total, metrics.aggregated_query_hit)
    assert totals == (2, 10, 4)
    assert RequestSpecDecodeMetrics.new(num_spec_tokens=2).num_accepted_tokens_per_pos == [0, 0]


def test_a_core_has_its_parts() -> None:
    set_by_the_constructor = set(EngineCore.__init__.__code__.co_names)
    assert {"scheduler", "model_executor", "batch_queue", "vllm_config"} <= set_by_the_constructor
