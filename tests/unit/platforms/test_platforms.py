"""Choice of the platform, facts about the host, and the platform's word on the size of the KV cache."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.config import CacheConfig, VllmConfig
from vllm.platforms import Platform, UnspecifiedPlatform, current_platform
from vllm.platforms import cpu as cpu_module
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.resolve import CPU_PLATFORM, CUDA_PLATFORM, choose_target
from vllm.utils.platform_utils import is_pin_memory_available


@pytest.mark.parametrize(
    ("target", "plugins", "cuda", "expected"),
    [
        ("cpu", {"mine": "m:P"}, True, CPU_PLATFORM),
        (None, {}, False, CPU_PLATFORM),
        ("cuda", {}, False, CPU_PLATFORM),
        (None, {}, True, CUDA_PLATFORM),
        (None, {"mine": "m:P"}, True, "m:P"),
        ("tpu", {}, True, None),
    ],
)
def test_precedence(target, plugins, cuda, expected) -> None:
    assert choose_target(target, plugins, cuda) == expected


def test_two_plugins_are_one_too_many() -> None:
    with pytest.raises(RuntimeError, match="found: a, b"):
        choose_target(None, {"b": "m:B", "a": "m:A"}, False)


def test_the_current_platform_is_one_object() -> None:
    assert current_platform.is_cpu()
    assert not current_platform.is_cuda_alike()
    assert isinstance(current_platform, Platform)
    assert not is_pin_memory_available()


def test_importing_platforms_loads_no_torch() -> None:
    code = (
        "import sys, vllm.platforms, vllm.platforms.cuda; vllm.platforms.current_platform.get_device_count();"
        " print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


@pytest.mark.parametrize("platform", [CpuPlatform(), CudaPlatform(), UnspecifiedPlatform()])
def test_hooks_have_neutral_answers(platform) -> None:
    config = VllmConfig()
    platform.check_and_update_config(config)
    platform.register_custom_kv_cache_specs(None)
    platform.pre_register_and_update(None)
    platform.validate_request("prompt", None, None)
    assert platform.support_hybrid_kv_cache()
    assert platform.get_attn_backend_cls() == ""
    builder = platform.get_kv_cache_config_builder_cls(config)
    assert builder == "vllm.v1.core.kv_cache_planning.DefaultKVCacheConfigBuilder"


def test_names_and_kinds() -> None:
    assert CpuPlatform().device_type == "cpu"
    assert CudaPlatform().is_cuda()
    assert CudaPlatform().is_cuda_alike()
    assert UnspecifiedPlatform().is_unspecified()
    assert CpuPlatform.get_device_name() == "cpu"
    assert CpuPlatform.get_device_count() == 1
    with pytest.raises(RuntimeError, match="UnspecifiedPlatform has no device memory"):
        UnspecifiedPlatform.get_device_total_memory()


def test_memory_facts_respect_a_container(monkeypatch) -> None:
    assert 0 < CpuPlatform.get_available_memory() <= CpuPlatform.get_device_total_memory()
    monkeypatch.setattr(cpu_module, "_cgroup_limit_and_usage", lambda: (5 << 20, 2 << 20))
    assert CpuPlatform.get_device_total_memory() == 5 << 20
    assert CpuPlatform.get_available_memory() == 3 << 20
    monkeypatch.setattr(cpu_module, "_cgroup_limit_and_usage", lambda: (1 << 20, 2 << 20))
    assert CpuPlatform.get_available_memory() == 0


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_were_read_do_not_take_a_containers_memory(
    version: int, tmp_path: Path, monkeypatch
) -> None:
    """A model that was loaded an hour ago must not make the next start too large."""
    monkeypatch.setattr(
        cpu_module, "_CGROUPS", tuple((str(tmp_path), *names) for _, *names in cpu_module._CGROUPS)
    )
    assert cpu_module._cgroup_limit_and_usage() is None
    limit, usage, prefix = cpu_module._CGROUPS[2 - version][1:]
    (tmp_path / limit).write_text(f"{9 << 20}\n")
    (tmp_path / usage).write_text(f"{7 << 20}\n")
    assert CpuPlatform.get_available_memory() == 2 << 20
    rows = {"anon": 2 << 20, f"{prefix}inactive_file": 3 << 20, f"{prefix}active_file": 1 << 20, "slab": 5}
    (tmp_path / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in rows.items()))
    assert CpuPlatform.get_available_memory() == 6 << 20
    (tmp_path / limit).write_text("max\n")
    assert cpu_module._cgroup_limit_and_usage() is None


def test_threads_follow_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert CpuPlatform.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "junk")
    assert CpuPlatform.get_num_threads() >= 1


def test_the_environment_sizes_the_kv_cache_unless_bytes_are_given(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert VllmConfig().cache_config.kv_cache_memory_bytes == 1 << 29
    given = VllmConfig(cache_config=CacheConfig(kv_cache_memory_bytes=77))
    assert given.cache_config.kv_cache_memory_bytes == 77
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
    with pytest.raises(ValueError, match="VLLM_CPU_KVCACHE_SPACE=0.0 must be a positive"):
        VllmConfig()


@pytest.mark.parametrize(
    ("vendor", "flags", "users", "expected"),
    [
        ("GenuineIntel", "sse2 avx2 avx512f", None, "AVX512,STRICT"),
        ("GenuineIntel", "sse2 avx2", None, "AVX2,STRICT"),
        ("GenuineIntel", "sse2 avx2", "AUTO", "AUTO"),
        ("AuthenticAMD", "sse2 avx2", None, None),
    ],
)
def test_the_order_of_sums_is_fixed_where_that_is_quick_and_the_user_has_not_chosen(
    monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, users: str | None, expected: str | None
) -> None:
    text = f"vendor_id\t: {vendor}\nflags\t\t: {flags}\n\n"
    monkeypatch.setattr(cpu_module.Path, "read_text", lambda _: text)
    monkeypatch.delenv("MKL_CBWR", raising=False)
    if users is not None:
        monkeypatch.setenv("MKL_CBWR", users)
    CpuPlatform.fix_order_of_sums()
    assert os.environ.get("MKL_CBWR") == expected


FREED_MEMORY_SCRIPT = """
import ctypes, resource, threading
from vllm.platforms.cpu import CpuPlatform

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
SIZE = 48 << 20

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def steps(count):
    for _ in range(count):
        big = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(SIZE)))
        ctypes.memset(big, 1, SIZE)
        libc.free(big)

def count_faults():
    steps(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    steps(3)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

keeps = CpuPlatform.keep_freed_memory()
faults = []
count_faults()
thread = threading.Thread(target=count_faults)
thread.start()
thread.join()
kept = resident()
CpuPlatform.release_freed_memory()
print(keeps, max(faults) < 1000, min(faults) > 10000, kept - resident() > 40 << 20)
"""


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "True True False True"), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, "False False True False")],
)
def test_what_a_step_frees_is_kept_for_the_next_until_it_is_released(
    chosen: dict[str, str], expected: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment.pop("GLIBC_TUNABLES", None)
    done = subprocess.run(
        [sys.executable, "-c", FREED_MEMORY_SCRIPT],
        env=environment | chosen,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == (
        expected if platform.libc_ver()[0] == "glibc" else "False False True False"
    )


def test_a_c_library_that_cannot_keep_large_blocks_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.35 glibc refuses so large a bound; one arena for all threads would then be a price without use."""
    changed: list[int] = []

    class OldLibrary:
        def mallopt(self, option: int, value: int) -> int:
            if option == -3 and value > 2**25:
                return 0
            changed.append(option)
            return 1

    monkeypatch.setattr(cpu_module, "_is_glibc", lambda: True)
    monkeypatch.setattr(cpu_module, "_libc", OldLibrary)
    for name in list(os.environ):
        if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES":
            monkeypatch.delenv(name)
    assert not CpuPlatform.keep_freed_memory()
    assert changed == []
