"""Settings that a configuration object may hold but no engine here can honour. Checked when an engine starts. Layer: L1.

A value other than the default is refused by name, or answered with one warning where leaving it out changes no result.
"""

from __future__ import annotations

from typing import Final

from vllm import platforms
from vllm.config.kv_events import check_port_ranges
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.vllm import VllmConfig
from vllm.logger import init_logger

logger = init_logger(__name__)

SUPPORTED_QUANTIZATION: Final = ("gguf",)
DEFAULT_KV_PORT: Final = 14579


def refuse_unserved(config: VllmConfig) -> None:
    """Raise ValueError naming the first setting that cannot be honoured."""
    for name, part in (
        ("ec_transfer_config", config.ec_transfer_config),
        ("diffusion_config", config.diffusion_config),
        ("reasoning_config", config.reasoning_config),
    ):
        if part is not None:
            raise ValueError(f"{name}={part!r} is not supported: the feature is not part of this build")
    cache = config.cache_config
    for name, value in (
        ("mamba_cache_dtype", cache.mamba_cache_dtype),
        ("mamba_ssm_cache_dtype", cache.mamba_ssm_cache_dtype),
    ):
        if value != "auto":
            raise ValueError(
                f"{name}={value!r} is not supported: every model knows the precision of its states"
            )
    if not cache.swa_bounded_replay:
        logger.warning_once("swa_bounded_replay=False has no effect: no model here replays windows")
    _check_quantization(config)
    refuse_replicas(config)
    if config.kv_transfer_config is not None:
        _check_transfer(config.kv_transfer_config)


def refuse_replicas(config: VllmConfig) -> None:
    """Raise ValueError for engines that this machine has no room for, or whose KV events would meet at one address."""
    parallel, events = config.parallel_config, config.kv_events_config
    if parallel.data_parallel_size > 1:
        platforms.current_platform.check_replicas(parallel.data_parallel_size, parallel.world_size)
    if events is not None and events.enable_kv_cache_events and events.publisher == "zmq":
        last_rank = max(parallel.data_parallel_rank, parallel.data_parallel_size - 1)
        check_port_ranges(events.endpoint, events.replay_endpoint, last_rank)


def _check_quantization(config: VllmConfig) -> None:
    """Quantised checkpoints other than GGUF would be read as if they were plain numbers."""
    if config.model_config is None:
        return
    stated = config.model_config.hf_config.first("quantization_config", "compression_config")
    method = config.model_config.quantization or (stated.get("quant_method") if stated is not None else None)
    if method is not None and method not in SUPPORTED_QUANTIZATION:
        raise ValueError(
            f"quantization={method!r} is not supported; supported: {', '.join(SUPPORTED_QUANTIZATION)} and plain weights"
        )


def _check_transfer(transfer: KVTransferConfig) -> None:
    if transfer.enable_permute_local_kv:
        raise ValueError("enable_permute_local_kv=True is not supported: no connector here permutes")
    if transfer.kv_port != DEFAULT_KV_PORT:
        logger.warning_once("kv_port=%d has no effect: no built-in connector listens", transfer.kv_port)
