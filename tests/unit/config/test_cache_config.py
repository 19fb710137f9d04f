import pytest
import torch
from pydantic import ValidationError

from vllm.config import (
    KV_CACHE_DTYPES,
    CacheConfig,
    get_kv_cache_dtype_handler,
    is_known_kv_cache_dtype,
    register_kv_cache_dtype,
)
from vllm.v1.kv_cache_layout import KVCacheLayout


def test_defaults():
    config = CacheConfig()
    assert (config.block_size, config.gpu_memory_utilization, config.enable_prefix_caching) == (
        None,
        0.92,
        True,
    )
    assert (
        config.prefix_cache_retention_interval,
        config.swa_bounded_replay,
        CacheConfig.DEFAULT_BLOCK_SIZE,
    ) == (0, True, 16)


@pytest.mark.parametrize(
    "bad",
    [
        {"block_size": 0}, {"gpu_memory_utilization": 0}, {"gpu_memory_utilization": 1.5}, {"cache_dtype": "int3"},
        {"prefix_caching_hash_algo": "md5"}, {"prefix_cache_retention_interval": -1}, {"mamba_cache_mode": "all"},
        {"kv_offloading_size": 0}, {"kv_offloading_size": float("inf")}, {"kv_offloading_backend": "x"}, {"num_gpu_blocks_override": 0},
        {"mamba_block_size": 16, "enable_prefix_caching": False},
    ],
)  # fmt: skip
def test_bad_values_are_refused_naming_the_field(bad):
    with pytest.raises(ValidationError) as error:
        CacheConfig(**bad)
    assert next(iter(bad)) in str(error.value)


def test_unknown_field_is_a_type_error_with_a_hint():
    with pytest.raises(TypeError, match="did you mean 'block_size'"):
        CacheConfig(blocksize=16)
    with pytest.raises(TypeError, match="positional"):
        CacheConfig(*range(40))


def test_fields_filled_in_later_are_assignable_but_no_arguments():
    config = CacheConfig()
    config.num_gpu_blocks = 7
    config.simple_cpu_offload_num_blocks = 3
    assert config.metrics_info()["num_gpu_blocks"] == "7"
    with pytest.raises(TypeError):
        CacheConfig(num_gpu_blocks=7)


def test_layout_is_known_after_the_workers_chose():
    config = CacheConfig()
    with pytest.raises(ValueError, match="not resolved"):
        config.get_resolved_kv_cache_layout()
    config.kv_cache_layout = "BLHNC"
    assert config.get_resolved_kv_cache_layout() is KVCacheLayout.BLHNC


def test_built_in_dtypes():
    assert get_kv_cache_dtype_handler("fp8").torch_dtype() is torch.float8_e4m3fn
    assert (
        get_kv_cache_dtype_handler("fp8").quant_mode(),
        get_kv_cache_dtype_handler("bfloat16").quant_mode(),
    ) == (1, 0)
    assert get_kv_cache_dtype_handler("auto") is None
    assert "nvfp4" in KV_CACHE_DTYPES
    assert CacheConfig(cache_dtype="nvfp4").cache_dtype == "nvfp4"


def test_a_registered_dtype_is_accepted_from_then_on():
    assert not is_known_kv_cache_dtype("test_dtype_q3")
    with pytest.raises(ValidationError):
        CacheConfig(cache_dtype="test_dtype_q3")

    @register_kv_cache_dtype("test_dtype_q3")
    class Handler:
        name = ""

        def torch_dtype(self):
            return torch.uint8

        def quant_mode(self):
            return 13

    assert CacheConfig(cache_dtype="test_dtype_q3").cache_dtype == "test_dtype_q3"
    handler = get_kv_cache_dtype_handler("test_dtype_q3")
    assert isinstance(handler, Handler)
    assert handler.name == "test_dtype_q3"
    with pytest.raises(ValueError, match="already registered"):
        register_kv_cache_dtype("test_dtype_q3")
    with pytest.raises(ValueError, match="already registered"):
        register_kv_cache_dtype("auto")
