"""The worker half of the simple CPU offload, the aggregator and the runner's connector calls, driven by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.public_api.by_hand import kv_config, vllm_config
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator, yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.simple_kv_offload import sizing
from vllm.v1.simple_kv_offload import worker as offload_worker
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
from vllm.v1.simple_kv_offload.metrics import MetricName, SimpleCPUOffloadPromMetrics, SimpleCPUOffloadStats
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

BLOCKS, LAYERS = 6, 2


def layered() -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Two layers with a tensor each: as many bytes per block as `page_size_bytes` says."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    page = spec.page_size_bytes
    names = [f"layer{i}" for i in range(LAYERS)]
    placed = [
        KVCacheTensor(size=page * BLOCKS, layers=[name], layer_stride=0, block_stride=page) for name in names
    ]
    caches = {name: torch.zeros(BLOCKS, page, dtype=torch.int8) for name in names}
    return KVCacheConfig(BLOCKS, placed, [KVCacheGroupSpec(names, spec)]), caches


@pytest.fixture
def worker() -> Iterator[SimpleCPUOffloadWorker]:
    config, caches = layered()
    made = SimpleCPUOffloadWorker(None, config, 4 * 2 * 128)
    made.register_kv_caches(caches)
    yield made
    made.shutdown()


def test_worker_without_an_engine(worker: SimpleCPUOffloadWorker) -> None:
    assert isinstance(offload_worker.PIN_MEMORY, bool)
    assert worker.num_cpu_blocks == 4
    assert worker.device == torch.device("cpu")
    assert set(worker.gpu_kv_caches) == {"layer0", "layer1"}
    assert [tuple(region.shape) for region in worker.cpu_kv_caches.values()] == [(4, 128), (4, 128)]
    assert all(region.dtype is torch.int8 for region in worker.cpu_kv_caches.values())
    assert not any(region.any() for region in worker.cpu_kv_caches.values())


def test_store_and_load(worker: SimpleCPUOffloadWorker) -> None:
    for index, region in enumerate(worker.gpu_kv_caches.values()):
        region[2] = 7 + index
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata(store_event=0, store_gpu_blocks=[2], store_cpu_blocks=[1])
    )
    worker.wait_for_save()
    worker.clear_connector_metadata()
    reports: dict[int, int] = {}
    deadline = time.monotonic() + 5
    while not reports and time.monotonic() < deadline:
        report = worker.build_connector_worker_meta()
        reports = {} if report is None else report.completed_store_events
    assert reports == {0: 1}
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata(
            load_event=0, load_gpu_blocks=[5], load_cpu_blocks=[1], load_event_to_reqs={0: ["a", "b"]}
        )
    )
    worker.start_load_kv()
    worker.wait_for_save()
    worker.clear_connector_metadata()
    received: set[str] = set()
    while not received and time.monotonic() < deadline:
        received = worker.get_finished(set())[1] or set()
    assert received == {"a", "b"}
    assert [int(region[5].unique()) for region in worker.gpu_kv_caches.values()] == [7, 8]


class Recorder:
    """A mover of the caller's own."""

    def __init__(self) -> None:
        self.copies: list[tuple[Any, ...]] = []
        self.is_shut_down = False

    def launch_copy(
        self,
        src: list[int],
        dst: list[int],
        is_store: bool,
        event_idx: int,
        events: list[Any],
        wait: Any = None,
    ) -> None:
        self.copies.append((list(src), list(dst), is_store, event_idx))

        class Done:
            def query(self) -> bool:
                return True

        events.append((event_idx, Done()))

    def shutdown(self) -> None:
        self.is_shut_down = True


def test_the_mover_can_be_replaced(worker: SimpleCPUOffloadWorker) -> None:
    own = worker._backend
    assert own is not None
    recorder = Recorder()
    worker._backend = recorder
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata(
            load_event=3,
            load_gpu_blocks=[1],
            load_cpu_blocks=[2],
            load_event_to_reqs={3: ["r"]},
            store_event=5,
            store_gpu_blocks=[4],
            store_cpu_blocks=[3],
        )
    )
    worker.start_load_kv()
    worker.wait_for_save()
    assert recorder.copies == [([2], [1], False, 3), ([4], [3], True, 5)]
    assert worker.get_finished(set()) == (None, {"r"})
    report = worker.build_connector_worker_meta()
    assert report is not None
    assert report.completed_store_events == {5: 1}
    own.shutdown()
    worker.shutdown()
    assert recorder.is_shut_down
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-offload")]


def test_block_counts_of_a_worker() -> None:
    config, caches = layered()
    with pytest.raises(ValueError, match="num_cpu_blocks"):
        SimpleCPUOffloadWorker(None, config, 2 * 256, num_cpu_blocks=0)
    made = SimpleCPUOffloadWorker(None, config, 2 * 256, num_cpu_blocks=3)
    with pytest.raises(ValueError, match="num_cpu_blocks"):
        made.register_kv_caches(caches)
    assert sizing.sync_num_offload_blocks_across_workers(5) == 5
    assert sizing.dist is torch.distributed
    assert sizing.gpu_total_bytes(config) == 2 * 128 * BLOCKS


def offload_config(**extra: Any) -> VllmConfig:
    return vllm_config(
        kv_transfer_config=KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
    )


def test_connector_halves() -> None:
    config, caches = layered()
    scheduler_half = SimpleCPUOffloadConnector(
        offload_config(cpu_bytes_to_use=1024), KVConnectorRole.SCHEDULER, config
    )
    assert scheduler_half.scheduler_manager is not None
    assert scheduler_half.scheduler_manager.num_cpu_blocks == 4
    assert scheduler_half.worker_handler is None
    assert scheduler_half.requires_kv_delivery is False
    assert scheduler_half.role is KVConnectorRole.SCHEDULER
    worker_half = SimpleCPUOffloadConnector(offload_config(num_cpu_blocks=3), KVConnectorRole.WORKER, config)
    assert worker_half.scheduler_manager is None
    worker_half.register_kv_caches(caches)
    assert worker_half.get_aligned_num_cpu_blocks() == 3
    assert worker_half._connector_metadata is None
    metadata = SimpleCPUOffloadMetadata()
    worker_half.bind_connector_metadata(metadata)
    assert worker_half._connector_metadata is metadata
    worker_half.clear_connector_metadata()
    assert not worker_half.has_connector_metadata()
    worker_half.shutdown()
    assert SimpleCPUOffloadConnector.supports_sleep_mode(KVTransferConfig()) is True
    assert KVConnectorBase_V1.supports_sleep_mode(KVTransferConfig()) is True


def test_the_example_connector_keeps_its_files_where_it_is_told_else_in_tmp(tmp_path: Path) -> None:
    for extra, folder in (({}, Path("/tmp")), ({"shared_storage_path": str(tmp_path)}, tmp_path)):
        config = vllm_config(
            kv_transfer_config=KVTransferConfig(
                kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=extra
            )
        )
        connector = ExampleConnector(config, KVConnectorRole.SCHEDULER, kv_config(num_blocks=4))
        assert connector._storage == folder
        for _ in range(2):  # nothing to do, however often
            assert connector.unregister_kv_caches() is None  # type: ignore[func-returns-value]
            assert connector.restore_kv_caches() is None  # type: ignore[func-returns-value]
        connector.shutdown()


def test_agreed_block_counts_reach_the_scheduler() -> None:
    config, _ = layered()
    vllm = offload_config(cpu_bytes_to_use=1024)
    vllm.cache_config.simple_cpu_offload_num_blocks = 2
    half = SimpleCPUOffloadConnector(vllm, KVConnectorRole.SCHEDULER, config)
    assert half.scheduler_manager is not None
    assert half.scheduler_manager.num_cpu_blocks == 2


def test_factory() -> None:
    assert {"SimpleCPUOffloadConnector", "MultiConnector", "ExampleConnector"} <= set(
        KVConnectorFactory._registry
    )
    with pytest.raises(ValueError, match="already"):
        KVConnectorFactory.register_connector("MultiConnector", "m", "C")
    assert KVConnectorFactory.get_connector_class_by_name("MultiConnector") is MultiConnector
    with pytest.raises(ValueError):
        KVConnectorFactory.get_connector_class_by_name("NoSuchConnector")
    name = "PublicApiTestConnector"
    KVConnectorFactory.register_connector(name, ExampleConnector.__module__, "ExampleConnector")
    try:
        config = vllm_config(kv_transfer_config=KVTransferConfig(kv_connector=name, kv_role="kv_both"))
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_config())
        assert isinstance(made, ExampleConnector)
    finally:
        KVConnectorFactory._registry.pop(name)


def multi() -> MultiConnector:
    children = [
        {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1024},
        }
    ] * 2
    config = vllm_config(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": children},
        )
    )
    return MultiConnector(vllm_config=config, role=KVConnectorRole.SCHEDULER, kv_cache_config=layered()[0])


def test_multi_connector() -> None:
    made = multi()
    assert len(made._connectors) == 2
    assert made.sub_connectors == made._connectors
    assert made._requests_to_connector == {}
    assert made._all_support_hma is True
    assert MultiKVConnectorMetadata((SimpleCPUOffloadMetadata(),)).extra_async_saves is None
    stats = SimpleCPUOffloadStats()
    assert MultiKVConnectorStats({"a": stats})["a"] is stats


def output(**fields: Any) -> ModelRunnerOutput:
    return ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(**fields))


def test_reports_of_all_workers() -> None:
    aggregator = KVOutputAggregator(expected_finished_count=2)
    assert aggregator._expected_finished_count == 2
    first = aggregator.aggregate(
        [
            output(finished_sending={"s"}, finished_recving={"r"}),
            output(finished_recving={"q"}, invalid_block_ids={3}),
        ]
    )
    assert first is not None
    assert first.kv_connector_output is not None
    assert first.kv_connector_output.finished_recving is None
    assert first.kv_connector_output.invalid_block_ids == {3}
    assert aggregator._send_remaining_count == {"s": 1}
    assert aggregator._recv_remaining_count == {"r": 1, "q": 1}
    second = aggregator.aggregate([output(failed_recving={"r"}, finished_recving={"r"}), output()])
    assert second is not None
    assert second.kv_connector_output is not None
    assert second.kv_connector_output.finished_recving == {"r"}
    assert second.kv_connector_output.failed_recving == {"r"}
    assert aggregator._recv_remaining_count == {"q": 1}
    assert aggregator.aggregate([None, output(finished_recving={"q"})]) is None
    assert aggregator._recv_remaining_count == {"q": 1}
    aggregator.ft_defer_kv_connector_outputs([KVConnectorOutput(finished_recving={"q"})])
    third = aggregator.aggregate([output(), output()])
    assert third is not None
    assert third.kv_connector_output is not None
    assert third.kv_connector_output.finished_recving == {"q"}


def test_tables_of_a_step() -> None:
    new = NewRequestData("n", [1], [], None, None, ([1],), 0, None)
    cached = CachedRequestData(["c", "d"], {"d"}, [], {}, [None, ([2],)], [1, 1], [0, 0])
    step = SchedulerOutput([new], cached, {}, 0, {}, {}, set(), [])
    assert list(yield_req_data(step)) == [("n", ([1],), True), ("c", None, False), ("d", ([2],), True)]


def test_runner_calls_without_a_connector() -> None:
    step = SchedulerOutput.make_empty()
    with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step) as report:
        assert report is None
    assert (
        KVConnectorModelRunnerMixin.kv_connector_no_forward(step, vllm_config()) is EMPTY_MODEL_RUNNER_OUTPUT
    )


def test_runner_calls_of_an_active_connector() -> None:
    config, caches = layered()
    half = SimpleCPUOffloadConnector(offload_config(num_cpu_blocks=3), KVConnectorRole.WORKER, config)
    half.register_kv_caches(caches)
    active = ActiveKVConnector(half)
    assert active.kv_connector is half
    assert active._disabled is False
    assert active._pending_load_kwargs is None
    step = SchedulerOutput.make_empty()
    step.kv_connector_metadata = SimpleCPUOffloadMetadata()
    assert active.no_forward(step) is EMPTY_MODEL_RUNNER_OUTPUT
    active._disabled = True
    assert active.no_forward(SchedulerOutput.make_empty()) is EMPTY_MODEL_RUNNER_OUTPUT
    half.shutdown()


def test_offload_metrics_on_a_page() -> None:
    registry = CollectorRegistry()

    def bound(cls: Any) -> Any:
        return lambda **kwargs: cls(registry=registry, **kwargs)

    metrics = SimpleCPUOffloadPromMetrics(
        offload_config(),
        {Gauge: bound(Gauge), Counter: bound(Counter), Histogram: bound(Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    assert MetricName.USED_BLOCKS in metrics._defs
    stats = SimpleCPUOffloadStats()
    stats.increase_counter(MetricName.SAVE_OUTCOMES, 2, ("stored",))
    stats.set_gauge(MetricName.USED_BLOCKS, 3)
    stats.set_gauge(MetricName.INFO, 1, ("cpu", "false", "true", "9"))
    metrics.observe(stats.data)
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value(MetricName.SAVE_OUTCOMES, {**labels, "outcome": "stored"}) == 2
    assert registry.get_sample_value(MetricName.USED_BLOCKS, labels) == 3
    info = {"backend": "cpu", "page_cache": "false", "lazy_offload": "true", "capacity_blocks": "9"}
    assert registry.get_sample_value(MetricName.INFO, {**labels, **info}) == 1
    assert (0, MetricName.USED_BLOCKS, ()) in metrics._metrics


def test_example_connector_records() -> None:
    assert ReqMeta(torch.tensor([1]), torch.tensor([2]), True, []).is_store
