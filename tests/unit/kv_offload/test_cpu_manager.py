"""`CPUOffloadingManager`: which content is in which chunk, what goes first, resets and events."""

from __future__ import annotations

import pytest

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    TierMatcher,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tier_filter import TierFilter

CTX = ReqContext("r")


def key(number: int) -> OffloadKey:
    return make_offload_key(bytes([number]) * 32, 0)  # type: ignore[arg-type]


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def store(manager: CPUOffloadingManager, *numbers: int) -> list[int]:
    made = manager.prepare_store(keys(*numbers), CTX)
    assert made is not None
    manager.complete_store(made.keys_to_store, CTX)
    assert isinstance(made.store_spec, CPULoadStoreSpec)
    return made.store_spec.block_ids


def found(manager: CPUOffloadingManager, *numbers: int) -> list[LookupResult]:
    return [manager.lookup(one, CTX) for one in keys(*numbers)]


def test_content_is_found_once_it_has_arrived() -> None:
    manager = CPUOffloadingManager(num_chunks=4)
    made = manager.prepare_store(keys(1, 2), CTX)
    assert made is not None
    assert (list(made.keys_to_store), list(made.evicted_keys)) == (keys(1, 2), [])
    assert found(manager, 1, 2, 3) == [LookupResult.HIT_PENDING, LookupResult.HIT_PENDING, LookupResult.MISS]
    with pytest.raises(KeyError):
        manager.prepare_load(keys(1), CTX)
    manager.complete_store(keys(1), CTX)
    manager.complete_store(keys(2), CTX, success=False)
    assert found(manager, 1, 2) == [LookupResult.HIT, LookupResult.MISS]
    again = manager.prepare_store(keys(1, 3), CTX)
    assert again is not None
    assert list(again.keys_to_store) == keys(3)


def test_the_least_recently_used_goes_and_what_is_used_stays() -> None:
    manager = CPUOffloadingManager(num_chunks=3)
    store(manager, 1, 2, 3)
    # Of a chain its first block is worth most.
    manager.touch(keys(1, 2, 3), CTX)
    made = manager.prepare_store(keys(4), CTX)
    assert made is not None
    assert list(made.evicted_keys) == keys(3)
    manager.complete_store(keys(4), CTX)
    loading = manager.prepare_load(keys(1, 2), CTX)
    assert len(loading.block_ids) == 2
    assert manager.prepare_store(keys(5, 6), CTX) is None
    assert found(manager, 1, 2, 4) == [LookupResult.HIT] * 3
    manager.complete_load(keys(1, 2), CTX)
    # What is offered itself is never what goes.
    made = manager.prepare_store(keys(2, 5, 6), CTX)
    assert made is not None
    assert set(made.evicted_keys) == set(keys(1, 4))


def test_a_reset_forgets_all_and_gives_back_what_was_in_use_when_it_is_flushed() -> None:
    manager = CPUOffloadingManager(num_chunks=3)
    store(manager, 1, 2)
    manager.prepare_load(keys(1), CTX)
    manager.prepare_store(keys(3), CTX)
    manager.reset_cache()
    assert found(manager, 1, 2, 3) == [LookupResult.MISS] * 3
    assert manager.prepare_store(keys(4, 5), CTX) is None
    assert len(store(manager, 4)) == 1
    manager.on_reset_flushed()
    assert sorted(store(manager, 5, 6)) != []
    assert found(manager, 4, 5, 6) == [LookupResult.HIT] * 3
    with pytest.raises(ValueError, match="num_chunks must be positive, got 0"):
        CPUOffloadingManager(num_chunks=0)


def test_events_say_what_came_and_went() -> None:
    manager = CPUOffloadingManager(num_chunks=2, enable_events=True)
    store(manager, 1, 2)
    store(manager, 3)
    manager.reset_cache()
    told = [(list(event.keys), event.removed, event.medium) for event in manager.take_events()]
    assert told == [
        (keys(1, 2), False, "CPU"), (keys(1), True, "CPU"), (keys(3), False, "CPU"), (keys(2, 3), True, "CPU"),
    ]  # fmt: skip
    assert not list(manager.take_events())
    silent = CPUOffloadingManager(num_chunks=2)
    store(silent, 1)
    assert not list(silent.take_events())


def test_a_request_that_wants_other_tiers_finds_nothing() -> None:
    manager = CPUOffloadingManager(num_chunks=2)
    store(manager, 1)
    for medium, answer in ((Medium.CPU, LookupResult.HIT), (Medium.STORAGE, LookupResult.MISS)):
        ctx = ReqContext("r", load_tier_filter=TierFilter((TierMatcher(medium),)))
        assert manager.lookup(key(1), ctx) is answer
    assert manager.get_load_source(key(1), CTX) == ("CPU", "LOCAL")
    assert manager.get_load_source(key(2), CTX) is None
