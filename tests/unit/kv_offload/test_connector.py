"""`OffloadingConnector` with a spec from outside: what its manager and workers are asked, and what their faults cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.offload_rig import STEP_FAILED, full, mamba, prompt, ring, window
from tests.helpers.scripted_offload import ShelfSpec, new_script
from tests.helpers.scripted_rig import TOKENS, half, make, settle, stored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import plugin_tier
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.plugin_tier import FAILED_LOAD_BAN_S
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    WAIT_MAX_S,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadPolicy,
    PrepareStoreOutput,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

MANAGER_METHODS = (
    "lookup", "prepare_load", "prepare_store", "on_new_request", "touch", "complete_load", "complete_store",
    "on_request_finished", "take_events", "on_schedule_end", "has_pending_work", "on_reset_flushed", "get_stats",
    "config_info", "shutdown",
)  # fmt: skip
WORKER_METHODS = ("submit_store", "submit_load", "get_finished", "wait", "worker_shutdown")


def test_what_is_stored_comes_back() -> None:
    script = new_script()
    rig = make()
    stored(rig, script)
    assert len(script.manager.ready) == 5
    again = rig.generate(TOKENS)
    assert again.num_cached_tokens == 20
    (job,) = [job for job in script.workers[0].all_jobs.values() if not job.is_store]
    assert (job.blocks.group_sizes, job.blocks.block_indices) == ((5,), (0,))
    settle(rig, script)


@pytest.mark.parametrize("answer", [LookupResult.RETRY, LookupResult.HIT_PENDING])
def test_a_put_off_answer_is_waited_for_so_long_and_no_longer(answer: LookupResult) -> None:
    script = new_script()
    rig = make()
    stored(rig, script)
    last = list(script.manager.ready)[2]
    script.answer = lambda key: answer if key == last else None
    request = rig.add(TOKENS)
    for _ in range(3):
        rig.step()
    assert not request.num_computed_tokens
    assert not rig.steps[-1].num_scheduled_tokens
    rig.clock.now += WAIT_MAX_S / 2
    rig.step()
    assert not request.num_computed_tokens
    rig.clock.now += WAIT_MAX_S / 2
    rig.run()
    rig.check_output(request)
    assert request.num_cached_tokens == 8
    settle(rig, script)


def test_an_answer_that_comes_while_it_is_waited_for_is_used() -> None:
    script = new_script()
    rig = make()
    stored(rig, script)
    script.answer = lambda key: LookupResult.RETRY
    request = rig.add(TOKENS)
    rig.step()
    rig.clock.now += WAIT_MAX_S - 0.1
    script.answer = lambda key: None
    rig.run()
    assert request.num_cached_tokens == 20
    # The next one has its own time.
    script.answer = lambda key: LookupResult.RETRY
    rig.evict_device()
    later = rig.add(TOKENS)
    rig.step()
    assert not rig.steps[-1].num_scheduled_tokens
    script.answer = lambda key: None
    rig.run()
    assert later.num_cached_tokens == 20
    settle(rig, script)


@pytest.mark.parametrize("name", [*MANAGER_METHODS, *WORKER_METHODS])
def test_an_exception_never_ends_the_engine(name: str) -> None:
    script = new_script(raises={name})
    rig = make(events=True)
    for _ in range(2):
        request = rig.add(TOKENS)
        for _ in range(12):
            rig.clock.now += WAIT_MAX_S
            rig.step()
        assert request.is_finished()
        rig.check_output(request)
        if not rig.manager.has_pending_work():
            rig.evict_device()
        rig.connector.get_kv_connector_stats()
    rig.scheduler.reset_prefix_cache(False, True)
    rig.close()
    rig.connector.shutdown()
    assert script.calls[name] or name in ("submit_load", "prepare_load", "touch", "complete_load", "wait")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("lookup", True),
        ("lookup", None),
        ("prepare_load", None),
        ("prepare_store", ["x"]),
        ("prepare_store", PrepareStoreOutput(None, None, None)),  # type: ignore[arg-type]
        ("on_new_request", None),
        ("take_events", [None]),
        ("get_stats", {"vllm:shelf_fill": 3}),
        ("get_stats", {"vllm:shelf_lookups_total": {(): 1}}),
        ("config_info", None),
    ],
)
def test_an_answer_of_another_kind_costs_no_more_than_an_exception(name: str, answer: Any) -> None:
    script = new_script()
    rig = make(events=True)
    stored(rig, script)
    script.answers = {name: answer}
    rig.generate(TOKENS)
    rig.connector.get_kv_connector_stats()
    script.answers = {}
    settle(rig, script)


@pytest.mark.parametrize("how", ["raises", "refuses", "fails"])
def test_a_load_that_fails_is_computed_and_not_tried_again_soon(how: str) -> None:
    script = new_script()
    rig = make()
    stored(rig, script)
    if how == "raises":
        script.raises = {"prepare_load"}
    else:
        setattr(script, how, lambda: True)
    request = rig.generate(TOKENS)
    assert not script.manager.script.errors
    script.raises, script.refuses, script.fails = set(), lambda: False, lambda: False
    settle(rig, script)
    rig.evict_device()
    before = script.calls["prepare_load"]
    assert rig.generate(TOKENS).num_cached_tokens == 0
    assert script.calls["prepare_load"] == before
    settle(rig, script)
    rig.evict_device()
    rig.clock.now += FAILED_LOAD_BAN_S
    assert rig.generate(TOKENS).num_cached_tokens == 20
    rig.check_output(request)
    settle(rig, script)


def test_one_of_two_loads_of_a_step_that_cannot_be_prepared_fails_alone() -> None:
    script = new_script()
    rig = make()
    first, second = prompt(22, 1), prompt(22, 2)
    for tokens in (first, second):
        rig.generate(tokens)
    settle(rig, script)
    rig.evict_device()
    original = script.manager.prepare_load

    def prepare(keys: Any, ctx: Any) -> Any:
        if ctx.req_id == "bad":
            raise KeyError("gone")
        return original(keys, ctx)

    script.manager.prepare_load = prepare  # type: ignore[method-assign]
    bad, good = rig.add(first, request_id="bad"), rig.add(second, request_id="good")
    rig.run()
    assert (good.num_cached_tokens, bad.num_cached_tokens) == (20, 0)
    settle(rig, script)


@pytest.mark.parametrize(
    ("choose", "count"),
    [
        (lambda keys: keys, 5),
        (lambda keys: keys[1::2], 2),
        (lambda keys: [], 0),
        (lambda keys: keys[::-1], 0),
        (lambda keys: [*keys[:1], b"not offered" + bytes(30)], 0),
        (lambda keys: [keys[0], keys[0]], 0),
    ],
    ids=["all", "some", "none", "backwards", "strange", "twice"],
)
def test_what_the_manager_takes_is_stored_and_no_more(choose: Callable[[Any], Any], count: int) -> None:
    script = new_script(choose=choose)
    rig = make()
    request = rig.generate(TOKENS)
    for _ in range(5):
        rig.step()
    assert len(script.manager.ready) == len(rig.in_tier(request)) == count
    ledger = rig.manager.store_side.ledger
    assert (ledger.done, ledger.dropped, ledger.in_flight) == (count, 5 - count, 0)
    rig.assert_at_rest()
    assert not script.manager.storing
    rig.evict_device()
    rig.generate(TOKENS)


def test_room_is_made_by_eviction_and_what_went_is_not_found() -> None:
    script = new_script(capacity=6)
    rig = make()
    rig.generate(prompt(22, 1))
    settle(rig, script)
    rig.generate(prompt(22, 2))
    settle(rig, script)
    assert len(script.manager.ready) == 6
    assert [len(rig.in_tier(rig.requests[name])) for name in ("r0", "r1")] == [1, 5]
    rig.evict_device()
    assert rig.generate(prompt(22, 2)).num_cached_tokens == 20
    assert rig.generate(prompt(22, 1)).num_cached_tokens == 0
    settle(rig, script)


@pytest.mark.parametrize("how", ["refuses", "fails"])
def test_a_store_that_fails_is_told_and_not_found(how: str) -> None:
    script = new_script()
    setattr(script, how, lambda: True)
    rig = make()
    rig.generate(TOKENS)
    settle(rig, script)
    assert not script.manager.ready
    told = [entry[2] for entry in script.log if entry[0] == "complete_store"]
    assert told
    assert not any(told)


def test_a_request_that_ends_in_an_error_bans_what_it_stored() -> None:
    script = new_script()
    rig = make()
    request = rig.add(TOKENS, 8)
    for _ in range(3):
        rig.step()
    assert script.manager.ready
    rig.step(nan=[request.request_id])
    settle(rig, script)
    assert script.manager.ready
    assert half(rig).plugin_tier.mirror.banned.keys() == script.manager.ready.keys()
    rig.clock.now += 10 * FAILED_LOAD_BAN_S
    rig.evict_device()
    assert rig.generate(TOKENS).num_cached_tokens == 0
    assert not script.calls["prepare_load"]
    settle(rig, script)
    # Once the manager has let go of it, it is stored anew and used.
    script.manager.drop(list(script.manager.ready))
    rig.evict_device()
    rig.generate(TOKENS)
    settle(rig, script)
    rig.evict_device()
    assert rig.generate(TOKENS).num_cached_tokens == 20


@pytest.mark.parametrize(("resets", "count"), [(False, 7), (True, 1)])
def test_whole_requests_are_stored_at_their_end(resets: bool, count: int) -> None:
    script = new_script(policy=OffloadPolicy.REQUEST_LEVEL)
    rig = make(options={"offload_prompt_only": False})
    request = rig.add(TOKENS, 10)
    for _ in range(6):
        rig.step()
    if resets:
        rig.scheduler.reset_prefix_cache(False, True)
    rig.step()
    assert not script.calls["prepare_store"]
    rig.run()
    settle(rig, script)
    (offer,) = [entry for entry in script.log if entry[0] == "prepare_store"]
    assert offer[2] == request.request_id
    assert len(offer[1]) == len(script.manager.ready) == count
    (job,) = script.workers[0].all_jobs.values()
    assert (job.blocks.group_sizes, job.blocks.block_indices) == ((count,), (7 - count,))


def test_whole_requests_wait_for_their_end_also_where_the_tier_has_lost_something() -> None:
    script = new_script(policy=OffloadPolicy.REQUEST_LEVEL)
    rig = make(options={"offload_prompt_only": False})
    tier = half(rig).plugin_tier
    rig.add(TOKENS, 10)
    for _ in range(6):
        rig.step()
        tier.guard_losses += 1
    assert not script.calls["prepare_store"]
    rig.run()
    assert script.calls["prepare_store"] == 1


@pytest.mark.parametrize(
    "answer", [PrepareStoreOutput([7], ShelfSpec([1]), []), PrepareStoreOutput([], ShelfSpec([]), [7])]
)
def test_keys_that_are_none_are_a_refusal(answer: PrepareStoreOutput) -> None:
    script = new_script(answers={"prepare_store": answer})
    rig = make()
    rig.generate(TOKENS)
    settle(rig, script)
    assert script.calls["prepare_store"]
    assert not half(rig)._open_stores


def test_more_bad_blocks_than_can_be_remembered_close_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_tier, "BANNED_MAX", 3)
    script = new_script()
    rig = make()
    stored(rig, script)
    mirror = half(rig).plugin_tier.mirror
    keys = sorted(script.manager.ready)
    mirror.ban(keys[:2])
    mirror.ban(keys[2:4], until=5.0)
    assert sorted(mirror.banned) == keys[:2], "those for a while go first"
    mirror.ban(keys[2:4])
    assert mirror.is_closed
    lookups = script.calls["lookup"]
    rig.generate(TOKENS)
    assert script.calls["lookup"] == lookups
    assert rig.connector.reset_cache() is not None
    assert not mirror.is_closed


@pytest.mark.parametrize("by_tier", [False, True])
def test_a_reset_during_copies_voids_them_and_is_flushed_once_they_ended(by_tier: bool) -> None:
    script = new_script()
    rig = make()
    stored(rig, script)
    rig.add(TOKENS)
    rig.add(prompt(22, 7))
    rig.step(copies=False)
    rig.step(copies=False)
    assert half(rig)._open_loads
    assert half(rig)._open_stores
    assert rig.scheduler.cache_tiers == (CacheHitSource.DEVICE, CacheHitSource.EXTERNAL_UNSPECIFIED)
    tiers = [CacheHitSource.EXTERNAL_UNSPECIFIED]
    assert not (rig.connector.reset_tiers(tiers) if by_tier else rig.connector.reset_cache())
    assert (script.calls["reset_cache"], script.calls["on_reset_flushed"]) == (1, 0)
    rig.run()
    settle(rig, script)
    assert script.calls["on_reset_flushed"] == 1
    rig.evict_device()


def test_after_a_reset_that_failed_nothing_old_is_found() -> None:
    script = new_script()
    rig = make()
    stored(rig, script)
    script.raises = {"reset_cache"}
    assert rig.connector.reset_cache() is False
    script.raises = set()
    assert rig.generate(TOKENS).num_cached_tokens == 0
    settle(rig, script)
    assert rig.connector.reset_cache() is True
    rig.evict_device()
    assert rig.generate(TOKENS).num_cached_tokens == 0
    settle(rig, script)
    rig.evict_device()
    assert rig.generate(TOKENS).num_cached_tokens == 20


def test_an_aborted_load_is_not_prepared_before_it_was_ordered_and_completed_after() -> None:
    script = new_script()
    rig = make()
    stored(rig, script)
    request = rig.add(TOKENS)
    rig.step(copies=False)
    assert script.calls["prepare_load"] == 1
    rig.abort(request)
    rig.run()
    settle(rig, script)
    assert script.calls["complete_load"] == 1
    # Orders of a step that fails before the workers see them end as failed.
    rig.add(TOKENS)
    rig.fail_step()
    rig.run()
    settle(rig, script)


def test_all_layer_groups_take_part_with_exact_positions() -> None:
    script = new_script()
    rig = make([ring(6), full(), window(), mamba()], device_blocks=64)
    stored(rig, script)
    places = half(rig).config.groups
    assert [group.group_id for group in places] == [1, 2, 3]
    (config, *_) = script.configs
    assert [(g.group_id, g.tokens_per_block, g.sliding_window_size_in_chunks) for g in config.groups] == [
        (1, 4, None), (2, 4, 2), (3, 4, 1),
    ]  # fmt: skip
    rig.generate(TOKENS)
    (job,) = [job for job in script.workers[0].all_jobs.values() if not job.is_store]
    assert (job.blocks.group_sizes, job.blocks.block_indices) == ((5, 2, 1), (0, 3, 4))
    (load,) = [entry for entry in script.log if entry[0] == "prepare_load"]
    assert [get_offload_group_idx(key) for key in load[1]] == [1] * 5 + [2] * 2 + [3]
    for job in script.workers[0].all_jobs.values():
        assert len(job.blocks.group_sizes) == 3
    settle(rig, script)


@pytest.mark.parametrize("is_bound", [False, True])
def test_jobs_of_a_step_that_fails_are_never_started_and_end_as_failed(is_bound: bool) -> None:
    script = new_script()
    rig = make()
    stored(rig, script)
    other = rig.add(prompt(40, 3), 6)
    rig.step()
    loading = rig.add(TOKENS)
    started = len(script.workers[0].all_jobs)
    if is_bound:
        rig.fail_step()
    else:
        output = rig.scheduler.schedule()
        rig._follow(output)
        rig._collect(rig.scheduler.fail_step(output, STEP_FAILED))
    assert script.calls["prepare_load"] == 1
    assert len(script.workers[0].all_jobs) == started
    rig.run()
    settle(rig, script)
    assert script.calls["complete_load"] == 1
    for request in (other, loading):
        rig.check_output(request)


def test_the_manager_is_asked_for_steps_it_needs() -> None:
    script = new_script()
    rig = make()
    assert not rig.connector.has_pending_push_work()
    script.manager.has_pending_work = lambda: True  # type: ignore[method-assign]
    assert rig.connector.has_pending_push_work()


def test_a_manager_whose_lock_fails_is_used_without_it() -> None:
    script = new_script()
    rig = make()
    script.manager.inner_lock = None  # type: ignore[assignment]
    script.manager.enter = lambda name: script.manager  # type: ignore[method-assign]
    stored_before = rig.generate(TOKENS)
    rig.check_output(stored_before)
    for _ in range(5):
        rig.step()
    assert len(script.manager.ready) == 5
