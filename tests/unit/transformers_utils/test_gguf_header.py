import struct

import pytest

from tests.helpers.gguf_files import llama_metadata, write_gguf
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.gguf_config import ARCHITECTURES, config_from_gguf
from vllm.transformers_utils.gguf_metadata import is_gguf_file, read_gguf_header

TENSORS = {"token_embd.weight": (3, 32), "blk.0.attn_q.weight": (32, 32), "output_norm.weight": (32,)}


def test_header_gives_metadata_tensors_and_data_offset(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), TENSORS)
    header = read_gguf_header(path)
    assert header.metadata["llama.block_count"] == 2
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b", "c"]
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
    assert [(t.name, t.shape) for t in header.tensors] == list(TENSORS.items())
    first = header.tensors[0]
    assert (first.dimensions, first.num_elements, first.type_number, first.offset) == ((32, 3), 96, 0, 0)
    assert header.data_offset % 32 == 0
    assert path.stat().st_size == header.data_offset + 4 * (96 + 1024 + 32)
    assert is_gguf_file(path)


def test_config_follows_the_metadata(tmp_path):
    config = config_from_gguf(write_gguf(tmp_path / "m.gguf", llama_metadata(), TENSORS))
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads, config.vocab_size) == (
        32,
        2,
        2,
        3,
    )
    assert (config.max_position_embeddings, config.eos_token_id, config.rope_theta) == (128, 2, 10000.0)
    assert config.tie_word_embeddings is True
    assert config.attention_bias is False


def test_config_sees_an_untied_output_and_attention_bias(tmp_path):
    tensors = {**TENSORS, "output.weight": (3, 32), "blk.0.attn_q.bias": (32,)}
    config = config_from_gguf(write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors))
    assert config.tie_word_embeddings is False
    assert config.attention_bias is True


def test_config_reads_rope_scaling_and_partial_rotation(tmp_path):
    metadata = llama_metadata(**{
        "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32, "llama.rope.dimension_count": 4,
    })  # fmt: skip
    config = config_from_gguf(write_gguf(tmp_path / "m.gguf", metadata, TENSORS))
    assert config.rope_scaling.to_dict() == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert config.partial_rotary_factor == 0.5


def test_vocabulary_size_without_an_embedding_tensor(tmp_path):
    assert config_from_gguf(write_gguf(tmp_path / "m.gguf", llama_metadata(), {})).vocab_size == 3


@pytest.mark.parametrize("name", ["clip", "gemma2", "gemma3", "phi3", "qwen3moe", "smollm3"])
def test_an_architecture_that_is_not_served_is_refused_at_its_name(tmp_path, name):
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": name}, {})
    told = f"GGUF architecture '{name}' is not supported; supported: llama, mistral, qwen2, qwen3"
    with pytest.raises(ValueError, match=told):
        config_from_gguf(path)
    with pytest.raises(ValueError, match=told):  # at the start of an engine
        EngineArgs(str(path)).create_engine_config()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("expert_count", 8, r"llama\.expert_count=8 is not supported: no GGUF model has experts"),
        ("final_logit_softcapping", 30.0, "capped logits"),
        ("attn_logit_softcapping", 50.0, "capped scores"),
        (
            "rope.scaling.type",
            "longrope",
            r"scaling\.type='longrope' is not supported; supported: none, linear, yarn",
        ),
    ],
)
def test_what_no_served_model_does_is_refused_by_name(tmp_path, key, value, told):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(**{f"llama.{key}": value}), TENSORS)
    with pytest.raises(ValueError, match=told):
        config_from_gguf(path)
    harmless = "none" if isinstance(value, str) else type(value)(0)
    config_from_gguf(write_gguf(path, llama_metadata(**{f"llama.{key}": harmless}), TENSORS))


def test_every_architecture_has_a_model():
    for model_type, class_name in ARCHITECTURES.values():
        assert model_type
        assert class_name in ModelRegistry.get_supported_archs()


def test_other_files_are_refused(tmp_path):
    other = tmp_path / "x.gguf"
    other.write_bytes(b"not a model")
    with pytest.raises(ValueError, match="not a GGUF file"):
        read_gguf_header(other)
    assert not is_gguf_file(other)
    assert not is_gguf_file(tmp_path)
    with pytest.raises(ValueError, match="version 9"):
        read_gguf_header(write_gguf(tmp_path / "v.gguf", {}, {}, version=9))


def test_a_cut_header_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), TENSORS)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match="cut off"):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (struct.pack("<QI", 1 << 40, 0), "claims"),
        (struct.pack("<Q", 1) + b"k" + struct.pack("<I", 99), "value type 99"),
    ],
)
def test_a_broken_header_does_not_allocate_or_loop(tmp_path, tail, message):
    path = tmp_path / "b.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + tail)
    with pytest.raises(ValueError, match=message):
        read_gguf_header(path)
