"""The planner over the specs that the models themselves declare."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.kv_plans import plan_config
from vllm.model_executor.models.glm5_next_config import glm_kv_specs
from vllm.model_executor.models.interfaces import ModelSettings
from vllm.v1.core.kv_cache_placement import bytes_per_block
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
from vllm.v1.core.kv_cache_sizes import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout

RELEASE = {
    "vocab_size": 154880,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "v_head_dim": 256,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "index_kpool": 4,
    "index_n_heads": 16,
}


@pytest.mark.parametrize(
    ("tp", "latents", "block_size"),
    [
        (1, torch.bfloat16, 4352),
        (4, torch.bfloat16, 1152),
        (8, torch.bfloat16, 640),
        (8, torch.float8_e4m3fn, 1152),
    ],
)
def test_glm_release_groups(tp: int, latents: torch.dtype, block_size: int) -> None:
    settings = ModelSettings(
        dtype=torch.bfloat16, cache_dtype=latents, max_model_len=4096, tp_size=tp, gpu_storage=True
    )
    specs = glm_kv_specs(RELEASE, settings)
    groups = get_kv_cache_groups(plan_config(), specs)
    assert len(specs) == 67
    assert resolve_kv_cache_block_sizes(KVCacheConfig(4, [], groups), plan_config()) == (
        block_size,
        block_size,
    )
    if tp == 4:
        assert [len(g.layer_names) for g in groups] == [22, 9, 9, 8, 8, 11]
        assert bytes_per_block(KVCacheLayout.BLHNC, groups) == 13_394_304
