"""A KV kind of a package outside the tree, found by its entry point: the example of docs/design/kv-heart.md, run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

SPEC_IMPORTS = """
from dataclasses import dataclass
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpecKind
from vllm.v1.kv_cache_spec_base import SizingContext, max_model_len_of
"""

MANAGER = """
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_kinds.tails import tail_mask

class DilatedManager(SingleTypeKVCacheManager):
    supports_retention = True

    @classmethod
    def admission_cap(cls, kv_cache_spec, max_in_flight_tokens, max_model_len):
        return kv_cache_spec.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block,
        alignment_tokens, dcp_world_size=1, pcp_world_size=1,
    ):
        size = kv_cache_spec.block_size
        run = cdiv(kv_cache_spec.reach - 1, size)
        for end in range(min(max_length // size, len(block_hashes)), 0, -1):
            start = max(0, end - run)
            found = [block_pool.get_cached_block(h, kv_cache_group_ids) for h in block_hashes[start:end]]
            if end * size % alignment_tokens == 0 and None not in found:
                head = [block_pool.null_block] * start
                return tuple([*head, *column] for column in zip(*found)), end * size
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_skipped_tokens(self, num_computed_tokens):
        return max(0, num_computed_tokens - self.kv_cache_spec.reach + 1)

    @classmethod
    def reachable_block_mask(
        cls, start_block, end_block, alignment_tokens, kv_cache_spec, use_eagle, retention_interval=None,
        reachable_boundaries=(), dcp_world_size=1, final_segment_end_block=None,
    ):
        return tail_mask(
            range(start_block, end_block), kv_cache_spec.block_size, alignment_tokens,
            before=cdiv(kv_cache_spec.reach - 1, kv_cache_spec.block_size), after=0,
            retention=(retention_interval, reachable_boundaries, final_segment_end_block),
        )
"""

USE = """
from mine.specs import DilatedSpec
from tests.helpers.kv_core import BYTE, admit, config, full, request
from tests.helpers.kv_plans import plan_config
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

spec = DilatedSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=BYTE, reach=7, step=2)
assert KVCacheSpecRegistry.get_manager_class(spec).__module__ == "mine.kinds"
assert KVCacheSpecRegistry.get_uniform_type_base_spec(spec) is DilatedSpec
layers = [{"a": full(4), "d": spec, "e": spec}]
plan = plan_config(max_model_len=64, max_in_flight_tokens=16, block_size=4)
groups = get_global_kv_cache_groups(plan, layers)
(cfg,) = get_kv_cache_configs(plan, layers, [10_000], groups)
assert sorted(sorted(g.layer_names) for g in cfg.kv_cache_groups) == [["a"], ["d"], ["e"]]
kv = KVCacheManager(config(40, full(4), spec), 64, 4, 4, max_in_flight_tokens=16)
first = request("r", range(30), hash_block=4)
assert kv.allocate_slots(first, 30) is not None
first.num_computed_tokens = 30
kv.allocate_slots(first, 1)
assert [b.is_null for b in kv.get_blocks("r").blocks[1]] == [True] * 6 + [False] * 2
kv.free(first)
blocks, hit, _ = kv.get_computed_blocks(request("s", range(30), hash_block=4))
assert hit == 28 and [b.is_null for b in blocks.blocks[1]] == [True] * 5 + [False] * 2
print("ok")
"""


def test_an_outside_package_brings_a_kind_by_its_entry_point(tmp_path: Path) -> None:
    text = (ROOT / "docs/design/kv-heart.md").read_text()
    found = re.search(r"```python\n(.*?class DilatedSpec.*?)```", text, re.DOTALL)
    assert found is not None
    lines = found.group(1).splitlines()
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "specs.py").write_text(SPEC_IMPORTS + "\n".join(line.removeprefix("   ") for line in lines))
    (package / "kinds.py").write_text(MANAGER)
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.kv_cache_kinds]\nmine.specs.DilatedSpec = mine.kinds:DilatedManager\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", USE], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.endswith("ok\n"), done.stderr
