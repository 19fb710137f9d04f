"""Configuration as outside code builds and changes it: by hand, partial, without a weight file or an accelerator."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pydantic
import pytest
import torch

from vllm import config as configs
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    get_current_vllm_config,
    set_current_vllm_config,
)
from vllm.config.cache import (
    KV_CACHE_DTYPES,
    get_kv_cache_dtype_handler,
    is_known_kv_cache_dtype,
    register_kv_cache_dtype,
)
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

CONFIG_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which only the config exists."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON))
    return folder


@pytest.fixture
def model(model_folder: Path) -> ModelConfig:
    return ModelConfig(str(model_folder), skip_tokenizer_init=True, dtype="float32")


def test_a_model_config_needs_only_the_config_file(model: ModelConfig) -> None:
    parallel = ParallelConfig()
    assert model.dtype is torch.float32
    assert (model.max_model_len, model.get_vocab_size(), model.get_hidden_size()) == (512, 320, 64)
    assert (model.get_total_num_kv_heads(), model.get_num_kv_heads(parallel), model.get_head_size()) == (
        2,
        2,
        16,
    )
    assert (model.get_total_num_hidden_layers(), model.get_num_layers(parallel)) == (3, 3)
    assert model.architectures == ["LlamaForCausalLM"]
    assert model.hf_config.hidden_size == model.hf_text_config.hidden_size == 64
    assert model.get_sliding_window() is None
    for name in ("is_encoder_decoder", "is_hybrid", "is_attention_free", "use_mla", "is_multimodal_model"):
        assert getattr(model, name) is False, name
    assert model.multimodal_config is None
    assert not model.supports_kv_cache_grouping


def test_scheduler_config_needs_the_two_init_values() -> None:
    with pytest.raises((TypeError, pydantic.ValidationError)):
        SchedulerConfig()  # type: ignore[call-arg]
    made = SchedulerConfig(
        max_model_len=64, is_encoder_decoder=False, max_num_batched_tokens=64, max_num_seqs=4
    )
    assert (made.max_num_encoder_input_tokens, made.encoder_cache_size) == (64, 64)
    default = SchedulerConfig.default_factory()
    assert (default.max_num_batched_tokens, default.max_num_seqs) == (2048, 128)
    assert SchedulerConfig.default_factory(max_num_seqs=3, max_model_len=100).max_num_seqs == 3


def test_scheduler_classes() -> None:
    made = SchedulerConfig.default_factory()
    made.async_scheduling = True
    assert made.get_scheduler_cls() is AsyncScheduler
    made.async_scheduling = False
    assert made.get_scheduler_cls() is Scheduler
    made.scheduler_cls = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
    assert made.get_scheduler_cls() is AsyncScheduler
    made.scheduler_cls = Scheduler
    assert made.get_scheduler_cls() is Scheduler


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: CacheConfig(block_size=0), "block_size"),
        (lambda: CacheConfig(cache_dtype="no_such"), "no_such"),
        (lambda: CacheConfig(mamba_cache_mode="all"), "mamba_cache_mode"),
        (lambda: CacheConfig(prefix_caching_hash_algo="md5"), "prefix_caching_hash_algo"),
        (lambda: CacheConfig(mamba_block_size=16, enable_prefix_caching=False), "mamba_block_size"),
        (lambda: SchedulerConfig.default_factory(watermark=1.0), "watermark"),
        (lambda: SchedulerConfig.default_factory(policy="lifo"), "policy"),
        (lambda: SchedulerConfig.default_factory(enable_chunked_prefill=False), "max_model_len"),
        (lambda: SchedulerConfig.default_factory(max_num_batched_tokens=8, max_num_seqs=9), "max_num_seqs"),
        (lambda: KVTransferConfig(kv_connector="X"), "kv_role"),
        (lambda: KVTransferConfig(kv_connector_module_path=""), "kv_connector_module_path"),
    ],
)
def test_bad_values_raise_validation_errors(make: object, field: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=field):
        make()  # type: ignore[operator]
    assert issubclass(pydantic.ValidationError, ValueError)


def test_misuse_raises_type_errors() -> None:
    with pytest.raises(TypeError, match="no_such"):
        CacheConfig(no_such=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        VllmConfig(no_such=1)  # type: ignore[call-arg]


def test_configs_stay_assignable_and_are_read_late() -> None:
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="A", kv_role="kv_both"))
    config.cache_config.num_gpu_blocks = 7
    config.cache_config.simple_cpu_offload_num_blocks = 3
    config.cache_config.kv_cache_layout = "BLHNC"
    assert config.cache_config.get_resolved_kv_cache_layout() is KVCacheLayout.BLHNC
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_connector_extra_config = {"k": 1}
    assert config.kv_transfer_config.get_from_extra_config("k", 0) == 1
    config.scheduler_config.max_num_batched_tokens = 10
    config.scheduler_config.async_scheduling = False
    assert config.max_in_flight_tokens == 10
    config.scheduler_config.async_scheduling = True
    assert (config.max_concurrent_batches, config.max_in_flight_tokens) == (2, 20)
    config.parallel_config.decode_context_parallel_size = 2
    config.parallel_config.data_parallel_rank = 3


def test_kv_cache_configs_stay_assignable_and_derived_values_follow() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    config = KVCacheConfig(4, [], [KVCacheGroupSpec(["a"], spec)])
    config.kv_cache_groups[0].layer_names = ["x", "y"]
    assert config.transfer_group_index_by_layer == {"x": 0, "y": 0}
    config.kv_cache_groups = [
        *config.kv_cache_groups,
        KVCacheGroupSpec(["z"], spec, enable_kv_transfer=False),
    ]
    config.num_blocks = 9
    assert tuple(config.transfer_group_ids) == (0,)
    config.kv_cache_groups[1].enable_kv_transfer = True
    assert tuple(config.transfer_group_ids) == (0, 1)
    assert copy.deepcopy(config).num_blocks == 9
    with pytest.raises(AttributeError):
        spec.block_size = 3  # type: ignore[misc]
    assert hash(spec) == hash(copy.deepcopy(spec))


def test_the_whole_config_resolves_what_was_left_open(model: ModelConfig) -> None:
    config = VllmConfig(model_config=model)
    assert config.cache_config.block_size == 16
    assert config.scheduler_config.async_scheduling is True
    assert config.use_v2_model_runner is True
    assert (config.num_speculative_tokens, config.num_lookahead_tokens) == (0, 0)
    assert (config.num_prefill_lookahead_tokens, config.num_hash_lookahead_tokens) == (0, 0)
    assert config.is_mm_encoder_only is False
    assert VllmConfig().model_config is None


def test_partial_records_are_accepted() -> None:
    model = SimpleNamespace(max_model_len=8, is_hybrid=False, is_attention_free=False, runner_type="generate")
    assert VllmConfig(model_config=model).model_config is model  # type: ignore[arg-type]


def test_partial_records_are_enough_for_sizes_and_groups() -> None:
    cache = CacheConfig(block_size=16)
    record = SimpleNamespace(cache_config=cache, parallel_config=ParallelConfig(), kv_transfer_config=None)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    config = KVCacheConfig(4, [], [KVCacheGroupSpec(["a"], spec)])
    assert resolve_kv_cache_block_sizes(config, record) == (16, 16)
    record = SimpleNamespace(
        cache_config=cache, scheduler_config=SchedulerConfig.default_factory(), speculative_config=None
    )
    assert [group.layer_names for group in get_kv_cache_groups(record, {"a": spec, "b": spec})] == [
        ["a", "b"]
    ]


def test_draft_layers_compare_like_others() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    draft = replace(spec, is_draft=True)
    assert draft == spec
    assert hash(draft) == hash(spec)
    assert FullAttentionSpec.merge([spec, draft]) == spec
    assert replace(spec, block_size=32).block_size == 32
    assert replace(spec, block_size=32) != spec


def test_devices_are_detected_without_an_accelerator() -> None:
    assert DeviceConfig("cpu").device_type == "cpu"
    assert DeviceConfig().device_type == "cpu"
    assert VllmConfig().device_config.device_type == "cpu"


def test_the_current_config_is_a_context() -> None:
    config = VllmConfig()
    with set_current_vllm_config(config):
        assert get_current_vllm_config() is config


def test_connector_configs() -> None:
    plain = KVTransferConfig()
    roles = (plain.is_kv_transfer_instance, plain.is_kv_producer, plain.is_kv_consumer)
    assert roles == (False, False, False)
    assert KVTransferConfig().engine_id != plain.engine_id
    both = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both")
    assert both.is_kv_transfer_instance
    assert both.is_kv_producer
    assert both.is_kv_consumer
    both.kv_connector_extra_config = {"connectors": [{"kv_connector": "A", "kv_role": "kv_both"}]}
    assert both.has_connector("A")
    assert both.has_connector("MultiConnector")
    assert not both.has_connector("B")


def test_event_configs() -> None:
    assert KVEventsConfig().publisher == "null"
    assert KVEventsConfig(enable_kv_cache_events=True).publisher == "zmq"


def test_the_offloading_flag_makes_a_connector() -> None:
    config = VllmConfig(cache_config=CacheConfig(kv_offloading_size=0.5))
    transfer = config.kv_transfer_config
    assert transfer is not None
    assert transfer.kv_role == "kv_both"
    assert transfer.kv_connector_extra_config["cpu_bytes_to_use"] == 2**29


def test_speculation_as_the_scheduler_sees_it() -> None:
    eagle = SpeculativeConfig(model="m", method="eagle", num_speculative_tokens=2)
    assert eagle.use_eagle()
    assert eagle.needs_eagle_block_drop()
    assert eagle.use_eagle_block_drop()
    kept = SpeculativeConfig(method="eagle", num_speculative_tokens=2, disable_eagle_block_drop=True)
    assert not kept.use_eagle_block_drop()
    config = VllmConfig(speculative_config=eagle)
    assert (config.num_speculative_tokens, config.num_lookahead_tokens) == (2, 2)


@pytest.fixture
def registered_dtype() -> Iterator[str]:
    name = "public_api_test_dtype"

    @register_kv_cache_dtype(name)
    class Handler:
        name = ""

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> int:
            return 12

    yield name
    configs.cache._registered.pop(name)


def test_cache_dtypes_can_be_registered(registered_dtype: str) -> None:
    assert "auto" in KV_CACHE_DTYPES
    assert is_known_kv_cache_dtype(registered_dtype)
    assert CacheConfig(cache_dtype=registered_dtype).cache_dtype == registered_dtype
    handler = get_kv_cache_dtype_handler(registered_dtype)
    assert handler is not None
    assert (handler.torch_dtype(), handler.quant_mode()) == (torch.uint8, 12)
    assert get_kv_cache_dtype_handler("auto") is None


def test_engine_args_make_a_config(model_folder: Path) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", str(model_folder), "--max-num-seqs", "5"]))
    assert args.max_num_seqs == 5
    assert EngineArgs(model=str(model_folder)).mamba_cache_mode is None
    config = AsyncEngineArgs(
        model=str(model_folder),
        skip_tokenizer_init=True,
        max_num_seqs=5,
        kv_transfer_config={"kv_port": 14579},
    ).create_engine_config()
    assert isinstance(config, VllmConfig)
    assert config.scheduler_config.max_num_seqs == 5
    assert isinstance(config.kv_transfer_config, KVTransferConfig)
