"""The host processor as a device: memory, cores, threads. Layer: L6, imports only L0.

Owns: facts read from the operating system (cgroup limits included). Must not know: how much of it the KV cache takes.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from vllm import envs
from vllm.platforms.interface import Platform, PlatformEnum

# (folder, limit, usage, in front of the names in memory.stat)
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


# (option of mallopt, value): the largest block that comes from an arena; what may lie free at its end; steps of growth;
# arenas. In front what an old library refuses: there nothing changes, and threads do not share one arena for no use.
_KEEP_FREED_MEMORY = ((-3, 2**30), (-1, 2**31 - 1), (-2, 2**26), (-8, 1))


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _read_int(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: str) -> dict[str, int]:
    """The numbers of a file of the kernel by their names, in its own units; empty without the file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    rows = (line.replace(":", " ").split() for line in lines)
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _meminfo(key: str) -> int | None:
    value = _fields("/proc/meminfo").get(key)
    return None if value is None else value * 1024


def _cpu_features() -> set[str]:
    """The instruction sets of an Intel processor; empty for others, where MKL has no strict mode that is quick."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    lines = (line.partition(":") for line in text.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    return set(facts.get("flags", "").split()) if facts.get("vendor_id") == "GenuineIntel" else set()


def _cgroup_limit_and_usage() -> tuple[int, int] | None:
    """Of the container, if it has a limit. Files that were read count as free, as the system counts them."""
    for folder, limit_file, usage_file, prefix in _CGROUPS:
        limit, usage = _read_int(f"{folder}/{limit_file}"), _read_int(f"{folder}/{usage_file}")
        if limit is not None and usage is not None:
            parts = _fields(f"{folder}/memory.stat")
            files = sum(parts.get(f"{prefix}{name}_file", 0) for name in ("active", "inactive"))
            return limit, max(0, usage - files)
    return None


class CpuPlatform(Platform):
    """The host processor."""

    _enum: ClassVar[PlatformEnum] = PlatformEnum.CPU
    device_name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    dist_backend: ClassVar[str] = "gloo"
    worker_cls: ClassVar[str] = "vllm.v1.worker.cpu_worker.CPUWorker"
    default_block_size: ClassVar[int] = 16
    hybrid_block_alignment: ClassVar[int] = 16
    supported_dtype_names: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of memory this process may use at most: the machine's, or less in a container."""
        total = _meminfo("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cgroup = _cgroup_limit_and_usage()
        return total if cgroup is None else min(total, cgroup[0])

    @classmethod
    def get_available_memory(cls) -> int:
        """Bytes that can be allocated now without swapping, within a container's limit."""
        available = _meminfo("MemAvailable") or cls.get_device_total_memory()
        cgroup = _cgroup_limit_and_usage()
        return available if cgroup is None else max(0, min(available, cgroup[0] - cgroup[1]))

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """`VLLM_CPU_KVCACHE_SPACE` (GiB) sizes the KV cache unless bytes were given."""
        space, cache_config = envs.VLLM_CPU_KVCACHE_SPACE, vllm_config.cache_config
        if space is None or cache_config is None or cache_config.kv_cache_memory_bytes is not None:
            return
        if not space > 0:
            raise ValueError(f"VLLM_CPU_KVCACHE_SPACE={space} must be a positive number of GiB")
        cache_config.kv_cache_memory_bytes = int(space * 2**30)

    @classmethod
    def fix_order_of_sums(cls) -> None:
        """Let fp32 matrix products add up a row in the same order however many rows there are.

        Without it a token's logits depend on what runs beside its request: by 1e-4 and more where layers amplify what
        rounding does (MKL's strict reproducible mode; must come before the first product; a user's `MKL_CBWR` wins).
        """
        features = _cpu_features()
        if "avx512f" in features:
            os.environ.setdefault("MKL_CBWR", "AVX512,STRICT")
        elif "avx2" in features:
            os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

    @classmethod
    def keep_freed_memory(cls) -> bool:
        """Let the C library keep what a step frees for the next step, which wants the same again; says whether it does so.

        Otherwise large activations go back to the system after each layer and come again page by page: a hundred page
        faults per token of a long prompt, 4 to 5 % of its time, and by chance of where a process's memory lies more or
        less of them for short ones. The price: a process stays as large as its largest step made it, until
        `release_freed_memory`. One arena, since only the first one has no limit of size, and compute threads hardly
        allocate. A user's own choice (`MALLOC_*`, `GLIBC_TUNABLES`) wins. Call it before other threads start.
        """
        if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
            return False
        return _is_glibc() and all(_libc().mallopt(option, value) for option, value in _KEEP_FREED_MEMORY)

    @classmethod
    def release_freed_memory(cls) -> None:
        """Give the system what the C library has kept."""
        if _is_glibc():
            _libc().malloc_trim(0)

    @classmethod
    def get_device_count(cls) -> int:
        """The host counts as one device."""
        return 1

    @classmethod
    def check_replicas(cls, num_replicas: int, ranks_each: int) -> None:
        """Each needs a processor; a user who wants them to share says so."""
        processors = len(os.sched_getaffinity(0))
        if num_replicas > processors and not envs.VLLM_ALLOW_CROWDED_REPLICAS:
            raise ValueError(
                f"data_parallel_size={num_replicas}: each replica needs a processor of its own, and this process may use "
                f"{processors}; VLLM_ALLOW_CROWDED_REPLICAS=1 lets them share"
            )

    @classmethod
    def get_num_threads(cls) -> int:
        """Compute threads to use: OMP_NUM_THREADS if set, else the processors this process may run on."""
        chosen = os.environ.get("OMP_NUM_THREADS", "")
        if chosen.isdigit() and int(chosen) > 0:
            return int(chosen)
        return max(1, len(os.sched_getaffinity(0)))
