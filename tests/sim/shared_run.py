"""What a run has to do with the pool that its engine shares with another one."""

from __future__ import annotations

import random

from tests.sim.marks import Marks
from tests.sim.other_engine import OtherEngine
from tests.sim.params import SimParams
from tests.sim.registry import HashRegistry
from tests.sim.views import RunViews
from vllm.v1.core.block_hash import BlockHashWithGroupId, make_block_hash_with_group_id
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.transfer import TransferState


class SharedRun(RunViews):
    """The other engine, an observer of the pool, and the action that is the other engine's."""

    params: SimParams
    registry: HashRegistry
    marks: Marks
    requests: dict[str, Request]
    must_be_stored: set[bytes]
    store_excuse: str | None
    _other: OtherEngine | None = None
    _observer: OtherEngine | None = None
    _wanted: list[BlockHashWithGroupId] | None = None

    def other_engine(self) -> OtherEngine:
        """The engine beside this one; a new one where it has died."""
        if self._other is None or self._other.is_dead:
            self._other = self._attach()
        return self._other

    def observer(self) -> BlockPool:
        """The shared pool as an engine sees it that takes no part."""
        if self._observer is None:
            self._observer = self._attach()
        self._observer.view()
        return self._observer.pool

    def _attach(self) -> OtherEngine:
        assert self.world.shared is not None
        assert self.offload is not None
        tier = self.offload.tier
        sizes = {group: tier.coordinator.group_block_sizes[group] for group in tier.group_ids}
        widths = tier.geometry.slot_widths
        return OtherEngine(self.world.shared, self.worker, self.registry, sizes, widths, self.marks)

    def _mark_shared(self) -> None:
        offload = self.offload
        if offload is None or offload.tier.shared is None:
            return
        own = offload.tier.shared.own_slots
        loading = [
            block.block_id for load in offload.load_side.loads.values() for block in load.transfer.tier_blocks
        ]
        if not own >= set(loading):
            self.marks.hit("load of what another engine stored")

    def close(self) -> None:
        """Let go of what lies outside this process."""
        for engine in (self._other, self._observer):
            if engine is not None and not engine.is_dead:
                engine.die()
        self.world.close()

    def insist(self) -> None:
        """The other engine wants as many blocks in the pool as that has, and never gives up.

        None of them lies on this engine's device: what that has, it may want there itself.
        """
        if not self.params.shared or self.offload is None:
            return
        if self._wanted is None:
            self._wanted = self._not_on_the_device()
            self.store_excuse = self.store_excuse or "another engine"
        self.other_engine().insist(self._wanted)

    def _not_on_the_device(self) -> list[BlockHashWithGroupId]:
        index, found = self.device_pool.cached_block_hash_to_block, []
        group, tokens = min(self.other_engine().sizes.items())
        width = self.other_engine().widths[group]
        count = self.params.host_blocks - 1
        if (
            width > 1
        ):  # those that fit: of more, each would evict two of its own, and leave a slot empty now and then
            count = self.other_engine().pool.get_num_free_blocks() // width
        scale = tokens // self.registry.unit
        for request in self.requests.values():
            for block_hash in request.block_hashes[scale - 1 :: scale]:
                key = make_block_hash_with_group_id(block_hash, group)
                is_known = bytes(block_hash) in self.registry.meanings
                if is_known and key not in found and index.get_one_block(key) is None:
                    found.append(key)
        return found[-count:] if count else []

    def _do_other(self, rng: random.Random) -> None:
        """Another engine of the node does something with the shared pool."""
        self._mark_shared()
        other = self.other_engine()
        before = other.pool.epoch
        copies = [t for t in self.store_transfers() if t.state is TransferState.SUBMITTED]
        other.act(rng, list(self.requests.values()), "reset" not in self.params.actions_off)
        if other.pool.epoch != before:
            self.must_be_stored.clear()
            if copies or (self.offload is not None and self.offload.load_side.loads):
                self.marks.hit("another engine resets while a copy runs")
        # It evicts, it is about to store what it never does, and it resets.
        self.store_excuse = self.store_excuse or "another engine"
