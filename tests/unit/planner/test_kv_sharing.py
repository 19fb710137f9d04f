"""Layers that read another layer's cache: what may be shared, the plan without them, ranks, the report."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.helpers.kv_plans import BF16, plan_config
from vllm.v1.core.kv_cache_placement import group_waste
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.core.kv_cache_sharing import check_kv_sharing, merge_kv_sharing, note_kv_sharing
from vllm.v1.core.kv_cache_sizes import generate_scheduler_kv_cache_config
from vllm.v1.core.kv_cache_view import describe_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups

FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=BF16)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=BF16, sliding_window=32)
STATE = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(BF16,))
LAYERS: dict[str, KVCacheSpec] = {
    "w0": WINDOW,
    "f1": FULL,
    "w2": WINDOW,
    "f3": FULL,
    "w4": WINDOW,
    "f5": FULL,
}
SHARING = {"w4": "w2", "f5": "f3"}
OWNED = {name: spec for name, spec in LAYERS.items() if name not in SHARING}


def test_layers_may_share_the_cache_of_an_earlier_layer_of_their_kind() -> None:
    check_kv_sharing(LAYERS, SHARING)
    check_kv_sharing(LAYERS, {"w4": "w0", "w2": "w0"})
    check_kv_sharing(LAYERS, {})


@pytest.mark.parametrize(
    ("specs", "targets", "named"),
    [
        ({}, {"w4": "w9"}, "'w4' cannot share the KV cache of 'w9': no layer of this rank"),
        ({}, {"w9": "w2"}, "'w9' cannot share the KV cache of 'w2': the sharing layer is no layer"),
        ({}, {"w4": "w4"}, "'w4' cannot share the KV cache of 'w4': a layer cannot be its own"),
        (
            {},
            {"w2": "w0", "w4": "w2"},
            "'w4' cannot share the KV cache of 'w2': that one itself shares .* 'w0'",
        ),
        ({}, {"w0": "w2"}, "'w0' cannot share the KV cache of 'w2': that one runs later"),
        (
            {},
            {"f5": "w2"},
            r"'f5' cannot share the KV cache of 'w2': it reads Full.*head_size=64.*finds Sliding",
        ),
        (
            {
                "w4": SlidingWindowSpec(
                    block_size=16, num_kv_heads=1, head_size=32, dtype=BF16, sliding_window=16
                )
            },
            {"w4": "w2"},
            r"'w4' .* 'w2': it reads .*sliding_window=16.*finds .*sliding_window=32",
        ),
        ({"w2": STATE, "w4": STATE}, {"w4": "w2"}, "MambaSpec does not keep a row for each token"),
    ],
)
def test_a_bad_target_is_told_with_both_names(
    specs: dict[str, KVCacheSpec], targets: dict[str, str], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        check_kv_sharing({**LAYERS, **specs}, targets)


@pytest.mark.parametrize(
    ("per_rank", "owned", "named"),
    [
        (
            [SHARING, {"w4": "w0"}],
            [OWNED, OWNED],
            "'w4' shares the KV cache of 'w2' and, on rank 1, that of 'w0'",
        ),
        (
            [{}, {"w4": "w2"}],
            [{"w2": WINDOW}, {"f3": FULL}],
            "'w4' shares .* 'w2', which rank 1 does not own",
        ),
        ([SHARING], [LAYERS], "'w4' shares the KV cache of 'w2' but has one of its own on rank 0"),
        ([SHARING], [OWNED, OWNED], "1 ranks tell which layers share, but 2 have specs"),
    ],
)
def test_ranks_that_do_not_fit_together_are_told(
    per_rank: list[dict[str, str]], owned: list[dict[str, KVCacheSpec]], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        merge_kv_sharing(per_rank, owned)


def test_tensor_parallel_ranks_share_alike() -> None:
    assert merge_kv_sharing([SHARING, SHARING], [OWNED, OWNED]) == SHARING
    assert merge_kv_sharing([{}], [OWNED]) == {}


def plan(config: Any, owned: list[dict[str, KVCacheSpec]], memory: int = 4 << 20) -> list[KVCacheConfig]:
    groups = get_global_kv_cache_groups(config, owned)
    return get_kv_cache_configs(config, owned, [memory] * len(owned), groups)


def bytes_of(config: KVCacheConfig) -> int:
    return config.kv_cache_tensors[0].size


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
@pytest.mark.parametrize("disable_hybrid", [False, True])
def test_layers_that_share_take_no_bytes(layout: str, disable_hybrid: bool) -> None:
    config = plan_config(layout=layout, disable_hybrid=disable_hybrid)
    (sharing,) = plan(config, [OWNED])
    (owning,) = plan(config, [LAYERS])
    assert {n for group in sharing.kv_cache_groups for n in group.layer_names} == OWNED.keys()
    per_block = [bytes_of(found) // found.num_blocks for found in (sharing, owning)]
    assert per_block[0] * len(LAYERS) == per_block[1] * len(OWNED)
    assert sharing.num_blocks > 1.4 * owning.num_blocks, "what they leave becomes blocks"


def test_a_fixed_number_of_blocks_takes_less_memory() -> None:
    config = plan_config(override=50)
    (sharing,), (owning,) = plan(config, [OWNED]), plan(config, [LAYERS])
    assert sharing.num_blocks == owning.num_blocks == 50
    assert bytes_of(sharing) * 3 == bytes_of(owning) * 2


def test_each_pipeline_stage_adds_its_own_sharing_layers() -> None:
    stages: list[dict[str, KVCacheSpec]] = [{"w0": WINDOW, "f1": FULL}, {"w2": WINDOW, "f3": FULL}]
    sharing = merge_kv_sharing([{}, SHARING], stages)
    first, second = plan(plan_config(), stages)
    assert first.num_blocks == second.num_blocks
    add_kv_sharing_layers_to_kv_cache_groups(SHARING, second.kv_cache_groups)
    assert sorted(sorted(group.layer_names) for group in second.kv_cache_groups) == [
        ["f3", "f5"],
        ["w2", "w4"],
    ]
    with pytest.raises(ValueError, match="w4 shares the KV cache of w2, which is in no KV cache group"):
        add_kv_sharing_layers_to_kv_cache_groups(sharing, first.kv_cache_groups)


def test_the_groups_of_the_scheduler_say_how_many_layers_read_them(caplog: pytest.LogCaptureFixture) -> None:
    config = generate_scheduler_kv_cache_config(plan(plan_config(), [OWNED]))
    with caplog.at_level(logging.INFO):
        note_kv_sharing(config, {"w4": "w2", "w6": "w2", "f5": "f3"})
    counts = {
        group.kind: (group.num_layers, group.num_sharing_layers) for group in describe_groups(config, 1)
    }
    assert counts == {"sliding_window": (2, 2), "full_attention": (2, 1)}
    assert "3 of 7 layers read the cache of another layer" in caplog.text


def test_without_sharing_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config = generate_scheduler_kv_cache_config(plan(plan_config(), [OWNED]))
    with caplog.at_level(logging.INFO):
        note_kv_sharing(config, {})
    assert "another layer" not in caplog.text
    assert all(group.num_sharing_layers == 0 for group in describe_groups(config, 1))


@pytest.mark.parametrize(("owners", "block_bytes"), [(15, 98304), (35, 229376)])
def test_a_model_of_35_layers_of_which_20_share(owners: int, block_bytes: int) -> None:
    """Four windows of 256 channels to one full layer of 512, one KV head each: no byte of a block is left unused."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=512, dtype=BF16)
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=256, dtype=BF16, sliding_window=512)
    layers = {f"l{i}": full if i % 5 == 4 else window for i in range(owners)}
    config = plan_config(max_model_len=8192, max_in_flight_tokens=2048)
    (found,) = plan(config, [layers], memory=1 << 30)
    assert bytes_of(found) == found.num_blocks * block_bytes
    fulls = owners // 5
    assert sorted(len(group.layer_names) for group in found.kv_cache_groups) == [fulls, 2 * fulls, 2 * fulls]
    assert all(waste.wasted_bytes == 0 for waste in group_waste(KVCacheLayout.BLHNC, found.kv_cache_groups))
