"""Pauses that empty the caches: copies under way hold blocks for a while, which is no failure."""

import re
from concurrent.futures import Future
from typing import Any

import pytest

from tests.helpers.sched import ManualClock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.async_control import joined_resets
from vllm.v1.engine.core_control import CLEAR_TIMEOUT_S, CoreControl
from vllm.v1.kv_connector_types import KVConnectorMetadata
from vllm.v1.metrics.cache_hit_source import CacheHitSource


class Connector:
    """Something is withdrawn once per reset of it."""

    def __init__(self) -> None:
        self.withdrawn: list[KVConnectorMetadata] = []

    def take_withdrawal(self) -> KVConnectorMetadata | None:
        return self.withdrawn.pop() if self.withdrawn else None


class Scheduler:
    """Blocks are held during the first `held` resets."""

    connector: Connector | None = None

    def __init__(self, held: int) -> None:
        self.held = held
        self.resets: list[tuple[bool, bool]] = []
        self.by_tier: list[tuple[object, ...]] = []
        self.unfinished = False
        self.pause_state = PauseState.UNPAUSED
        self.reset_prefix_cache_report = None

    def has_unfinished_requests(self) -> bool:
        return self.unfinished

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        self.resets.append((running, connector))
        if connector and self.connector is not None:
            self.connector.withdrawn.append(KVConnectorMetadata())
        return len(self.resets) > self.held

    cache_tiers = tuple(CacheHitSource(name) for name in ("device", "host", "disk"))

    def reset_tiers(self, tiers: list[CacheHitSource], running: bool) -> bool:
        self.by_tier.append((*tiers, running))
        return True

    def flush_events(self) -> None:
        pass

    def get_kv_connector(self) -> Connector | None:
        return self.connector

    def reset_encoder_cache(self) -> None:
        pass


class Executor:
    def __init__(self) -> None:
        self.withdrawals = 0
        self.problem: str | Exception | None = None
        self.slept: list[int] = []
        self.woken: list[list[str] | None] = []

    def apply_kv_withdrawal(self, withdrawal: KVConnectorMetadata) -> str | None:
        self.withdrawals += 1
        if isinstance(self.problem, Exception):
            raise self.problem
        return self.problem

    def reset_mm_cache(self) -> None:
        pass

    def check_sleep(self, level: int) -> None:
        if level == 2:
            raise ValueError("no level 2 here")

    def sleep(self, level: int) -> None:
        self.slept.append(level)

    def wake_up(self, tags: list[str] | None) -> None:
        self.woken.append(tags)


def world(held: int) -> tuple[CoreControl, Any, Any, ManualClock]:
    scheduler, executor, clock = Scheduler(held), Executor(), ManualClock()
    nothing = lambda: None  # noqa: E731
    return CoreControl(scheduler, executor, nothing, nothing, clock), scheduler, executor, clock  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_nothing_held_is_done_at_once(mode: Any) -> None:
    control, scheduler, _, _ = world(held=0)
    assert control.pause(mode) is None
    assert scheduler.resets == [(True, True)]
    assert control.is_paused()


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_a_pause_completes_when_copies_have_given_their_blocks_back(mode: Any) -> None:
    control, scheduler, _, _ = world(held=3)
    scheduler.unfinished = mode == "wait"
    paused = control.pause(mode)
    assert isinstance(paused, Future)
    scheduler.unfinished = False
    for _ in range(3):
        assert not paused.done()
        control.tick()
    control.tick()
    assert paused.result(0) is None
    assert scheduler.resets == [(True, True)] * 4
    control.tick()
    assert len(scheduler.resets) == 4


def test_pfx_14_a_reset_is_answered_when_the_workers_have_carried_it_out() -> None:
    control, scheduler, executor, _ = world(held=0)
    scheduler.connector = Connector()
    assert control.reset_prefix_cache(reset_connector=False)
    assert executor.withdrawals == 0
    assert control.reset_prefix_cache(reset_connector=True)
    assert executor.withdrawals == 1


@pytest.mark.parametrize(
    ("problem", "told"),
    [("/d/kv.index cannot be written", "/d/kv.index cannot"), (OSError(5, "gone"), "OSError: .*gone")],
)
def test_pfx_15_a_reset_that_a_restart_may_undo_is_no_success(problem: Any, told: str) -> None:
    control, scheduler, executor, _ = world(held=0)
    scheduler.connector, executor.problem = Connector(), problem
    result = control.reset_prefix_cache_detailed(reset_connector=True)
    assert result["success"] is False
    assert re.match(f"the next engine may find it again: {told}", result["reason"])


@pytest.mark.parametrize(
    ("tiers", "all_below", "emptied"),
    [
        (["host"], False, ("host",)),
        (["disk", "device", "disk"], False, ("device", "disk")),
        (["device"], True, ("device", "host", "disk")),
        (["host"], True, ("host", "disk")),
    ],
)
def test_tiers_are_emptied_from_the_device_outwards(
    tiers: list[str], all_below: bool, emptied: tuple[str, ...]
) -> None:
    control, scheduler, executor, _ = world(held=0)
    scheduler.connector = Connector()
    scheduler.connector.withdrawn.append(KVConnectorMetadata())
    assert control.reset_prefix_cache_detailed(True, all_below, tiers)["success"]
    assert scheduler.by_tier == [(*emptied, True)]
    assert not scheduler.resets
    assert executor.withdrawals == 1


@pytest.mark.parametrize(
    ("tiers", "told"),
    [(["tape", "host", "p2p"], "tiers names 'tape', 'p2p'; this engine has device, host, disk"),
     ([], "tiers names none; this engine has")],
)  # fmt: skip
def test_a_tier_that_is_not_there_is_refused_before_anything_is_emptied(tiers: list[str], told: str) -> None:
    control, scheduler, _, _ = world(held=0)
    with pytest.raises(ValueError, match=told):
        control.reset_prefix_cache_detailed(True, True, tiers)
    assert not scheduler.by_tier


def test_several_engines_answer_a_reset_together() -> None:
    def answer(success: bool, dropped: int, held: int) -> dict[str, Any]:
        reason = None if success else f"{held} blocks are held"
        host = {
            "tier": "host",
            "asked": True,
            "success": success,
            "blocks_dropped": dropped,
            "blocks_held": held,
        }
        far = {"tier": "external_unspecified", "asked": False, "success": None, "blocks_dropped": None}
        return {
            "success": success, "reason": reason, "held_blocks": held, "connector_reset": None,
            "tiers": [{**host, "reason": reason}, far],
        }  # fmt: skip

    first, second = answer(True, 3, 0), answer(False, 4, 2)
    assert joined_resets([first]) == first
    told = joined_resets([first, second])
    assert told.pop("engines") == [first, second]
    (host, _) = joined_resets([first, second], ["host"])["tiers"]
    assert (host["blocks_dropped"], host["blocks_held"], host["success"]) == (4, 2, False), "one pool of both"
    reason = "engine 1: 2 blocks are held"
    assert told == {
        "success": False, "reason": reason, "held_blocks": 2, "connector_reset": None,
        "tiers": [
            {"tier": "host", "asked": True, "success": False, "blocks_dropped": 7, "blocks_held": 2, "reason": reason},
            {"tier": "external_unspecified", "asked": False, "success": None, "blocks_dropped": None},
        ],
    }  # fmt: skip


def test_without_clearing_nothing_is_reset() -> None:
    control, scheduler, _, _ = world(held=3)
    assert control.pause("keep", clear_cache=False) is None
    assert scheduler.resets == []


def test_blocks_that_never_come_back_fail_the_pause_with_the_reason() -> None:
    control, _, _, clock = world(held=99)
    paused = control.pause("abort")
    assert isinstance(paused, Future)
    clock.now += CLEAR_TIMEOUT_S
    control.tick()
    with pytest.raises(RuntimeError, match="blocks are in use"):
        paused.result(0)
    assert control.is_paused()


def test_a_resume_gives_the_clearing_up() -> None:
    control, scheduler, _, _ = world(held=99)
    paused = control.pause("abort")
    assert isinstance(paused, Future)
    control.resume()
    with pytest.raises(RuntimeError, match="resumed"):
        paused.result(0)
    control.tick()
    assert len(scheduler.resets) == 1


def test_a_later_pause_takes_the_place_of_one_that_still_clears() -> None:
    control, _, _, _ = world(held=2)
    first, second = control.pause("abort"), control.pause("abort")
    assert isinstance(first, Future)
    assert isinstance(second, Future)
    assert first.cancelled()
    control.tick()
    assert second.result(0) is None


@pytest.mark.parametrize("release", [False, True])
def test_memory_goes_only_after_the_last_copy(release: bool) -> None:
    control, _, executor, _ = world(held=1)
    if release:
        control.pause("abort", clear_cache=False)
    done = control.release_kv_cache_memory() if release else control.sleep(1)
    assert isinstance(done, Future)
    assert executor.slept == []
    control.tick()
    assert done.result(0) is None
    assert executor.slept == [1]


def test_a_refused_sleep_stops_nothing() -> None:
    control, scheduler, executor, _ = world(held=0)
    with pytest.raises(ValueError, match="no level 2 here"):
        control.sleep(2)
    assert not control.is_paused()
    assert (scheduler.resets, executor.slept) == ([], [])


@pytest.mark.parametrize("how", ["resume", "wake_up", "wake_up scheduling"])
@pytest.mark.parametrize("release", [False, True])
def test_nothing_is_scheduled_while_memory_is_away(how: str, release: bool) -> None:
    control, _, executor, _ = world(held=0)
    control.pause() if release else control.sleep(1)
    assert not release or control.release_kv_cache_memory() is None
    assert control.is_sleeping()
    if how == "resume":
        control.resume()
    else:
        control.wake_up(["scheduling"] if " " in how else None)
    assert executor.woken == [None]
    assert not control.is_sleeping()
    assert not control.is_paused()
    control.resume()
    assert executor.woken == [None]


def test_memory_taken_back_in_parts_goes_on_with_the_last() -> None:
    control, _, executor, _ = world(held=0)
    control.sleep(1)
    control.wake_up(["weights"])
    assert control.is_sleeping()
    assert control.is_paused()
    control.wake_up(["kv_cache"])
    assert executor.woken == [["weights"], None]
    assert not control.is_sleeping()
    assert not control.is_paused()


def test_tags_of_memory_that_is_there_leave_a_pause_alone() -> None:
    control, _, executor, _ = world(held=0)
    control.pause("keep")
    control.wake_up(["weights"])
    assert control.is_paused()
    assert executor.woken == []
