"""`OffloadingConnector` with a spec from outside: its figures, events and log, and the end of its life."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.helpers.offload_rig import prompt
from tests.helpers.scripted_offload import new_script
from tests.helpers.scripted_rig import TOKENS, make, settle, stored
from vllm.distributed.kv_event_types import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    parse_tier_filter,
)


def metric_types(registry: CollectorRegistry) -> dict[Any, Any]:
    return {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}


def test_figures_reach_the_metrics_page() -> None:
    script = new_script(capacity=33)
    rig = make()
    rig.connector.get_kv_connector_stats()
    stored(rig, script)
    registry = CollectorRegistry()
    sink = OffloadingConnector.build_prom_metrics(rig.config, metric_types(registry), ["engine"], {0: ["0"]})
    stats = rig.connector.get_kv_connector_stats()
    assert stats is not None
    sink.observe(stats.data)
    page = generate_latest(registry).decode()
    for line in (
        'vllm:kv_offload_spec_info{engine="0",shelves="33",spec_name="ScriptedSpec"} 1.0',
        'vllm:shelf_lookups_total{engine="0",kind="some"} 2.0',
        'vllm:shelf_fill{engine="0"} 0.5',
        'vllm:shelf_waits_bucket{engine="0",le="1.0"} 1.0',
        'vllm:shelf_waits_bucket{engine="0",le="+Inf"} 2.0',
    ):
        assert line in page
    assert "shelf_unknown" not in page


def test_without_events_nothing_is_remembered_of_them() -> None:
    tracker = OffloadingEventsTracker({}, self_describing=True, is_enabled=False)
    assert tracker.convert([OffloadingEvent([b"k" * 36], "SHELF", removed=False)]) == []
    assert tracker.present() == []


@pytest.mark.parametrize("describes", [False, True])
def test_events_are_the_managers(describes: bool) -> None:
    script = new_script()
    rig = make(events=True, options={"self_describing_kv_events": describes})
    rig.generate(TOKENS)
    settle(rig, script)
    rig.step()
    mine = [event for event in rig.publisher.events if getattr(event, "medium", None) == "SHELF"]
    assert len(mine) == 5
    for place, event in enumerate(mine):
        assert isinstance(event, BlockStored)
        assert (event.locality, event.ownership, event.group_idx) == ("REMOTE", "me", 0)
        assert event.kv_cache_spec_kind == "full_attention"
        assert event.token_ids == (TOKENS[4 * place : 4 * place + 4] if describes else [])
        assert (event.parent_block_hash is not None) == (describes and place > 0)
    assert list(rig.connector.present_events()) == mine
    # A reset that the manager does not tell of is told all the same, once.
    script.manager.has_events = False
    seen = len(rig.publisher.events)
    rig.scheduler.reset_prefix_cache(False, True)
    assert not list(rig.connector.present_events())
    rig.generate(prompt(3))
    gone = [e for e in rig.publisher.events[seen:] if isinstance(e, BlockRemoved) and e.medium == "SHELF"]
    assert [event.block_hashes for event in gone] == [event.block_hashes for event in mine]


@pytest.mark.parametrize("is_stored_again", [False, True])
def test_a_manager_that_tells_late_what_a_reset_removed_is_not_heard_twice(is_stored_again: bool) -> None:
    tracker = OffloadingEventsTracker({}, self_describing=False)
    key = b"k" * 32 + bytes(4)
    came, went = (OffloadingEvent([key], "SHELF", removed) for removed in (False, True))
    tracker.convert([came])
    tracker.clear()
    told = [type(event) for event in tracker.convert([])]
    assert told == [BlockRemoved]
    late = tracker.convert([went] if not is_stored_again else [came, went])
    assert [type(event) for event in late] == ([BlockStored, BlockRemoved] if is_stored_again else [])
    assert [type(event) for event in tracker.convert([went])] == [BlockRemoved], (
        "what is new is told as it is"
    )


@pytest.mark.parametrize("is_reset", [False, True])
def test_what_consumers_have_as_stored_is_not_told_a_second_time(is_reset: bool) -> None:
    tracker = OffloadingEventsTracker({}, self_describing=False)
    key = b"k" * 32 + bytes(4)
    came, went = (OffloadingEvent([key], "SHELF", removed) for removed in (False, True))
    elsewhere = OffloadingEvent([key], "ATTIC", removed=False)
    assert [type(event) for event in tracker.convert([came])] == [BlockStored]
    if is_reset:
        tracker.clear()  # and it is stored again before anybody heard of that
    assert [event.medium for event in tracker.convert([came, came, elsewhere])] == ["ATTIC"]
    assert {event.medium for event in tracker.present()} == {"SHELF", "ATTIC"}
    told = tracker.convert([went, came, came])
    assert [type(event) for event in told] == [BlockRemoved, BlockStored]


def test_sleep_and_shutdown_with_jobs_open() -> None:
    script = new_script()
    rig = make()
    request = rig.add(TOKENS)
    rig.step(copies=False)
    rig.step(copies=False)
    assert script.workers[0].jobs
    rig.workers[0].kv_connector.unregister_kv_caches()
    assert not script.workers[0].jobs
    rig.run()
    rig.check_output(request)
    settle(rig, script)
    rig.add(prompt(22, 5))
    rig.step(copies=False)
    rig.step(copies=False)
    assert script.workers[0].jobs
    rig.close()
    rig.close()
    rig.connector.shutdown()
    assert script.workers[0].is_down
    assert script.manager.is_down
    assert script.calls["worker_shutdown"] == 1


def test_a_request_that_wants_other_tiers_takes_nothing_from_one_that_loads() -> None:
    script = new_script()
    rig = make()
    stored(rig, script)
    original = script.manager.lookup
    script.manager.lookup = lambda key, ctx: (  # type: ignore[method-assign]
        original(key, ctx) if ctx.load_tier_filter.allows("CPU") else LookupResult.MISS
    )
    elsewhere = {"load_tier_filter": [{"medium": "STORAGE"}]}
    first = rig.add(TOKENS)
    second = rig.make_request(TOKENS, request_id="other")
    second.kv_transfer_params = elsewhere
    second.load_tiers = parse_tier_filter(elsewhere)
    rig.scheduler.add_request(second)
    rig.run()
    assert not rig.manager.load_side.failures
    assert (first.num_cached_tokens, second.num_cached_tokens) == (20, 0)
    settle(rig, script)


def test_a_manager_that_always_fails_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    new_script(raises={"lookup"})
    rig = make()
    caplog.clear()
    for seed in range(20):
        rig.generate(prompt(22, seed))
    told = [
        record.getMessage() for record in caplog.records if "lookup of the offloading" in record.getMessage()
    ]
    assert [message.rpartition(" ")[2] for message in told] == ["1", "2", "4", "8", "16"]
    assert all(record.exc_info for record in caplog.records if "lookup of the" in record.getMessage())
