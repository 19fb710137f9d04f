"""What every connector must survive, both halves together: hits, aborts, preemptions, resets, repeated asks.

The model writes bytes that depend on the whole prefix and checks all it reads, so that a connector which delivers
anything but the right bytes fails the run. A new connector joins `CONNECTORS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.offload_rig import Rig, full, mamba, prompt, window
from vllm.config import KVTransferConfig
from vllm.v1.request import Request


def simple(**extra: Any) -> Callable[[Path], KVTransferConfig]:
    def make(folder: Path) -> KVTransferConfig:
        options = {key: f"{folder}/kv" if key == "disk_path" else value for key, value in extra.items()}
        return KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"num_cpu_blocks": 48, **options},
            kv_load_failure_policy="recompute",
        )

    return make


def example(folder: Path) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(folder / "shared")},
    )


def multi(folder: Path) -> KVTransferConfig:
    child = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "connectors": [
                {**child, "kv_connector_extra_config": {"num_cpu_blocks": 6}},
                {**child, "kv_connector_extra_config": {"num_cpu_blocks": 48}},
            ]
        },
        kv_load_failure_policy="recompute",
    )


DISK = {
    "kv_offload_backend": "disk",
    "disk_path": "?",
    "disk_capacity_bytes": 1 << 20,
    "use_page_cache": True,
}
CONNECTORS: dict[str, Callable[[Path], KVTransferConfig]] = {
    "example": example,
    "multi": multi,
    "offload-disk": simple(**DISK),
    "offload-eager": simple(),
    "offload-lazy": simple(lazy_offload=True),
}
SINGLE_GROUP_AND_WORKER = {"example"}
SPECS = {"full": [full()], "window": [full(), window()], "state": [full(), mamba()]}


@pytest.fixture(params=list(CONNECTORS))
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(specs: str = "full", **changes: Any) -> Rig:
        if request.param in SINGLE_GROUP_AND_WORKER:
            specs, changes["ranks"] = "full", 1
        config = CONNECTORS[request.param](tmp_path)
        rigs.append(Rig(SPECS[specs], held=changes.pop("held", False), connector_config=config, **changes))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def at_rest(rig: Rig) -> None:
    """Nothing is held and nothing is pending."""
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert not pool.leases
    assert pool.get_num_free_blocks() == rig.device_blocks - 1
    assert not rig.scheduler.requests
    assert not rig.connector.has_pending_push_work()


@pytest.mark.parametrize("specs", list(SPECS))
def test_cold_and_warm_outputs_are_equal(make_rig: Callable[..., Rig], specs: str) -> None:
    rig = make_rig(specs, device_blocks=20)
    for _ in range(2):
        for seed in range(4):
            rig.generate(prompt(21, seed), max_tokens=5)
    at_rest(rig)


def test_a_lookup_may_be_repeated(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(device_blocks=14)
    for seed in range(3):
        rig.generate(prompt(25, seed), max_tokens=1)
    rig.scheduler.kv_cache_manager.reset_prefix_cache()
    request = rig.make_request(prompt(25))
    answers = [rig.connector.get_num_new_matched_tokens(request, 0) for _ in range(3)]
    assert len(set(answers)) == 1
    rig.scheduler.add_request(request)
    rig.run()
    rig.check_output(request)
    at_rest(rig)


@pytest.mark.parametrize("after", range(5))
def test_abort_at_any_step(make_rig: Callable[..., Rig], after: int) -> None:
    rig = make_rig()
    rig.generate(prompt(25), max_tokens=2)
    rig.scheduler.kv_cache_manager.reset_prefix_cache()
    request = rig.add(prompt(25), max_tokens=6)
    for _ in range(after):
        rig.step(copies=False)
    rig.abort(request)
    rig.abort(request)
    rig.run()
    rig.generate(prompt(25), max_tokens=6)
    at_rest(rig)


@pytest.mark.parametrize("after", range(1, 5))
def test_preempt_at_any_step(make_rig: Callable[..., Rig], after: int) -> None:
    rig = make_rig()
    rig.generate(prompt(25), max_tokens=2)
    rig.scheduler.kv_cache_manager.reset_prefix_cache()
    request = rig.add(prompt(25), max_tokens=6)
    for _ in range(after):
        rig.step(copies=False)
    if request in rig.scheduler.running:
        rig.scheduler._preempt_request(request, 0.0)
    rig.run()
    rig.check_output(request)
    at_rest(rig)


@pytest.mark.parametrize("after", range(4))
def test_reset_at_any_step(make_rig: Callable[..., Rig], after: int) -> None:
    rig = make_rig()
    rig.generate(prompt(25), max_tokens=2)
    rig.scheduler.kv_cache_manager.reset_prefix_cache()
    request = rig.add(prompt(25), max_tokens=6)
    for _ in range(after):
        rig.step(copies=False)
    rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    rig.run()
    rig.check_output(request)
    at_rest(rig)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("specs", list(SPECS))
def test_a_busy_engine_with_everything_at_once(make_rig: Callable[..., Rig], specs: str, ranks: int) -> None:
    rig = make_rig(specs, device_blocks=26, ranks=ranks, config_changes={"max_num_batched_tokens": 12})
    rng = random.Random(f"{specs} {ranks}")
    live: list[Request] = []
    for step in range(60):
        if len(live) < 5 and rng.random() < 0.5:
            live.append(rig.add(prompt(rng.choice((7, 13, 21, 30)), rng.randrange(3)), rng.randint(1, 6)))
        rig.step(copies=rng.random() < 0.3)
        if live and rng.random() < 0.1:
            rig.abort(rng.choice(live))
        if rig.scheduler.running and rng.random() < 0.1:
            rig.scheduler._preempt_request(rng.choice(rig.scheduler.running), float(step))
        if rng.random() < 0.03:
            rig.scheduler.reset_prefix_cache(reset_connector=True)
        live = [request for request in live if not request.is_finished()]
    rig.run()
    for request in rig.requests.values():
        rig.check_output(request)
    at_rest(rig)


def test_shutdown_is_idempotent_and_ends_threads_and_files(
    make_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make_rig()
    rig.generate(prompt(9), max_tokens=1)
    for active in rig.workers:
        active.kv_connector.shutdown()
        active.kv_connector.shutdown()
    rig.connector.shutdown()
    assert not [path for path in tmp_path.iterdir() if path.is_file()]
