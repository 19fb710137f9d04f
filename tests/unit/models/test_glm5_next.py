"""GLM-5.3-Flash against the transformers library, one-shot and over pages, and its release numbers."""

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

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unbounded_decay": {"linear_lower_bound": None},
    "pool_two": {"index_kpool": 2},
    "expert_groups": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "biases": {"attention_bias": True},
    "two_attention_layers": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"]
    },
    "shared_selection": {
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
    },
}


def load(tmp_path: Path, oracle: torch.nn.Module, **options: Any) -> Any:
    folder = save_oracle(oracle, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    return get_model(engine_config(folder, config, **options))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_one_shot_logits_equal_the_oracle(variant: str, tmp_path: Path) -> None:
    oracle = make_oracle("glm5_next", **VARIANTS[variant])
    harness = PagedHarness(load(tmp_path, oracle))
    tokens = random_tokens(random.Random(1), 45)
    (logits,) = harness.step([(harness.start(tokens), 45)])
    torch.testing.assert_close(logits, oracle_logits(oracle, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", ["plain", "shared_selection", "unbounded_decay", "pool_two"])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_schedule_gives_the_one_shot_logits(variant: str, seed: int, tmp_path: Path) -> None:
    oracle = make_oracle("glm5_next", seed, **VARIANTS[variant])
    harness = PagedHarness(load(tmp_path, oracle), num_blocks=120, seed=seed)
    marks = run_random_schedule(harness, oracle, seed, align=harness.block_sizes["paged"])
    assert harness.null_is_clean()
    assert marks.mixed_steps > 0
    assert marks.unaligned_chunks > 0
    assert marks.prefix_hits > 0


def test_the_reference_attention_backend_gives_the_same_logits(tmp_path: Path) -> None:
    oracle = make_oracle("glm5_next")
    folder = save_oracle(oracle, tmp_path)
    config = engine_config(folder, json.loads((folder / "config.json").read_text()))
    config.attention_config.backend = "TORCH_REF"
    harness = PagedHarness(get_model(config))
    tokens = random_tokens(random.Random(1), 30)
    request = harness.start(tokens)
    rows = [harness.step([(request, n)])[0] for n in (17, 1, 12)]
    torch.testing.assert_close(torch.cat(rows), oracle_logits(oracle, tokens), atol=TOLERANCE, rtol=0)
