import json
import math

import pytest
import torch
from pydantic import ValidationError

from tests.helpers.gguf_files import llama_metadata, write_gguf
from tests.helpers.model_folders import write_model_folder
from vllm.config import ModelConfig, ParallelConfig


@pytest.fixture
def folder(tmp_path):
    return write_model_folder(tmp_path / "m")


def test_facts_of_a_plain_model(folder):
    model = ModelConfig(folder)
    assert (model.max_model_len, model.original_max_model_len, model.served_model_name) == (512, None, folder)
    assert (model.get_hidden_size(), model.get_head_size(), model.get_vocab_size()) == (64, 16, 256)
    assert (model.get_total_num_hidden_layers(), model.get_total_num_kv_heads()) == (2, 2)
    assert (model.architectures, model.tokenizer) == (["LlamaForCausalLM"], folder)
    answers = (
        model.is_hybrid,
        model.is_attention_free,
        model.use_mla,
        model.is_encoder_decoder,
        model.is_multimodal_model,
    )
    assert not any(answers)
    assert model.hf_text_config is model.hf_config
    assert model.get_sliding_window() is None
    assert model.registry is not None


def test_division_over_ranks(folder):
    model = ModelConfig(folder)
    parallel = ParallelConfig(tensor_parallel_size=4)
    assert (model.get_num_kv_heads(parallel), model.get_num_attention_heads(parallel)) == (1, 1)
    staged = ParallelConfig(pipeline_parallel_size=2)
    assert model.get_num_layers(staged) == 1
    staged.rank = 1
    assert model.get_num_layers(staged) == 1


def test_dtype_is_a_torch_dtype_when_read(folder, tmp_path):
    assert ModelConfig(folder).dtype is torch.float32
    assert ModelConfig(folder, dtype="half").dtype is torch.float16
    assert ModelConfig(folder, dtype=torch.bfloat16).dtype is torch.bfloat16
    assert ModelConfig(write_model_folder(tmp_path / "b", torch_dtype="bfloat16")).dtype is torch.bfloat16
    model = ModelConfig(folder)
    model.dtype = "bfloat16"
    assert model.dtype is torch.bfloat16
    assert ModelConfig.dtype == "auto"
    for bad in ("int8", torch.int8):
        with pytest.raises(ValidationError, match="dtype"):
            ModelConfig(folder, dtype=bad)


def test_length_is_limited_by_the_checkpoint(folder, monkeypatch):
    assert ModelConfig(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(ValidationError, match=r"max_model_len=513.*512"):
        ModelConfig(folder, max_model_len=513)
    with pytest.raises(ValidationError, match="max_model_len=0"):
        ModelConfig(folder, max_model_len=0)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert ModelConfig(folder, max_model_len=513).max_model_len == 513


def test_a_seed_that_no_generator_takes_is_named(folder):
    assert ModelConfig(folder, seed=(1 << 63) - 1).seed == (1 << 63) - 1
    with pytest.raises(ValidationError, match="seed"):
        ModelConfig(folder, seed=1 << 63)


def test_minus_one_means_what_fits(folder):
    model = ModelConfig(folder, max_model_len=-1)
    assert (model.max_model_len, model.original_max_model_len) == (512, -1)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "llama3", "factor": 8.0}, 512),
        ({"rope_theta": 10000.0}, 512),
    ],
)
def test_rope_scaling_lengthens_what_it_does_not_already_state(tmp_path, scaling, expected):
    assert ModelConfig(write_model_folder(tmp_path, rope_scaling=scaling)).max_model_len == expected


def test_a_model_that_states_no_length(tmp_path):
    assert ModelConfig(write_model_folder(tmp_path, max_position_embeddings=None)).max_model_len == 2048


def test_sliding_window(tmp_path):
    folder = write_model_folder(tmp_path / "w", sliding_window=64)
    assert ModelConfig(folder).get_sliding_window() == 64
    limited = ModelConfig(folder, disable_sliding_window=True)
    assert (limited.get_sliding_window(), limited.max_model_len) == (None, 64)
    unused = write_model_folder(tmp_path / "u", sliding_window=64, use_sliding_window=False)
    assert ModelConfig(unused).get_sliding_window() is None


def test_latent_cache(tmp_path):
    model = ModelConfig(write_model_folder(tmp_path, kv_lora_rank=32, qk_rope_head_dim=8))
    assert (model.use_mla, model.get_total_num_kv_heads(), model.get_head_size()) == (True, 1, 40)


def test_explicit_head_size_and_other_spellings(tmp_path):
    ModelConfig(write_model_folder(tmp_path / "nope", kv_lora_rank=32, qk_rope_head_dim=0, head_dim=0))
    model = ModelConfig(write_model_folder(tmp_path / "a", head_dim=32))
    assert model.get_head_size() == 32
    gpt = write_model_folder(
        tmp_path / "b", hidden_size=None, num_hidden_layers=None, num_attention_heads=None, num_key_value_heads=None,
        n_embd=48, n_layer=3, n_head=4, model_type="gpt2",
    )  # fmt: skip
    model = ModelConfig(gpt)
    assert (model.get_hidden_size(), model.get_total_num_hidden_layers(), model.get_total_num_kv_heads()) == (
        48,
        3,
        4,
    )
    assert model.get_head_size() == 12
    shared = ModelConfig(write_model_folder(tmp_path / "c", multi_query=True))
    assert shared.get_total_num_kv_heads() == 1


def test_missing_size_is_reported_with_its_names(tmp_path):
    model = ModelConfig(write_model_folder(tmp_path, model_type="of its own", hidden_size=None))
    with pytest.raises(ValueError, match="lacks hidden_size / n_embd / d_model"):
        model.get_hidden_size()


@pytest.mark.parametrize(
    ("extra", "fault"),
    [
        ({"rope_theta": 0}, "rope_theta=0 must be a positive finite number"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta=-1.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 0}}}, "rope_theta=0"),
        ({"rope_scaling": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor=1.5"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan must be a positive finite number"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps=inf"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'"),
        ({"torch_dtype": "int8"}, "torch_dtype='int8' is not supported; supported: .*bfloat16"),
        ({"dtype": "float7"}, "dtype='float7' is not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype='float8_e4m3fn'"),
        ({"hidden_size": -64}, "hidden_size=-64 must be a positive integer"),
        ({"hidden_size": 64.5}, "hidden_size=64.5"),
        ({"hidden_size": 65}, "hidden_size=65 must be an even multiple of num_attention_heads=4"),
        ({"hidden_size": 60}, "hidden_size=60 must be an even multiple of num_attention_heads=4"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"head_dim": -16}, "head_dim=-16 must be a positive integer"),
        ({"head_dim": 0}, "head_dim=0 must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": True}, "vocab_size=True"),
        (
            {"model_type": "llama", "hidden_size": 65, "head_dim": 16},
            "hidden_size=65 must be a multiple of num_attention_heads=4",
        ),
        ({"model_type": "llama", "hidden_size": 66, "head_dim": 16}, "hidden_size=66 .*head_dim=16"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"head_dim": 16, "partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 turns 3 of head_dim=16"),
        (
            {"head_dim": 16, "rope_parameters": {"partial_rotary_factor": 0.01}},
            "partial_rotary_factor=0.01 turns 0",
        ),
        ({"q_lora_rank": 0}, "q_lora_rank=0 must be a positive integer"),
        ({"index_topk": "8"}, "index_topk='8' must be a positive integer"),
        ({"global_head_dim": 0}, "global_head_dim=0 must be a positive integer"),
        ({"global_head_dim": 31}, "global_head_dim=31 must be even"),
        ({"vocab_size_per_layer_input": "9"}, "vocab_size_per_layer_input='9' must be a positive integer"),
        ({"per_layer_config": {"2": {"head_dim": 31}}}, "head_dim=31 in per_layer_config must be even"),
        (
            {"per_layer_config": {"2": {"num_key_value_heads": 0}}},
            "num_key_value_heads=0 in per_layer_config must be a positive integer",
        ),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1 must be a positive finite number"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping=0 must be"),
        ({"text_config": 5}, "text_config=5 must be an object"),
        ({"linear_attn_config": {"num_heads": 0}}, "num_heads=0 in linear_attn_config"),
        (
            {"n_routed_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok=5 must be at most the 4 experts",
        ),
        ({"n_routed_experts": 3, "num_experts_per_tok": 1, "n_group": 2}, "n_routed_experts=3 .*n_group=2"),
        ({"n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 2, "topk_group": 3}, "topk_group=3"),
        (
            {"n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 4},
            "n_group=4 leaves 1 of n_routed_experts=4",
        ),
        (
            {"n_routed_experts": 8, "num_experts_per_tok": 5, "n_group": 2, "topk_group": 1},
            "num_experts_per_tok=5 must be at most the 4 experts in topk_group=1",
        ),
    ],
)
def test_impossible_values_of_a_checkpoint_are_refused(tmp_path, extra, fault):
    with pytest.raises(ValueError, match=f"config.json: {fault}"):
        ModelConfig(write_model_folder(tmp_path, **extra))


@pytest.mark.parametrize(
    "extra",
    [
        {"model_type": "mistral", "hidden_size": 63, "head_dim": 16},
        {
            "model_type": "llama",
            "hidden_size": 63,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
        {"kv_lora_rank": 31, "q_lora_rank": None, "num_key_value_heads": 3},
        {"head_dim": 16, "partial_rotary_factor": 0.25},
        {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    ],
)
def test_unusual_but_possible_shapes_are_accepted(tmp_path, extra):
    assert ModelConfig(write_model_folder(tmp_path, **extra)).get_hidden_size() > 0


def test_impossible_values_in_the_language_part_are_refused(tmp_path):
    folder = write_model_folder(tmp_path, text_config={"hidden_size": 64, "rms_norm_eps": 0})
    with pytest.raises(ValueError, match="rms_norm_eps=0"):
        ModelConfig(folder)
    assert ModelConfig(folder, hf_overrides={"text_config": {"rms_norm_eps": 1e-6}}).get_hidden_size() == 64


@pytest.mark.parametrize(
    ("extra", "hybrid", "free"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, True, False),
        ({"layer_types": ["sliding_attention", "full_attention"]}, False, False),
        ({"layers_block_type": ["mamba", "attention"]}, True, False),
        ({"hybrid_override_pattern": "M*-M"}, True, False),
        ({"linear_attn_config": {"num_heads": 2}}, True, False),
        ({"model_type": "jamba"}, True, False),
        ({"model_type": "mamba2"}, False, True),
        ({"layer_types": ["mamba", "mamba"]}, False, True),
    ],
)
def test_recurrent_layers(tmp_path, extra, hybrid, free):
    model = ModelConfig(write_model_folder(tmp_path, **extra))
    assert (model.is_hybrid, model.is_attention_free) == (hybrid, free)


def test_layer_kinds(tmp_path):
    model = ModelConfig(write_model_folder(tmp_path, hybrid_override_pattern="M*-"))
    assert model.get_layer_kinds() == ["mamba", "full_attention", "mlp"]


def test_composite_checkpoint_uses_its_language_part(tmp_path):
    text = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 9,
        "max_position_embeddings": 33,
    }
    folder = write_model_folder(
        tmp_path, text_config=text, vision_config={"depth": 1}, torch_dtype=None, dtype="bfloat16"
    )
    model = ModelConfig(folder)
    assert (model.get_vocab_size(), model.max_model_len, model.is_multimodal_model) == (9, 33, True)
    assert model.multimodal_config.get_limit_per_prompt("image") == 0
    assert model.dtype is torch.bfloat16


def test_overrides_replace_values_of_the_checkpoint(folder):
    assert (
        ModelConfig(folder, hf_overrides={"vocab_size": 7, "rope_scaling": {"factor": 2}}).get_vocab_size()
        == 7
    )

    def change(record):
        record.vocab_size = 11
        return record

    assert ModelConfig(folder, hf_overrides=change).get_vocab_size() == 11
    assert ModelConfig(folder, hf_overrides=lambda record: None).get_vocab_size() == 256
    with pytest.raises(ValidationError, match="hf_overrides"):
        ModelConfig(folder, hf_overrides=3)


def test_sampling_defaults(folder):
    with open(f"{folder}/generation_config.json", "w") as file:
        json.dump({"temperature": 0.6, "max_new_tokens": 9, "eos_token_id": [1], "do_sample": True}, file)
    model = ModelConfig(folder, override_generation_config={"top_k": 5, "temperature": 0.1})
    assert model.get_diff_sampling_param() == {"temperature": 0.1, "top_k": 5, "max_tokens": 9}
    assert ModelConfig(folder, generation_config="vllm").get_diff_sampling_param() == {}
    assert ModelConfig(folder, generation_config=folder).try_get_generation_config()["eos_token_id"] == [1]


def test_served_names(folder):
    assert ModelConfig(folder, served_model_name=["a", "b"]).served_model_name == ["a", "b"]
    assert ModelConfig(folder, served_model_name=[]).served_model_name == folder


def test_gguf_file_as_model(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), {"token_embd.weight": (3, 32)})
    model = ModelConfig(str(path))
    assert (model.get_vocab_size(), model.max_model_len, model.dtype) == (3, 128, torch.float32)


def test_unknown_model_is_refused_naming_it():
    with pytest.raises(ValidationError, match="no/such"):
        ModelConfig("no/such")


def test_token_is_not_shown(folder):
    assert "secret" not in repr(ModelConfig(folder, hf_token="secret"))
