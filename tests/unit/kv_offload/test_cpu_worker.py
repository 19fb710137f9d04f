"""`CPUOffloadingWorker`: bytes come back as they were, whichever chunk they lay in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.scripted_offload import ShelfSpec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import canonical_caches
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingWorker

NUM_BLOCKS = 8


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def tensors(device: torch.device) -> list[torch.Tensor]:
    made = torch.arange(NUM_BLOCKS * 96, dtype=torch.int32).to(torch.int8).view(NUM_BLOCKS, 96).to(device)
    # Pieces of one block, as layers of a cache are.
    return [made[:, :64], made[:, 64:]]


@pytest.fixture
def worker(tensors: list[torch.Tensor]) -> Iterator[CPUOffloadingWorker]:
    made = CPUOffloadingWorker(
        canonical_caches({str(i): tensor for i, tensor in enumerate(tensors)}, 2), num_chunks=4
    )
    yield made
    made.shutdown()
    made.shutdown()


def gpu(*blocks: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, [len(blocks), 0], [0, 0])


def ended(worker: CPUOffloadingWorker, *jobs: int) -> list[tuple[int, bool, int | None]]:
    worker.wait(jobs)
    return sorted((r.job_id, r.success, r.transfer_size) for r in worker.get_finished())


def test_bytes_come_back(worker: CPUOffloadingWorker, tensors: list[torch.Tensor]) -> None:
    before = [tensor.clone() for tensor in tensors]
    assert worker.submit_store(5, gpu(1, 6), CPULoadStoreSpec([3, 0]))
    assert ended(worker, 5) == [(5, True, 2 * 96)]
    for tensor in tensors:
        tensor.zero_()
    assert worker.submit_load(6, CPULoadStoreSpec([0]), gpu(2), expedited=True)
    assert worker.submit_load(7, CPULoadStoreSpec([3]), gpu(1))
    assert ended(worker, 6, 7) == [(6, True, 96), (7, True, 96)]
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[2], old[6])
        assert torch.equal(tensor[1], old[1])
        assert not tensor[3:].any()
    assert worker.get_finished() == []


def test_the_host_memory_hears_of_stores_before_they_start(
    worker: CPUOffloadingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[list[int]] = []
    monkeypatch.setattr(worker._host, "use", used.append)
    worker.submit_store(1, gpu(1, 6), CPULoadStoreSpec([3, 0]))
    worker.submit_load(2, CPULoadStoreSpec([0]), gpu(2))
    assert used == [[3, 0]]


def test_what_cannot_be_copied_is_refused_or_fails(worker: CPUOffloadingWorker) -> None:
    assert not worker.submit_store(1, gpu(1), ShelfSpec([0]))
    assert not worker.submit_load(2, ShelfSpec([0]), gpu(1))
    assert worker.submit_store(3, gpu(1), CPULoadStoreSpec([4]))
    assert ended(worker, 3) == [(3, False, 96)]
    assert ended(worker, 99) == []
