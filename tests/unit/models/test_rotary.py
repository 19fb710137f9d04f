"""Rotary tables against the transformers library's formulas, and their independence of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm.model_executor.layers.rotary_embedding import RopeParams, RotaryEmbedding

HEAD_DIM = 16
FACTORS = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_not_truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
        "beta_fast": 8.0,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional_stretched": {"rope_type": "proportional", "partial_rotary_factor": 0.6, "factor": 8.0},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 32, **FACTORS},
    "longrope_attention_factor": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
        **FACTORS,
    },
}


def config_of(scaling: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_theta": 10000.0, **scaling},
    }


def library_row(config: dict[str, Any], position: int) -> torch.Tensor:
    """`cos | sin` at a position as the library has it for a sequence that ends there."""
    record = LlamaConfig(**config)
    kind = config["rope_parameters"]["rope_type"]
    inverse, scale = ROPE_INIT_FUNCTIONS[kind](record, "cpu", seq_len=position + 1)
    angles = position * inverse
    return torch.cat([angles.cos(), angles.sin()]) * scale


@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_table_equals_the_library_for_a_sequence_ending_at_the_position(name: str) -> None:
    config = config_of(SCALINGS[name])
    table = RotaryEmbedding(RopeParams.from_config(config, HEAD_DIM)).rows(400)
    for position in (0, 1, 31, 32, 33, 127, 128, 200, 399):
        torch.testing.assert_close(table[position], library_row(config, position), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_a_row_does_not_depend_on_how_long_other_requests_are(name: str) -> None:
    params = RopeParams.from_config(config_of(SCALINGS[name]), HEAD_DIM)
    grown, whole = RotaryEmbedding(params), RotaryEmbedding(params)
    early = grown.rows(5)[:5].clone()
    assert torch.equal(whole.rows(5000)[:5], early)
    grown.rows(1500)
    assert torch.equal(grown.rows(5000)[:5000], whole.rows(5000)[:5000])


def test_old_and_new_config_forms_mean_the_same() -> None:
    new = config_of(SCALINGS["llama3"])
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    scaling = {k: v for k, v in SCALINGS["llama3"].items() if k != "rope_type"}
    old |= {"rope_theta": 10000.0, "rope_scaling": {**scaling, "type": "llama3"}}
    tables = [RotaryEmbedding(RopeParams.from_config(c, HEAD_DIM)).rows(9) for c in (new, old)]
    assert torch.equal(*tables)


def test_partial_rotation_leaves_the_other_channels() -> None:
    config = config_of({"rope_type": "default", "partial_rotary_factor": 0.25})
    rope = RotaryEmbedding(RopeParams.from_config(config, HEAD_DIM))
    x = torch.randn(3, 2, HEAD_DIM)
    turned = rope.apply(x.clone(), rope.rows(8)[torch.tensor([1, 5, 7])])
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.equal(turned[..., :4], x[..., :4])


def test_rotation_depends_on_distance_only() -> None:
    rope = RotaryEmbedding(RopeParams.from_config(config_of({"rope_type": "default"}), HEAD_DIM))
    q, k = torch.randn(1, 1, HEAD_DIM), torch.randn(1, 1, HEAD_DIM)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        rows = rope.rows(100)
        return (
            rope.apply(q.clone(), rows[q_position : q_position + 1])
            * rope.apply(k.clone(), rows[k_position : k_position + 1])
        ).sum()

    torch.testing.assert_close(score(9, 4), score(60, 55), atol=1e-4, rtol=1e-4)


def test_extra_divisors_stretch_frequencies() -> None:
    params = RopeParams.from_config(config_of({"rope_type": "default"}), HEAD_DIM)
    plain, stretched = RotaryEmbedding(params), RotaryEmbedding(params)
    stretched.divide_frequencies(torch.full((8,), 4.0))
    torch.testing.assert_close(stretched.rows(41)[40], plain.rows(11)[10], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="3 rotary factors"):
        stretched.divide_frequencies(torch.ones(3))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type 'spiral' is not supported"),
        ({"rope_type": "linear"}, "rope_type 'linear' needs 'factor'"),
        (
            {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
            "rope long_factor has 1 values",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(RopeParams.from_config(config_of(scaling), HEAD_DIM))


def test_a_config_without_a_length_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="lacks max_position_embeddings"):
        RopeParams.from_config({"rope_theta": 10000.0}, HEAD_DIM)
