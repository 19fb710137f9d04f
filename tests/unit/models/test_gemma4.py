"""Gemma 4 against the transformers library, one-shot and over pages, and what its config may not say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.paged_harness import PagedHarness
from tests.helpers.random_schedule import TOLERANCE, random_tokens, run_random_schedule
from tests.helpers.tiny_models import engine_config, make_oracle, oracle_logits, save_oracle
from vllm.model_executor.model_loader.loader import get_model

EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nothing_shared": {"num_kv_shared_layers": 0},
    "wide_mlp": {"use_double_wide_mlp": True},
    "experts": EXPERTS,
    "experts_of_large_release": {
        **EXPERTS,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "keys_are_values_and_shared": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "untied_without_cap": {"tie_word_embeddings": False, "final_logit_softcapping": None},
    "biases": {"attention_bias": True},
    "odd_width": {"hidden_size": 63, "intermediate_size": 81},
    "usual_pattern": {"layer_types": None, "num_kv_shared_layers": 1},
    "plain_rope": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        }
    },
}


def load(tmp_path: Path, oracle: torch.nn.Module, **options: Any) -> Any:
    folder = save_oracle(oracle, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    return get_model(engine_config(folder, config, **options))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_one_shot_logits_equal_the_oracle(variant: str, tmp_path: Path) -> None:
    oracle = make_oracle("gemma4_text", **VARIANTS[variant])
    harness = PagedHarness(load(tmp_path, oracle))
    tokens = random_tokens(random.Random(1), 45)
    (logits,) = harness.step([(harness.start(tokens), 45)])
    torch.testing.assert_close(logits, oracle_logits(oracle, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", ["plain", "experts", "wide_mlp", "keys_are_values_and_shared"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_random_schedule_gives_the_one_shot_logits(variant: str, block_size: int, tmp_path: Path) -> None:
    oracle = make_oracle("gemma4_text", **VARIANTS[variant])
    harness = PagedHarness(load(tmp_path, oracle, block_size=block_size), num_blocks=200)
    marks = run_random_schedule(harness, oracle, seed=block_size, share=False)
    assert harness.null_is_clean()
    assert marks.mixed_steps > 0
    assert marks.preemptions > 0


def test_the_reference_attention_backend_gives_the_same_logits(tmp_path: Path) -> None:
    oracle = make_oracle("gemma4_text")
    folder = save_oracle(oracle, tmp_path)
    config = engine_config(folder, json.loads((folder / "config.json").read_text()))
    config.attention_config.backend = "TORCH_REF"
    harness = PagedHarness(get_model(config))
    tokens = random_tokens(random.Random(1), 30)
    request = harness.start(tokens)
    rows = [harness.step([(request, n)])[0] for n in (17, 1, 12)]
    torch.testing.assert_close(torch.cat(rows), oracle_logits(oracle, tokens), atol=TOLERANCE, rtol=0)
