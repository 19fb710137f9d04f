"""A toy engine round the KV cache manager: requests from a tree of prefixes, memory as stamps, steps in sequence.

Every slot remembers the exact prefix it was computed from, so that *hit ⇒ bytes equal* is checked at each read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.helpers.kv_core import chunked, config, full, mamba, replay_window, request, ring, rswa, window
from vllm.utils.math_utils import cdiv
from vllm.v1.core.invariants import check_invariants
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_kinds.mamba import MambaManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    get_mamba_prefill_checkpoint_position,
)
from vllm.v1.request import Request

Stamp = int
UNIT = 4


@dataclass
class Worker:
    """Memory of all groups: (group, block, slot) → stamp of the prefix that was computed into it."""

    slots: dict[tuple[int, int, int], Stamp] = field(default_factory=dict)

    def copy(self, source: int, target: int) -> None:
        for key in [key for key in self.slots if key[1] == target]:
            del self.slots[key]
        for (group, block, slot), stamp in list(self.slots.items()):
            if block == source:
                self.slots[group, target, slot] = stamp


@dataclass
class Chunk:
    """What one request computes in one step."""

    req: Request
    start: int
    end: int
    first_row: int  # rows below are cached already


def draw_specs(rng: random.Random) -> list[KVCacheSpec]:
    """One to four groups; the first is mostly full attention."""
    block = rng.choice((4, 8))
    makers = {
        "full": lambda: full(block),
        "window": lambda: window(rng.choice((4, 8)), rng.choice((1, 3, 6, 9))),
        "chunked": lambda: chunked(4, rng.choice((4, 8, 12))),
        "state": lambda: mamba(rng.choice((4, 8))),
        "ring": lambda: ring(6),
        "rswa": lambda: rswa(4, rng.choice((4, 8))),
    }
    specs = [makers["full" if rng.random() < 0.8 else rng.choice(sorted(makers))]()]
    specs += [makers[rng.choice(sorted(makers))]() for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.15:
        return [full(4), replay_window(4, 4)]
    if rng.random() < 0.25:  # states far apart and hits on hash units
        return [full(8), mamba(rng.choice((8, 16)))][:: rng.choice((1, -1))]
    return specs


class World:
    """One run. `act` takes a random action; every action checks what it can."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        specs = draw_specs(rng)
        sizes = [spec.block_size for spec in specs if spec.prefix_cacheable] or [4]
        scheduler = max(sizes)
        single = len(specs) == 1
        unit = specs[0].block_size if single else UNIT
        if single and not specs[0].prefix_cacheable:
            scheduler = unit
        self.kv = KVCacheManager(
            config(rng.randint(12, 40), *specs, prefix_cache_retention_interval=rng.choice((None, 0))),
            64,
            scheduler,
            unit,
            max_in_flight_tokens=16,
            enable_caching=rng.random() < 0.9,
            use_eagle=rng.random() < 0.2,
            enable_kv_cache_events=True,
            enable_mamba_shared_prefix_checkpoint=rng.random() < 0.5,
        )
        self.unit = unit
        self.groups = self.kv.coordinator.single_type_managers
        self.worker = Worker()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.count = 0
        self.hits = 0
        self.replay = max((spec.prefix_replay_tokens for spec in specs), default=0)
        self.replay_starts: dict[str, int] = {}

    # Actions

    def act(self) -> None:
        """One action, then a recount."""
        name = self.rng.choices(("arrive", "step", "abort", "reset", "preempt"), (4, 12, 1, 0.3, 0.7))[0]
        {
            "arrive": self.arrive,
            "step": self.step,
            "abort": self.abort,
            "reset": self.reset,
            "preempt": self.preempt,
        }[name]()
        check_invariants(self.kv)

    def arrive(self) -> None:
        """A prompt that shares a prefix with others, of a length near a block's edge."""
        rng = self.rng
        stem = [rng.choice((1, 2))] * rng.choice((4, 8, 12, 16))
        branch = [rng.choice((3, 4))] * rng.choice((0, 4, 7, 8))
        leaf = [rng.randrange(5, 8) for _ in range(rng.randint(1, 9))]
        req = request(f"r{self.count}", stem + branch + leaf, hash_block=self.unit)
        self.count += 1
        self.waiting.append(req)

    def abort(self) -> None:
        """Some request goes away."""
        everyone = self.running + self.waiting
        if everyone:
            self.leave(self.rng.choice(everyone))

    def leave(self, req: Request) -> None:
        """The request gives everything back."""
        self.kv.free(req)
        self.replay_starts.pop(req.request_id, None)
        for queue in (self.running, self.waiting):
            if req in queue:
                queue.remove(req)

    def preempt(self) -> None:
        """The last running request starts again later."""
        if self.running:
            req = self.running.pop()
            self.kv.free(req)
            req.num_computed_tokens = 0
            self.waiting.insert(0, req)

    def reset(self) -> None:
        """All entries vanish, whatever is held."""
        self.kv.block_pool.invalidate_prefix_cache()

    def step(self) -> None:
        """Schedule, run, take the results."""
        self.kv.new_step_starts()
        chunks: list[Chunk] = []
        budget = 16
        for req in list(self.running):
            if req not in self.running:
                continue
            end = self.end_of_chunk(req, req.num_computed_tokens, budget)
            start = req.num_computed_tokens
            if end <= start:
                continue
            while not self.allocate(req, end - start):
                victim = self.running[-1]
                chunks = [chunk for chunk in chunks if chunk.req is not victim]
                self.preempt()
                if victim is req:
                    break
            else:
                budget -= end - start
                chunks.append(Chunk(req, start, end, start))
                continue
            break
        for chunk in chunks:  # a victim of this pass must not leave hashes behind
            self.kv.cache_blocks(chunk.req, min(chunk.end, chunk.req.num_tokens))
        for req in list(self.waiting):
            chunk = self.admit(req, budget)
            if chunk is None:
                continue
            budget -= chunk.end - chunk.start
            chunks.append(chunk)
        failing = self.failing(chunks)
        self.run(chunks, failing)
        self.finish(chunks, failing)

    def failing(self, chunks: list[Chunk]) -> set[str]:
        """Requests whose step goes wrong: now and then one, and whoever hit its blocks in the same step."""
        if not chunks or self.rng.random() >= 0.05:
            return set()
        tables = {
            c.req.request_id: {b for t in self.kv.get_block_ids(c.req.request_id) for b in t if b}
            for c in chunks
        }
        first = self.rng.choice(chunks).req.request_id
        bad, spoiled = {first}, set(tables[first])
        while more := {name for name, blocks in tables.items() if name not in bad and blocks & spoiled}:
            bad |= more
            spoiled = set().union(*(tables[name] for name in bad))
        return bad

    def admit(self, req: Request, budget: int) -> Chunk | None:
        """Take a waiting request in, if its blocks suffice."""
        blocks, hit, junction = self.kv.get_computed_blocks(req)
        assert hit < req.num_tokens
        req.shared_prefix_boundary = junction
        start = hit
        if self.replay and hit:
            if hit <= self.replay:
                blocks, hit, start = self.kv.empty_kv_cache_blocks, 0, 0
            else:
                start = hit - self.replay
        end = self.end_of_chunk(req, hit, budget)
        if end <= hit:
            return None
        if not self.allocate(req, end - hit, hit, blocks):
            return None
        self.hits += hit > 0
        self.replay_starts[req.request_id] = start if start < hit else 0
        self.waiting.remove(req)
        self.running.append(req)
        return Chunk(req, start, end, hit)

    def allocate(self, req: Request, num_new: int, hit: int = 0, blocks: KVCacheBlocks | None = None) -> bool:
        """`allocate_slots`; running requests (no blocks given) are hashed at the end of their phase."""
        taken = self.kv.allocate_slots(req, num_new, hit, blocks, delay_cache_blocks=blocks is None)
        if taken is None and blocks is not None:
            assert not any(self.kv.get_block_ids(req.request_id)), "a refused request holds blocks"
        return taken is not None

    def end_of_chunk(self, req: Request, start: int, budget: int) -> int:
        """Where the chunk ends: on state boundaries during prefill, as the scheduler does it."""
        end = min(req.num_tokens, start + budget)
        states = [group for group in self.groups if isinstance(group, MambaManager)]
        if not states or not self.kv.enable_caching:
            return end
        block = max(group.block_size for group in states)
        prefill_end = max(req.num_prompt_tokens, req.num_tokens - 1)
        if start >= prefill_end:
            return end
        if end < prefill_end:
            aligned = end // block * block
            following = (start // block + 1) * block
            end = aligned if aligned > start else (following if end >= following else start)
        drops = bool(self.kv.coordinator.drop_eagle_group_ids)
        last = (req.num_tokens - 1) // block * block - (block if drops else 0)
        stops = [last, req.shared_prefix_boundary, (start // block + 1) * block if start % block else 0]
        if self.kv.coordinator.enable_partial_hash_hits:
            stops.append(get_mamba_prefill_checkpoint_position(req.num_tokens, self.unit, drops))
        return min([stop for stop in stops if start < stop < end], default=end)

    # The worker

    def run(self, chunks: list[Chunk], failing: set[str]) -> None:
        """Copies, then all writes, then all reads; states are read first."""
        for source, target in self.kv.take_kv_cache_block_copies():
            self.worker.copy(source, target)
        tables = {chunk.req.request_id: self.kv.get_block_ids(chunk.req.request_id) for chunk in chunks}
        for chunk in chunks:
            for group in self.groups:
                if isinstance(group, MambaManager) and chunk.start:
                    self.expect(group, tables[chunk.req.request_id], chunk, chunk.start, 0, group.block_size)
        for chunk in chunks:
            for group in self.groups:
                self.write(group, tables[chunk.req.request_id], chunk, chunk.req.request_id in failing)
        for chunk in chunks:
            if chunk.req.request_id not in failing:
                for group in self.groups:
                    self.read(group, tables[chunk.req.request_id], chunk)

    @staticmethod
    def stamp(group: SingleTypeKVCacheManager, req: Request, num_tokens: int) -> Stamp:
        return hash((group.kv_cache_group_id, *req.all_token_ids[:num_tokens]))

    def write(
        self, group: SingleTypeKVCacheManager, table: tuple[list[int], ...], chunk: Chunk, bad: bool
    ) -> None:
        number, size, spec = group.kv_cache_group_id, group.block_size, group.kv_cache_spec
        own = table[number]
        if isinstance(spec, CircularBufferSpec):
            assert len(own) == 1
            assert own[0] != 0
            return
        if isinstance(spec, MambaSpec):
            block = own[cdiv(chunk.end, size) - 1]
            assert block != 0
            assert self.kv.block_pool.blocks[block].ref_cnt >= 1
            self.worker.slots[number, block, 0] = -1 if bad else self.stamp(group, chunk.req, chunk.end)
            return
        first = chunk.start if not spec.prefix_cacheable else chunk.first_row
        for position in range(first, chunk.end):
            block = own[position // size]
            assert block != 0, f"no slot for token {position} of {chunk.req} in group {number}"
            self.worker.slots[number, block, position % size] = (
                -1 if bad else self.stamp(group, chunk.req, position + 1)
            )

    def read(self, group: SingleTypeKVCacheManager, table: tuple[list[int], ...], chunk: Chunk) -> None:
        spec = group.kv_cache_spec
        if isinstance(spec, CircularBufferSpec | MambaSpec):
            return
        prompt = chunk.req.num_prompt_tokens
        for position in range(self.first_visible(spec, chunk), chunk.end):
            hidden = isinstance(spec, RSWASpec) and prompt <= position <= chunk.start - spec.rswa_window
            if not hidden:
                self.expect(group, table, chunk, position + 1, position % group.block_size, group.block_size)

    def first_visible(self, spec: KVCacheSpec, chunk: Chunk) -> int:
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, chunk.start - spec.sliding_window + 1)
            return first if spec.prefix_cacheable else max(first, self.replay_starts[chunk.req.request_id])
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return chunk.start // spec.attention_chunk_size * spec.attention_chunk_size
        return 0

    def expect(
        self,
        group: SingleTypeKVCacheManager,
        table: tuple[list[int], ...],
        chunk: Chunk,
        num_tokens: int,
        slot: int,
        size: int,
    ) -> None:
        number = group.kv_cache_group_id
        block = table[number][(num_tokens - 1) // size]
        got = self.worker.slots.get((number, block, slot)) if block else None
        assert got == self.stamp(group, chunk.req, num_tokens), (
            f"{chunk.req.request_id} computes [{chunk.start}, {chunk.end}) and reads wrong bytes for token "
            f"{num_tokens - 1} in block {block} of group {number} ({type(group.kv_cache_spec).__name__})"
        )

    def finish(self, chunks: list[Chunk], failing: set[str]) -> None:
        """Count the tokens, sample, end requests."""
        for chunk in chunks:
            req = chunk.req
            if req.request_id in failing:
                self.kv.evict_unconfirmed(req, chunk.start)
                self.leave(req)
                continue
            req.num_computed_tokens = chunk.end
            if chunk.end == req.num_tokens:
                if req.num_output_tokens >= 6 or req.num_tokens >= 60 or self.rng.random() < 0.1:
                    self.kv.finalize_partial_tail_offloads(req)
                    self.leave(req)
                else:
                    req.append_output_token_ids(self.rng.randrange(5, 7))

    def rest(self) -> None:
        """Let everything go and check that nothing is left."""
        for req in self.running + self.waiting:
            self.leave(req)
        self.kv.new_step_starts()
        self.kv.take_kv_cache_block_copies()
        self.kv.new_step_starts()
        check_invariants(self.kv, at_rest=True)
        assert self.kv.reset_prefix_cache()
