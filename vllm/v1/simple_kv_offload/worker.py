"""The worker half of the CPU offload: orders → copies, results → reports.

Owns the host memory, the backend and the copies under way on this rank. It must not know hashes,
tokens or why a block is copied. Layer L6.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_connector_types import KVConnectorMetadata, KVConnectorTransferResults
from vllm.v1.simple_kv_offload.capacity import choose_num_blocks
from vllm.v1.simple_kv_offload.copy_backend import create_copy_backend
from vllm.v1.simple_kv_offload.copy_backends.base import (
    CopyBackend,
    CopyResult,
    EventsList,
    WaitEvent,
    bytes_per_block,
)
from vllm.v1.simple_kv_offload.copy_backends.disk_file import DIRECT_IO_ALIGNMENT
from vllm.v1.simple_kv_offload.copy_backends.kept import Keeper
from vllm.v1.simple_kv_offload.copy_backends.shared_host import (
    SharedSlots,
    bytes_per_part,
    open_shared_pool,
)
from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor, unpin_tensor
from vllm.v1.simple_kv_offload.disk_backend import DiskBackend, DiskFile, Streams
from vllm.v1.simple_kv_offload.disk_moves import DiskMoves
from vllm.v1.simple_kv_offload.host_buffer import HostBuffer
from vllm.v1.simple_kv_offload.metadata import (
    INVALID_JOB_ID,
    KeptInventory,
    KeptOrder,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)
from vllm.v1.simple_kv_offload.options import DEFAULT_TRANSFER_TIMEOUT_S, check_num_cpu_blocks
from vllm.v1.simple_kv_offload.regions import LayerCache, device_regions
from vllm.v1.simple_kv_offload.sizing import sync_num_offload_blocks_across_workers
from vllm.v1.simple_kv_offload.timing import StepTimer

logger = init_logger(__name__)

_NOTHING = SimpleCPUOffloadWorkerMetadata()
PIN_MEMORY: bool = torch.cuda.is_available()
DRAIN_POLL_S = 0.005


class Mover(Protocol):
    """The least a backend has to offer."""

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: EventsList,
        wait_event: WaitEvent | None = None,
    ) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(slots=True)
class _OpenCopy:
    """A copy until its result is in. The backend fills ``events`` when it has taken the job."""

    event_idx: int
    req_ids: tuple[str, ...] = ()
    num_blocks: int = 0
    events: EventsList = field(default_factory=list)

    def is_over(self) -> bool:
        return bool(self.events) and self.events[0][1].query()

    def result(self) -> CopyResult | None:
        """The outcome, if the backend tells more than that it is over."""
        event = self.events[0][1]
        return event if isinstance(event, CopyResult) else None


class SimpleCPUOffloadWorker:
    """Executes the orders of one rank.

    ``vllm_config`` may be None. Sizes are per rank; ``num_cpu_blocks`` replaces sizing by bytes and
    must fit (``ValueError`` from ``register_kv_caches``).
    """

    def __init__(
        self,
        vllm_config: VllmConfig | None,
        kv_cache_config: KVCacheConfig,
        cpu_capacity_bytes: int,
        kv_offload_backend: str = "cpu",
        disk_path: str | None = None,
        disk_capacity_bytes: int = 0,
        disk_buffer_slots: int = 2,
        use_page_cache: bool = False,
        num_cpu_blocks: int | None = None,
        *,
        transfer_timeout_s: float = DEFAULT_TRANSFER_TIMEOUT_S,
        disk_tier: bool = False,
        disk_persist: bool = False,
        shared_pool: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._shared_pool = shared_pool
        self._shared: SharedSlots | None = None
        self._kv_cache_config = kv_cache_config
        self._is_disk = kv_offload_backend == "disk"
        self._capacity_bytes = disk_capacity_bytes if self._is_disk else cpu_capacity_bytes
        self._disk_path = disk_path
        self._disk_buffer_slots = disk_buffer_slots
        self._use_page_cache = use_page_cache
        self._disk_tier_bytes = disk_capacity_bytes if disk_tier else 0
        self._disk_persist = disk_persist
        self._configured_blocks = check_num_cpu_blocks(num_cpu_blocks)
        self._transfer_timeout_s = transfer_timeout_s
        self._clock = clock or MonotonicClock()

        self.device: torch.device | None = None
        self.gpu_kv_caches: dict[str, torch.Tensor] = {}
        self.cpu_kv_caches: dict[str, torch.Tensor] = {}
        self.num_cpu_blocks = 0
        self._host_buffer: HostBuffer | None = None
        self._backend: Mover | None = None
        self._moves: DiskMoves | None = None
        self._keeper: Keeper | None = None

        self._metadata: SimpleCPUOffloadMetadata | None = None
        self._loads: list[_OpenCopy] = []
        self._stores: list[_OpenCopy] = []
        self._undeliverable: set[str] = set()
        self._lost_stores: list[int] = []
        self._lost_loads: set[int] = set()
        self._lost_loads_to_report: set[int] = set()
        self._last_store_seen = INVALID_JOB_ID
        self._last_load_seen = INVALID_JOB_ID
        self._load_pending = False
        self._store_pending = False
        self._bad_slots: set[int] = set()
        self._timer = StepTimer(self._clock, None)

    # -- life cycle ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, LayerCache]) -> None:
        """Derive the regions, agree on the number of blocks with the other ranks, start the backend.

        Raises ``ValueError`` if the caches do not fit the plan or ``num_cpu_blocks`` does not fit.
        """
        self.gpu_kv_caches = device_regions(self._kv_cache_config, kv_caches)
        self.device = next(iter(self.gpu_kv_caches.values())).device
        self._timer = StepTimer(self._clock, self.device)
        block_bytes = bytes_per_block(self.gpu_kv_caches)
        capacity_bytes = self._capacity_bytes
        if self._shared_pool is not None:
            capacity_bytes = bytes_per_part(self._vllm_config, self._kv_cache_config, capacity_bytes)
        capacity_blocks = max(1, capacity_bytes // block_bytes)
        own_blocks = choose_num_blocks(capacity_blocks, self._configured_blocks)
        self.num_cpu_blocks = sync_num_offload_blocks_across_workers(own_blocks)
        streams = _copy_streams(self.device)
        if self._is_disk:
            self._backend = self._open_disk(
                self.gpu_kv_caches, self.device, streams, self.num_cpu_blocks, self._use_page_cache
            )
        else:
            self._start_host(streams)
        count, gib = self.num_cpu_blocks, self.num_cpu_blocks * block_bytes / 1024**3
        logger.info("KV offload: %d blocks of %d bytes, %.2f GiB on this rank", count, block_bytes, gib)
        if count < 2:
            logger.warning(
                "KV offload: one block is reserved, so a pool of one keeps nothing; make it larger"
            )

    def _start_host(self, streams: Streams) -> None:
        assert self.device is not None
        pins = PIN_MEMORY and self.device.type == "cuda"
        row_bytes = {name: region.shape[1] for name, region in self.gpu_kv_caches.items()}
        regions = None
        if self._shared_pool is not None:
            self._shared = open_shared_pool(
                self._vllm_config, self._kv_cache_config, self._shared_pool, row_bytes, self.num_cpu_blocks
            )
            regions = self._shared.regions
        self._host_buffer = HostBuffer(
            row_bytes,
            self.num_cpu_blocks,
            pin_tensor if pins else None,
            unpin_tensor if pins else None,
            regions,
        )
        self.cpu_kv_caches = self._host_buffer.regions
        try:
            self._moves = DiskMoves(self._open_disk_tier()) if self._disk_tier_bytes else None
        except BaseException:
            self.shutdown()  # what touches the memory by now would be left behind
            raise
        backend = create_copy_backend(
            "cuda_dma" if self.device.type == "cuda" else "threaded", self._clock, self._transfer_timeout_s
        )
        backend.init(self.gpu_kv_caches, self.cpu_kv_caches, self.device, *streams)
        self._backend = backend

    def _open_disk_tier(self) -> DiskBackend | None:
        """The disk below host memory; None, with a message, if its file cannot be made: the engine goes on."""
        block_bytes = bytes_per_block(self.cpu_kv_caches)
        num_slots = max(1, self._disk_tier_bytes // block_bytes)
        use_page_cache = self._use_page_cache or block_bytes % DIRECT_IO_ALIGNMENT != 0
        try:
            return self._open_disk(
                self.cpu_kv_caches, torch.device("cpu"), (None, None), num_slots, use_page_cache
            )
        except OSError as error:
            logger.error(
                "KV offload: the disk tier is off, %s cannot be used: %s. The engine goes on with the host tier.",
                error.filename or self._disk_path,
                error,
            )
            return None

    def _open_disk(
        self,
        regions: dict[str, torch.Tensor],
        device: torch.device,
        streams: Streams,
        num_slots: int,
        use_page_cache: bool,
    ) -> DiskBackend:
        if self._disk_path is None:
            raise ValueError("disk_path must be set for disk_tier=true and for kv_offload_backend='disk'")
        file = DiskFile(
            self._disk_path,
            self._disk_buffer_slots,
            use_page_cache,
            self._disk_persist,
            self._clock,
            self._transfer_timeout_s,
        )
        backend = file.open(regions, device, streams, num_slots, self._vllm_config, self._kv_cache_config)
        self._keeper = backend.keeper
        return backend

    @property
    def kept_inventory(self) -> KeptInventory | None:
        """What an earlier engine left on this rank's disk; None without a disk that is kept."""
        return None if self._keeper is None else KeptInventory(self._keeper.found)

    def withdraw(self, order: KeptOrder) -> str | None:
        """See `Keeper.withdraw`."""
        return None if self._keeper is None else self._keeper.withdraw(order)

    def unregister_kv_caches(self) -> None:
        """Before sleep: let every copy end, so that none touches memory that goes away. Idempotent."""
        self.drain()

    def shutdown(self) -> None:
        """End copies and threads, release memory and files. Idempotent."""
        moves, self._moves = self._moves, None
        if moves is not None:
            moves.shutdown()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.shutdown()
        self.cpu_kv_caches = {}
        if self._host_buffer is not None:
            self._host_buffer.close()
            self._host_buffer = None
        shared, self._shared = self._shared, None
        if shared is not None:
            # Slots are not given away under a copy.
            copies = (*self._loads, *self._stores)
            shared.segment.close(busy=not all(copy.is_over() for copy in copies))

    # -- one step -----------------------------------------------------------------------------

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        """Set the orders of this step."""
        if not isinstance(metadata, SimpleCPUOffloadMetadata):
            raise TypeError(f"expected SimpleCPUOffloadMetadata, got {type(metadata).__name__}")
        self._metadata = metadata
        self._load_pending = metadata.load_event != INVALID_JOB_ID
        self._store_pending = metadata.store_event != INVALID_JOB_ID
        self._notice_lost_orders(metadata)
        self._undeliverable.update(metadata.failed_load_reqs)
        self._timer.start(metadata.prefill_tokens)
        if self._keeper is not None:
            self._keeper.bind(metadata.kept)
        if self._moves is not None:
            self._moves.bind(metadata)

    def _notice_lost_orders(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Orders of steps that never got as far as here (an earlier part of the step failed) end as failed."""
        if metadata.issued_store_event > self._last_store_seen:
            stores = range(self._last_store_seen + 1, metadata.issued_store_event + 1)
            self._lost_stores += [event for event in stores if event != metadata.store_event]
            self._last_store_seen = metadata.issued_store_event
        if metadata.issued_load_event > self._last_load_seen:
            loads = range(self._last_load_seen + 1, metadata.issued_load_event + 1)
            lost = {event for event in loads if event != metadata.load_event}
            self._lost_loads |= lost
            self._lost_loads_to_report |= lost
            self._last_load_seen = metadata.issued_load_event
        for event, req_ids in metadata.failed_load_events.items():
            if event in self._lost_loads:
                self._lost_loads.discard(event)
                self._undeliverable.update(req_ids)

    def clear_connector_metadata(self) -> None:
        """The step is over. Orders that it did not get round to, because it failed, end as failed."""
        metadata, self._metadata = self._metadata, None
        if metadata is None:
            return
        self._timer.drop()
        if self._moves is not None:
            self._moves.drop()
        if self._load_pending:
            self._undeliverable.update(metadata.load_event_to_reqs.get(metadata.load_event, ()))
        if self._store_pending:
            self._lost_stores.append(metadata.store_event)
        self._load_pending = self._store_pending = False

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        """References protect the blocks of running copies; only an explicit flush has to wait."""
        if isinstance(metadata, SimpleCPUOffloadMetadata) and metadata.need_flush:
            self.drain()

    def start_load_kv(self) -> None:
        """Start the step's loads, one copy per request, behind everything the device was given so far.

        The wait keeps a load from overtaking a forward that still reads the blocks' old content, or
        the zeroing of fresh blocks.
        """
        metadata = self._metadata
        if metadata is not None and self._moves is not None and self._host_buffer is not None:
            self._host_buffer.use(metadata.move_up.dst_blocks)
            self._moves.start()
        if metadata is None or not self._load_pending:
            return
        self._load_pending = False
        wait_event = self._device_event()
        for req_ids, part in metadata.loads_by_request():
            if not req_ids:
                continue
            sources, groups = metadata.load_cpu_blocks[part], metadata.load_groups[part]
            if self._shared is not None:
                sources = self._shared.parts.rows(sources, groups, metadata.companions)
            copy = _OpenCopy(metadata.load_event, req_ids, len(sources))
            self._loads.append(copy)
            self._launch(copy, sources, metadata.load_gpu_blocks[part], False, wait_event)

    def wait_for_save(self) -> None:
        """Start the step's store behind everything computed so far. Does not wait."""
        metadata = self._metadata
        self._timer.stop()
        if metadata is None or not self._store_pending:
            return
        self._store_pending = False
        copy = _OpenCopy(metadata.store_event)
        self._stores.append(copy)
        sources, targets = metadata.store_gpu_blocks, metadata.store_cpu_blocks
        if self._shared is not None:
            parts, groups = self._shared.parts, metadata.store_groups
            sources, targets = parts.to_store(sources, targets, groups, metadata.companions)
        if self._host_buffer is not None:
            self._host_buffer.use(targets)
        self._launch(copy, sources, targets, True, self._device_event())

    def _launch(
        self,
        copy: _OpenCopy,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        wait_event: WaitEvent | None,
    ) -> None:
        if self._backend is None:
            raise RuntimeError("register_kv_caches was not called, or the worker was shut down")
        # A mover that died while it had nothing to do is replaced before it gets anything.
        self._check_health()
        self._backend.launch_copy(src_blocks, dst_blocks, is_store, copy.event_idx, copy.events, wait_event)

    def _device_event(self) -> WaitEvent | None:
        """A mark behind the work the device has been given; host memory needs none."""
        if self.device is None or self.device.type != "cuda":
            return None
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self.device))
        event: WaitEvent = mark
        return event

    # -- reports ------------------------------------------------------------------------------

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose load ended on this rank since the last call, failed ones in both sets."""
        if self._is_at_work:
            self._check_health()
        failed, self._undeliverable = self._undeliverable, set()
        received = set(failed)
        still_open = []
        for copy in self._loads:
            if not copy.is_over():
                still_open.append(copy)
                continue
            received.update(copy.req_ids)
            result = copy.result()
            self._timer.loaded(result, copy.num_blocks)
            if result is not None and result.error is not None:
                failed.update(copy.req_ids)
                bad = result.bad_blocks
                self._bad_slots |= bad if self._shared is None else self._shared.parts.slots(bad)
                logger.error("KV load of %s failed: %s", ", ".join(copy.req_ids), result.error)
        self._loads = still_open
        return KVConnectorTransferResults(None, received or None, failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(None, requests whose load ended); see `get_transfer_results` for failures."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving

    def build_connector_worker_meta(self) -> SimpleCPUOffloadWorkerMetadata | None:
        """Store events that ended on this rank since the last call, and unusable slots; None if nothing."""
        if not (self._is_at_work or self._has_news):
            return None  # so it is in most steps
        self._check_health()
        report = SimpleCPUOffloadWorkerMetadata()
        still_open = []
        for copy in self._stores:
            if not copy.is_over():
                still_open.append(copy)
                continue
            result = copy.result()
            if result is None or result.error is None:
                report.completed_store_events[copy.event_idx] = 1
                self._timer.stored(result)
            else:
                report.failed_store_events[copy.event_idx] = 1
                logger.error("KV store %d failed: %s", copy.event_idx, result.error)
        self._stores = still_open
        for event in self._lost_stores:
            report.failed_store_events[event] = 1
        self._lost_stores = []
        report.timings = self._timer.take()
        if self._moves is not None:
            self._moves.report_to(report)
        if self._keeper is not None:
            report.kept_lost = self._keeper.take_lost()
        report.bad_cpu_blocks, self._bad_slots = self._bad_slots, set()
        report.lost_load_events, self._lost_loads_to_report = self._lost_loads_to_report, set()
        return None if report == _NOTHING else report

    def drain(self) -> None:
        """Wait until every copy under way has ended, well or badly."""
        for copy in (*self._loads, *self._stores):
            while not copy.is_over():
                self._check_health()
                result = copy.result() if copy.events else None
                if result is not None:
                    result.synchronize(DRAIN_POLL_S)
                else:
                    time.sleep(DRAIN_POLL_S)
        for result in () if self._moves is None else self._moves.open_results:
            while not result.synchronize(DRAIN_POLL_S):
                self._check_health()

    @property
    def _is_at_work(self) -> bool:
        """Whether some mover may have something to do, on a disk also in the background."""
        return bool(self._loads or self._stores) or self._moves is not None or self._is_disk

    @property
    def _has_news(self) -> bool:
        """Whether there is something to report besides what the movers have done."""
        return bool(self._lost_stores or self._bad_slots or self._lost_loads_to_report or self._timer.has_any)

    def _check_health(self) -> None:
        # A mover put in from outside need not offer this.
        if isinstance(self._backend, CopyBackend):
            self._backend.check_health()
        if self._moves is not None:
            self._moves.check_health()


def _copy_streams(device: torch.device) -> Streams:
    """(load, store) streams of lowest priority, so that copies yield to compute."""
    if device.type != "cuda":
        return None, None
    lowest, _ = torch.cuda.Stream.priority_range()
    return torch.cuda.Stream(device, priority=lowest), torch.cuda.Stream(device, priority=lowest)
