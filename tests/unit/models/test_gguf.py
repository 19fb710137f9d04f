"""GGUF tensors: block formats, names, the rotary row order, whole models, conversion into a folder."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.helpers import gguf_writer as writer
from tests.helpers.paged_harness import PagedHarness
from tests.helpers.random_schedule import random_tokens
from tests.helpers.tiny_models import engine_config, make_oracle, oracle_logits
from tests.helpers.tp_ranks import run_ranks
from vllm.model_executor.model_loader.gguf import dequantise, iter_gguf, tensor_name
from vllm.model_executor.model_loader.gguf_convert import convert
from vllm.model_executor.model_loader.loader import get_model
from vllm.transformers_utils.gguf_config import config_from_gguf


def half(data: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", data, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def decode_one(kind: int, block: bytes) -> list[float]:
    """The block formats spelled out one value at a time."""
    if kind == writer.Q4_0:
        return [half(block, 0) * (((block[2 + i % 16] >> (4 * (i // 16))) & 15) - 8) for i in range(32)]
    if kind == writer.Q4_1:
        d, m = half(block, 0), half(block, 2)
        return [d * ((block[4 + i % 16] >> (4 * (i // 16))) & 15) + m for i in range(32)]
    if kind == writer.Q8_0:
        return [half(block, 0) * signed(block[2 + i]) for i in range(32)]
    values = []
    for i in range(256):
        part, group, lane = i // 128, i % 128 // 32, i % 32
        low = block[64 * part + 32 * (group % 2) + lane]
        low = low >> 4 if group >= 2 else low & 15
        high = (block[128 + 32 * part + lane] >> (2 * group)) & 3
        scale = signed(block[192 + 8 * part + 2 * group + lane // 16])
        values.append(half(block, 208) * scale * ((low | (high << 4)) - 32))
    return values


@pytest.mark.parametrize(
    ("kind", "size", "halves"),
    [(writer.Q4_0, 18, [0]), (writer.Q4_1, 20, [0, 2]), (writer.Q8_0, 34, [0]), (writer.Q6_K, 210, [208])],
)
def test_block_formats(kind: int, size: int, halves: list[int]) -> None:
    rng = random.Random(kind)
    blocks = [bytearray(rng.randbytes(size)) for _ in range(5)]
    for block in blocks:
        for at in halves:
            block[at : at + 2] = struct.pack("<e", rng.uniform(-2, 2))
    expected = [decode_one(kind, bytes(block)) for block in blocks]
    data = np.frombuffer(b"".join(blocks), dtype=np.uint8)
    result = dequantise(data, kind, (5, len(expected[0])))
    torch.testing.assert_close(result, torch.tensor(expected), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(writer.F32, torch.float32), (writer.F16, torch.float16), (writer.BF16, torch.bfloat16)],
)
def test_plain_formats_are_exact(kind: int, dtype: torch.dtype) -> None:
    values = torch.randn(3, 7).to(dtype)
    data = np.frombuffer(values.view(torch.uint8).numpy().tobytes(), dtype=np.uint8)
    assert torch.equal(dequantise(data, kind, (3, 7)), values.float())


def test_unknown_types_cut_blocks_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="GGUF tensor type 12 is not supported; supported: F32, F16"):
        dequantise(np.zeros(8, dtype=np.uint8), 12, (2,))
    with pytest.raises(ValueError, match="19 bytes are no whole number of Q4_0 blocks of 18"):
        dequantise(np.zeros(19, dtype=np.uint8), writer.Q4_0, (32,))
    with pytest.raises(ValueError, match=r"GGUF tensor 'blk\.0\.ssm_in\.weight' is not known"):
        tensor_name("blk.0.ssm_in.weight")


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 10000.0,
}

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_of(oracle: torch.nn.Module, path: Path, extra: dict[str, Any] | None = None) -> Path:
    """The oracle's weights as a llama GGUF: fp32, but Q8_0 for attention values and Q4_1 for the down projections.

    The oracle's own weights are replaced by what those formats keep.
    """
    tensors: list[writer.Tensor] = []
    state = oracle.state_dict()
    for name, tensor in state.items():
        parts = name.split(".")
        if parts[1] == "layers":
            part, kind = ".".join(parts[3:-1]), parts[-1]
            target = f"blk.{parts[2]}.{NAMES[part]}.{kind}"
        else:
            target = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
            }.get(name, "output.weight")
        values = tensor.numpy()
        if "attn_v" in target:
            data, number = writer.quantise_q8_0(values), writer.Q8_0
        elif "ffn_down" in target:
            data, number = writer.quantise_q4_1(values), writer.Q4_1
        else:
            heads = 4 if "attn_q" in target else 2
            stored = (
                writer.permute_rotary(values, heads) if "attn_q" in target or "attn_k" in target else values
            )
            data, number = stored.astype(np.float32).tobytes(), writer.F32
        if number != writer.F32:
            tensor.copy_(dequantise(np.frombuffer(data, dtype=np.uint8), number, tuple(tensor.shape)))
        tensors.append((target, tuple(values.shape), number, data))
    return writer.write_gguf(path, {**METADATA, **(extra or {})}, tensors)


def test_a_gguf_file_is_served_like_its_model(tmp_path: Path) -> None:
    oracle = make_oracle("llama")
    path = gguf_of(oracle, tmp_path / "model.gguf")
    config = config_from_gguf(path)
    model = get_model(engine_config(path, config))
    tokens = random_tokens(random.Random(0), 30)
    harness = PagedHarness(model)
    (logits,) = harness.step([(harness.start(tokens), 30)])
    torch.testing.assert_close(logits, oracle_logits(oracle, tokens), atol=1e-4, rtol=0)


def test_ranks_share_a_gguf_file(tmp_path: Path) -> None:
    """The down projections end within blocks of 32 there."""
    oracle = make_oracle("llama")
    path = gguf_of(oracle, tmp_path / "model.gguf")
    config = config_from_gguf(path)
    tokens = random_tokens(random.Random(0), 30)

    def work(rank: int) -> torch.Tensor:
        harness = PagedHarness(get_model(engine_config(path, config, tensor_parallel_size=2)))
        return harness.step([(harness.start(tokens), 30)])[0]

    for logits in run_ranks(2, work):
        torch.testing.assert_close(logits, oracle_logits(oracle, tokens), atol=1e-4, rtol=0)


def test_cut_file_and_unsupported_tensor_are_refused_by_name(tmp_path: Path) -> None:
    path = writer.write_gguf(
        tmp_path / "a.gguf", METADATA, [("output.weight", (64,), writer.F32, b"\0" * 256)]
    )
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ValueError, match=r"tensor 'output\.weight' is cut off"):
        list(iter_gguf(path, show_progress=False))
    path = writer.write_gguf(tmp_path / "b.gguf", METADATA, [("output.weight", (256,), 12, b"\0" * 144)])
    with pytest.raises(ValueError, match=r"tensor 'output\.weight' has type 12, which is not supported"):
        list(iter_gguf(path, show_progress=False))
    good = ("output_norm.weight", (64,), writer.F32, b"\0" * 256)
    for bad, told in (
        (("output.weight", (256,), 12, b"\0" * 144), "has type 12"),
        (("blk.0.post_ffw_norm.weight", (64,), writer.F32, b"\0" * 256), "is not known"),
    ):
        path = writer.write_gguf(tmp_path / "c.gguf", METADATA, [good, bad])
        with pytest.raises(ValueError, match=told):  # before the good one is read
            next(iter_gguf(path, show_progress=False))


def test_load_format_gguf_needs_a_gguf_file(tmp_path: Path) -> None:
    config = {**make_oracle("llama").config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ValueError, match="is no GGUF file and holds none"):
        get_model(engine_config(tmp_path, config, load_format="gguf"))


TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "h",
    "e",
    "l",
    "o",
    "Ġ",
    "1",
    "2",
    "he",
    "ll",
    "hell",
    "hello",
    "Ġhello",
]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS + [f"<unused{i}>" for i in range(264 - len(TOKENS))],
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 261,
    "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "Ġ hello"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
}


def test_conversion_writes_a_folder_that_serves_the_same(tmp_path: Path) -> None:
    oracle = make_oracle("llama", tie_word_embeddings=False)
    path = gguf_of(oracle, tmp_path / "model.gguf", TOKENIZER)
    folder = convert(path, tmp_path / "folder", show_progress=False)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "gguf_file" not in config
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert settings["chat_template"] == TOKENIZER["tokenizer.chat_template"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>hello hello12").tokens == [
        "<|im_start|>",
        "hello",
        "Ġhello",
        "1",
        "2",
    ]
    tokens = random_tokens(random.Random(0), 20)
    results = []
    for source in (path, folder):
        harness = PagedHarness(get_model(engine_config(source, config)))
        results.extend(harness.step([(harness.start(tokens), 20)]))
    # Stored as fp16: 11 bits of each weight.
    torch.testing.assert_close(results[0], results[1], atol=0.02, rtol=0)


def test_scaled_rotary_factors_are_applied_and_not_converted(tmp_path: Path) -> None:
    oracle = make_oracle("llama")
    path = gguf_of(oracle, tmp_path / "model.gguf", TOKENIZER)
    factors = ("rope_freqs.weight", (8,), writer.F32, np.linspace(1, 8, 8).astype(np.float32).tobytes())
    tensors = [factors]
    scaled = writer.write_gguf(tmp_path / "scaled.gguf", {**METADATA, **TOKENIZER}, tensors)
    model = get_model(engine_config(path, config_from_gguf(path)))
    before = model.rope.rows(3)[2].clone()
    model.load_weights(iter_gguf(scaled, show_progress=False))
    after = model.rope.rows(3)[2]
    torch.testing.assert_close(after[0], before[0])
    assert not torch.allclose(after[9:], before[9:])
    with pytest.raises(ValueError, match="has no form in config.json"):
        convert(scaled, tmp_path / "folder", show_progress=False)
