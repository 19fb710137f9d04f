import dataclasses
import sys

import pytest
import torch
from pydantic import ValidationError

from vllm import config as configs
from vllm.config import (
    AttentionConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoadConfig,
    LoRAConfig,
    MultiModalConfig,
    ObservabilityConfig,
    ParallelConfig,
    SpeculativeConfig,
)
from vllm.config.setting import setting_info


def test_device_names():
    assert DeviceConfig().device_type == "cpu"
    assert DeviceConfig("cuda").device_type == "cuda"
    assert DeviceConfig(torch.device("cpu")).device_type == "cpu"
    with pytest.raises(ValidationError, match="toaster"):
        DeviceConfig("toaster")


def test_parallel_sizes():
    config = ParallelConfig(
        tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=2, data_parallel_rank=1
    )
    assert (config.world_size, config.world_size_across_dp, config.data_parallel_index) == (6, 12, 1)


def test_a_replica_is_an_engine_of_its_own_that_knows_its_place():
    config = ParallelConfig(tensor_parallel_size=2, data_parallel_size=3)
    assert (config.first_local_rank, config.replicas_on_node) == (0, 3)
    config.become_replica(2)
    assert (config.data_parallel_size, config.data_parallel_rank, config.data_parallel_index) == (1, 0, 2)
    assert (config.first_local_rank, config.replicas_on_node, config.world_size) == (4, 3, 2)


@pytest.mark.parametrize(
    "bad",
    [
        {"tensor_parallel_size": 0}, {"distributed_executor_backend": "threads"}, {"data_parallel_rank": 1},
        {"decode_context_parallel_size": 2},
    ],
)  # fmt: skip
def test_bad_parallel_values(bad):
    with pytest.raises(ValidationError, match=next(iter(bad))):
        ParallelConfig(**bad)


def test_executor_may_be_a_class_or_a_path():
    assert ParallelConfig(distributed_executor_backend=int).distributed_executor_backend is int
    assert ParallelConfig(distributed_executor_backend="a.b").distributed_executor_backend == "a.b"


def test_kv_transfer_roles():
    config = KVTransferConfig(kv_connector="X", kv_role="kv_both")
    assert config.is_kv_transfer_instance
    assert config.is_kv_producer
    assert config.is_kv_consumer
    assert len(config.engine_id) == 32
    assert config.kv_buffer_device == "cpu"
    assert KVTransferConfig(kv_connector="X", kv_role="kv_producer").is_kv_consumer is False
    assert KVTransferConfig().is_kv_transfer_instance is False


def test_kv_transfer_needs_a_role_and_a_module_name():
    with pytest.raises(ValueError, match="kv_role"):
        KVTransferConfig(kv_connector="X")
    with pytest.raises(ValueError, match="kv_connector_module_path"):
        KVTransferConfig(kv_connector="X", kv_role="kv_both", kv_connector_module_path="")
    with pytest.raises(ValidationError, match="kv_load_failure_policy"):
        KVTransferConfig(kv_load_failure_policy="ignore")


def test_connectors_are_found_inside_a_multi_connector():
    inner = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "B"}]},
    }
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [{"kv_connector": "A"}, inner, 3]},
    )
    assert all(config.has_connector(name) for name in ("MultiConnector", "A", "B"))
    assert not config.has_connector("C")
    assert not KVTransferConfig().has_connector("A")
    inner["kv_connector_extra_config"]["connectors"][0]["kv_connector_extra_config"] = {
        "deep": "x",
        "off": None,
    }
    assert config.has_option("deep")
    assert not config.has_option("off")
    assert not config.has_option("shallow")
    config.kv_connector_extra_config = {"k": 1}
    assert config.has_option("k")
    assert (config.get_from_extra_config("k", 0), config.get_from_extra_config("l", 5)) == (1, 5)


def test_event_publisher_follows_the_switch():
    assert KVEventsConfig().publisher == "null"
    assert KVEventsConfig(enable_kv_cache_events=True).publisher == "zmq"
    assert KVEventsConfig(publisher="mine").publisher == "mine"
    defaults = KVEventsConfig()
    assert (defaults.endpoint, defaults.replay_endpoint, defaults.buffer_steps) == (
        "tcp://*:5557",
        None,
        10_000,
    )
    assert (defaults.hwm, defaults.max_queue_size, defaults.topic) == (100_000, 100_000, "")


def test_load_format():
    assert LoadConfig().load_format == "auto"
    with pytest.raises(ValidationError, match="tensorizer"):
        LoadConfig(load_format="tensorizer")


def test_lora_limits():
    assert LoRAConfig(max_loras=3).max_cpu_loras == 3
    with pytest.raises(ValidationError, match="max_cpu_loras=1"):
        LoRAConfig(max_loras=3, max_cpu_loras=1)


def test_speculation():
    config = SpeculativeConfig(method="eagle", num_speculative_tokens=2)
    assert config.use_eagle()
    assert config.needs_eagle_block_drop()
    assert config.use_eagle_block_drop()
    assert config.lookahead_tokens() == 0
    config.disable_eagle_block_drop = True
    assert not config.use_eagle_block_drop()
    assert SpeculativeConfig(model="m", num_speculative_tokens=1).method == "draft_model"
    assert SpeculativeConfig(num_speculative_tokens=1).method == "ngram"
    with pytest.raises(ValidationError, match="num_speculative_tokens"):
        SpeculativeConfig(method="ngram")


def test_other_records():
    assert AttentionConfig(backend="X").backend == "X"
    assert ObservabilityConfig(show_hidden_metrics_for_version="0.32").show_hidden_metrics
    assert not ObservabilityConfig().show_hidden_metrics
    assert MultiModalConfig(limit_per_prompt={"image": 2}).get_limit_per_prompt("image") == 2
    assert MultiModalConfig().get_limit_per_prompt("image") == 0


def config_classes():
    return [
        value
        for name in configs.__all__
        if isinstance(value := getattr(configs, name), type) and dataclasses.is_dataclass(value)
    ]


@pytest.mark.parametrize("config_class", config_classes(), ids=lambda cls: cls.__name__)
def test_every_setting_has_a_doc(config_class):
    module = sys.modules[config_class.__module__]
    assert module.__doc__
    for field in dataclasses.fields(config_class):
        info = setting_info(field)
        assert info is not None or not field.init, field.name
        assert info is None or info.doc.endswith((".", "…")), field.name
