"""What every copy backend of the table must do, bare and in the wrapper of tests: bytes, order, errors as results, closing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.faulty_backend import FaultyBackend
from vllm.utils.clock import MonotonicClock
from vllm.v1.simple_kv_offload.copy_backend import COPY_BACKENDS, create_copy_backend
from vllm.v1.simple_kv_offload.copy_backends.base import CopyBackend, CopyResult
from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor, unpin_tensor
from vllm.v1.simple_kv_offload.host_buffer import aligned_zeros

BLOCKS, SLOTS = 12, 8
WIDTHS = {"a": 64, "b": 160}
CPU = torch.device("cpu")
FAULTY = "faulty "


class Bench:
    """A backend between device regions and a lower tier that only the backend itself can look into."""

    def __init__(
        self, kind: str, folder: Path, device: torch.device = CPU, widths: dict[str, int] = WIDTHS
    ) -> None:
        self.widths = widths
        rows = {
            name: torch.zeros(BLOCKS, width + 16, dtype=torch.int8, device=device)
            for name, width in widths.items()
        }
        # Rows lie apart, as pages of one layer inside a block do.
        self.device = {name: rows[name][:, :width] for name, width in widths.items()}
        self._pinned: list[torch.Tensor] = []
        self.fill()
        inner = kind.removeprefix(FAULTY)
        self.copies_at_once = inner == "inline"
        self.backend: CopyBackend = self._on_disk(folder) if inner == "disk" else self._on_host(inner, device)
        if kind != inner:
            self.backend = FaultyBackend(self.backend, seed=0, rate=0.0)

    def _on_disk(self, folder: Path) -> CopyBackend:
        disk = create_copy_backend("disk", MonotonicClock(), 30.0)
        path, block_bytes = str(folder / "kv.e.rank_0"), sum(self.widths.values())
        disk.init(self.device, CPU, None, None, path, SLOTS, block_bytes, 2, True)
        return disk

    def _on_host(self, kind: str, device: torch.device) -> CopyBackend:
        # Each on pages of its own: pages are what a device pins.
        self.tier = {name: aligned_zeros(SLOTS, width) for name, width in self.widths.items()}
        backend = create_copy_backend(kind, MonotonicClock(), 30.0)  # type: ignore[call-overload]
        on_host = device == CPU
        if not on_host:
            self._pinned = [rows for rows in self.tier.values() if pin_tensor(rows)]
            assert len(self._pinned) == len(self.tier)
        streams = [None if on_host else torch.cuda.Stream(device) for _ in range(2)]
        backend.init(self.device, self.tier, device, *streams)
        return backend

    def fill(self) -> None:
        for number, region in enumerate(self.device.values()):
            for block in range(BLOCKS):
                region[block] = 10 * block + number
        settle()

    def close(self) -> None:
        self.backend.shutdown()
        while self._pinned:  # before the memory goes, and another test gets it
            unpin_tensor(self._pinned.pop())

    def copy(self, src: list[int], dst: list[int], is_store: bool, wait_event: Any = None) -> CopyResult:
        events: list[Any] = []
        self.backend.launch_copy(src, dst, is_store, 7, events, wait_event)
        (event,) = events
        assert event[0] == 7
        assert isinstance(event[1], CopyResult)
        return event[1]

    def content(self, block: int) -> list[int]:
        return [int(value) for region in self.device.values() for value in region[block].unique()]


def settle() -> None:
    """What was written to a device's memory is there: streams of copies do not wait for the one of tests by themselves."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# The wrapper of tests changes nothing while no fault is planted. "cuda_dma" runs all this where a GPU is: tests/gpu.
ON_ANY_MACHINE = [kind for kind in COPY_BACKENDS if kind != "cuda_dma"]
KINDS = [*ON_ANY_MACHINE, *(FAULTY + kind for kind in ON_ANY_MACHINE)]


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(request.param, tmp_path)
    yield bench
    bench.close()


def done(result: CopyResult) -> CopyResult:
    assert result.synchronize(10.0)
    assert result.query()
    return result


def test_bytes_come_back_as_they_were(bench: Bench) -> None:
    assert done(bench.copy([3, 4, 5, 9], [0, 1, 2, 6], True)).error is None
    for region in bench.device.values():
        region.fill_(-1)
    settle()
    assert done(bench.copy([6, 0, 2], [1, 2, 11], False)).error is None
    assert bench.content(1) == [90, 91]
    assert bench.content(2) == [30, 31]
    assert bench.content(11) == [50, 51]
    assert bench.content(3) == [-1, -1]


def test_an_empty_copy_is_over_at_once(bench: Bench) -> None:
    assert done(bench.copy([], [], True)).error is None


def test_jobs_of_one_direction_keep_their_order(bench: Bench) -> None:
    first = bench.copy([1], [0], True)
    second = bench.copy([2], [0], True)
    done(first)
    done(second)
    done(bench.copy([0], [5], False))
    assert bench.content(5) == [20, 21]


def test_a_store_reads_after_its_wait_event(bench: Bench) -> None:
    class Compute:
        """Compute that ends when a copy waits for it."""

        def synchronize(self) -> None:
            for region in bench.device.values():
                region[4] = 77
            settle()

    done(bench.copy([4], [0], True, Compute()))
    done(bench.copy([0], [7], False))
    assert bench.content(7) == [77, 77]


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_bad_block_ids_are_a_failed_result(bench: Bench, block: int) -> None:
    result = done(bench.copy([1, block], [0, 1], True))
    assert result.error is not None
    assert "outside" in str(result.error)
    assert done(bench.copy([1], [0], True)).error is None, "the backend goes on"


def test_an_exception_while_waiting_is_a_failed_result(bench: Bench) -> None:
    class Broken:
        def synchronize(self) -> None:
            raise OSError("device gone")

    result = done(bench.copy([1], [0], True, Broken()))
    assert isinstance(result.error, OSError)
    assert done(bench.copy([1], [0], True)).error is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("inline")])
def test_a_load_does_not_wait_behind_stores(kind: str, tmp_path: Path) -> None:
    """Nor does it take the time of waiting for the device as its own."""
    bench = Bench(kind, tmp_path)
    done(bench.copy([1], [0], True))
    gate = threading.Event()
    stuck = [bench.copy([2], [slot], True, Gate(gate)) for slot in (1, 2, 3)]
    load = done(bench.copy([0], [5], False))
    assert load.error is None
    assert load.seconds is not None
    assert load.seconds < 10.0
    assert bench.content(5) == [10, 11]
    assert not any(store.query() for store in stuck)
    gate.set()
    for store in stuck:
        assert done(store).error is None
    bench.close()


class Gate:
    """A point on the device that is reached when the test says so."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def synchronize(self) -> None:
        assert self._gate.wait(10.0)


def test_the_caller_may_reuse_its_lists(bench: Bench) -> None:
    gate = threading.Event()

    class Gate:
        def synchronize(self) -> None:
            gate.wait(10.0)

    source, target = [1], [0]
    events: list[Any] = []
    # The reference backend copies inside the call, so that its gate has to be open.
    if bench.copies_at_once:
        gate.set()
    bench.backend.launch_copy(source, target, True, 1, events, Gate())
    source[0], target[0] = 9, 5
    gate.set()
    done(events[0][1])
    done(bench.copy([0], [7], False))
    assert bench.content(7) == [10, 11]


def test_after_shutdown_jobs_fail_at_once(bench: Bench) -> None:
    bench.backend.shutdown()
    bench.backend.shutdown()
    assert done(bench.copy([1], [0], True)).error is not None


def test_no_thread_is_left_behind(bench: Bench) -> None:
    done(bench.copy([1], [0], True))
    bench.backend.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-offload")]


def test_source_and_target_must_pair_up(bench: Bench) -> None:
    with pytest.raises(AssertionError, match="2 source blocks for 1 target blocks"):
        bench.copy([1, 2], [0], True)
