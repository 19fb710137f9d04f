"""Answers that a caller gets for what is unknown, missing or not set up: each is a promise of its own."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.sched import Driver, full, kv_config, make_scheduler, mamba, sched_config
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1.core.sched.budget import StepBudget
from vllm.v1.core.sched.cache_report import hits
from vllm.v1.core.sched.in_flight import InFlightSteps, StepRecord
from vllm.v1.core.sched.manager_setup import make_kv_cache_manager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.params import CacheShape
from vllm.v1.core.sched.request_queue import PriorityRequestQueue, create_request_queue
from vllm.v1.core.sched.stop import check_stop
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVCacheSpecKind
from vllm.v1.kv_cache_report import HitReport
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus


def request(name: str, lora: int | None = None) -> Request:
    adapter = None if lora is None else LoRARequest(f"lora{lora}", lora, "/nowhere")
    return Request(name, [1], SamplingParams(), None, arrival_time=0.0, lora_request=adapter)


def kv_manager(**changes: Any) -> Any:
    config = sched_config()
    for name, value in changes.items():
        setattr(config, name, value)
    return make_kv_cache_manager(config, kv_config([full(4)], 20), (4, 4), 512, log_stats=True)  # type: ignore[arg-type]


def speculative(drops: bool) -> SimpleNamespace:
    return SimpleNamespace(use_eagle=lambda: True, use_eagle_block_drop=lambda: drops)


def test_taking_out_an_adapter_that_was_never_counted_changes_nothing() -> None:
    budget = StepBudget(10, 10, max_loras=1)
    budget.add_lora(request("a", 1))
    budget.remove_lora(request("b", 2))
    budget.remove_lora(request("c"))
    assert not budget.allows_lora(request("d", 2))
    budget.remove_lora(request("a", 1))
    assert budget.allows_lora(request("d", 2))


def test_without_adapters_the_statistics_of_a_step_do_not_walk_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler([full(4)], 20, log_stats=True, policy="priority")

    def walk(queue: Any) -> Any:
        raise AssertionError("a long queue would be walked, and sorted, in every step")

    monkeypatch.setattr(PriorityRequestQueue, "__iter__", walk)
    scheduler.add_request(request("r"))
    stats = scheduler.make_stats()
    assert stats is not None
    assert (stats.num_waiting_reqs, stats.waiting_lora_adapters) == (1, {})


def test_an_unknown_step_has_no_partial_prefills() -> None:
    steps = InFlightSteps()
    known = [StepRecord(SchedulerOutput.make_empty(), seq, {name}) for seq, name in enumerate("ab")]
    for record in known:
        steps.push(record)
    assert steps.partial_prefills(known[1].output) == {"b"}
    assert steps.partial_prefills(SchedulerOutput.make_empty()) == set()


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="unknown scheduling policy: 'lottery'"):
        create_request_queue("lottery")  # type: ignore[arg-type]


def test_an_output_without_repetition_goes_on() -> None:
    detector = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=3)
    varied = Request(
        "r", [1], SamplingParams(max_tokens=50, repetition_detection=detector), None, arrival_time=0.0
    )
    varied.status = RequestStatus.RUNNING
    varied.append_output_token_ids([7, 8, 9, 7, 8, 10])
    assert not check_stop(varied, 100)
    assert varied.status is RequestStatus.RUNNING


def test_block_metrics_are_collected_when_asked_for() -> None:
    assert kv_manager().block_pool.metrics_collector is None
    observed = kv_manager(
        observability_config=SimpleNamespace(kv_cache_metrics=True, kv_cache_metrics_sample=1.0)
    )
    collector = observed.block_pool.metrics_collector
    blocks = observed.block_pool.get_new_blocks(2)
    assert set(collector.block_metrics) == {block.block_id for block in blocks}


@pytest.mark.parametrize(
    ("drops", "lookahead", "flagged"), [(True, 0, True), (False, 4, True), (False, 0, False)]
)
def test_groups_of_a_drafter_are_flagged_where_its_blocks_need_care(
    drops: bool, lookahead: int, flagged: bool
) -> None:
    manager = kv_manager(speculative_config=speculative(drops), num_hash_lookahead_tokens=lookahead)
    assert manager.use_eagle is flagged


def test_there_is_no_report_before_the_first_reset() -> None:
    scheduler = make_scheduler()
    assert scheduler.reset_prefix_cache_report is None
    assert scheduler.reset_prefix_cache()
    report = scheduler.reset_prefix_cache_report
    assert report is not None
    assert report["success"] is True


def test_drafts_for_requests_that_are_gone_or_not_in_the_step_are_ignored() -> None:
    scheduler = make_scheduler([full(4)], 40, num_speculative_tokens=2, num_lookahead_tokens=2)
    driver = Driver(scheduler)
    driver.add("r", range(5), max_tokens=20)
    driver.schedule()
    driver.apply()
    scheduler.update_draft_token_ids(DraftTokenIds(["r", "gone"], [[3, 4], [5, 6]]))
    output = driver.schedule()
    assert output.scheduled_spec_decode_tokens == {"r": [3, 4]}
    scheduler.update_draft_token_ids_in_output(DraftTokenIds(["r", "gone"], [[8, 9], [5, 6]]), output)
    assert output.scheduled_spec_decode_tokens == {"r": [8, 9]}
    assert output.num_invalid_spec_tokens is None


def test_hits_of_a_tier_that_nobody_names_are_reported_as_asked_of_all() -> None:
    use = SimpleNamespace(
        local_queries=100,
        external_queries=60,
        hits_by_source={CacheHitSource.DEVICE: 40, CacheHitSource.EXTERNAL_UNSPECIFIED: 12},
    )
    assert hits(use, None) == (  # type: ignore[arg-type]
        HitReport(CacheHitSource.DEVICE, 100, 40),
        HitReport(CacheHitSource.EXTERNAL_UNSPECIFIED, 60, 12),
    )


@dataclass(frozen=True)
class OutsideState(KVCacheSpec):
    """A recurrent kind of another package, which shares no class with ours."""

    num_heads = 1
    tokens_per_state = -1
    state_content_size_bytes = 64
    page_size_bytes = 64
    keeps_aligned_states = True
    kv_cache_spec_kind = KVCacheSpecKind.MAMBA

    def max_memory_usage_bytes(self, vllm_config: object) -> int:
        return 2 * self.page_size_bytes


@dataclass(frozen=True)
class OutsideWhole(KVCacheSpec):
    """A kind of another package that keeps every token, which shares no class with ours."""

    num_heads = 1
    tokens_per_state = 1
    state_content_size_bytes = 64
    page_size_bytes = 64
    keeps_all_tokens = True
    kv_cache_spec_kind = KVCacheSpecKind.UNKNOWN

    def max_memory_usage_bytes(self, vllm_config: object) -> int:
        return 2 * self.page_size_bytes


def test_a_kind_from_outside_that_keeps_every_token_may_be_cut_anywhere() -> None:
    config = KVCacheConfig(9, [], [KVCacheGroupSpec(["w"], OutsideWhole(block_size=4))])
    assert CacheShape.from_config(config, 4, 4).can_cut_anywhere


def test_recurrent_kinds_are_known_by_what_they_say_of_themselves() -> None:
    groups = [KVCacheGroupSpec(["a"], full(4)), KVCacheGroupSpec(["s"], OutsideState(block_size=16))]
    shape = CacheShape.from_config(KVCacheConfig(9, [], groups), 16, 4)
    assert shape == CacheShape.from_config(
        KVCacheConfig(9, [], [groups[0], KVCacheGroupSpec(["s"], mamba(16))]), 16, 4
    )
    assert shape.state_block_tokens == 16
    assert shape.overwrites_state
