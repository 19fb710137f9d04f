"""Loading: weight files, complaints that name what is wrong, dummy and tiny checkpoints, narrowed weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.paged_harness import PagedHarness
from tests.helpers.random_schedule import random_tokens
from tests.helpers.tiny_models import engine_config
from vllm import _custom_ops as ops
from vllm.model_executor.model_loader import loader
from vllm.model_executor.model_loader.loader import get_model
from vllm.model_executor.model_loader.tiny import TINY_CONFIGS, VOCAB_SIZE, make_tiny
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.tokenizer import get_tokenizer


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    harness = PagedHarness(model)
    return harness.step([(harness.start(tokens), len(tokens))])[0]


@pytest.mark.parametrize("name", sorted(TINY_CONFIGS))
def test_tiny_checkpoints_load_and_choose_clearly(name: str, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    logits = logits_of(
        get_model(engine_config(folder, config_of(folder))), random_tokens(random.Random(0), 40)
    )
    assert logits.shape == (40, VOCAB_SIZE)
    assert logits.isfinite().all()
    assert logits.std() > 0.5
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3
    assert len(set(logits.argmax(-1).tolist())) > 10


def test_tiny_checkpoints_are_reproducible_and_differ_by_seed(tmp_path: Path) -> None:
    files = [
        make_tiny("llama", tmp_path / str(i), seed) / "model.safetensors" for i, seed in enumerate((0, 0, 1))
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes() != files[2].read_bytes()
    with pytest.raises(
        ValueError, match="tiny checkpoint 'huge' is unknown; known: gemma4, glm5_next, llama"
    ):
        make_tiny("huge", tmp_path)


def test_tiny_tokenizer_encodes_any_text_and_has_chat_roles(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    tokenizer = get_tokenizer(str(folder))
    text = "Grüße, 你好 😀\n\t<tag> 12"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("ab")) == 2
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert "<|assistant|>" in template


@pytest.mark.parametrize("name", ["glm5_next", "llama"])
def test_weights_may_be_split_over_indexed_files(name: str, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    tokens = random_tokens(random.Random(0), 12)
    expected = logits_of(get_model(engine_config(folder, config_of(folder))), tokens)
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({n: weights[n] for n in members}, folder / file)
    index = {"weight_map": {n: file for file, members in parts.items() for n in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").write_bytes(b"a second copy that must not be read")
    assert torch.equal(logits_of(get_model(engine_config(folder, config_of(folder))), tokens), expected)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index\.json names b\.safetensors, which does not exist"):
        get_model(engine_config(folder, config_of(folder)))


def rewrite(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), r"lacks 1 weights: model\.norm\.weight"),
        (lambda w: w.update({"model.extra": torch.zeros(3)}), r"weight 'model\.extra' \(3,\) has no place"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(3)}),
            r"weight 'model\.norm\.weight' has shape \(3,\), LlamaForCausalLM needs \(64,\)",
        ),
        (
            lambda w: w.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.zeros(1)}),
            "weight_scale_inv' .* has no place",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            r"weight 'model\.norm\.weight' has type torch\.int8",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
            r"weight 'model\.norm\.weight' has type torch\.float8_e4m3fn; .* needs plain weights",
        ),
    ],
)
def test_wrong_weights_are_named(change: Any, message: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        get_model(engine_config(folder, config_of(folder)))


def test_recomputable_buffers_and_a_second_tied_matrix_are_passed_over(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    rewrite(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    config = {**config_of(folder), "tie_word_embeddings": True}
    model = get_model(engine_config(folder, config))
    assert model.head.weight is model.embed.weight


def test_glm_passes_over_vision_and_prediction_layers(tmp_path: Path) -> None:
    folder = make_tiny("glm5_next", tmp_path)

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            if name.startswith("model."):
                weights[name.replace("model.", "model.language_model.", 1)] = weights.pop(name)
        weights["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(4)
        weights["model.language_model.layers.4.eh_proj.weight"] = torch.zeros(4)

    tokens = random_tokens(random.Random(0), 12)
    expected = logits_of(get_model(engine_config(folder, config_of(folder))), tokens)
    rewrite(folder, change)
    config = config_of(folder)
    composite = {"architectures": ["Glm5NextForConditionalGeneration"], "text_config": config}
    assert torch.equal(logits_of(get_model(engine_config(folder, composite)), tokens), expected)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors"):
        get_model(engine_config(folder, config_of(folder)))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no safetensors weights"):
        get_model(engine_config(folder, config_of(folder)))


@pytest.mark.parametrize("text", ["nope", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}'])
def test_a_broken_index_is_named(text: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is no index of safetensors files"):
        get_model(engine_config(folder, config_of(folder)))


def test_dummy_weights_need_no_files_and_are_reproducible(tmp_path: Path) -> None:
    config = {**TINY_CONFIGS["glm5_next"]}
    tokens = random_tokens(random.Random(0), 12)
    results = [
        logits_of(get_model(engine_config(tmp_path, config, load_format="dummy")), tokens) for _ in range(2)
    ]
    assert torch.equal(*results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("tensor_parallel_size", "tensor_parallel_size 2"),
        ("pipeline_parallel_size", "pipeline_parallel_size 2"),
    ],
)
def test_parallel_sizes_that_one_process_cannot_serve_are_refused(
    size: str, message: str, tmp_path: Path
) -> None:
    config = engine_config(tmp_path, TINY_CONFIGS["llama"], load_format="dummy")
    setattr(config.parallel_config, size, 2)
    with pytest.raises(ValueError, match=message):
        get_model(config)


def test_unknown_load_format_and_cache_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="load_format 'tensorizer' is not supported"):
        get_model(engine_config(tmp_path, TINY_CONFIGS["llama"], load_format="tensorizer"))
    config = engine_config(tmp_path, TINY_CONFIGS["llama"], load_format="dummy")
    config.cache_config.cache_dtype = "fp8"
    with pytest.raises(ValueError, match="kv_cache_dtype 'fp8' is not supported on CPU"):
        get_model(config)


def test_registry_resolves_the_first_known_architecture() -> None:
    assert ModelRegistry.resolve_model_cls(["Unknown", "LlamaForCausalLM"]) is LlamaForCausalLM
    assert ModelRegistry.resolve_model_cls("MistralForCausalLM") is LlamaForCausalLM
    with pytest.raises(
        ValueError, match=r"\['Nope'\] are not supported; supported: Gemma3ForCausalLM, Gemma3ForCond"
    ):
        ModelRegistry.resolve_model_cls(["Nope"])
    with pytest.raises(ValueError, match="target must be 'module:Class'"):
        ModelRegistry.register_model("Mine", "just_a_name")


@pytest.mark.parametrize("name", ["glm5_next", "llama"])
def test_half_size_weights_run_in_fp32_give_what_wide_ones_give(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny(name, tmp_path)
    rewrite(folder, lambda w: w.update({n: t.half() for n, t in w.items()}))
    tokens = random_tokens(random.Random(0), 12)
    narrow = get_model(engine_config(folder, config_of(folder)))
    monkeypatch.setattr(loader, "has_native_ops", lambda: False)
    wide = get_model(engine_config(folder, config_of(folder)))
    assert wide.head.weight.dtype == torch.float32
    if ops.has_native_ops():
        assert narrow.head.weight.dtype == torch.float16
    torch.testing.assert_close(logits_of(narrow, tokens), logits_of(wide, tokens), atol=1e-4, rtol=0)


def test_pages_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = get_model(engine_config(tmp_path, TINY_CONFIGS["llama"], load_format="dummy"))
    with pytest.raises(
        ValueError, match=r"missing \['model\.layers\.0\.self_attn\.attn', .* unknown \['x'\]"
    ):
        model.bind_kv_caches({"x": torch.zeros(2, 8, dtype=torch.int8)})
    names = list(model.kv_specs())
    with pytest.raises(ValueError, match="a page needs 4096 bytes, got 8"):
        model.bind_kv_caches({n: torch.zeros(2, 8, dtype=torch.int8) for n in names})
    with pytest.raises(ValueError, match="raw pages must be int8"):
        model.bind_kv_caches({n: torch.zeros(2, 8192) for n in names})


@pytest.mark.parametrize("name", ["glm5_next", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_fp32(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    tokens = random_tokens(random.Random(0), 40)
    wide = logits_of(get_model(engine_config(folder, config_of(folder))), tokens)
    model = get_model(engine_config(folder, config_of(folder), dtype=dtype))
    harness = PagedHarness(model)
    request = harness.start(tokens)
    half = torch.cat([harness.step([(request, n)])[0] for n in (25, 1, 1, 13)])
    assert half.dtype == torch.float32
    assert torch.corrcoef(torch.stack([half.flatten(), wide.flatten()]))[0, 1] > 0.98
