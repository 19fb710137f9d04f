"""The load half of the manager: accepted loads from the order to the last report.

Owns the leases of loads. It must not know stores nor how a promise was found. Layer L4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.lookup import Promises
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
from vllm.v1.simple_kv_offload.records import Ledger
from vllm.v1.simple_kv_offload.tier import Tier
from vllm.v1.simple_kv_offload.transfer import Transfer, TransferState

logger = init_logger(__name__)


@dataclass(slots=True)
class Load:
    """One request's load.

    ``finished``: the request ended before its load. ``deliverable`` False: it has no blocks and is sent only to be
    reported as failed. ``bad_slots_known``: workers told which of its sources are unusable. ``groups``: those of its
    blocks, where workers have to know them.
    """

    request: Request
    transfer: Transfer
    event: int | None = None
    finished: bool = False
    deliverable: bool = True
    bad_slots_known: bool = False
    groups: Sequence[int] = ()


class LoadSide:
    """At most one load per request; it lives until all ranks have reported the request.

    The blocks of both tiers stay leased until then, also if the request is aborted meanwhile.
    """

    def __init__(self, tier: Tier, device: BlockPool, promises: Promises) -> None:
        self.loads: dict[str, Load] = {}
        self.abandoned: dict[str, Load] = {}
        self.lost_events: set[int] = set()
        self.ledger = Ledger()
        self.failures = 0
        self.num_loads = 0
        """Loads so far, each of one request."""
        self._tier = tier
        self._device = device
        self._promises = promises
        self._next_event = 0

    def owns(self, request_id: str) -> bool:
        """Whether a load of this request has not ended."""
        return request_id in self.loads or request_id in self.abandoned

    def accept(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """The scheduler took ``num_tokens`` of the promise and allocated ``blocks`` for the request.

        What cannot be delivered is reported by the workers as a failed load: the scheduler has
        counted on it already.
        """
        accepted = self._promises.accept(request, num_tokens)
        if accepted is None:
            logger.error(
                "KV offload: %d tokens of request %s cannot be delivered; the load is reported as failed.",
                num_tokens,
                request.request_id,
            )
            self._start(request, [], (), deliverable=False)
            return
        plan, lease = accepted
        chosen = [
            (slot, target, group)
            for slot, (group, index) in zip(plan.tier_blocks, plan.positions, strict=True)
            # Out of the window at the end of the prefix: nothing will read it.
            if not (target := blocks.blocks[group][index]).is_null
        ]
        self._tier.used(plan.tier_blocks)
        groups = [group for _, _, group in chosen] if self._tier.has_parts else ()
        self._start(request, [(slot, target) for slot, target, _ in chosen], groups, deliverable=True)
        lease.release()

    def _start(
        self,
        request: Request,
        pairs: Sequence[tuple[KVCacheBlock, KVCacheBlock]],
        groups: Sequence[int],
        *,
        deliverable: bool,
    ) -> None:
        owner = f"load of {request.request_id}"
        source = Lease(self._tier.pool, [slot for slot, _ in pairs], owner)
        target = Lease(self._device, [block for _, block in pairs], owner)
        transfer = Transfer(owner, target, source, request_id=request.request_id)
        self.loads[request.request_id] = Load(request, transfer, deliverable=deliverable, groups=groups)
        self.ledger.scheduled += len(pairs)
        self.num_loads += 1

    def order(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Put the accepted loads into the step's orders, under one event."""
        metadata.issued_load_event = self._next_event - 1
        if self.lost_events:
            metadata.failed_load_events = self._take_lost()
        if not self.loads:
            return
        fresh = [load for load in self.loads.values() if load.event is None]
        if not fresh:
            return
        event, self._next_event = self._next_event, self._next_event + 1
        delivered = []
        for load in fresh:
            load.event = event
            load.transfer.submit()
            if not load.deliverable:
                metadata.failed_load_reqs.append(load.request.request_id)
                continue
            delivered.append(load.request.request_id)
            metadata.load_gpu_blocks += [block.block_id for block in load.transfer.device_blocks]
            metadata.load_cpu_blocks += [block.block_id for block in load.transfer.tier_blocks]
            metadata.load_block_counts.append(len(load.transfer))
            metadata.load_groups += load.groups
            metadata.companions |= self._tier.companions(load.transfer.tier_blocks)
        metadata.load_event = metadata.issued_load_event = event
        metadata.load_event_to_reqs = {event: delivered}

    def _take_lost(self) -> dict[int, list[str]]:
        """The requests of the loads that a rank never received; that rank reports them as failed.

        Told in every step until the loads have ended: the step that tells it may fail as well.
        """
        lost: dict[int, list[str]] = {}
        for request_id, load in (*self.loads.items(), *self.abandoned.items()):
            if load.event is not None and load.event in self.lost_events:
                lost.setdefault(load.event, []).append(request_id)
        self.lost_events.intersection_update(lost)
        return lost

    def finish_request(self, request_id: str) -> None:
        """The request ended; a load that was not sent yet is dropped, one under way keeps its blocks."""
        load = self.loads.get(request_id)
        if load is None:
            return
        if load.event is None:
            del self.loads[request_id]
            self._discard(load)
        else:
            load.finished = True

    def _discard(self, load: Load) -> None:
        self.ledger.dropped += len(load.transfer)
        load.transfer.discard()

    def report(self, received: Iterable[str], failed: Iterable[str], bad_slots: Iterable[int]) -> None:
        """All ranks have reported these requests. Unknown ids (other connectors', stale ones) are ignored."""
        unusable = set(bad_slots)
        if unusable:
            self._forget_bad_slots(unusable)
        failures = set(failed)
        for request_id in sorted(received):
            load = self.loads.pop(request_id, None) or self.abandoned.pop(request_id, None)
            if load is None:
                continue
            ok = request_id not in failures
            if not ok:
                self._disown(load)
            self._end(load, ok)

    def _end(self, load: Load, ok: bool) -> None:
        size = len(load.transfer)
        state = load.transfer.finish(ok=ok)
        if state is TransferState.DONE:
            self.ledger.done += size
        elif state is TransferState.FAILED:
            self.ledger.failed += size
        else:
            self.ledger.dropped += size

    def _forget_bad_slots(self, bad_slots: set[int]) -> None:
        self._tier.evict(bad_slots)
        for load in (*self.loads.values(), *self.abandoned.values()):
            if any(block.block_id in bad_slots for block in load.transfer.tier_blocks):
                load.bad_slots_known = True

    def _disown(self, load: Load) -> None:
        """A failed source must not be promised again: the bad slots if they are known, else all of them."""
        self.failures += 1
        if not load.bad_slots_known:
            self._tier.evict(block.block_id for block in load.transfer.tier_blocks)

    def reset(self) -> bool:
        """Drop unsent loads, abandon running ones; True if none is running."""
        for request_id, load in list(self.loads.items()):
            del self.loads[request_id]
            if load.event is None:
                self._discard(load)
            else:
                load.transfer.abandon()
                self.abandoned[request_id] = load
        return not self.abandoned

    @property
    def blocks_loaded(self) -> int:
        """Blocks that were loaded and wanted."""
        return self.ledger.done

    @property
    def has_orphans(self) -> bool:
        """Whether a load runs whose request has ended: only further steps can collect it."""
        return any(load.finished for load in (*self.loads.values(), *self.abandoned.values()))
