"""What checkers and actions read of a run: its pools by tier, and the transfers between them."""

from __future__ import annotations

from tests.sim.device import Memory
from tests.sim.outside import ShelfManager
from tests.sim.outside_worker import OutsideWorker
from tests.sim.worker import SimWorker
from tests.sim.world import World
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.simple_kv_offload.disk_kept import KeptIndex
from vllm.v1.simple_kv_offload.disk_tier import DiskChain
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.transfer import Transfer


class RunViews:
    """Computed on demand; nothing is kept here."""

    world: World
    scheduler: Scheduler
    worker: SimWorker

    @property
    def device_pool(self) -> BlockPool:
        """The device tier."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def has_work(self) -> bool:
        """A step may be of use."""
        return self.scheduler.has_requests() or self.worker.has_late_news

    @property
    def offloads(self) -> list[SimpleCPUOffloadScheduler]:
        """The offload managers, in the order of their connectors."""
        return self.world.offloads

    @property
    def offload(self) -> SimpleCPUOffloadScheduler | None:
        """The first offload manager, if there is one."""
        return self.world.offloads[0] if self.world.offloads else None

    @property
    def shelf(self) -> ShelfManager | None:
        """The manager from outside, where there is one. The pool of its tier has names only."""
        return self.world.shelf

    @property
    def put_off_since(self) -> list[float]:
        """When requests that wait for an answer of the manager from outside were put off first."""
        if not isinstance(self.offload, OffloadingConnectorScheduler):
            return []
        states = self.offload._requests.values()
        return [state.put_off_since for state in states if state.put_off_since is not None]

    @property
    def has_jobs_outside(self) -> bool:
        """Whether a manager from outside has stores under way."""
        return self.shelf is not None and bool(self.shelf.storing)

    @property
    def host_pool(self) -> BlockPool | None:
        """The tier below the device."""
        return None if self.offload is None else self.offload.tier.pool

    @property
    def chain(self) -> DiskChain | None:
        """The moves between host and disk."""
        return None if self.offload is None else self.offload.chain

    @property
    def kept(self) -> KeptIndex | None:
        """What the first offload manager keeps of its disk for the next engine."""
        return None if self.offload is None else self.offload.kept

    @property
    def kept_pool(self) -> BlockPool:
        """The tier on that disk."""
        assert self.host_pool is not None
        return self.host_pool if self.chain is None else self.chain.disk.pool

    def lower_pools(self) -> list[tuple[str, BlockPool, list[Memory]]]:
        """The tiers below the device: name, pool, and memory by rank."""
        pools = []
        for index, offload in enumerate(self.offloads):
            hosts, disks = self.worker.memories_below(index)
            suffix = f" {index + 1}" if index else ""
            pools.append((f"host{suffix}", offload.tier.pool, hosts))
            if offload.chain is not None:
                pools.append((f"disk{suffix}", offload.chain.disk.pool, disks))
        return pools

    def idle_with_a_copy(self, of_the_host: bool = False) -> list[int]:
        """Blocks of the device that nobody holds and whose content a tier below has too; or such of the host."""
        pool, *below = [self.device_pool, *(lower for _, lower, _ in self.lower_pools())]
        if of_the_host:
            pool, *below = below
        idle = [block for block in pool.blocks[1:] if block.ref_cnt == 0 and block.block_hash is not None]
        indexes = [lower.cached_block_hash_to_block for lower in below]
        return [b.block_id for b in idle if any(index.get_one_block(b.block_hash) for index in indexes)]

    def look_at_shared_pool(self) -> None:
        """Bring this engine's view of the shared pool up to date, so that it can be compared with the bytes."""
        if self.offload is not None:
            with self.offload.tier.turn:
                pass

    def moves(self) -> list[Transfer]:
        """Planned and submitted moves between host and disk."""
        return [] if self.chain is None else [*self.chain.down.live, *self.chain.up.live]

    def store_transfers(self) -> list[Transfer]:
        """Planned and submitted stores of all connectors."""
        sides = [offload.store_side for offload in self.offloads]
        return [transfer for side in sides for transfer in (*side.planned, *side.table.transfers)]

    def offload_tables(self) -> dict[str, object]:
        """What the offload managers remember per request or transfer; empty at rest."""
        tables = {}
        for index, offload in enumerate(self.offloads):
            tables |= {f"{name} of connector {index}": t for name, t in self._tables_of(offload).items()}
        if isinstance(self.offload, OffloadingConnectorScheduler):
            tables |= self._outside_tables(self.offload)
        return tables

    def _outside_tables(self, half: OffloadingConnectorScheduler) -> dict[str, object]:
        assert self.shelf is not None
        assert isinstance(self.worker, OutsideWorker)
        names = ("_requests", "_ended", "_whole", "_refused", "_open_stores", "_open_loads")
        return {
            **{name: vars(half)[name] for name in names},
            "flushes": half._is_flushing or half._flushed_stores or half._flushed_loads,
            "taken": half.plugin_tier.taken,
            "load jobs": half._load_jobs,
            "given up": {**half.given_up._loads, **half.given_up._stores, **half.given_up._holds},
            **self.worker.tables(),
            **self.shelf.tables(),
        }

    def _tables_of(self, offload: SimpleCPUOffloadScheduler) -> dict[str, object]:
        stores, loads, chain = offload.store_side, offload.load_side, offload.chain
        return {
            "stores planned": stores.planned,
            "stores running": list(stores.table),
            "keys in flight": stores.in_flight,
            "store states": stores.states,
            "store requests": stores.requests,
            "loads": loads.loads,
            "abandoned loads": loads.abandoned,
            "offers of requests": stores.stores.reuse._progress,
            "answers about slow tiers": offload.speed._answers,
            "asked": offload._asked,
            "promises": offload._pending_cpu_hits,
            "moves": [] if chain is None else [*chain.down.live, *chain.up.live],
            "waits for the disk": {} if chain is None else chain.waiting,
        }
