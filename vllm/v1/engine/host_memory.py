"""Whether this machine has the memory that all engines of this server will fill.  Layer L7.

Owns the sum over replicas, ranks, host pools and KV caches in host memory. Must not know what a connector does with a pool.
Pools and caches take little when they are made and all of it in time, so that the system would end a process hours later.
"""

from __future__ import annotations

from vllm import platforms
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.kv_connector_types import HostPool
from vllm.v1.worker.cpu_worker import kv_cache_bytes

GIB = 2**30


def check_host_memory(vllm_config: VllmConfig) -> None:
    """``ValueError`` if host pools and KV caches of this server together are larger than the memory that is available.

    It says what each takes and what would fit. What has no size yet (a number of blocks) is not counted; without a host
    pool nothing is refused.
    """
    # Before the pools: what another replica takes of a shared one meanwhile must not count as missing and as wanted.
    available = CpuPlatform.get_available_memory()
    replicas = vllm_config.parallel_config.replicas_on_node
    pools: dict[object, HostPool] = {}
    for index, pool in enumerate(KVConnectorFactory.host_pools(vllm_config)):
        pools[index if pool.shared_name is None else pool.shared_name] = pool
    counts = {key: replicas if pool.shared_name is None else 1 for key, pool in pools.items()}
    taken = sum(max(0, counts[key] * pool.num_bytes - pool.bytes_there) for key, pool in pools.items())
    cache = _kv_cache_bytes(vllm_config, available)
    if not pools or taken + cache <= available:
        return
    parts = [_describe(pool, counts[key]) for key, pool in pools.items()]
    if cache:
        parts.append(f"KV caches of {cache / GIB:.2f} GiB in all (kv_cache_memory_bytes)")
    room = max(0, available - cache) + sum(pool.bytes_there for pool in pools.values())
    count = sum(counts.values())
    each = " each" if count > 1 else ""
    instead = ", or one pool for all replicas (shared_pool)" if replicas > 1 and count >= replicas else ""
    setting = next(iter(pools.values())).setting
    fits = f"{setting} of at most {room // count} bytes{each} would fit{instead}"
    if room < count:
        fits = "The KV caches alone leave nothing; lower kv_cache_memory_bytes"
    raise ValueError(
        f"the {replicas * vllm_config.parallel_config.world_size} ranks of this server would take "
        f"{(taken + cache) / GIB:.2f} GiB of host memory, and {available / GIB:.2f} GiB are available: "
        f"{', '.join(parts)}. {fits}"
    )


def _describe(pool: HostPool, count: int) -> str:
    size = f"{pool.num_bytes / GIB:.2f} GiB ({pool.setting}={pool.num_bytes})"
    if pool.shared_name is not None:
        there = f", of which {pool.bytes_there / GIB:.2f} GiB are there already" if pool.bytes_there else ""
        return f"one pool {pool.shared_name!r} for all of {size}{there}"
    return f"{count} host pools of {size} each" if count > 1 else f"a host pool of {size}"


def _kv_cache_bytes(vllm_config: VllmConfig, available: int) -> int:
    """What all ranks of all replicas have for their KV caches in host memory; 0 if it lies elsewhere or is not known yet."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if not platforms.current_platform.is_cpu() or cache.num_gpu_blocks_override is not None:
        return 0
    num_ranks = parallel.world_size * parallel.replicas_on_node
    return num_ranks * kv_cache_bytes(cache.kv_cache_memory_bytes, available, num_ranks)
