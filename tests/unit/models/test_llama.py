"""Llama and relatives against the transformers library, one-shot and over pages."""

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

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "multi_query": ("llama", {"num_key_value_heads": 1}),
    "no_head_dim": ("llama", {"head_dim": None}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "dynamic_within": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral_window": ("mistral", {}),
    "odd_width": ("mistral", {"hidden_size": 63}),
    "odd_width_of_odd_heads": (
        "llama",
        {"hidden_size": 63, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def load(tmp_path: Path, oracle: torch.nn.Module, **options: Any) -> Any:
    folder = save_oracle(oracle, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    return get_model(engine_config(folder, config, **options))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_one_shot_logits_equal_the_oracle(variant: str, tmp_path: Path) -> None:
    kind, overrides = VARIANTS[variant]
    oracle = make_oracle(kind, **overrides)
    harness = PagedHarness(load(tmp_path, oracle))
    tokens = random_tokens(random.Random(1), 45)
    (logits,) = harness.step([(harness.start(tokens), 45)])
    torch.testing.assert_close(logits, oracle_logits(oracle, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", ["plain", "biases", "llama3", "mistral_window", "qwen3"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_random_schedule_gives_the_one_shot_logits(variant: str, block_size: int, tmp_path: Path) -> None:
    kind, overrides = VARIANTS[variant]
    oracle = make_oracle(kind, **overrides)
    harness = PagedHarness(load(tmp_path, oracle, block_size=block_size), num_blocks=200)
    run_random_schedule(harness, oracle, seed=block_size, share=variant != "mistral_window")
    assert harness.null_is_clean()


def test_a_narrower_kv_cache_costs_only_precision(tmp_path: Path) -> None:
    oracle = make_oracle("llama")
    folder = save_oracle(oracle, tmp_path)
    config = engine_config(folder, json.loads((folder / "config.json").read_text()))
    config.cache_config.cache_dtype = "bfloat16"
    model = get_model(config)
    assert {spec.dtype for spec in model.kv_specs().values()} == {torch.bfloat16}
    harness = PagedHarness(model)
    tokens = random_tokens(random.Random(1), 20)
    request = harness.start(tokens)
    rows = [harness.step([(request, n)])[0] for n in (12, 1, 7)]
    error = (torch.cat(rows) - oracle_logits(oracle, tokens)).abs()
    assert TOLERANCE < error.max() < 0.3


def test_the_reference_attention_backend_gives_the_same_logits(tmp_path: Path) -> None:
    oracle = make_oracle("llama")
    folder = save_oracle(oracle, tmp_path)
    config = engine_config(folder, json.loads((folder / "config.json").read_text()))
    config.attention_config.backend = "TORCH_REF"
    harness = PagedHarness(get_model(config))
    tokens = random_tokens(random.Random(1), 30)
    request = harness.start(tokens)
    rows = [harness.step([(request, n)])[0] for n in (17, 1, 12)]
    torch.testing.assert_close(torch.cat(rows), oracle_logits(oracle, tokens), atol=TOLERANCE, rtol=0)
