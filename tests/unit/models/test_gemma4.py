"""Gemma 3 and 4 against the transformers library, one-shot and over pages, and what its config may not say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
)

from tests.helpers.paged_harness import PagedHarness
from tests.helpers.random_schedule import TOLERANCE, random_tokens, run_random_schedule
from tests.helpers.tiny_models import CONFIGS, engine_config, make_oracle, oracle_logits, save_oracle
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.model_loader.loader import get_model
from vllm.model_executor.model_loader.tiny import TINY_CONFIGS
from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM
from vllm.model_executor.models.gemma4_config import GemmaParams
from vllm.model_executor.models.interfaces import ModelSettings, config_dict
from vllm.transformers_utils.config_defaults import FAMILY_DEFAULTS
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

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
    "indexes_of_two_digits": {"num_hidden_layers": 12, "layer_types": None, "num_kv_shared_layers": 4},
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


THIRD: dict[str, dict[str, Any]] = {
    "plain": {},
    "usual_pattern": {"num_hidden_layers": 7, "sliding_window_pattern": 6},
    "biases_cap_untied": {
        "attention_bias": True,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": False,
    },
    "stretched": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        }
    },
}


@pytest.mark.parametrize("variant", sorted(THIRD))
def test_gemma_3_gives_the_logits_of_the_oracle(variant: str, tmp_path: Path) -> None:
    oracle = make_oracle("gemma3_text", **THIRD[variant])
    harness = PagedHarness(load(tmp_path, oracle, block_size=4))
    tokens = random_tokens(random.Random(1), 45)
    (logits,) = harness.step([(harness.start(tokens), 45)])
    torch.testing.assert_close(logits, oracle_logits(oracle, tokens), atol=TOLERANCE, rtol=0)
    run_random_schedule(harness, oracle, seed=3, share=False)
    assert harness.null_is_clean()


@pytest.mark.parametrize("first", ["auto", "dummy"])
def test_gemma_3_goes_by_the_weights_that_were_loaded_last(first: str, tmp_path: Path) -> None:
    oracle, other = make_oracle("gemma3_text"), make_oracle("gemma3_text", seed=5)
    model = load(tmp_path / "a", oracle, load_format=first)
    tokens = random_tokens(random.Random(1), 20)
    harness = PagedHarness(model)
    harness.step([(harness.start(tokens), 20)])
    weights = load_file(save_oracle(other, tmp_path / "b") / "model.safetensors")
    with torch.inference_mode():
        model.load_weights(weights.items())
    harness = PagedHarness(model)
    (logits,) = harness.step([(harness.start(tokens), 20)])
    torch.testing.assert_close(logits, oracle_logits(other, tokens), atol=TOLERANCE, rtol=0)


def test_gemma_3_reads_the_old_names_of_its_rotary_settings() -> None:
    oracle = make_oracle("gemma3_text", **THIRD["stretched"]).config.to_dict()
    new = GemmaParams.from_config(oracle)
    del oracle["rope_parameters"]
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    read = GemmaParams.from_config(oracle | old)
    for kind, rope in new.ropes.items():
        assert torch.equal(RotaryEmbedding(read.ropes[kind]).rows(64), RotaryEmbedding(rope).rows(64)), kind
    assert read.layers == new.layers


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


@pytest.mark.parametrize("variant", ["plain", "experts"])
def test_half_precision_is_as_near_to_fp32_as_the_library_s(variant: str, tmp_path: Path) -> None:
    oracle = make_oracle("gemma4_text", **VARIANTS[variant])
    harness = PagedHarness(load(tmp_path, oracle, dtype=torch.bfloat16))
    tokens = random_tokens(random.Random(1), 45)
    request = harness.start(tokens)
    half = torch.cat([harness.step([(request, n)])[0] for n in (30, 1, 14)])
    exact = oracle_logits(oracle, tokens)
    theirs = oracle_logits(oracle.bfloat16(), tokens).float()
    assert (half - exact).abs().mean() < 1.25 * (theirs - exact).abs().mean()


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
VISION |= {"image_size": 28, "patch_size": 14}
COMPOSITES: dict[str, Any] = {
    "gemma3_text": (Gemma3Config, Gemma3ForConditionalGeneration, {}),
    "gemma4_text": (Gemma4Config, Gemma4ForConditionalGeneration, {"audio_config": None}),
}
# Equal to what the family's class says by itself; released checkpoints leave out what is.
LEFT_OUT = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize("kind", sorted(COMPOSITES))
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_language_model_of_a_composite_checkpoint_is_served(
    kind: str, is_tied: bool, tmp_path: Path
) -> None:
    config_class, model_class, more = COMPOSITES[kind]
    torch.manual_seed(0)
    numbers = CONFIGS[kind] | LEFT_OUT
    config = config_class(text_config=numbers, vision_config=VISION, tie_word_embeddings=is_tied, **more)
    composite = model_class(config).float().eval()
    text = make_oracle(kind, **LEFT_OUT, tie_word_embeddings=is_tied)
    composite.model.language_model.load_state_dict(text.model.state_dict())
    composite.lm_head.load_state_dict(text.lm_head.state_dict())
    folder = save_oracle(composite, tmp_path)
    whole = json.loads((folder / "config.json").read_text())
    defaults = FAMILY_DEFAULTS[kind].items()
    whole["text_config"] = {
        name: value for name, value in whole["text_config"].items() if (name, value) not in defaults
    }
    assert not LEFT_OUT.keys() & whole["text_config"].keys()
    model = get_model(engine_config(folder, whole))
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert any("vision_tower" in name for name in names)
    assert any(name.endswith("lm_head.weight") for name in names) is not is_tied
    harness = PagedHarness(model)
    tokens = random_tokens(random.Random(1), 30)
    (logits,) = harness.step([(harness.start(tokens), 30)])
    torch.testing.assert_close(logits, oracle_logits(text, tokens), atol=TOLERANCE, rtol=0)


def test_keys_and_values_that_a_sharing_layer_no_longer_uses_are_passed_over(tmp_path: Path) -> None:
    folder = save_oracle(make_oracle("gemma4_text"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    before = get_model(engine_config(folder, json.loads((folder / "config.json").read_text())))
    for name in ("k_proj", "v_proj", "k_norm"):
        weights[f"model.layers.4.self_attn.{name}.weight"] = weights[
            f"model.layers.3.self_attn.{name}.weight"
        ].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    after = get_model(engine_config(folder, json.loads((folder / "config.json").read_text())))
    assert before.slots().keys() == after.slots().keys()
    assert not any(name.startswith("model.layers.4.self_attn.k") for name in after.slots())


def specs_of(**changes: Any) -> dict[str, Any]:
    config = {**TINY_CONFIGS["gemma4"], **changes}
    settings = ModelSettings(torch.bfloat16, torch.bfloat16, 512)
    return Gemma4ForCausalLM.kv_specs_from_config(config, settings)


def test_only_layers_with_keys_and_values_of_their_own_have_a_spec(tmp_path: Path) -> None:
    specs = specs_of()
    assert list(specs) == [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    kinds = [(type(spec), spec.head_size, spec.num_kv_heads) for spec in specs.values()]
    window = (SlidingWindowSpec, 16, 2)
    assert kinds == [window, window, (FullAttentionSpec, 32, 2), window]
    model = load(tmp_path, make_oracle("gemma4_text"))
    assert list(model.kv_specs()) == list(specs)
    assert model.kv_sharing().keys() == model.cache_layers.keys() - specs.keys()


def test_head_sizes_may_be_spelled_out_by_layer_or_named_for_full_layers() -> None:
    by_layer = {str(i): {"head_dim": 32, "num_key_value_heads": 1} for i in (2, 5, 6)}
    spelled = specs_of(per_layer_config=by_layer, global_head_dim=None)
    named = specs_of(attention_k_eq_v=True, num_global_key_value_heads=1)
    assert spelled == named
    assert {spec.num_kv_heads for spec in named.values()} == {1, 2}
    ignored = specs_of(num_global_key_value_heads=1)
    assert ignored == specs_of(), "the number counts where keys are values only"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers 7 must be a whole number from 0 to 6"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers -1 must be a whole number from 0 to 6"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers 6: layer 2 is full_attention, and no layer"),
        ({"sliding_window": 0}, "sliding_window 0 must be a whole number at least 1"),
        ({"sliding_window": 2.5}, "sliding_window 2.5 must be"),
        ({"sliding_window_pattern": -1}, "sliding_window_pattern -1 must be"),
        ({"hidden_size_per_layer_input": -3}, "hidden_size_per_layer_input -3 must be"),
        (EXPERTS | {"top_k_experts": 5}, "top_k_experts 5 must be a whole number from 1 to 4"),
        (EXPERTS | {"num_experts": 0}, "num_experts 0 must be"),
        ({"per_layer_config": {"7": {"head_dim": 16}}}, "per_layer_config names 7: there are layers 0 to 6"),
        ({"per_layer_config": {"x": {}}}, "per_layer_config names x"),
        ({"per_layer_config": [16]}, r"per_layer_config \[16\] must be an object of objects"),
        (
            {"per_layer_config": {"2": {"head_dim": 32}}, "num_kv_shared_layers": 0},
            r"head_dim \[16, 32\] of full_attention layers",
        ),
        (
            {"rope_parameters": {"full_attention": 5}},
            "rope_parameters {'full_attention': 5} must be an object of",
        ),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers 5: layer 2 is full_attention, and no layer"),
        ({"layer_types": ["full_attention"]}, "for each of 7 layers, got 1 names"),
        ({"layer_types": ["full_attention"] * 6 + ["linear"]}, r"got 7 names, among them \['linear'\]"),
        (
            {"num_key_value_heads": 3},
            "layer 0: num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ({"per_layer_config": {"0": {"window": 4}}}, "per_layer_config of layer 0: window is not supported"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"model_type": "gemma3n_text"}, "model_type 'gemma3n_text' is not supported; supported: gemma3, "),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention True is",
        ),
        ({"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input 99 is smaller than vocab_size 264"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "x"}, "full_attention": {}}},
            "rope_type 'x' is not supported",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "config.json lacks sliding_attention"),
    ],
)
def test_a_config_that_cannot_be_computed_is_told(changes: dict[str, Any], named: str) -> None:
    config = {key: value for key, value in (TINY_CONFIGS["gemma4"] | changes).items() if value is not None}
    with pytest.raises(ValueError, match=named):
        GemmaParams.from_config({**FAMILY_DEFAULTS["gemma4_text"], "hidden_size": None, **config})


@pytest.mark.parametrize(
    ("changes", "tp", "named"),
    [
        ({}, 3, "does not divide num_attention_heads 4"),
        ({"intermediate_size": 98}, 4, "does not divide intermediate_size 98"),
        ({**EXPERTS, "moe_intermediate_size": 26}, 4, "does not divide moe_intermediate_size 26"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "does not divide num_key_value_heads 6"),
    ],
)
def test_ranks_that_cannot_share_the_model_are_told(changes: dict[str, Any], tp: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size {tp} {named}"):
        Gemma4ForCausalLM.check_split(config_dict(TINY_CONFIGS["gemma4"] | changes), tp)
