"""Random engine lives with a spec from outside that fails at random: books balance, content is right, all comes to rest."""

from __future__ import annotations

import random

import pytest

from tests.helpers.offload_rig import Rig, full, mamba, prompt, ring, window
from tests.helpers.scripted_offload import Script, new_script, scripted
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, OffloadPolicy

SPECS = {
    "full": [full()],
    "window": [full(), window()],
    "state": [full(), mamba()],
    "scratch": [ring(6), full()],
}
WORKER_METHODS = ("submit_store", "submit_load", "get_finished", "wait")
MANAGER_METHODS = ("lookup", "prepare_load", "prepare_store", "on_new_request", "touch", "take_events")


def outside_half(rig: Rig) -> OffloadingConnectorScheduler:
    manager = rig.manager
    assert isinstance(manager, OffloadingConnectorScheduler)
    return manager


def assert_at_rest(rig: Rig, script: Script) -> None:
    rig.assert_at_rest()
    script.manager.assert_at_rest()
    half = outside_half(rig)
    for kept in (
        half._requests,
        half._whole,
        half._refused,
        half._open_stores,
        half._open_loads,
        half.plugin_tier.taken,
    ):
        assert not kept
    assert not half._flushed_stores
    assert not half._flushed_loads
    assert not half._is_flushing
    for rank in range(rig.ranks):
        mover = rig.worker(rank)._backend
        for kept in (mover._open, mover._waiting, mover._missing, mover._failed):  # type: ignore[union-attr]
            assert not kept


def storm(rng: random.Random, script: Script, kind: str) -> None:
    chaos = rng.choice([0.0, 0.05, 0.2])
    script.capacity = rng.choice([6, 20, 64])
    script.policy = rng.choice(list(OffloadPolicy))
    script.refuses = lambda: rng.random() < chaos
    script.fails = lambda: rng.random() < chaos
    script.choose = lambda keys: [key for key in keys if rng.random() >= chaos]

    def answer(key: OffloadKey) -> LookupResult | None:
        return rng.choice([LookupResult.RETRY, LookupResult.MISS]) if rng.random() < chaos / 4 else None

    script.answer = answer
    rig = Rig(
        SPECS[kind],
        connector_config=scripted(offload_prompt_only=rng.random() < 0.5),
        device_blocks=rng.choice([14, 24, 40]),
        held=False,
        ranks=rng.choice([1, 2]),
        events=rng.random() < 0.3,
        config_changes={"looks_ahead": rng.random() < 0.3},
    )
    live = []
    for count in range(60):
        act = rng.random()
        if act < 0.4:
            tokens = prompt(rng.randrange(4, 36), rng.randrange(3))
            name = f"q{count}" if act < 0.3 else f"again{count % 4}"
            if name not in rig.scheduler.requests:
                rig.outputs.pop(name, None)
                live.append(rig.add(tokens, rng.randrange(1, 12), request_id=name))
        elif act < 0.45 and live:
            rig.abort(rng.choice(live))
        elif act < 0.48:
            rig.scheduler.reset_prefix_cache(rng.random() < 0.5, True)
        elif act < 0.52:
            script.manager.drop([key for key in script.manager.ready if rng.random() < 0.3])
        elif act < 0.56:
            rig.fail_step()
        elif act < 0.6 and rng.random() < chaos * 4:
            script.raises = {rng.choice((*WORKER_METHODS, *MANAGER_METHODS))}
        else:
            script.raises = set()
        if act > 0.9:
            rig.clock.now += 3.0
        running = [request.request_id for request in rig.scheduler.running]
        rig.step(copies=rng.random() < 0.4, nan=running[:1] if rng.random() < 0.02 else ())
        if rng.random() < 0.3:
            for worker in script.workers:
                worker.run(rng.randrange(3))
    script.raises, script.refuses, script.fails = set(), lambda: False, lambda: False
    script.answer = lambda key: None
    rig.run()
    while rig.manager.has_pending_work():
        rig.step()
    for request in {request.request_id: request for request in live}.values():
        rig.check_output(request)
    assert_at_rest(rig, script)
    script.manager.drop(list(script.manager.ready))
    rig.close()
    rig.connector.shutdown()
    assert script.manager.is_down


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("seed", range(5))
def test_books_balance_and_content_is_right(seed: int, kind: str) -> None:
    storm(random.Random(f"{kind} {seed}"), new_script(), kind)
