"""The KV cache specs that models state: the release numbers of GLM-5.3-Flash, and the rules on CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from vllm.model_executor.model_loader.tiny import TINY_CONFIGS
from vllm.model_executor.models.glm5_next import Glm5NextForCausalLM
from vllm.model_executor.models.glm5_next_config import GlmParams, glm_kv_specs
from vllm.model_executor.models.interfaces import ModelSettings
from vllm.model_executor.models.llama import LlamaParams, llama_kv_specs
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

RELEASE: dict[str, Any] = {
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


def settings(**changes: Any) -> ModelSettings:
    base: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "cache_dtype": torch.bfloat16,
        "max_model_len": 131072,
        "gpu_storage": True,
    }
    return ModelSettings(**{**base, **changes})


@pytest.mark.parametrize(
    ("tp", "block", "state", "index_page"),
    [(1, 4352, 4341760, 143616), (4, 1152, 1085440, 38016), (8, 640, 542720, 21120)],
)
def test_release_block_sizes(tp: int, block: int, state: int, index_page: int) -> None:
    specs = glm_kv_specs(RELEASE, settings(tp_size=tp))
    mamba = specs["model.layers.0.linear_attn"]
    latent = specs["model.layers.3.self_attn.attn"]
    keys = specs["model.layers.3.self_attn.indexer.k_cache"]
    ring = specs["model.layers.3.self_attn.indexer.kpool_tail"]
    assert isinstance(mamba, MambaSpec)
    assert isinstance(keys, MLAAttentionSpec)
    assert latent.block_size == keys.block_size == mamba.block_size == block
    assert latent.page_size_bytes == mamba.page_size_bytes == block * 1024
    assert mamba.unpadded_page_size_bytes == state
    assert keys.page_size_bytes == index_page
    assert (keys.head_size, keys.dtype, keys.tokens_per_state) == (132, torch.uint8, 4)
    assert (ring.block_size, ring.page_size_bytes) == (4, 2048)
    assert mamba.mamba_cache_mode == "align"


def test_release_has_67_caches() -> None:
    specs = glm_kv_specs(RELEASE, settings(tp_size=4))
    assert len(specs) == 67
    kinds = Counter(name.rsplit(".", 1)[1] for name in specs)
    assert kinds == {"linear_attn": 34, "attn": 11, "k_cache": 11, "kpool_tail": 11}
    # One packed pool block: 11 latent and 11 index pages.
    packed = sum(spec.page_size_bytes for spec in specs.values() if isinstance(spec, MLAAttentionSpec))
    assert packed == 13394304


def test_a_kv_cache_of_half_the_width_doubles_the_block() -> None:
    specs = glm_kv_specs(RELEASE, settings(tp_size=8, cache_dtype=torch.float8_e4m3fn))
    assert specs["model.layers.3.self_attn.attn"].block_size == 1152


@pytest.mark.parametrize(("drafts", "capacity"), [(0, 4), (1, 8), (5, 16)])
def test_drafts_widen_ring_and_conv_rows(drafts: int, capacity: int) -> None:
    specs = glm_kv_specs(RELEASE, settings(tp_size=4, num_speculative_tokens=drafts))
    ring = specs["model.layers.3.self_attn.indexer.kpool_tail"]
    mamba = specs["model.layers.0.linear_attn"]
    assert isinstance(ring, CircularBufferSpec)
    assert isinstance(mamba, MambaSpec)
    assert ring.block_size == capacity
    assert specs["model.layers.3.self_attn.attn"].block_size % capacity == 0
    assert mamba.shapes[0] == (3 + drafts, 3 * 16 * 128)
    assert mamba.num_speculative_blocks == drafts


def test_without_prefix_caching_one_state_serves_the_whole_request() -> None:
    specs = glm_kv_specs(RELEASE, settings(tp_size=4, enable_prefix_caching=False))
    mamba = specs["model.layers.0.linear_attn"]
    assert isinstance(mamba, MambaSpec)
    assert (mamba.mamba_cache_mode, mamba.block_size) == ("none", 131072)
    assert specs["model.layers.3.self_attn.attn"].block_size == 1152


def test_cpu_storage_keeps_exact_rows_and_aligns_to_16() -> None:
    tiny = TINY_CONFIGS["glm5_next"]
    cpu = settings(dtype=torch.float32, cache_dtype=torch.float32, gpu_storage=False)
    specs = glm_kv_specs(tiny, cpu)
    keys = specs["model.layers.3.self_attn.indexer.k_cache"]
    assert isinstance(keys, MLAAttentionSpec)
    assert (keys.head_size, keys.dtype) == (16, torch.float32)
    # State: 3·192·4 + 4·16·16·4 = 6400 bytes; a token: 128 bytes; so 50 tokens, rounded up to 16.
    assert keys.block_size == 64
    bigger = glm_kv_specs(
        tiny, settings(dtype=torch.float32, cache_dtype=torch.float32, gpu_storage=False, block_size=100)
    )
    assert bigger["model.layers.3.self_attn.attn"].block_size == 112


def test_shared_layers_have_no_indexer_caches() -> None:
    config = {**RELEASE, "index_topk_pattern": "FFFFFFFS" * 6}
    specs = glm_kv_specs(config, settings())
    assert "model.layers.3.self_attn.indexer.k_cache" in specs
    assert "model.layers.7.self_attn.indexer.k_cache" not in specs
    assert "model.layers.7.self_attn.attn" in specs


def test_class_level_specs_take_composite_configs() -> None:
    composite = {"text_config": RELEASE, "tie_word_embeddings": False}
    flat = Glm5NextForCausalLM.kv_specs_from_config(RELEASE, settings())
    assert Glm5NextForCausalLM.kv_specs_from_config(composite, settings()) == flat


@pytest.mark.parametrize("params", [GlmParams, LlamaParams])
def test_a_config_that_lacks_a_number_is_told_so(params: type[GlmParams | LlamaParams]) -> None:
    lacking = {name: value for name, value in RELEASE.items() if name != "intermediate_size"}
    with pytest.raises(ValueError, match=r"config\.json lacks intermediate_size"):
        params.from_config(lacking)


def test_linear_attention_sizes_may_come_as_one_record() -> None:
    record = {
        "num_heads": 8,
        "head_dim": 32,
        "short_conv_kernel_size": 3,
        "gate_lower_bound": None,
        "safe_gate": False,
    }
    params = GlmParams.from_config({**RELEASE, "linear_attn_config": record})
    assert (params.linear_heads, params.linear_dim, params.linear_kernel) == (8, 32, 3)
    assert params.decay_min is None
    record["safe_gate"] = True
    assert GlmParams.from_config({**RELEASE, "linear_attn_config": record}).decay_min == -5.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim 64 is not supported"),
        ({"index_topk": 2046}, "index_topk 2046 must be a multiple of index_kpool 4"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail false is not supported"),
        ({"layer_types": ["linear_attention"]}, "layer_types names 1 layers, num_hidden_layers is 45"),
        ({"index_topk_pattern": "S" * 45}, "the first attention layer 3 has no selection to share"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlmParams.from_config({**RELEASE, **change})


@pytest.mark.parametrize("tp", [3, 128])
def test_tensor_parallel_sizes_must_divide_the_heads(tp: int) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size {tp} does not divide"):
        glm_kv_specs(RELEASE, settings(tp_size=tp))


LLAMA: dict[str, Any] = {
    **TINY_CONFIGS["llama"],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_llama_splits_or_repeats_kv_heads(tp: int, heads: int) -> None:
    specs = llama_kv_specs(LLAMA, settings(tp_size=tp, gpu_storage=False))
    assert list(specs) == ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
    assert set(specs.values()) == {
        FullAttentionSpec(
            block_size=16, num_kv_heads=heads, head_size=128, dtype=torch.bfloat16, max_tp_shards=8
        )
    }


@pytest.mark.parametrize("tp", [3, 12])
def test_llama_refuses_tensor_parallel_sizes_that_do_not_fit(tp: int) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size {tp} does not divide"):
        llama_kv_specs(LLAMA, settings(tp_size=tp))


def test_windows_follow_layer_types_or_the_family_rule() -> None:
    def windows(config: dict[str, Any]) -> list[int | None]:
        found = llama_kv_specs({**LLAMA, **config}, settings()).values()
        return [s.sliding_window if isinstance(s, SlidingWindowSpec) else None for s in found]

    assert windows({}) == [None, None]
    assert windows({"model_type": "mistral", "sliding_window": 9}) == [9, 9]
    assert windows({"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}) == [9, None]
    qwen = {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 1}
    assert windows(qwen) == [None, None]
    assert windows({**qwen, "use_sliding_window": True}) == [None, 9]


def test_impossible_head_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_attention_heads 32 is not a multiple of num_key_value_heads 5"):
        llama_kv_specs({**LLAMA, "num_key_value_heads": 5}, settings())
