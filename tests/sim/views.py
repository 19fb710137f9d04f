"""What checkers and actions read of a run: its pools by tier, and the transfers between them."""

from __future__ import annotations

from tests.sim.device import Memory
from tests.sim.worker import SimWorker
from tests.sim.world import World
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
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
    def offload(self) -> SimpleCPUOffloadScheduler | None:
        """The offload manager, if there is one."""
        connector = self.world.connector
        return None if connector is None else connector.scheduler_manager

    @property
    def host_pool(self) -> BlockPool | None:
        """The tier below the device."""
        return None if self.offload is None else self.offload.tier.pool

    @property
    def chain(self) -> DiskChain | None:
        """The moves between host and disk."""
        return None if self.offload is None else self.offload.chain

    def lower_pools(self) -> list[tuple[str, BlockPool, list[Memory]]]:
        """The tiers below the device: name, pool, and memory by rank."""
        pools = [] if self.host_pool is None else [("host", self.host_pool, self.worker.hosts)]
        return pools + ([] if self.chain is None else [("disk", self.chain.disk.pool, self.worker.disks)])

    def moves(self) -> list[Transfer]:
        """Planned and submitted moves between host and disk."""
        return [] if self.chain is None else [*self.chain.down.live, *self.chain.up.live]

    def store_transfers(self) -> list[Transfer]:
        """Planned and submitted stores."""
        if self.offload is None:
            return []
        side = self.offload.store_side
        return [*side.planned, *side.table.transfers]

    def offload_tables(self) -> dict[str, object]:
        """What the offload manager remembers per request or transfer; empty at rest."""
        if self.offload is None:
            return {}
        stores, loads = self.offload.store_side, self.offload.load_side
        return {
            "stores planned": stores.planned,
            "stores running": list(stores.table),
            "keys in flight": stores.in_flight,
            "store states": stores.states,
            "store requests": stores.requests,
            "loads": loads.loads,
            "abandoned loads": loads.abandoned,
            "offers of requests": stores.stores.reuse._progress,
            "answers about slow tiers": self.offload.speed._answers,
            "asked": self.offload._asked,
            "promises": self.offload._pending_cpu_hits,
            "moves": self.moves(),
            "waits for the disk": {} if self.chain is None else self.chain.waiting,
        }
