"""What every connector must survive, both halves together: hits, aborts, preemptions, resets, repeated asks.

The model writes bytes that depend on the whole prefix and checks all it reads, so that a connector which delivers
anything but the right bytes fails the run. A new connector joins `CONNECTORS`. What one connector does beyond that is
tested beside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.helpers.offload_rig import Rig, full, mamba, prompt, ring, window
from vllm.config import KVTransferConfig
from vllm.distributed.kv_event_types import MEDIUM_GPU, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorPrometheus
from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.kv_connector_types import KVConnectorTransferResults
from vllm.v1.request import Request, RequestStatus


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
        kv_load_failure_policy="recompute",
    )


def native(**extra: Any) -> Callable[[Path], KVTransferConfig]:
    def make(folder: Path) -> KVTransferConfig:
        tier = {
            "type": "fs",
            "disk_path": f"{folder}/kv",
            "disk_capacity_bytes": 1 << 20,
            "use_page_cache": True,
        }
        tiers = (
            {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]} if extra.get("tiers") else {}
        )
        return KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 1 << 12, **tiers, **(extra.get("spec") or {})},
            kv_load_failure_policy="recompute",
        )

    return make


def outside(folder: Path) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="ShelfConnector",
        kv_connector_module_path="tests.helpers.outside_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
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
SPEC = {"spec_name": "CPUOffloadingSpec", "spec_module_path": "vllm.v1.kv_offload.cpu.spec"}
CHAIN = {"disk_tier": True, "disk_path": "?", "disk_capacity_bytes": 1 << 20, "use_page_cache": True}
CONNECTORS: dict[str, Callable[[Path], KVTransferConfig]] = {
    "example": example,
    "multi": multi,
    "native": native(),
    "native-chain": native(tiers=True),
    "native-spec": native(spec=SPEC),
    "offload-chain": simple(**CHAIN),
    "offload-arc": simple(eviction_policy="arc"),
    "offload-disk": simple(**DISK),
    "offload-eager": simple(),
    "offload-lazy": simple(lazy_offload=True),
    "outside": outside,
}
SINGLE_GROUP = {"example", "outside"}
SINGLE_WORKER = {"example"}
# Files that other engines share: there before a step is known to be good, and still there after a reset.
SHARED_FILES = {"example"}
# Their copies cannot be held back by the test.
OWN_THREADS = {"offload-disk", "native-spec"}
HINTS = [
    None,
    {"pin": True, "ttl": 3},
    {"priority": "low"},
    {"priority": "high", "id": "a", "superseded_by": "b"},
    {"id": "b"},
]
SPECS = {
    "full": [full()],
    "window": [full(), window()],
    "state": [full(), mamba()],
    "scratch": [full(), ring(6)],
}


@pytest.fixture(params=list(CONNECTORS))
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(specs: str = "full", **changes: Any) -> Rig:
        if request.param in SINGLE_GROUP:
            specs = "full"
        if request.param in SINGLE_WORKER:
            changes["ranks"] = 1
        if request.param in OWN_THREADS:
            changes["held"] = False
        config = CONNECTORS[request.param](tmp_path)
        rigs.append(Rig(SPECS[specs], held=changes.pop("held", False), connector_config=config, **changes))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def warm(rig: Rig, *, seeds: int = 1, length: int = 25) -> None:
    """Prompts that only the connector knows."""
    for seed in range(seeds):
        rig.generate(prompt(length, seed), max_tokens=2)
    # Other content brings lazy copies about.
    for seed in range(10, 13):
        rig.generate(prompt(length, seed), max_tokens=1)
    assert rig.scheduler.kv_cache_manager.reset_prefix_cache()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The connector under test."""
    return str(request.node.callspec.params["make_rig"])


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
            tokens = prompt(rng.choice((7, 13, 21, 30)), rng.randrange(3))
            live.append(rig.add(tokens, rng.randint(1, 6), hint=rng.choice(HINTS)))
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


def test_fewer_tokens_than_offered_may_be_taken(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(device_blocks=14)
    warm(rig)
    ask = rig.connector.get_num_new_matched_tokens

    def ask_for_less(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens, is_async = ask(request, num_computed_tokens)
        return (num_tokens and max(0, num_tokens - 8)), is_async and num_tokens > 8

    rig.connector.get_num_new_matched_tokens = ask_for_less  # type: ignore[method-assign]
    request = rig.generate(prompt(25), max_tokens=3)
    assert request.num_cached_tokens == 16
    rig.connector.get_num_new_matched_tokens = ask  # type: ignore[method-assign]
    rig.generate(prompt(25), max_tokens=3)
    at_rest(rig)


def test_none_of_the_tokens_offered_need_be_taken(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(device_blocks=14)
    warm(rig)
    ask = rig.connector.get_num_new_matched_tokens

    def ask_for_nothing(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens, _ = ask(request, num_computed_tokens)
        return (None if num_tokens is None else 0), False

    rig.connector.get_num_new_matched_tokens = ask_for_nothing  # type: ignore[method-assign]
    assert rig.generate(prompt(25), max_tokens=3).num_cached_tokens == 0
    at_rest(rig)


def fail_first_load(rig: Rig, name: str) -> list[str]:
    """The first load of every rank counts as failed, whatever the bytes are; returns who it was."""
    failed: list[str] = []
    active = rig.workers[0]
    results, errors = (
        active.kv_connector.get_transfer_results,
        active.kv_connector.get_block_ids_with_load_errors,
    )

    def failing_results(finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = results(finished_req_ids)
        if not failed and found.finished_recving:
            failed.extend(sorted(found.finished_recving))
            found.failed_recving = set(failed)
        return found

    def failing_blocks() -> set[int]:
        if failed:
            return errors()
        output = rig.steps[-1]
        for new in output.scheduled_new_reqs:
            if new.num_computed_tokens:
                failed.append(new.req_id)
                return {new.block_ids[0][1]}
        return errors()

    active.kv_connector.get_transfer_results = failing_results  # type: ignore[method-assign]
    if name == "example":
        active.kv_connector.get_block_ids_with_load_errors = failing_blocks  # type: ignore[method-assign]
    return failed


@pytest.mark.parametrize("specs", ["full", "window", "state"])
def test_a_failed_load_costs_its_request_a_recompute_and_others_nothing(
    make_rig: Callable[..., Rig], name: str, specs: str
) -> None:
    rig = make_rig(specs)
    warm(rig, seeds=2)
    failed = fail_first_load(rig, name)
    requests = [rig.add(prompt(25, seed), max_tokens=4) for seed in (0, 1, 5)]
    rig.run()
    assert failed
    for request in requests:
        assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        assert len(rig.outputs[request.request_id]) == 4
        rig.check_output(request)
    rig.generate(prompt(25), max_tokens=3)
    at_rest(rig)


def test_an_end_in_an_error_leaves_nothing_that_others_hit(make_rig: Callable[..., Rig], name: str) -> None:
    rig = make_rig()
    request = rig.add(prompt(25), max_tokens=6)
    rig.step(nan=[request.request_id])
    rig.run()
    assert request.status is RequestStatus.FINISHED_ERROR
    again = rig.generate(prompt(25), max_tokens=2)
    assert again.num_cached_tokens == 0 or name in SHARED_FILES
    at_rest(rig)


@pytest.mark.parametrize("after", range(1, 5))
def test_a_failed_step_ends_its_requests_and_nothing_stays_open(
    make_rig: Callable[..., Rig], after: int
) -> None:
    rig = make_rig()
    warm(rig)
    request = rig.add(prompt(25), max_tokens=6)
    for _ in range(after):
        rig.step(copies=False)
    rig.fail_step()
    rig.run()
    assert request.is_finished()
    rig.generate(prompt(25), max_tokens=6)
    at_rest(rig)


def test_a_reset_while_copies_are_under_way_ends_all_hits(make_rig: Callable[..., Rig], name: str) -> None:
    rig = make_rig(held=True)
    first = rig.add(prompt(25), max_tokens=3)
    for _ in range(4):
        rig.step(copies=False)
    rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    again = rig.make_request(prompt(25))
    if name not in SHARED_FILES:
        assert rig.connector.get_num_new_matched_tokens(again, 0) == (0, False)
    rig.run()
    rig.check_output(first)
    at_rest(rig)


def test_scratch_blocks_are_neither_read_nor_written(make_rig: Callable[..., Rig], name: str) -> None:
    """Scratch of running requests changes at random between steps: no copy may bring older bytes back or hand them on."""
    rig = make_rig("scratch", events=True)
    mine = [index for index, spec in enumerate(rig.specs) if isinstance(spec, CircularBufferSpec)]
    patterns: dict[int, int] = {}
    warm(rig, seeds=2)
    rng = random.Random(3)
    for step in range(60):
        if step % 6 == 0:
            rig.add(prompt(25, rng.randrange(4)), max_tokens=5)
        rig.step(copies=rng.random() < 0.5)
        for group in mine:
            held = {block for row in rig.rows.values() for block in row.tables[group] if block}
            memory = rig.memories[0][f"layer{group}"]
            for block in held & set(patterns):
                assert torch.all(memory[block] == patterns[block]), f"scratch block {block} was written"
            patterns = {block: rng.randrange(1, 100) for block in held}
            for block, pattern in patterns.items():
                memory[block] = pattern
    rig.run()
    for request in rig.requests.values():
        rig.check_output(request)
    stored = [event for event in rig.publisher.events if isinstance(event, BlockStored)]
    assert not [event for event in stored if event.group_idx in mine]
    if name not in SINGLE_GROUP:
        assert [event for event in stored if event.medium != MEDIUM_GPU]
    at_rest(rig)


def test_figures_survive_the_way_to_their_sinks(make_rig: Callable[..., Rig]) -> None:
    """Plain values, the connector's own class rebuilds them, they add up, and no counter ever falls."""
    rig = make_rig(device_blocks=14, config_changes={"max_num_batched_tokens": 12})
    rig.config.cache_config.num_gpu_blocks = 14
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    sink = KVConnectorPrometheus(rig.config, types, ["model_name", "engine"], {0: ["m", "0"]})
    log = KVConnectorLogging(rig.config.kv_transfer_config)
    seen: dict[str, float] = {}
    for seed in (0, 1, 2, 0, 1, 2):
        rig.generate(prompt(25, seed), max_tokens=1)
        stats = rig.connector.get_kv_connector_stats()
        if stats is None:
            continue
        payload = msgspec.msgpack.decode(msgspec.msgpack.encode(_plain(stats.to_dict())), strict=False)
        assert payload
        rebuilt = type(rig.connector).build_kv_connector_stats(stats.to_dict())
        assert rebuilt is not None
        assert not rebuilt.is_empty()
        log.observe(stats.to_dict())
        sink.observe(stats.to_dict())
        for line in generate_latest(registry).decode().splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#") and "_total" in name:
                assert float(value) >= seen.get(name, 0), name
                seen[name] = float(value)
    lines: list[tuple[object, ...]] = []
    log.log(lambda *args: lines.append(args))
    assert bool(lines) == bool(seen)
    at_rest(rig)


def _plain(value: Any) -> Any:
    """Label tuples as the text they are on the wire; everything else must be plain already."""
    if isinstance(value, dict):
        return {(repr(k) if isinstance(k, tuple) else k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float) else _plain(value.to_dict())


def test_reports_about_unknown_requests_are_ignored(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    active = rig.workers[0].kv_connector
    results = active.get_transfer_results

    def with_strangers(finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = results(finished_req_ids)
        found.finished_recving = (found.finished_recving or set()) | {"stranger"}
        return found

    active.get_transfer_results = with_strangers  # type: ignore[method-assign]
    rig.generate(prompt(25), max_tokens=2)
    at_rest(rig)
