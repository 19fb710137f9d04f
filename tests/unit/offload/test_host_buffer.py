"""Host memory of a tier: there at once whatever its size, aligned, zeroed, and honest when there is not enough."""

import errno
import itertools
import mmap
from pathlib import Path

import psutil
import pytest
import torch

from tests.helpers.offload_rig import rig_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.simple_kv_offload import host_buffer
from vllm.v1.simple_kv_offload.host_buffer import HostBuffer, aligned_zeros

LARGE_ROWS, ROW_BYTES = 1 << 17, 1 << 13


def test_reserving_costs_no_memory_until_it_is_written() -> None:
    before = psutil.Process().memory_info().rss
    rows = aligned_zeros(LARGE_ROWS, ROW_BYTES)
    assert rows.shape == (LARGE_ROWS, ROW_BYTES)
    assert psutil.Process().memory_info().rss - before < LARGE_ROWS * ROW_BYTES // 8
    assert rows.data_ptr() % mmap.PAGESIZE == 0
    rows[LARGE_ROWS // 2] = 7
    assert int(rows[LARGE_ROWS // 2].sum(dtype=torch.int64)) == 7 * ROW_BYTES
    assert not rows[LARGE_ROWS - 1].any()


def test_memory_that_cannot_be_reserved_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"GiB of host memory cannot be reserved .*cpu_bytes_to_use"):
        aligned_zeros(1 << 40, 1 << 20)


def test_reservable_before_the_model_is_loaded_is_what_can_be_reserved_after_it() -> None:
    """Pieces that the system grants one by one are not refused for their sum."""
    too_much = {"cpu_bytes_to_use": 1 << 60}
    with pytest.raises(ValueError, match="cannot be reserved"):
        KVConnectorFactory.check_config(rig_config(extra=too_much))
    KVConnectorFactory.check_config(rig_config(extra={"cpu_bytes_to_use": LARGE_ROWS * ROW_BYTES}))
    KVConnectorFactory.check_config(rig_config(extra={**too_much, "num_cpu_blocks": 3}))
    KVConnectorFactory.check_config(rig_config(extra=too_much, caching=False))
    layers_first = rig_config(extra=too_much)
    layers_first.cache_config.kv_cache_layout = "LBHNC"
    KVConnectorFactory.check_config(layers_first)


def test_regions_live_as_long_as_somebody_has_them_and_pins_are_undone_once() -> None:
    undone: list[torch.Tensor] = []
    buffer = HostBuffer({"a": 64, "empty": 0}, 4, pin=lambda region: region.shape[1] > 0, unpin=undone.append)
    region = buffer.regions["a"]
    buffer.close()
    buffer.close()
    assert undone == [region]
    region[3] = 1
    assert region.sum() == 64


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages to ask for"
)
def test_huge_pages_are_asked_for() -> None:
    rows = aligned_zeros(1024, 4096)
    parts = Path("/proc/self/smaps").read_text().split("VmFlags:")
    ends = [part.splitlines() for part in parts]
    flags = {
        line.split()[0]: following[0].split()
        for before, following in itertools.pairwise(ends)
        for line in before[-40:]
        if "-" in line.split(" ", 1)[0]
    }
    (own,) = [
        held
        for place, held in flags.items()
        if int(place.split("-")[0], 16) <= rows.data_ptr() < int(place.split("-")[1], 16)
    ]
    assert "hg" in own


def test_a_kernel_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *args: int) -> None:  # type: ignore[override]
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(host_buffer, "_reserve", lambda size: Plain(-1, size))
    rows = aligned_zeros(4, 4096)
    rows[3] = 2
    assert int(rows.sum()) == 2 * 4096
