"""Engines in miniature on one shared segment: they store, look up, evict and reset, and check every byte they find."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId, make_block_hash_with_group_id
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.invariants import pool_problems, reference_problems
from vllm.v1.simple_kv_offload.copy_backends.shared_segment import SegmentShape, SharedSegment
from vllm.v1.simple_kv_offload.shared_pool import SharedPool

ROW_BYTES = (96, 160)


class Killed(BaseException):
    """The engine ends here, in the middle of what it was doing."""


def key_of(number: int, group: int = 0) -> BlockHashWithGroupId:
    """The index key of a piece of content."""
    return make_block_hash_with_group_id(BlockHash(hashlib.sha256(b"%d" % number).digest()), group)


def shape(
    num_slots: int = 9, keys_per_slot: int = 2, digest: bytes = b"d" * 32, max_width: int = 1
) -> SegmentShape:
    """A small segment."""
    return SegmentShape(digest, num_slots, keys_per_slot, ROW_BYTES, max_width=max_width)


@dataclass
class StepClock:
    """Time passes by itself, so that the dead are looked for in every turn."""

    now: float = 0.0

    def monotonic(self) -> float:
        self.now += 2.0
        return self.now

    def time(self) -> float:
        return self.now


@dataclass
class MiniEngine:
    """One attached engine. ``stores``: slots being filled, ``reads``: slots held with the key they must go on holding."""

    path: Path
    size: SegmentShape
    clock: Clock = field(default_factory=StepClock)
    events: bool = False
    engine_id: str | None = None
    widths: tuple[int, ...] = ()
    stores: list[tuple[Lease, BlockHashWithGroupId]] = field(default_factory=list)
    reads: list[tuple[Lease, BlockHashWithGroupId]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.segment = SharedSegment(
            str(self.path),
            self.size,
            self.clock,
            engine_id=self.engine_id,
            patience_s=60.0,
            grace_s=0.0,
        )
        self.pool = SharedPool(self.segment, 16, enable_kv_cache_events=self.events, widths=self.widths)

    def kill_after(self, num_stores: int) -> None:
        """End the engine at a store into the shared table: that one and all later ones do not happen."""
        segment, left = self.segment, [num_stores]
        put, put_signed, put_key = segment._put, segment._put_signed, segment._put_key

        def count() -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        def killing_put(word: int, value: int) -> None:
            count()
            put(word, value)

        def killing_put_signed(word: int, value: int) -> None:
            count()
            put_signed(word, value)

        def killing_put_key(word: int, key: bytes) -> None:
            half = len(key) // 2
            put_key(word, key[:half])
            count()
            put_key(word, key)

        segment._put, segment._put_signed = killing_put, killing_put_signed  # type: ignore[method-assign]
        segment._put_key = killing_put_key  # type: ignore[method-assign]

    def die(self) -> None:
        """What the kernel does for a killed process: locks go, nothing is tidied up."""
        os.close(self.segment._fd)
        self.segment._fd = -1

    # Bytes

    def slots_of(self, slot: int) -> tuple[int, ...]:
        """The slots of the block that has its keys in this one, which this engine has held or seen."""
        return (slot, *self.pool.wide.companions(slot))

    def _rows(self, slot: int) -> list[tuple[int, int]]:
        starts = self.size.region_starts
        slots = self.slots_of(slot)
        return [(starts[i] + own * size, size) for own in slots for i, size in enumerate(ROW_BYTES)]

    def fill(self, slot: int, key: bytes, parts: int = 1) -> None:
        """Write the bytes that belong to a key, in several pieces."""
        for number, (start, size) in enumerate(self._rows(slot)):
            content = _content(key, size, number)
            step = -(-size // parts)
            for offset in range(0, size, step):
                piece = content[offset : offset + step]
                self.segment.data[start + offset : start + offset + len(piece)] = piece

    def check(self, slot: int, key: bytes) -> None:
        """The slot holds exactly the bytes of the key, and so do its companions."""
        for number, (start, size) in enumerate(self._rows(slot)):
            found = self.segment.data[start : start + size]
            assert found == _content(key, size, number), (
                f"piece {number} of slot {slot} does not hold the bytes of {key.hex()[:8]}"
            )

    # What engines do

    def stage(self, key: BlockHashWithGroupId) -> bool:
        """Begin to store; False if it is there, is being stored, or finds no room."""
        pool = self.pool
        with pool:
            if pool.cached_block_hash_to_block.get_one_block(key) is not None or pool.is_expected(key):
                return False
            if any(key == own for _, own in self.stores):
                return False
            if pool.get_num_free_blocks() < pool.wide.width(key):
                return False
            (block,) = pool.get_blocks_for([key])
            pool.announce(block, ((key, 16),))
            self.stores.append((Lease.adopt(pool, [block], "store"), key))
        return True

    def finish(self, index: int, *, ok: bool = True) -> None:
        """End a store; the bytes are there if it went well."""
        lease, key = self.stores.pop(index)
        block = lease.blocks[0]
        if ok:
            self.fill(block.block_id, key)
        with self.pool as pool:
            if ok:
                pool.commit_staged(block, key, 16, None)
            lease.release()

    def read(self, key: BlockHashWithGroupId) -> bool:
        """Find and hold; the bytes must be right then and until the hold ends."""
        with self.pool as pool:
            block = pool.cached_block_hash_to_block.get_one_block(key)
            if block is None:
                return False
            self.reads.append((Lease(pool, [block], "read"), key))
        self.check(block.block_id, key)
        return True

    def end_read(self, index: int) -> None:
        """Let go of what was found."""
        lease, key = self.reads.pop(index)
        self.check(lease.blocks[0].block_id, key)
        with self.pool:
            lease.release()

    def evict(self, slot: int) -> None:
        """Drop a slot's keys."""
        with self.pool as pool:
            pool.evict_blocks([slot])

    def reset(self) -> None:
        """Drop everything."""
        with self.pool as pool:
            pool.invalidate_prefix_cache()

    def view(self) -> tuple[dict[int, BlockHashWithGroupId], set[int]]:
        """What this engine sees now: findable slots with their keys, and held slots, its own and others'."""
        with self.pool as pool:
            assert not pool_problems(pool), pool_problems(pool)
            assert not reference_problems(pool, ()), reference_problems(pool, ())
            found = {
                block.block_id: block.block_hash for block in pool.blocks if block.block_hash is not None
            }
            return found, {block.block_id for block in pool.blocks if block.ref_cnt > 0}

    def order(self) -> list[int]:
        """The order of eviction."""
        with self.pool as pool:
            return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]

    def random_step(self, rng: random.Random, num_keys: int) -> str:
        """One of the things above."""
        choice, number = rng.random(), rng.randrange(num_keys)
        key = key_of(number, number % max(1, len(self.widths)))
        if self.stores and choice < 0.35:
            self.finish(rng.randrange(len(self.stores)), ok=rng.random() < 0.9)
            return "finish"
        if self.reads and choice < 0.6:
            self.end_read(rng.randrange(len(self.reads)))
            return "end"
        if choice < 0.62:
            self.evict(rng.randrange(1, self.size.num_slots))
            return "evict"
        if choice < 0.622:
            self.reset()
            return "reset"
        if choice < 0.8:
            return "hit" if self.read(key) else "miss"
        return "stage" if self.stage(key) else "no room"


def _content(key: bytes, size: int, number: int) -> bytes:
    return (hashlib.sha256(b"%d" % number + key).digest() * (size // 32 + 1))[:size]


def hammer(
    path: Path,
    size: SegmentShape,
    seed: int,
    steps: int | None,
    report: Path | None = None,
    widths: tuple[int, ...] = (),
) -> None:
    """A process's life: random steps, each piece of content written slowly. Ends with `AssertionError` for wrong bytes.

    ``report`` receives one line: what was done how often.
    """
    rng = random.Random(seed)
    engine = MiniEngine(path, size, MonotonicClock(), widths=widths)
    counts: Counter[str] = Counter()
    fill = engine.fill
    engine.fill = lambda slot, key, parts=7: fill(slot, key, parts)  # type: ignore[method-assign]
    done = 0
    while steps is None or done < steps:
        done += 1
        counts[engine.random_step(rng, num_keys=3 * size.num_slots)] += 1
        if done % 50 == 0:
            engine.view()
    while engine.stores:
        engine.finish(0)
    while engine.reads:
        engine.end_read(0)
    engine.segment.close()
    if report is not None:
        report.write_text(json.dumps(counts))
