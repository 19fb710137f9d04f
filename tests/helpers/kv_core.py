"""Small real objects of the KV core: specs, requests, pools and managers for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_hash import BlockHash, init_none_hash, make_block_hash_with_group_id
from vllm.v1.core.block_hasher import get_request_block_hasher
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request


@dataclass(frozen=True)
class Bytes:
    """Stands for a dtype."""

    itemsize: int = 1


BYTE = Bytes()
init_none_hash(sha256)


def full(block_size: int = 16, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=BYTE, **more)


def rswa(block_size: int, window: int) -> RSWASpec:
    return RSWASpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=BYTE, rswa_window=window)


def window(block_size: int, size: int, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=BYTE, sliding_window=size, **more
    )


def replay_window(block_size: int, size: int) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=2,
        dtype=BYTE,
        sliding_window=size,
        bounded_replay=True,
    )


def chunked(block_size: int, chunk: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=BYTE, attention_chunk_size=chunk
    )


def ring(block_size: int) -> CircularBufferSpec:
    return CircularBufferSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=BYTE, dcp_sharded=False
    )


def mamba(block_size: int, mode: str = "align", **more: Any) -> MambaSpec:
    return MambaSpec(block_size, ((2,),), (BYTE,), mamba_cache_mode=mode, **more)


def config(num_blocks: int, *specs: KVCacheSpec, eagle: Iterable[int] = (), **more: Any) -> KVCacheConfig:
    flagged = set(eagle)
    groups = [
        KVCacheGroupSpec([f"layer.{i}"], spec, is_eagle_group=i in flagged) for i, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks, [], groups, **more)


def manager(
    num_blocks: int,
    *specs: KVCacheSpec,
    scheduler_block: int | None = None,
    hash_block: int | None = None,
    eagle: Iterable[int] = (),
    retention: int | None = None,
    **more: Any,
) -> KVCacheManager:
    """A manager over these specs; block sizes default to the first group's."""
    size = scheduler_block or specs[0].block_size
    more.setdefault("max_model_len", 8192)
    return KVCacheManager(
        config(num_blocks, *specs, eagle=eagle, prefix_cache_retention_interval=retention),
        scheduler_block_size=size,
        hash_block_size=hash_block or size,
        **more,
    )


def request(
    request_id: str,
    tokens: Sequence[int],
    hash_block: int = 16,
    lookahead: int = 0,
    hash_fn: Any = sha256,
    **more: Any,
) -> Request:
    hasher = get_request_block_hasher(hash_block, hash_fn, lookahead)
    params = SamplingParams(max_tokens=1000)
    return Request(request_id, list(tokens), params, None, block_hasher=hasher, **more)


def lora(name: str, number: int, path: str) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)


def image(identifier: str, offset: int, length: int) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def fake_hashes(count: int, salt: str = "") -> list[BlockHash]:
    """Distinct hashes without any tokens behind them."""
    return [BlockHash(f"{salt}{i}".encode()) for i in range(count)]


def plant(
    pool: BlockPool, hashes: Sequence[BlockHash], cached: Sequence[int], group: int, first_id: int
) -> None:
    """Register block `first_id + i` under `hashes[i]` for every i in `cached`."""
    for i in cached:
        key = make_block_hash_with_group_id(hashes[i], group)
        pool.index.add(key, pool.blocks[first_id + i], None)


def admit(kv: KVCacheManager, req: Request, num_new: int | None = None) -> int | None:
    """Look up, take slots for the rest of the request (or `num_new` tokens) and count them as computed.

    Returns the hit in tokens, or None if there is no room.
    """
    blocks, hit, junction = kv.get_computed_blocks(req)
    req.shared_prefix_boundary = junction
    new = req.num_tokens - hit if num_new is None else num_new
    if kv.allocate_slots(req, new, hit, blocks) is None:
        return None
    req.num_computed_tokens = hit + new
    return hit


def step(kv: KVCacheManager, req: Request, num_new: int) -> bool:
    """Take slots for `num_new` more tokens of a running request."""
    if kv.allocate_slots(req, num_new) is None:
        return False
    req.num_computed_tokens += num_new
    return True


def ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def free_ids(kv_or_pool: KVCacheManager | BlockPool) -> list[int]:
    """Ids of the free queue, front first."""
    pool = kv_or_pool if isinstance(kv_or_pool, BlockPool) else kv_or_pool.block_pool
    return ids(pool.free_block_queue.get_all_free_blocks())
