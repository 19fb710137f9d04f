"""Another engine of the same node, as far as the shared host pool goes: it stores, reads, evicts, resets and dies.

It uses the real pool and the real segment; only its bytes are stamps in the simulated host memory. What it stores are
prefixes of the requests of this run, so that either engine finds what the other one stored.
"""

from __future__ import annotations

import random
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from tests.helpers.shared_engines import Killed, MiniEngine
from tests.sim.clock import SimClock
from tests.sim.failure import require
from tests.sim.marks import Marks
from tests.sim.params import SimParams
from tests.sim.rank_memory import count_parts, max_width
from tests.sim.registry import HashRegistry
from tests.sim.worker import SimWorker
from vllm.v1.core.block_hash import (
    BlockHash,
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.copy_backends.shared_segment import SegmentShape, SharedSegment

KEYS_PER_SLOT = 8


class SharedMemory:
    """The segment of one run, gone with it. Bytes are not in it: the simulator has its own."""

    def __init__(self, params: SimParams, clock: SimClock) -> None:
        folder = mkdtemp(prefix="kv-sim-")
        # Also where the world cannot be built, and nobody closes anything.
        self._remove = weakref.finalize(self, shutil.rmtree, folder)
        self.path = Path(folder) / "segment"
        self.shape = SegmentShape(
            b"sim", params.host_blocks, KEYS_PER_SLOT, (1,), count_parts(params), max_width(params)
        )
        self.clock = clock

    def attach(self) -> SharedSegment:
        """A place for one more engine."""
        return SharedSegment(str(self.path), self.shape, self.clock, grace_s=0.0)

    def close(self) -> None:
        """Remove the file."""
        self._remove()


class OtherEngine(MiniEngine):
    """See the module. `sizes`: tokens of a block by cacheable group; `widths`: slots of a block by group."""

    def __init__(
        self,
        memory: SharedMemory,
        worker: SimWorker,
        registry: HashRegistry,
        sizes: dict[int, int],
        widths: tuple[int, ...],
        marks: Marks,
    ) -> None:
        super().__init__(memory.path, memory.shape, memory.clock, widths=widths)
        self._worker, self._registry, self.sizes, self._marks = worker, registry, sizes, marks
        self._versions: dict[int, int] = {}
        self._filled_with: dict[int, int] = {}  # slot -> weights under which its content was computed
        self.is_dead = False

    # Bytes are stamps

    def _stamps(self, rank: int, key: bytes, version: int) -> dict[int, int]:
        group = self._worker.rank_groups[rank][get_group_id(BlockHashWithGroupId(key))]
        prints = self._registry.prints(bytes(get_block_hash(BlockHashWithGroupId(key))))
        return group.expected_page(prints, version)

    def stage(self, key: BlockHashWithGroupId) -> bool:
        went = super().stage(key)
        if went:
            self._filled_with[self.stores[-1][0].blocks[0].block_id] = self._worker.version
        return went

    def fill(self, slot: int, key: bytes, parts: int = 1) -> None:
        """All rows on all ranks, or with more parts only the first rows on the first ranks."""
        group = self._worker.groups[get_group_id(BlockHashWithGroupId(key))]
        hosts = self._worker.hosts
        for rank, memory in enumerate(hosts[: -(-len(hosts) // parts)]):
            rows = list(self._stamps(rank, key, self._filled_with[slot]).items())
            page = memory.page_of(self.slots_of(slot), group.group_id)
            page.bad = page.tainted = False  # what was lost there is no matter any more
            for row, stamp in rows[: max(1, len(rows) // parts)]:
                page.write(group.group_id, group.page_rows, row, stamp)

    def check(self, slot: int, key: bytes, version: int | None = None) -> None:
        """I6 for what this engine reads. A rank whose bytes the medium has lost finds that out, as a load does."""
        group = get_group_id(BlockHashWithGroupId(key))
        version = self._worker.version if version is None else version
        lost = self._losers(slot, group)
        if lost:
            self._marks.hit("another engine finds a block lost")
        for rank, memory in enumerate(self._worker.hosts):
            if rank in lost:
                continue
            for row, stamp in self._stamps(rank, key, version).items():
                got = memory.page_of(self.slots_of(slot), group).read(group, row)
                require(
                    got == stamp,
                    "I6",
                    f"rank {rank} of another engine reads a wrong row {row} in host slot {slot}",
                )

    def _lose(self, rng: random.Random) -> None:
        """What is being read gets lost on one rank; the engine drops it when the read has ended, if it lives then."""
        lease, key = self.reads[-1]
        slots = self.slots_of(lease.blocks[0].block_id)
        rng.choice(self._worker.hosts).page_of(slots, get_group_id(key)).spoil()

    def _losers(self, slot: int, group: int) -> set[int]:
        """Ranks that find a slot's bytes lost, but not withdrawn: those nobody may find."""
        pages = [memory.page_of(self.slots_of(slot), group) for memory in self._worker.hosts]
        return {rank for rank, page in enumerate(pages) if page.is_lost}

    # Reads go on over a change of weights

    def read(self, key: BlockHashWithGroupId) -> bool:
        found = super().read(key)
        if found:
            self._versions[id(self.reads[-1][0])] = self._worker.version
        return found

    def end_read(self, index: int) -> None:
        """Let go; what turned out lost is dropped for all engines, as after a report of it."""
        lease, key = self.reads.pop(index)
        version = self._versions.pop(id(lease))
        with self.pool as pool:
            block = lease.blocks[0]
            if pool.cached_block_hash_to_block.contain(key, block.block_id):
                self.check(block.block_id, key, version)  # else it was dropped as not to be trusted
                if self._losers(block.block_id, get_group_id(key)):
                    pool.evict_blocks([block.block_id])
            lease.release()

    # What it does

    def act(self, rng: random.Random, requests: list[Request], may_reset: bool) -> None:
        """One thing."""
        choice = rng.random()
        if choice < 0.3 and requests:
            self._begin(rng, rng.choice(requests))
        elif choice < 0.4 and self.stores:
            lease, key = rng.choice(self.stores)
            self.fill(lease.blocks[0].block_id, key, parts=2)
        elif choice < 0.65 and self.stores:
            self.finish(rng.randrange(len(self.stores)), ok=rng.random() < 0.9)
        elif choice < 0.8:
            found, _ = self.view()
            lost = [slot for slot, key in found.items() if self._losers(slot, get_group_id(key))]
            if found and self.read(found[rng.choice(sorted(lost or found))]):
                self._marks.hit("another engine reads")
                if self._worker.fault("bad source", rng):
                    self._lose(rng)
        elif choice < 0.93 and self.reads:
            self.end_read(rng.randrange(len(self.reads)))
        elif choice < 0.95:
            self.evict(rng.randrange(1, self.size.num_slots))
        elif choice < 0.97 and may_reset:
            self.reset()
            self._marks.hit("another engine resets")
        elif choice > 0.98:
            self._die(rng, requests)

    def _begin(self, rng: random.Random, request: Request) -> None:
        group, size = rng.choice(sorted(self.sizes.items()))
        scale = size // self._registry.unit
        num_blocks = len(request.block_hashes) // scale
        first = rng.choice((0, 0, rng.randint(0, num_blocks)))
        evicted = self.pool.num_evicted
        for index in range(first, min(num_blocks, first + rng.randint(1, 6))):
            block_hash = BlockHash(request.block_hashes[(index + 1) * scale - 1])
            if bytes(block_hash) in self._registry.meanings:
                self.stage(make_block_hash_with_group_id(block_hash, group))
        if self.pool.num_evicted > evicted:
            self._marks.hit("another engine evicts")

    def _die(self, rng: random.Random, requests: list[Request]) -> None:
        self._marks.hit("another engine dies")
        self.kill_after(rng.randint(0, 30))
        try:
            if self.stores and rng.random() < 0.5:
                self.finish(0)
            elif requests:
                self._begin(rng, rng.choice(requests))
        except Killed:
            self._marks.hit("another engine dies in the middle")
        self.die()
        self.is_dead = True

    def insist(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Store at once what the pool lacks of these, whatever is evicted for it."""
        for key in keys:
            if self.stage(key):
                self.finish(len(self.stores) - 1)

    def rest(self) -> None:
        """End everything."""
        while self.stores:
            self.finish(0)
        while self.reads:
            self.end_read(0)

    def staged_slots(self) -> set[int]:
        """Slots that it may be writing."""
        return {slot for lease, _ in self.stores for slot in self.slots_of(lease.blocks[0].block_id)}
