"""Gemma 4 in a real engine: layers that read other layers' caches answer like the oracle whatever tier a prefix is on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_configs import engine_args, offload_settings, prompt_of
from tests.helpers.tiny_models import make_oracle, oracle_logits, save_oracle
from tests.integration.engine.test_several_ranks import TOLERANCE, answer, difference, run, settle, values
from tests.integration.engine.test_several_ranks import start as start_ranks
from vllm.model_executor.model_loader.tiny import make_tiny
from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.outputs import RequestOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.cpu_worker import CPUWorker

BLOCK = 16
LENGTHS = (5, 16, 17, 40, 100, 203)
PROMPTS = [prompt_of(length, length) for length in LENGTHS]
HITS = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
OWNERS = {f"model.layers.{i}.self_attn.attn" for i in range(4)}


def start(folder: Path, **settings: Any) -> LLMEngine:
    fields = {"model": str(folder), "max_num_batched_tokens": 48, **settings}
    return LLMEngine.from_engine_args(engine_args(**fields), enable_multiprocessing=False)


def core_of(engine: LLMEngine) -> EngineCore:
    core: EngineCore = engine.engine_core.engine_core  # type: ignore[attr-defined]
    return core


class Known:
    """A checkpoint with what the library's model says of each prompt."""

    def __init__(self, folder: Path) -> None:
        oracle = make_oracle("gemma4_text")
        self.folder = save_oracle(oracle, folder)
        self.expected = []
        for prompt in PROMPTS:
            tokens = list(prompt)
            for _ in range(12):
                tokens.append(int(oracle_logits(oracle, tokens)[-1].argmax()))
            self.expected.append(tokens[len(prompt) :])


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known(tmp_path_factory.mktemp("gemma4"))


# One at a time: a process has one connector.
@pytest.fixture
def engine(known: Known) -> Iterator[LLMEngine]:
    engine = start(known.folder, **offload_settings())
    yield engine
    engine.shutdown()


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(answer(output).token_ids) for output in outputs]


def test_every_tier_gives_the_tokens_of_the_oracle(engine: LLMEngine, known: Known) -> None:
    cold = [run(engine, [prompt])[0] for prompt in PROMPTS]
    device = [run(engine, [prompt])[0] for prompt in PROMPTS]
    settle(engine)
    assert engine.reset_prefix_cache()
    host = [run(engine, [prompt])[0] for prompt in PROMPTS]
    assert [output.num_cached_tokens for output in cold] == [0] * len(PROMPTS)
    assert [output.num_cached_tokens for output in device] == HITS
    assert [output.num_cached_tokens for output in host] == HITS
    for outputs in (cold, device, host):
        assert tokens_of(outputs) == known.expected
        assert max(map(difference, outputs, cold)) <= TOLERANCE  # one token alone runs on another kernel
    assert list(map(values, device)) == list(map(values, host))


def test_prompts_beside_others_and_cut_in_chunks_give_the_same_tokens(
    engine: LLMEngine, known: Known
) -> None:
    assert tokens_of(run(engine, PROMPTS)) == known.expected
    settle(engine)
    assert engine.reset_prefix_cache()
    assert tokens_of(run(engine, PROMPTS)) == known.expected


def test_only_owners_are_planned_allocated_and_copied(engine: LLMEngine) -> None:
    core = core_of(engine)
    config = core.kv_cache_config
    assert {name for group in config.kv_cache_groups for name in group.layer_names} == OWNERS
    # Heads 2 × (key + value) × fp32: two pages of 16 channels in the windows' group or one of 32 fill a block.
    assert config.kv_cache_tensors[0].size == config.num_blocks * BLOCK * 2 * (32 + 32) * 4
    worker = core.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    model = worker.get_model()
    assert model.kv_sharing() == {
        f"model.layers.{sharer}.self_attn.attn": f"model.layers.{owner}.self_attn.attn"
        for sharer, owner in ((4, 3), (5, 2), (6, 2))
    }
    assert worker.model_runner.pages.raw.keys() == OWNERS
    for sharer, owner in model.kv_sharing().items():
        pages = (model.cache_layers[name].pages for name in (sharer, owner))
        assert len({(view.data_ptr(), view.stride(), view.shape) for view in pages}) == 1
    pools = engine.get_kv_cache_report()["pools"]
    assert {pool["tier"]: pool["block_bytes"] for pool in pools} == dict.fromkeys(
        ("device", "host"), BLOCK * 2 * 64 * 4
    )


def test_the_report_counts_the_layers_that_only_read(engine: LLMEngine) -> None:
    groups = engine.get_kv_cache_report()["groups"]
    layers = {group["kind"]: [0, 0] for group in groups}
    for group in groups:
        layers[group["kind"]][0] += group["num_layers"]
        layers[group["kind"]][1] += group["num_sharing_layers"]
    assert layers == {"sliding_window": [3, 1], "full_attention": [1, 2]}


@pytest.mark.parametrize(
    "settings",
    [
        {"disable_hybrid_kv_cache_manager": True},
        {"async_scheduling": False, "max_num_batched_tokens": 16},
        {"block_size": 4, "num_gpu_blocks_override": 150},
        {"kv_cache_dtype": "float32", "enable_prefix_caching": False},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_plans_and_cuts_give_the_same_tokens(settings: dict[str, Any], known: Known) -> None:
    engine = start(known.folder, **settings)
    try:
        assert tokens_of(run(engine, PROMPTS)) == known.expected
        assert tokens_of(run(engine, PROMPTS[::-1])) == known.expected[::-1]
    finally:
        engine.shutdown()


def test_layers_in_ranges_of_their_own_give_the_same_tokens(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPUWorker, "get_supported_kv_cache_layouts", lambda _: [KVCacheLayout.LBHNC])
    engine = start(known.folder, **offload_settings())
    try:
        assert core_of(engine).vllm_config.cache_config.kv_cache_layout == "LBHNC"
        cold = [run(engine, [prompt])[0] for prompt in PROMPTS]
        settle(engine)
        assert engine.reset_prefix_cache()
        host = [run(engine, [prompt])[0] for prompt in PROMPTS]
        assert [output.num_cached_tokens for output in host if output.num_cached_tokens]
        assert tokens_of(cold) == tokens_of(host) == known.expected
    finally:
        engine.shutdown()


def test_blocks_behind_the_window_serve_others_while_sharing_layers_read_on(known: Known) -> None:
    """Whole prompts kept for the window groups too would take twice as many blocks as there are."""
    engine = start(
        known.folder, block_size=4, num_gpu_blocks_override=110, enable_prefix_caching=False, max_num_seqs=1
    )
    try:
        prompt, expected = PROMPTS[-1], known.expected[-1]
        core = core_of(engine)
        groups = len(core.kv_cache_config.kv_cache_groups)
        assert groups * -(-len(prompt) // 4) > 110
        assert tokens_of(run(engine, [prompt])) == [expected]
        assert core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 109  # type: ignore[attr-defined]
    finally:
        engine.shutdown()


class SharesAnother(Gemma4ForCausalLM):
    """Its last layer names a layer of the other kind."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.shared_caches["model.layers.6.self_attn.attn"] = "model.layers.3.self_attn.attn"


def test_a_model_that_names_a_bad_target_does_not_start(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda _: SharesAnother)
    with pytest.raises(
        ValueError, match=r"layers\.6.*cannot share the KV cache of .*layers\.3.*: it reads Full"
    ):
        start(known.folder)


def test_ranks_share_alike_and_store_each_owner_once(tmp_path: Path) -> None:
    folder = make_tiny("gemma4", tmp_path)
    alone = start(folder, max_model_len=512)
    reference = run(alone, PROMPTS[2:5])
    alone.shutdown()
    ranks = start_ranks(model=str(folder), **offload_settings())
    try:
        cold = [run(ranks, [prompt])[0] for prompt in PROMPTS[2:5]]
        settle(ranks)
        assert ranks.reset_prefix_cache()
        host = [run(ranks, [prompt])[0] for prompt in PROMPTS[2:5]]
    finally:
        ranks.shutdown()
    assert [output.num_cached_tokens for output in host] == HITS[2:5]
    for outputs in (cold, host):
        assert max(map(difference, outputs, reference)) <= TOLERANCE
