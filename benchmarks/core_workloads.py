"""The workloads of bench_core.py, over public names alone, so that they run in any engine that has those.

`python benchmarks/core_workloads.py` reads names of workloads from stdin, one a line, and answers each with one round of it as a
line of JSON: `{"ms": 1.2}`, or `{"error": "…"}` where the engine lacks what is needed. Times are of the thread's own processor time:
whatever else the machine does is left out. One process serves all rounds of an engine.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

TOKENS, BLOCK, VOCABULARY = 32_768, 16, 128_000
ALLOCATIONS = 100_000
DECODES, STEPS = 256, 64  # steps: each request begins a block in every sixteenth
BIG_POOL = 1_000_000
TURNS = 12
SIZES = {  # tokens of a prompt, blocks of the pool
    "100_small": (100, 10_000),
    "100": (100, BIG_POOL),
    "2000": (2000, BIG_POOL),
    "16000": (16_000, BIG_POOL),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 131072, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of processor time; the garbage collector runs before, not meanwhile."""
    gc.collect()
    gc.disable()
    start = time.thread_time()
    work()
    elapsed = time.thread_time() - start
    gc.enable()
    return elapsed * 1e3


@cache
def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids, the same in every process."""
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 1) -> Any:
    """A request whose blocks are hashed."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, list(prompt), params, None, block_hasher=hasher)


def kv_config(num_blocks: int) -> Any:
    """One group of full attention."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])


def hash_prompt() -> float:
    made = request("r", tokens(TOKENS))
    hasher = get_request_block_hasher(BLOCK, sha256)
    made.block_hashes.clear()
    elapsed = timed(lambda: made.block_hashes.extend(hasher(made)))
    assert len(made.block_hashes) == TOKENS // BLOCK
    return elapsed


def look_up() -> float:
    manager, again = cached_prompt()
    found: list[Any] = []
    elapsed = timed(lambda: found.append(manager.get_computed_blocks(again)))
    assert found[0][1] == TOKENS - BLOCK
    return elapsed


@cache
def cached_prompt() -> tuple[Any, Any]:
    """A manager that has cached the prompt, and a second request for it."""
    manager = KVCacheManager(
        kv_config(2 * TOKENS // BLOCK),
        max_model_len=TOKENS + BLOCK,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
    )
    first = request("first", tokens(TOKENS))
    for start in range(0, TOKENS, 2048):
        assert manager.allocate_slots(first, 2048) is not None
        first.num_computed_tokens = start + 2048
    manager.free(first)
    return manager, request("second", tokens(TOKENS))


@cache
def hashed_request() -> Any:
    return request("long", tokens(ALLOCATIONS * BLOCK))


def cached_pool() -> Any:
    """A pool of blocks that are all free and cached, in the order in which a request lets go of them."""
    pool = BlockPool(ALLOCATIONS + 1, True, BLOCK)
    blocks = pool.get_new_blocks(ALLOCATIONS)
    pool.cache_full_blocks(hashed_request(), blocks, 0, ALLOCATIONS, BLOCK, 0)
    pool.free_blocks(reversed(blocks))
    return pool


def evict(batch: int) -> float:
    """Allocations from a pool whose every free block is cached: each evicts one block's content."""
    pool = cached_pool()

    def work() -> None:
        take = pool.get_new_blocks
        for _ in range(ALLOCATIONS // batch):
            take(batch)

    elapsed = timed(work)
    assert pool.get_num_free_blocks() == 0
    assert len(pool.cached_block_hash_to_block) == 0
    return elapsed


def walk() -> float:
    """Every block of the free queue in eviction order."""
    queue = cached_pool().free_block_queue
    seen: list[int] = []

    def work() -> None:
        seen.append(sum(1 for _ in queue.iter_blocks_after(None)))

    elapsed = timed(work)
    assert seen == [ALLOCATIONS]
    return elapsed


@cache
def model_folder() -> str:
    folder = tempfile.mkdtemp(prefix="bench-core-")
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    return folder


def engine_config(**settings: Any) -> Any:
    """The configuration of a tiny model, without weights or tokenizer."""
    args = EngineArgs(
        model=model_folder(), skip_tokenizer_init=True, dtype="float32", max_model_len=65536, block_size=BLOCK,
        max_num_seqs=DECODES, enforce_eager=True, async_scheduling=False,
        **({"max_num_batched_tokens": 8192} | settings),
    )  # fmt: skip
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = BIG_POOL
    return config


class Decoding:
    """A scheduler with requests of equal prompts' lengths. `spread`: of lengths such that as many begin a block in every step."""

    def __init__(self, prompt_tokens: int, num_blocks: int, *, spread: bool = False) -> None:
        config = engine_config()
        self.scheduler: Any = Scheduler(
            vllm_config=config, kv_cache_config=kv_config(num_blocks), block_size=BLOCK, hash_block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(config),
        )  # fmt: skip
        text = tokens(prompt_tokens + DECODES)
        for i in range(DECODES):
            prompt = text[i : i + prompt_tokens + (i % BLOCK if spread else 0)]
            self.scheduler.add_request(request(f"request-{i}", prompt, max_tokens=10_000))
        self.num_prefill_steps = (prompt_tokens + BLOCK) * DECODES // 8192 + DECODES

    def step(self) -> tuple[float, bool]:
        """Seconds of `schedule` + `update_from_output`, and whether every request decoded one token."""
        scheduler = self.scheduler
        scheduled: list[Any] = []
        elapsed = timed_bare(lambda: scheduled.append(scheduler.schedule()))
        names = list(scheduled[0].num_scheduled_tokens)
        by_name = scheduler.requests
        sampled = [[7] if by_name[n].num_computed_tokens >= by_name[n].num_tokens else [] for n in names]
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        elapsed += timed_bare(lambda: scheduler.update_from_output(scheduled[0], output))
        return elapsed, scheduled[0].total_num_scheduled_tokens == DECODES == sum(map(len, sampled))


def step(prompt_tokens: int, num_blocks: int) -> float:
    """The mean of `schedule` + `update_from_output` over steps in which every request decodes one token.

    Not the median: where all prompts are equally long, all requests take a block in the same few steps.
    """
    decoding = Decoding(prompt_tokens, num_blocks)
    times: list[float] = []
    for _ in range(decoding.num_prefill_steps + STEPS):
        elapsed, is_decode = decoding.step()
        if is_decode:
            times.append(elapsed)
            if len(times) == STEPS:
                return sum(times) / STEPS * 1e3
    raise RuntimeError(f"only {len(times)} steps decoded all {DECODES} requests")


def step_sizes() -> dict[str, float]:
    """`step` by the length of prompts and the size of the pool, as `SIZES` names them.

    The sizes take turns, as many steps at a time as a block has tokens: in each of them as many requests begin a block,
    whatever the size. Medians over the turns.
    """
    runs = {name: Decoding(*size, spread=True) for name, size in SIZES.items()}
    turns: dict[str, list[float]] = {name: [] for name in runs}
    for decoding in runs.values():
        for _ in range(decoding.num_prefill_steps):
            if decoding.step()[1]:
                break
    for _ in range(TURNS):
        for name, decoding in runs.items():
            decoding.step()  # the others' memory is in the caches yet
            steps = [decoding.step() for _ in range(BLOCK)]
            assert all(is_decode for _, is_decode in steps)
            turns[name].append(sum(elapsed for elapsed, _ in steps) / BLOCK * 1e3)
    return {name: statistics.median(times) for name, times in turns.items()}


def timed_bare(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def lazy_step(num_near: int, *, copied: bool = False, step: int = 1) -> float:
    """One step's look for blocks to store in lazy mode, over a free queue of cached blocks.

    `num_near` of them are near enough to their end that the step must look at them; the tier has room for as many, or
    has them all already. `step`: which one is timed.
    """
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    config = engine_config(kv_transfer_config=transfer_config(), max_num_batched_tokens=num_near * BLOCK // 2)
    pool = cached_pool()
    spec = kv_config(ALLOCATIONS + 1)
    page = spec.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    tensor = KVCacheTensor(page * (ALLOCATIONS + 1), ["layer"], 0, page)
    spec.kv_cache_tensors.append(tensor)
    manager: Any = SimpleCPUOffloadScheduler(
        config, spec, page * 2 * num_near, BLOCK, BLOCK, lazy_offload=True
    )
    manager.bind_gpu_block_pool(pool)
    if copied:
        tier = manager.cpu_block_pool
        for block, slot in zip(
            list(pool.free_block_queue.iter_blocks_after(None))[:num_near],
            tier.get_new_blocks(num_near),
            strict=True,
        ):
            tier._insert_block_hash(block.block_hash, slot, BLOCK)
            tier.free_blocks([slot])
    for _ in range(step):
        elapsed = timed(lambda: manager.build_connector_meta(SchedulerOutput.make_empty()))
    assert manager.has_pending_stores() is not copied
    return elapsed


def transfer_config() -> Any:
    from vllm.config import KVTransferConfig

    extra = {"cpu_bytes_to_use": 1 << 30, "lazy_offload": True}
    return KVTransferConfig(
        kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def big_pool() -> dict[str, float]:
    """Start time and resident memory of a pool of a million blocks: empty, all cached, and cached anew bit by bit."""
    gc.collect()
    before = resident_bytes()
    pools: list[Any] = []
    elapsed = timed(lambda: pools.append(BlockPool(BIG_POOL, True, BLOCK)))
    pool = pools.pop()
    empty = resident_bytes() - before
    peaks: list[int] = []
    count = 0
    for batch in (BIG_POOL - 1, 1000):
        for _ in range(BIG_POOL // batch):
            blocks = pool.get_new_blocks(batch)
            for block in blocks:
                count += 1
                key = make_block_hash_with_group_id(count.to_bytes(32, "big"), 0)  # type: ignore[arg-type]
                pool._insert_block_hash(key, block, (count % 2048 + 1) * BLOCK)
            pool.free_blocks(blocks)
        del blocks, block
        gc.collect()
        peaks.append(resident_bytes() - before)
    return {
        "ms": elapsed,
        "bytes_empty": empty / BIG_POOL,
        "bytes_cached": peaks[0] / BIG_POOL,
        "bytes_again": peaks[1] / BIG_POOL,
    }


WORKLOADS: dict[str, Callable[[], float | dict[str, float]]] = {
    "hash": hash_prompt,
    "look_up": look_up,
    "evict_1": lambda: evict(1),
    "evict_16": lambda: evict(16),
    "evict_1000": lambda: evict(1000),
    "step": lambda: step(100, 10_000),
    "step_long": lambda: step(2000, 100_000),
    "step_sizes": step_sizes,
    "walk": walk,
    "lazy_1024": lambda: lazy_step(1024),
    "lazy_copied": lambda: lazy_step(1024, copied=True),
    "lazy_again": lambda: lazy_step(1024, copied=True, step=2),
    "big_pool": big_pool,
}


def main() -> None:
    # Whatever an engine prints goes to stderr: stdout is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    for line in sys.stdin:
        try:
            result = WORKLOADS[line.strip()]()
            reply = result if isinstance(result, dict) else {"ms": result}
        except Exception as error:  # an engine may lack a name or take other arguments: that is an answer
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
