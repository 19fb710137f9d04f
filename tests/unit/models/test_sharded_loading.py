"""What a tensor-parallel rank reads: its parts of safetensors, GGUF and dummy weights, and sizes that cannot be shared."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers import gguf_writer as writer
from tests.helpers.tiny_models import engine_config
from tests.helpers.tp_ranks import lone_rank
from vllm.model_executor.layers.sharding import Part
from vllm.model_executor.model_loader import dummy
from vllm.model_executor.model_loader.gguf import iter_gguf
from vllm.model_executor.model_loader.loader import check_parallel, get_model
from vllm.model_executor.model_loader.tiny import TINY_CONFIGS, make_tiny
from vllm.model_executor.model_loader.weight_utils import SafetensorsWeight, iter_safetensors
from vllm.model_executor.models.interfaces import NativeModel

SMALL_VOCABULARY = 9


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**TINY_CONFIGS[name], **changes}


def build(folder: Path, config: dict[str, Any], rank: int, size: int, load_format: str) -> NativeModel:
    with lone_rank(rank, size):
        return get_model(engine_config(folder, config, load_format=load_format, tensor_parallel_size=size))


CASES = [
    ("glm5_next", 2, {}),
    ("glm5_next", 4, {"vocab_size": SMALL_VOCABULARY}),
    ("llama", 2, {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    ("llama", 4, {"vocab_size": SMALL_VOCABULARY, "tie_word_embeddings": True}),
    ("qwen3", 2, {"vocab_size": 265}),
]


def assert_parts(alone: NativeModel, ranks: list[NativeModel]) -> None:
    """Every slot of every rank is its part of what a rank alone has; all parts together are all of it."""
    whole = alone.slots()
    covered: dict[str, Tensor] = {
        name: torch.zeros(slot.shape, dtype=torch.bool) for name, slot in whole.items()
    }
    for model in ranks:
        assert model.slots().keys() == whole.keys()
        for name, slot in model.slots().items():
            assert slot.shape == whole[name].shape, name
            assert torch.equal(slot.tensor, whole[name].tensor[slot.part]), name
            covered[name][slot.part] = True
    assert all(bool(cover.all()) for cover in covered.values())


@pytest.mark.parametrize(("name", "size", "changes"), CASES)
def test_dummy_weights_of_ranks_are_parts_of_those_of_one(
    name: str, size: int, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(name, **changes)
    alone = build(tmp_path, config, 0, 1, "dummy")
    # Matrices of these sizes are drawn in many pieces then, which end within rows.
    monkeypatch.setattr(dummy, "_DRAWN", 16 * 13)
    assert_parts(alone, [build(tmp_path, config, rank, size, "dummy") for rank in range(size)])


@pytest.mark.parametrize(("name", "size", "changes"), CASES)
def test_ranks_read_their_parts_of_a_checkpoint_and_no_more(
    name: str, size: int, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(name, **changes)
    make_tiny(name, tmp_path, overrides=changes)
    alone = build(tmp_path, config, 0, 1, "auto")
    read: dict[str, list[int]] = defaultdict(list)
    original = SafetensorsWeight.__getitem__

    def recorded(self: SafetensorsWeight, part: Part) -> Tensor:
        tensor = original(self, part)
        read[self._name].append(tensor.numel())
        return tensor

    monkeypatch.setattr(SafetensorsWeight, "__getitem__", recorded)
    ranks = [build(tmp_path, config, rank, size, "auto") for rank in range(size)]
    assert_parts(alone, ranks)
    for weight, counts in read.items():
        assert counts == [model.slots()[weight].tensor.numel() for model in ranks], weight
    matrices = [
        name for name in read if name.endswith(("o_proj.weight", "up_proj.weight", "embed_tokens.weight"))
    ]
    assert matrices
    assert all(max(read[name]) < alone.slots()[name].tensor.numel() for name in matrices)


def test_a_rank_alone_reads_tensors_as_they_lie_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bool)}, file)
    sizes = {}
    for name, weight in iter_safetensors([file], show_progress=False):
        sizes[name] = weight.nbytes
        if name == "a":
            assert torch.equal(weight[()], torch.arange(12.0).view(3, 4))
            assert torch.equal(weight[slice(1, 3), slice(1, 2)], torch.tensor([[5.0], [9.0]]))
            assert weight[slice(3, 3), slice(0, 4)].shape == (0, 4)
    assert sizes == {"a": 48, "b": 5}


# --- GGUF ------------------------------------------------------------------------------------------------------------

BLOCKS = {
    writer.F32: (1, 4),
    writer.F16: (1, 2),
    writer.Q4_0: (32, 18),
    writer.Q8_0: (32, 34),
    writer.Q6_K: (256, 210),
}


def random_blocks(kind: int, count: int, rng: np.random.Generator) -> bytes:
    """Blocks whose halves and floats are small numbers."""
    values, size = BLOCKS[kind]
    if kind == writer.F32:
        return rng.standard_normal(count).astype(np.float32).tobytes()
    if kind == writer.F16:
        return rng.standard_normal(count).astype(np.float16).tobytes()
    blocks = rng.integers(0, 256, (count // values, size), dtype=np.uint8)
    at = 208 if kind == writer.Q6_K else 0
    blocks[:, at : at + 2] = np.full(1, 0.25, np.float16).view(np.uint8)
    return blocks.tobytes()


def write_file(folder: Path, tensors: dict[str, tuple[tuple[int, ...], int]]) -> Path:
    metadata = {
        "general.architecture": "llama",
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
    }
    rng = np.random.default_rng(0)
    records = [
        (name, shape, kind, random_blocks(kind, math.prod(shape), rng))
        for name, (shape, kind) in tensors.items()
    ]
    return writer.write_gguf(folder / "m.gguf", metadata, records)


def halves(shape: tuple[int, ...], axis: int) -> list[Part]:
    middle = shape[axis] // 2
    both = []
    for low, high in ((0, middle), (middle, shape[axis])):
        part = [slice(0, n) for n in shape]
        part[axis] = slice(low, high)
        both.append(tuple(part))
    return both


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_parts_of_gguf_tensors_are_parts_of_the_whole(kind: int, tmp_path: Path) -> None:
    width = 3 * BLOCKS[kind][0] * (1 if BLOCKS[kind][0] > 1 else 32)  # halves end within a block
    shapes = {
        "blk.0.attn_output.weight": ((8, width), kind),
        "blk.0.attn_q.weight": ((16, width), kind),
        "blk.0.attn_k.weight": ((8, width), kind),
        "blk.0.ffn_down.bias": ((width,), kind),
        "blk.0.attn_q.bias": ((16,), writer.F32),
    }
    for _, weight in iter_gguf(write_file(tmp_path, shapes), show_progress=False):
        whole = weight[()]
        for axis in range(whole.dim()):
            for part in halves(weight.shape, axis):
                assert torch.equal(weight[part], whole[part])


def test_parts_that_no_rank_can_have_are_refused(tmp_path: Path) -> None:
    shapes = {
        "blk.0.attn_q.weight": ((16, 32), writer.Q8_0),
        "blk.0.ffn_up.weight": ((32, 48), writer.Q8_0),
    }
    weights = dict(iter_gguf(write_file(tmp_path, shapes), show_progress=False))
    with pytest.raises(ValueError, match=r"'blk\.0\.attn_q\.weight': rows 0 to 6 are no whole heads of 4"):
        weights["model.layers.0.self_attn.q_proj.weight"][slice(0, 6), slice(0, 32)]
    odd = weights["model.layers.0.mlp.up_proj.weight"]
    assert odd[()].shape == (32, 48)
    with pytest.raises(
        ValueError, match=r"'blk\.0\.ffn_up\.weight' \(32, 48\) cannot be shared by ranks: .* Q8_0"
    ):
        odd[slice(0, 16), slice(0, 48)]


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "changes", "message"),
    [
        ("llama", 3, {}, "tensor_parallel_size 3 does not divide num_attention_heads 4"),
        (
            "llama",
            4,
            {"intermediate_size": 90},
            "tensor_parallel_size 4 does not divide intermediate_size 90",
        ),
        (
            "llama",
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            "tensor_parallel_size 2 does not divide num_key_value_heads 3",
        ),
        (
            "llama",
            4,
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            "tensor_parallel_size 4 does not divide num_key_value_heads 6",
        ),
        ("glm5_next", 8, {}, "tensor_parallel_size 8 does not divide num_attention_heads 4"),
        (
            "glm5_next",
            4,
            {"linear_num_heads": 6},
            "tensor_parallel_size 4 does not divide linear_num_heads 6",
        ),
        (
            "glm5_next",
            4,
            {"intermediate_size": 90},
            "tensor_parallel_size 4 does not divide intermediate_size 90",
        ),
        (
            "glm5_next",
            4,
            {"moe_intermediate_size": 30},
            "tensor_parallel_size 4 does not divide moe_intermediate_size 30",
        ),
    ],
)
def test_sizes_that_ranks_cannot_share_are_named(
    name: str, size: int, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = engine_config(
        tmp_path, config_of(name, **changes), load_format="dummy", tensor_parallel_size=size
    )
    with pytest.raises(ValueError, match=message):
        check_parallel(config)
    with lone_rank(0, size), pytest.raises(ValueError, match=message):
        get_model(config)


def test_models_run_in_no_stages_and_only_in_a_group_of_their_size(tmp_path: Path) -> None:
    config = engine_config(tmp_path, config_of("llama"), load_format="dummy", tensor_parallel_size=2)
    check_parallel(config)
    with (
        lone_rank(0, 4),
        pytest.raises(ValueError, match="size 2, but this process belongs to a group of 4 ranks"),
    ):
        get_model(config)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(
        ValueError, match="pipeline_parallel_size 2 is not supported: no model runs in stages"
    ):
        check_parallel(config)


def test_a_checkpoint_of_another_shape_is_named_with_the_shape_of_all_ranks(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    config = config_of("llama", intermediate_size=128)
    with pytest.raises(
        ValueError, match=r"down_proj\.weight' has shape \(64, 96\), LlamaForCausalLM needs \(64, 128\)"
    ):
        build(tmp_path, config, 1, 2, "auto")
