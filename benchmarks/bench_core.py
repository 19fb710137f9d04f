"""Time and memory of the KV core by itself: hashing, look-up, evicting allocation, blocks.

`python benchmarks/bench_core.py [--rounds 30]` prints one table. Every figure is the best of several rounds, because the
work is deterministic and everything else on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.kv_core import full, manager, request, window
from vllm.utils.hashing import sha256
from vllm.v1.core.block_hash import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.block_hasher import get_request_block_hasher
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

TOKENS = 32_768
BLOCK = 16
ALLOCATIONS = 100_000
VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `goal` has the unit of `value`."""

    name: str
    value: float
    unit: str
    goal: float | None = None


def best(rounds: int, work: Callable[[], object], prepare: Callable[[], None] | None = None) -> float:
    """Milliseconds of the fastest round; `prepare` runs before each and is not counted."""
    times = []
    for _ in range(rounds):
        if prepare is not None:
            prepare()
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        gc.enable()
    return min(times) * 1e3


def prompt() -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(VOCABULARY) for _ in range(TOKENS)]


def bench_hash(rounds: int) -> list[Row]:
    req = request("r", prompt(), hash_block=BLOCK)
    hasher = get_request_block_hasher(BLOCK, sha256)
    elapsed = best(rounds, lambda: hasher(req), req.block_hashes.clear)
    return [Row(f"hash {TOKENS} tokens in blocks of {BLOCK}", elapsed, "ms", 1.87)]


def cached(kv: KVCacheManager, chunk: int = 2048) -> Request:
    """A request whose prefix the manager has cached."""
    first = request("first", prompt(), hash_block=BLOCK)
    for start in range(0, TOKENS, chunk):
        assert kv.allocate_slots(first, chunk) is not None
        first.num_computed_tokens = start + chunk
    kv.free(first)
    return request("second", prompt(), hash_block=BLOCK)


def bench_lookup(rounds: int) -> list[Row]:
    rows = []
    for name, specs, goal in (
        ("full attention", [full(BLOCK)], 0.68),
        ("full and window", [full(BLOCK), window(BLOCK, 1024)], None),
    ):
        kv = manager(8 * TOKENS // BLOCK, *specs, max_model_len=TOKENS)
        again = cached(kv)
        assert kv.get_computed_blocks(again)[1] == TOKENS - BLOCK
        elapsed = best(rounds, lambda kv=kv, again=again: kv.get_computed_blocks(again))
        rows.append(Row(f"look up {TOKENS} cached tokens, {name}", elapsed, "ms", goal))
        elapsed = best(rounds, lambda kv=kv, again=again: admit(kv, again))
        rows.append(Row(f"look up, take and free them, {name}", elapsed, "ms"))
    return rows


def admit(kv: KVCacheManager, again: Request) -> None:
    """Find the hit, take it and give it back."""
    blocks, hit, _ = kv.get_computed_blocks(again)
    kv.allocate_slots(again, TOKENS - hit, hit, blocks)
    kv.free(again)


def full_pool() -> BlockPool:
    """A pool whose blocks are all free and cached."""
    pool = BlockPool(ALLOCATIONS + 1, True, BLOCK)
    for i, block in enumerate(pool.blocks[1:]):
        key = make_block_hash_with_group_id(BlockHash(i.to_bytes(32, "big")), 0)
        pool.index.add(key, block, BLOCK)
    return pool


def bench_eviction(rounds: int) -> list[Row]:
    rows = []
    pools: list[BlockPool] = []

    def prepare() -> None:
        pools[:] = [full_pool()]

    for batch, goal in ((1000, 25.8), (16, None), (1, None)):

        def work(batch: int = batch) -> None:
            take = pools[0].get_new_blocks
            for _ in range(ALLOCATIONS // batch):
                take(batch)

        elapsed = best(max(3, rounds // 5), work, prepare)
        rows.append(Row(f"{ALLOCATIONS} evicting allocations, {batch} at a time", elapsed, "ms", goal))
    return rows


def bench_release(rounds: int) -> list[Row]:
    pool = BlockPool(ALLOCATIONS + 1, True, BLOCK)
    held: list[list[object]] = []

    def prepare() -> None:
        held[:] = [pool.get_new_blocks(ALLOCATIONS)]

    elapsed = best(max(3, rounds // 5), lambda: pool.free_blocks(held[0]), prepare)
    return [Row(f"free {ALLOCATIONS} blocks", elapsed, "ms")]


def bench_memory() -> list[Row]:
    gc.collect()
    tracemalloc.start()
    pool = BlockPool(ALLOCATIONS, True, BLOCK)
    empty = tracemalloc.get_traced_memory()[0]
    for i, block in enumerate(pool.blocks[1:]):
        key = make_block_hash_with_group_id(BlockHash(i.to_bytes(32, "big")), 0)
        pool.index.add(key, block, BLOCK)
    filled = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return [
        Row("memory per block", empty / ALLOCATIONS, "B", 200),
        Row("memory per cached block, with key and index", filled / ALLOCATIONS, "B"),
    ]


def print_table(rows: list[Row]) -> None:
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  {'value':>9}      goal")
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:>8.2f} {'met' if row.value <= row.goal else 'MISSED'}"
        print(f"{row.name:{width}}  {row.value:>9.3f} {row.unit:3} {goal}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    rows = bench_hash(rounds) + bench_lookup(rounds) + bench_eviction(rounds) + bench_release(rounds)
    print_table(rows + bench_memory())


if __name__ == "__main__":
    main()
