"""What a checkpoint leaves out is what the library's config class says: by the table, and by what models make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from vllm.config import ModelConfig
from vllm.model_executor.layers.rotary_embedding import RopeParams
from vllm.model_executor.models.gemma4_config import GemmaParams
from vllm.model_executor.models.glm5_next_config import GlmParams
from vllm.model_executor.models.interfaces import config_dict
from vllm.model_executor.models.llama import LlamaParams
from vllm.transformers_utils.config_defaults import FAMILY_DEFAULTS, with_defaults

CLASSES = {
    "gemma3_text": transformers.Gemma3TextConfig,
    "gemma4_text": transformers.Gemma4TextConfig,
    "glm5_next_text": transformers.Glm5NextTextConfig,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
READERS: dict[str, Any] = {
    "gemma3_text": GemmaParams,
    "gemma4_text": GemmaParams,
    "glm5_next_text": GlmParams,
}
# Of training, of the library's own running, of the tokenizer, or of no meaning here: this engine reads none of them.
UNREAD = {
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "router_aux_loss_coef",
    "use_cache",
    "use_bidirectional_attention",  # off by default; refused where it is on
}


@pytest.mark.parametrize("family", sorted(FAMILY_DEFAULTS))
def test_the_table_has_every_default_of_the_library_and_no_other(family: str) -> None:
    library = CLASSES[family]
    theirs = {name: getattr(library, name) for name in library.__annotations__ if name not in UNREAD}
    theirs = {name: value for name, value in theirs.items() if value is not None}
    ours = dict(FAMILY_DEFAULTS[family])
    if family == "glm5_next_text":
        assert theirs.pop("head_dim") == 0  # the part that is turned, under the name of another family
    assert ours == theirs


@pytest.mark.parametrize("family", sorted(FAMILY_DEFAULTS))
def test_a_config_that_says_nothing_is_read_like_one_that_says_all(family: str) -> None:
    reader = READERS.get(family, LlamaParams)
    silent = config_dict({"model_type": family})
    spoken = config_dict(CLASSES[family]().to_dict())
    assert reader.from_config(silent) == reader.from_config(spoken)
    if reader is LlamaParams:
        assert RopeParams.from_config(silent, 128).theta == RopeParams.from_config(spoken, 128).theta


def test_values_that_are_there_stay_and_other_families_get_none() -> None:
    given = {"model_type": "llama", "vocab_size": 7, "rms_norm_eps": None}
    filled = with_defaults(given)
    assert (filled["vocab_size"], filled["rms_norm_eps"], filled["hidden_size"]) == (7, None, 4096)
    assert "hidden_size" not in given
    for other in ({"model_type": "bloom"}, {}, {"model_type": "bloom", "text_config": {"a": 1}}):
        assert with_defaults(other) == other


# What a released composite checkpoint of Gemma 3 says of its language model.
RELEASED: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_a_released_composite_gemma_3_is_read(named: bool, tmp_path: Path) -> None:
    text = {key: value for key, value in RELEASED.items() if named or key != "model_type"}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    model = ModelConfig(str(tmp_path), tokenizer="none")
    assert model.max_model_len == 131072, "the length is stated scaled"
    assert (model.get_vocab_size(), model.get_total_num_kv_heads(), model.get_head_size()) == (262208, 4, 256)
    read = GemmaParams.from_config(config_dict(model.hf_config))
    theirs = transformers.Gemma3Config(text_config=RELEASED).to_dict()
    assert read == GemmaParams.from_config(config_dict(theirs))
    assert {layer.window for layer in read.layers} == {1024, None}
    full = read.ropes["full_attention"]
    assert (full.kind, full.theta, full.options["factor"]) == ("linear", 1e6, 8.0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "left_out", ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "sliding_window"]
)
def test_a_llama_like_config_may_leave_out_any_of_these(family: str, left_out: str) -> None:
    values = CLASSES[family](
        hidden_size=512, num_attention_heads=32, num_hidden_layers=3, use_sliding_window=True
    ).to_dict()
    values.pop("layer_types", None)
    del values[left_out if left_out in values else "rope_parameters"]
    theirs = CLASSES[family](**values).to_dict()
    assert LlamaParams.from_config(config_dict(values)) == LlamaParams.from_config(config_dict(theirs))
