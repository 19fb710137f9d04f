"""Models shared by tensor-parallel ranks: the oracle's logits, equal on all ranks, and pages as the specs say."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.paged_harness import PagedHarness
from tests.helpers.random_schedule import TOLERANCE, random_tokens, run_random_schedule
from tests.helpers.tiny_models import engine_config, make_oracle, oracle_logits, save_oracle
from tests.helpers.tp_ranks import run_ranks
from vllm._custom_ops import has_native_ops
from vllm.model_executor.model_loader.loader import get_model
from vllm.model_executor.model_loader.tiny import TINY_CONFIGS, make_tiny
from vllm.v1.attention.pages import StatePages
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.simple_kv_offload.rank_parts import rank_parts

VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 2, {}),
    "llama_of_four": ("llama", 4, {}),
    "one_kv_head": ("llama", 2, {"num_key_value_heads": 1}),
    "tied": ("llama", 2, {"tie_word_embeddings": True}),
    "tied_uneven_vocabulary": ("llama", 2, {"tie_word_embeddings": True, "vocab_size": 271}),
    "uneven_vocabulary_of_four": ("llama", 4, {"vocab_size": 269}),
    "biases": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", 2, {}),
    "qwen3": ("qwen3", 2, {}),
    "mistral_window": ("mistral", 2, {}),
    "glm5_next": ("glm5_next", 2, {}),
    "glm5_next_of_four": ("glm5_next", 4, {}),
    "glm_unbounded_decay": ("glm5_next", 2, {"linear_lower_bound": None}),
    "glm_biases": ("glm5_next", 2, {"attention_bias": True}),
    "glm_expert_groups": ("glm5_next", 2, {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    "gemma3": ("gemma3_text", 2, {}),
    "gemma4": ("gemma4_text", 2, {}),
    "gemma4_of_four": ("gemma4_text", 4, {"use_double_wide_mlp": True}),
    "gemma4_experts": (
        "gemma4_text",
        2,
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "gemma4_one_key_head": (
        "gemma4_text",
        2,
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "glm_shared_selection": (
        "glm5_next",
        2,
        {
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
            "indexer_types": ["full", "full", "shared", "full"],
        },
    ),
}


def save(tmp_path: Path, oracle: torch.nn.Module) -> Callable[..., Any]:
    """Writes the checkpoint; the result loads it for a number of ranks, in the process of each of them."""
    folder = save_oracle(oracle, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    return lambda size, **options: get_model(
        engine_config(folder, config, tensor_parallel_size=size, **options)
    )


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits_equal_the_oracle_and_are_the_same_on_all_ranks(variant: str, tmp_path: Path) -> None:
    kind, size, overrides = VARIANTS[variant]
    oracle = make_oracle(kind, **overrides)
    load = save(tmp_path, oracle)
    tokens = random_tokens(random.Random(1), 45)

    def work(rank: int) -> torch.Tensor:
        harness = PagedHarness(load(size))
        request = harness.start(tokens)
        return torch.cat([harness.step([(request, n)])[0] for n in (30, 1, 1, 13)])

    first, *others = run_ranks(size, work)
    torch.testing.assert_close(first, oracle_logits(oracle, tokens), atol=TOLERANCE, rtol=0)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("kind", ["glm5_next", "llama"])
def test_random_schedule_gives_the_one_shot_logits(kind: str, tmp_path: Path) -> None:
    oracle = make_oracle(kind)
    load = save(tmp_path, oracle)

    def work(rank: int) -> tuple[bool, int]:
        harness = PagedHarness(load(2), num_blocks=200, seed=2)
        marks = run_random_schedule(harness, oracle, 2, align=harness.block_sizes["paged"])
        return harness.null_is_clean(), marks.prefix_hits

    for is_clean, prefix_hits in run_ranks(2, work):
        assert is_clean
        assert prefix_hits > 0


@pytest.mark.parametrize("kind", ["glm5_next", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_fp32(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    oracle = make_oracle(kind)
    load = save(tmp_path, oracle)
    tokens = random_tokens(random.Random(1), 30)

    def work(rank: int) -> torch.Tensor:
        harness = PagedHarness(load(2, dtype=dtype))
        return harness.step([(harness.start(tokens), 30)])[0]

    half, other = run_ranks(2, work)
    assert torch.equal(half, other)
    pair = torch.stack([half.flatten(), oracle_logits(oracle, tokens).flatten()])
    assert torch.corrcoef(pair)[0, 1] > 0.9


@pytest.mark.parametrize("name", ["glm5_next", "llama"])
def test_half_size_weights_run_in_fp32_give_what_one_rank_gives(name: str, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({key: weight.half() for key, weight in weights.items()}, folder / "model.safetensors")
    tokens = random_tokens(random.Random(1), 30)

    def run(size: int) -> tuple[torch.Tensor, torch.dtype]:
        model = get_model(engine_config(folder, TINY_CONFIGS[name], tensor_parallel_size=size))
        harness = PagedHarness(model)
        return harness.step([(harness.start(tokens), 30)])[0], model.head.weight.dtype

    alone, _ = run(1)
    for logits, dtype in run_ranks(2, lambda rank: run(2)):
        torch.testing.assert_close(logits, alone, atol=TOLERANCE, rtol=0)
        assert dtype == (torch.float16 if has_native_ops() else torch.float32)


@dataclass
class RankPages:
    """What a rank keeps: the bytes of every cache's written pages, and the spec."""

    pages: dict[str, bytes]
    typed: dict[str, list[torch.Tensor]]
    config: KVCacheConfig


def pages_of(harness: PagedHarness) -> RankPages:
    model = harness.model
    written = (harness.memory != -1).any(1).nonzero().flatten()
    typed = {}
    for name, layer in model.cache_layers.items():
        views = layer.states if isinstance(layer, StatePages) else [layer.pages]
        typed[name] = [view[written].clone() for view in views]
    groups = [KVCacheGroupSpec([name], spec) for name, spec in harness.specs.items()]
    return RankPages(
        {name: raw[written].numpy().tobytes() for name, raw in harness.raw.items()},
        typed,
        KVCacheConfig(num_blocks=harness.memory.shape[0], kv_cache_tensors=[], kv_cache_groups=groups),
    )


CACHES = {
    "llama": ("llama", 2, {}),
    "llama_of_four": ("llama", 4, {}),
    "one_kv_head": ("llama", 2, {"num_key_value_heads": 1}),
    "glm5_next": ("glm5_next", 2, {}),
    # Of two ranks' parts the sum is the same in any order.
    "glm5_next_of_four": ("glm5_next", 4, {}),
}


@pytest.mark.parametrize("variant", sorted(CACHES))
def test_pages_of_ranks_are_the_parts_that_a_shared_pool_takes_them_for(variant: str, tmp_path: Path) -> None:
    """Ranks with the same part hold the same bytes; the parts side by side are what a rank alone holds."""
    kind, size, overrides = CACHES[variant]
    load = save(tmp_path, make_oracle(kind, **overrides))
    prompts = [random_tokens(random.Random(seed), 75) for seed in (1, 2)]

    def run(ranks: int) -> RankPages:
        harness = PagedHarness(load(ranks, block_size=64))
        one, two = (harness.start(prompt) for prompt in prompts)
        for batch in ([(one, 70), (two, 33)], [(one, 1), (two, 37)], [(one, 4), (two, 5)]):
            harness.step(batch)
        return pages_of(harness)

    alone = run(1)
    ranks = run_ranks(size, lambda rank: run(size))
    parts = [rank_parts(ranks[0].config, rank, size, 1, 8) for rank in range(size)]
    places = [list(zip(own.slot_index, own.part, strict=True)) for own in parts]
    cacheable = ranks[0].config.prefix_cacheable_group_ids
    for group, (name, views) in enumerate(alone.typed.items()):
        held = [rank.pages[name] for rank in ranks]
        for r, bytes_of_rank in enumerate(held):
            alike = places[r][group] == places[0][group]
            assert alike == (bytes_of_rank == held[0]), (name, r)
        assert {p.replicas[group] for p in parts} == {held.count(held[0])}
        if group not in cacheable:
            assert held.count(held[0]) == size
        distinct = {own[group]: rank.typed[name] for own, rank in zip(places, ranks, strict=True)}
        for i, view in enumerate(views):
            pieces = [distinct[part][i] for part in sorted(distinct)]
            torch.testing.assert_close(joined(pieces, view), view, atol=TOLERANCE, rtol=0, equal_nan=True)


def joined(pieces: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """Parts split by head, as one: heads come first in a page, in rows of the convolution after q, k and v."""
    if len(pieces) == 1:
        return pieces[0]
    if whole.dim() == 3:
        return torch.cat([piece.unflatten(-1, (3, -1)) for piece in pieces], dim=-1).flatten(-2)
    return torch.cat(pieces, dim=1)
