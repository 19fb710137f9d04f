"""The GPU worker and runner on a host without a GPU: refusals, memory arithmetic, when graphs are captured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.engine_configs import engine_config
from tests.helpers.hand_scheduler import HandScheduler, start_worker
from vllm.v1.worker import gpu_model_runner, gpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

GIB = 2**30


class FakeCuda(SimpleNamespace):
    """The part of `torch.cuda` that the worker uses, over a device of 10 GiB."""

    def __init__(self) -> None:
        super().__init__(free=9 * GIB, reserved=2 * GIB, peak=3 * GIB, available=True, calls=[])

    def is_available(self) -> bool:
        return self.available

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return self.free, 10 * GIB

    def memory_reserved(self, device: object) -> int:
        return self.reserved

    def max_memory_allocated(self, device: object) -> int:
        return self.peak

    def get_device_name(self, device: object) -> str:
        return "test device"

    def device_count(self) -> int:
        return 1

    def __getattr__(self, name: str):
        return lambda *_: self.calls.append(name)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(gpu_worker.torch, "cuda", cuda)
    return cuda


def make_worker(**overrides) -> Worker:
    worker = Worker(engine_config(**{"kv_cache_memory_bytes": None, **overrides}), 0, 0, "")
    worker.device = torch.device("cpu")
    return worker


def test_no_device_is_said_clearly(cuda) -> None:
    cuda.available = False
    with pytest.raises(RuntimeError, match="VLLM_TARGET_DEVICE=cpu"):
        make_worker().init_device()


def test_a_rank_without_a_device_of_its_own_is_refused(cuda) -> None:
    config = engine_config(kv_cache_memory_bytes=None, data_parallel_size=2)
    config.parallel_config.become_replica(1)
    worker = Worker(config, config.parallel_config.first_local_rank, 0, "")
    told = r"data_parallel_size=2: rank 0 of replica 1 needs a GPU of its own \(cuda:1\), and this process sees 1"
    with pytest.raises(ValueError, match=told):
        worker.init_device()


def test_a_device_in_use_is_refused_unless_bytes_are_given(cuda) -> None:
    cuda.free = GIB
    with pytest.raises(ValueError, match=r"only 1\.00 of 10\.00 GiB are free"):
        make_worker().init_device()
    make_worker(kv_cache_memory_bytes=5).init_device()


def test_the_cache_gets_what_a_full_step_leaves(cuda) -> None:
    worker = make_worker(gpu_memory_utilization=0.8)
    worker.init_device()
    worker.load_model()
    cuda.free = 6 * GIB
    # 10 · 0.8 − 3 at the peak − (10 − 6 free − 2 of torch) of others
    assert worker.determine_available_memory() == 3 * GIB
    assert "reset_peak_memory_stats" in cuda.calls
    worker.vllm_config.cache_config.kv_cache_memory_bytes = 77
    assert worker.determine_available_memory() == 77
    worker.check_health()
    assert cuda.calls[-1] == "synchronize"


def test_the_runner_serves_a_model_without_graphs(monkeypatch) -> None:
    monkeypatch.setattr("vllm.v1.worker.cpu_worker.CPUModelRunner", GPUModelRunner)
    worker, plan = start_worker(engine_config(enforce_eager=False))
    runner = worker.model_runner
    assert isinstance(runner, GPUModelRunner)
    runner.capture_graphs()
    assert runner.graphs is None
    hand = HandScheduler(worker, plan)
    hand.add("a", [5, 6, 7])
    assert len(hand.run_alone("a", 3)) == 3


def test_graphs_are_captured_for_models_that_promise_to_be_safe(monkeypatch) -> None:
    monkeypatch.setattr("vllm.v1.worker.cpu_worker.CPUModelRunner", GPUModelRunner)
    worker, _ = start_worker(engine_config(enforce_eager=False))
    runner = worker.model_runner
    captured = []

    def capture(run):
        captured.append(run())
        return captured[-1], lambda: None

    monkeypatch.setattr(gpu_model_runner, "capture_cuda_graph", capture)
    model = SimpleNamespace(graph_safe_decode=True, forward=lambda ids, positions, meta: ids.unsqueeze(1))
    monkeypatch.setattr(runner, "model", model)
    runner.vllm_config.model_config.enforce_eager = True
    runner.capture_graphs()
    assert captured == []
    runner.vllm_config.model_config.enforce_eager = False
    runner.capture_graphs()
    assert [len(hidden) for hidden in captured] == [8, 4, 2, 1]
    ids, meta = runner.dummy_decode(3)
    assert meta.num_decodes == 3
    assert runner.run_model(ids, meta).shape == (3, 1)


def test_the_cpu_runner_needs_the_cpu() -> None:
    with pytest.raises(ValueError, match="needs a CPU device, got cuda"):
        CPUModelRunner(engine_config(), torch.device("cuda", 0))
