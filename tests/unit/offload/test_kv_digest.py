"""Whose KV it is: what changes the digest, and what does not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_configs import engine_config, tiny_folder
from tests.helpers.offload_rig import Rig, full, window
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.simple_kv_offload.copy_backends import kv_digest as module
from vllm.v1.simple_kv_offload.copy_backends.kv_digest import kv_digest


def plan(*specs: Any, blocks: int = 32) -> KVCacheConfig:
    return Rig(specs=specs, device_blocks=blocks).kv_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder(), tmp_path / "model"))


def config(folder: Path, **settings: Any) -> VllmConfig:
    return engine_config(model=str(folder), **settings)


def test_a_restart_with_other_sizes_has_the_same_digest(folder: Path) -> None:
    first = kv_digest(config(folder), plan(full()))
    assert len(first) == 32
    again = config(folder, max_num_seqs=3, max_model_len=128, kv_cache_memory_bytes=8 << 20)
    assert kv_digest(again, plan(full(), blocks=48)) == first


def touch_weights(folder: Path) -> None:
    os.utime(folder / "model.safetensors", (1.0, 1.0))


def grow_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    before = path.stat()
    with path.open("ab") as file:
        file.write(b"\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [touch_weights, grow_weights])
def test_other_weights_have_another_digest(folder: Path, change: Callable[[Path], None]) -> None:
    before = kv_digest(config(folder), plan(full()))
    change(folder)
    assert kv_digest(config(folder), plan(full())) != before


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rope_theta": 20000.0}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"load_format": "dummy"},
    ],
)
def test_what_decides_the_bytes_is_in_the_digest(folder: Path, settings: dict[str, Any]) -> None:
    assert kv_digest(config(folder, **settings), plan(full())) != kv_digest(config(folder), plan(full()))


def test_groups_layout_seed_and_version_are_in_the_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        kv_digest(config(folder), groups) for groups in (plan(full()), plan(full(8)), plan(full(), window()))
    }
    other = config(folder)
    other.cache_config.kv_cache_layout = "LBHNC"
    found.add(kv_digest(other, plan(full())))
    parallel = config(folder)
    parallel.parallel_config.tensor_parallel_size = 2
    found.add(kv_digest(parallel, plan(full())))
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONHASHSEED", "7")
        found.add(kv_digest(config(folder), plan(full())))
    monkeypatch.setattr(module, "__version__", "99.0")
    found.add(kv_digest(config(folder), plan(full())))
    assert len(found) == 7


def test_keys_that_a_restart_would_change_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    fast = config(folder, prefix_caching_hash_algo="xxhash")
    with pytest.raises(ValueError, match=r"'xxhash' starts from a random root.*PYTHONHASHSEED"):
        kv_digest(fast, plan(full()))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert kv_digest(fast, plan(full())) == kv_digest(fast, plan(full()))
