"""Memory is there before a copy needs it, a bounded way ahead, and nothing in it changes."""

import ctypes
import mmap
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.mappings import resident_bytes
from tests.helpers.offload_parts import Byte, full
from tests.helpers.offload_rig import Rig, prompt
from tests.helpers.rank_rig import RankRig
from vllm import _custom_ops as ops
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.simple_kv_offload import host_buffer
from vllm.v1.simple_kv_offload.copy_backends import prefault, shared_host
from vllm.v1.simple_kv_offload.copy_backends.prefault import PIECE_BYTES, Prefault
from vllm.v1.simple_kv_offload.host_buffer import HostBuffer, aligned_zeros
from vllm.v1.simple_kv_offload.metadata import DiskOrder, SimpleCPUOffloadMetadata

ROWS, ROW_BYTES = 512, 100_000
AHEAD_ROWS = 100
PATIENCE_S = 30.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def there(region: torch.Tensor) -> int:
    return resident_bytes(region.data_ptr(), region.numel())


def faults_of_copy(target: torch.Tensor, rows: range) -> int:
    """Page faults of this thread while it writes rows."""
    source = torch.full((1, target.shape[1]), 3, dtype=torch.int8)
    to, where = torch.tensor(list(rows)), torch.zeros(len(rows), dtype=torch.int64)
    ops.copy_blocks(
        source.clone(), source, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    )
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ops.copy_blocks(target, source, to, where)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.fixture
def region() -> torch.Tensor:
    return aligned_zeros(ROWS, ROW_BYTES)


@pytest.fixture
def ahead(region: torch.Tensor) -> Iterator[Prefault]:
    made = Prefault([region], AHEAD_ROWS * ROW_BYTES)
    yield made
    made.close()


def test_rows_behind_those_in_use_are_there_and_not_more(region: torch.Tensor, ahead: Prefault) -> None:
    for last in (-1, 40, 200, 201, 300):
        ahead.use(last)
        sure = min(last + 1 + AHEAD_ROWS * 3 // 4, ROWS) * ROW_BYTES
        wait_until(lambda sure=sure: ahead.num_bytes >= sure)
        time.sleep(0.01)
        assert sure <= there(region) <= (last + 1 + AHEAD_ROWS) * ROW_BYTES + PIECE_BYTES
    ahead.use(ROWS - 1)
    wait_until(lambda: ahead.num_bytes == ROWS * ROW_BYTES)
    assert there(region) >= region.numel()


def small_pages() -> torch.Tensor:
    """Memory without huge pages, where each page that is not there is a fault."""
    return torch.frombuffer(mmap.mmap(-1, AHEAD_ROWS * ROW_BYTES), dtype=torch.int8).view(-1, ROW_BYTES)


def test_a_store_into_what_is_there_meets_no_page_fault() -> None:
    region = small_pages()
    ahead = Prefault([region], None)
    wait_until(lambda: ahead.num_bytes == region.numel())
    ahead.close()
    faults = faults_of_copy(region, range(AHEAD_ROWS))
    of_new_memory = faults_of_copy(small_pages(), range(AHEAD_ROWS))
    assert of_new_memory >= region.numel() // mmap.PAGESIZE
    # The system may take single pages away meanwhile, and the call itself touches some of its own.
    assert faults <= of_new_memory // 50


def test_bytes_stay_while_others_write(region: torch.Tensor) -> None:
    value = torch.arange(ROW_BYTES).to(torch.int8)
    for row in range(0, ROWS, 7):
        region[row] = value
    everything = Prefault([region], None)
    for row in range(ROWS - 1, -1, -1):
        region[row] = value
    wait_until(lambda: everything.num_bytes == region.numel())
    assert bool((region == value).all())
    everything.close()


def test_several_regions_go_forward_together() -> None:
    regions = [aligned_zeros(ROWS, size) for size in (ROW_BYTES, 0, 30_000, 1)]
    together = Prefault(regions, AHEAD_ROWS * 130_001)
    wait_until(lambda: together.num_bytes >= AHEAD_ROWS * 130_001)
    assert [there(region) // AHEAD_ROWS >= region.shape[1] for region in regions if region.numel()] == [
        True
    ] * 3
    together.use(ROWS)
    wait_until(lambda: together.num_bytes == sum(region.numel() for region in regions))
    together.close()


def test_the_thread_ends_with_its_work_or_with_the_buffer() -> None:
    def threads() -> int:
        return sum(thread.name == "kv-offload-prefault" for thread in threading.enumerate())

    before = threads()
    small = HostBuffer({"a": 64}, 16)
    wait_until(lambda: threads() == before)
    large = HostBuffer({"a": ROW_BYTES}, 20 * ROWS)
    assert threads() == before + 1
    large.close()
    assert threads() == before
    large.close()
    small.close()
    assert not HostBuffer({}, 4).regions


def test_a_system_that_cannot_do_it_goes_without(
    region: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    class Refuses:
        argtypes: object = None

        def __call__(self, address: int, size: int, advice: int) -> int:
            calls.append(advice)
            return -1

    monkeypatch.setattr(prefault.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(madvise=Refuses()))
    refused = Prefault([region], None)
    wait_until(lambda: bool(calls) and refused._thread is not None and not refused._thread.is_alive())
    assert calls == [prefault.MADV_POPULATE_WRITE]
    refused.use(ROWS - 1)
    refused.close()
    region[ROWS - 1] = 1
    assert ctypes.string_at(region[ROWS - 1].data_ptr(), 2) == b"\1\1"


def test_stores_of_an_engine_move_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=1 << 13, dtype=Byte())
    page = spec.page_size_bytes
    monkeypatch.setattr(host_buffer, "AHEAD_BYTES", 8 * page)
    rig = Rig([spec], device_blocks=8, host_blocks=64, held=False)
    buffer = rig.worker()._host_buffer
    assert buffer is not None
    ahead = buffer._prefault
    assert ahead is not None
    wait_until(lambda: ahead.num_bytes >= 8 * page)
    assert ahead.num_bytes <= 8 * page + PIECE_BYTES
    for number in range(3):
        rig.generate(prompt(64, number), 2)
    stored = max(slot for step in rig.steps for slot in step.kv_connector_metadata.store_cpu_blocks)  # type: ignore[union-attr]
    assert stored >= 8
    wait_until(lambda: ahead.num_bytes >= (stored + 1 + 6) * page)
    rig.connector.shutdown()
    rig.worker().shutdown()


def test_what_comes_up_from_a_disk_moves_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[list[int]] = []
    monkeypatch.setattr(HostBuffer, "use", lambda self, rows: used.append(list(rows)))
    rig = Rig(
        [full()], extra={"disk_tier": True, "disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 16}
    )
    worker = rig.worker()
    worker.bind_connector_metadata(SimpleCPUOffloadMetadata(move_up=DiskOrder(0, 0, [1, 2], [7, 5])))
    worker.start_load_kv()
    assert used == [[7, 5]]
    worker.shutdown()


def test_all_of_a_shared_pool_is_mapped_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_host, "DEFAULT_FOLDER", str(tmp_path))
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=1 << 12, dtype=Byte())
    rig = RankRig([spec], ranks=2, host_blocks=64)
    for rank in range(2):
        (region,) = rig.worker(rank).cpu_kv_caches.values()
        wait_until(lambda region=region: there(region) >= region.numel())
    rig.close()
