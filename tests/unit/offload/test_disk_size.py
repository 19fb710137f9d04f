"""A disk whose size nobody has chosen is no larger than its records are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.offload_rig import Rig, full, prompt, window
from vllm.v1.simple_kv_offload import capacity, sizing
from vllm.v1.simple_kv_offload.capacity import default_disk_bytes
from vllm.v1.simple_kv_offload.options import DEFAULT_DISK_CAPACITY_BYTES, parse_options

GIB = 1024**3


def test_blocks_of_usual_models_fill_the_default() -> None:
    two_mib = 2 << 20
    assert default_disk_bytes(DEFAULT_DISK_CAPACITY_BYTES, 1000, 1000 * two_mib) == 100 * GIB
    assert default_disk_bytes(DEFAULT_DISK_CAPACITY_BYTES, 1000, 1000 * 2048) == 2_048_000_000
    assert default_disk_bytes(DEFAULT_DISK_CAPACITY_BYTES, 0, 0) == 1


@pytest.mark.parametrize("specs", [[full()], [full(), window()]])
@pytest.mark.parametrize(
    "mode", [{"disk_tier": True}, {"kv_offload_backend": "disk", "num_cpu_blocks": None}]
)
def test_both_halves_take_no_more_than_so_many_tiny_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any], specs: list[Any]
) -> None:
    for module in (capacity, sizing):
        monkeypatch.setattr(module, "DISK_BLOCKS_MAX", 64)
    mode = {key: value for key, value in mode.items() if value is not None}
    extra = {**mode, "disk_path": f"{tmp_path}/kv", "use_page_cache": True}
    rig = Rig(specs, host_blocks=16, held=False, extra=extra)
    manager = rig.manager
    disk = manager.tier if manager.chain is None else manager.chain.disk
    assert disk.num_blocks == (64 if manager.chain is not None else 16)
    (file,) = (path for path in tmp_path.iterdir() if path.is_file())
    assert file.stat().st_size <= 2 * 64 * 4096
    rig.generate(prompt(17), max_tokens=1)
    rig.close()


def test_a_size_that_was_chosen_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (capacity, sizing):
        monkeypatch.setattr(module, "DISK_BLOCKS_MAX", 64)
    extra = {
        "disk_tier": True,
        "disk_path": f"{tmp_path}/kv",
        "disk_capacity_bytes": 32 * 100,
        "use_page_cache": True,
    }
    rig = Rig(host_blocks=16, held=False, extra=extra)
    assert rig.chain.disk.num_blocks == 100
    rig.close()


def test_the_settings_know_whether_the_size_was_chosen() -> None:
    base: dict[str, Any] = {"disk_tier": True, "disk_path": "/tmp/kv"}
    assert parse_options(base, 1).has_default_disk_bytes
    assert not parse_options({**base, "disk_capacity_bytes": 100 * GIB}, 1).has_default_disk_bytes
