"""The host tier takes what it was given: at most 2 % more, records included, however small its blocks are."""

import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import memory_of_tier
from tests.helpers.offload_parts import Byte
from tests.helpers.offload_rig import Rig, full, mamba, ring, window
from vllm.utils.math_utils import round_up
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.simple_kv_offload.capacity import (
    SMALL_RECORDS_BYTES,
    fit_blocks,
    record_bytes,
)

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
# Bytes of a token, budget, events: blocks of 64 KiB, and so small ones that their records are a third of them.
FULL_TIERS = {
    "usual blocks": (4096, 256 * MIB, "quiet"),
    "usual blocks and events": (4096, 256 * MIB, "events"),
    "tiny blocks and events": (128, 64 * MIB, "events"),
}


@pytest.mark.parametrize("case", FULL_TIERS)
def test_a_full_tier_with_its_records_takes_what_it_was_given(case: str) -> None:
    token_bytes, budget, events = FULL_TIERS[case]
    command = [sys.executable, "-m", memory_of_tier.__name__, str(token_bytes), str(budget), events]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["cached"] == told["slots"] - 1, "full"
    arena = round_up(told["slots"] * told["block_bytes"], mmap.PAGESIZE)
    assert told["arena"]["Size"] == told["arena"]["Rss"] == arena
    assert told["arena"]["Size"] <= budget
    assert 0.93 * budget <= told["taken"] <= 1.02 * budget


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 300, 4096, 1 << 17])
@pytest.mark.parametrize("budget", [1000, 3 * MIB + 1, 1 << 34])
def test_blocks_and_records_fit_and_one_more_block_would_not(
    budget: int, block_bytes: int, events: bool
) -> None:
    record = record_bytes(16, has_events=events)
    fixed = budget // 200
    blocks = fit_blocks(budget, block_bytes, record, fixed)
    assert blocks * block_bytes <= budget
    taken = fixed + blocks * (block_bytes + record)
    is_small = blocks * record <= SMALL_RECORDS_BYTES
    assert is_small or taken <= 1.02 * budget
    one_more = fixed + (blocks + 1) * (block_bytes + record)
    assert (blocks + 1) * block_bytes > budget or one_more > 1.02 * budget


def test_a_number_of_blocks_that_the_user_gave_is_kept() -> None:
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype=Byte())
    budget = 2 * MIB
    count = budget // spec.page_size_bytes
    for chosen, expected in ((count, count), (None, fit_blocks(budget, spec.page_size_bytes, 256, MIB))):
        rig = Rig([spec], extra={"cpu_bytes_to_use": budget, "num_cpu_blocks": chosen})
        assert rig.worker().num_cpu_blocks == rig.manager.num_cpu_blocks == expected
    assert expected < count


def test_ranks_share_one_set_of_records() -> None:
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype=Byte())
    budget = 4 * MIB
    rig = Rig([spec], ranks=2, extra={"cpu_bytes_to_use": budget, "num_cpu_blocks": None})
    expected = fit_blocks(budget, 2 * spec.page_size_bytes, 256, MIB)
    assert (
        rig.worker().num_cpu_blocks == rig.worker(1).num_cpu_blocks == rig.manager.num_cpu_blocks == expected
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "kinds", [[full], [full, window], [full, mamba], [full, ring]], ids=lambda k: k[-1].__name__
)
def test_the_memory_of_all_ranks_together_is_the_budget(kinds: list[Any], ranks: int) -> None:
    specs = [kind().copy_with_new_block_size(1 << 12) for kind in kinds]
    budget = 32 * MIB
    rig = Rig(specs, device_blocks=8, ranks=ranks, extra={"cpu_bytes_to_use": budget, "num_cpu_blocks": None})
    taken = sum(region.numel() for rank in range(ranks) for region in rig.worker(rank).cpu_kv_caches.values())
    assert 0.9 * budget <= taken <= budget
    assert rig.manager.num_cpu_blocks == rig.worker(ranks - 1).num_cpu_blocks
