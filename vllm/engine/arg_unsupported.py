"""Settings of the public interface whose feature this engine does not have. Layer: L1.

They are accepted so that a command line written for the interface parses. A value other than the default is then either
refused with the reason, or, where leaving it out changes no result, answered with one warning. Never silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm.config.setting import PLAIN, Flag
from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One such setting. `kind` as in `arg_table.ArgSpec`; `refuse` False means that a warning is enough."""

    group: str
    kind: str
    default: Any  # the interface's default: any JSON value
    reason: str
    refuse: bool = True
    flag: Flag = PLAIN
    accepted: tuple[Any, ...] = ()


def _warn(group: str, kind: str, default: Any, reason: str, flag: Flag = PLAIN) -> Unsupported:
    return Unsupported(group, kind, default, reason, refuse=False, flag=flag)


_MEDIA: Final = "this engine serves text only"
_ONE_NODE: Final = (
    "this build replicates an engine on one node and behind one server only (data_parallel_size)"
)
_NO_EXPERT_PARALLEL: Final = "experts are not spread over ranks by this build"
_NO_LORA: Final = "LoRA adapters are not part of this build"
_GRAPHS: Final = "graph capture is chosen by the worker itself"
_COMPILE: Final = "models are not compiled: there is nothing to tune"

UNSUPPORTED: Final[Mapping[str, Unsupported]] = {
    # ModelConfig
    "model_impl": Unsupported(
        "ModelConfig", "text", "auto", "only the built-in model implementations exist", accepted=("vllm",)
    ),
    "config_format": Unsupported(
        "ModelConfig", "text", "auto", "only config.json and GGUF are read", accepted=("hf",)
    ),
    "code_revision": _warn("ModelConfig", "text", None, "code from model repositories is never run"),
    "enable_prompt_embeds": Unsupported("ModelConfig", "bool", False, "prompts are text or token ids"),
    "enable_sleep_mode": _warn(
        "ModelConfig",
        "bool",
        False,
        "sleeping needs no preparation: a worker on the CPU gives the memory of its KV cache back, others cannot sleep",
    ),
    "allowed_local_media_path": _warn("ModelConfig", "text", "", _MEDIA),
    "allowed_media_domains": _warn("ModelConfig", "text*", None, _MEDIA),
    "renderer_num_workers": _warn("ModelConfig", "int", 1, "prompts are rendered by one thread"),
    "pooler_config": Unsupported("ModelConfig", "json", None, "pooling models are not part of this build"),
    # LoadConfig
    "model_loader_extra_config": Unsupported("LoadConfig", "json", {}, "no loader here takes options"),
    "ignore_patterns": _warn(
        "LoadConfig", "text*", ["original/**/*"], "only the files that are needed are ever fetched"
    ),
    "safetensors_load_strategy": _warn("LoadConfig", "text", None, "weight files are memory-mapped"),
    # ParallelConfig
    "data_parallel_size_local": Unsupported("ParallelConfig", "int", None, _ONE_NODE, flag=Flag(short="dpl")),
    "data_parallel_start_rank": Unsupported("ParallelConfig", "int", None, _ONE_NODE, flag=Flag(short="dpr")),
    "data_parallel_address": Unsupported("ParallelConfig", "text", None, _ONE_NODE, flag=Flag(short="dpa")),
    "data_parallel_rpc_port": Unsupported("ParallelConfig", "int", 29550, _ONE_NODE, flag=Flag(short="dpp")),
    "data_parallel_backend": Unsupported("ParallelConfig", "text", "mp", _ONE_NODE, flag=Flag(short="dpb")),
    "data_parallel_hybrid_lb": Unsupported(
        "ParallelConfig", "bool", False, _ONE_NODE, flag=Flag(short="dph")
    ),
    "data_parallel_external_lb": Unsupported(
        "ParallelConfig", "bool", False, _ONE_NODE, flag=Flag(short="dpe")
    ),
    "data_parallel_multi_port_external_lb": Unsupported(
        "ParallelConfig", "bool", False, _ONE_NODE, flag=Flag(short="dpm")
    ),
    "nnodes": Unsupported("ParallelConfig", "int", 1, _ONE_NODE, flag=Flag(short="n")),
    "node_rank": Unsupported("ParallelConfig", "int", 0, _ONE_NODE, flag=Flag(short="r")),
    "master_addr": Unsupported("ParallelConfig", "text", "127.0.0.1", _ONE_NODE),
    "master_port": Unsupported("ParallelConfig", "int", 29501, _ONE_NODE),
    "enable_expert_parallel": Unsupported(
        "ParallelConfig", "bool", False, _NO_EXPERT_PARALLEL, flag=Flag(short="ep")
    ),
    "enable_eplb": Unsupported("ParallelConfig", "bool", False, _NO_EXPERT_PARALLEL),
    "disable_custom_all_reduce": _warn(
        "ParallelConfig", "bool", False, "there is no custom all-reduce to disable"
    ),
    "max_parallel_loading_workers": _warn("ParallelConfig", "int", None, "every worker loads for itself"),
    # CacheConfig, offloading of weights
    "kv_cache_dtype_skip_layers": Unsupported(
        "CacheConfig", "text*", None, "all layers share one cache dtype"
    ),
    "kv_sharing_fast_prefill": Unsupported("CacheConfig", "bool", False, "layers never skip prefill"),
    "cpu_offload_gb": Unsupported("OffloadConfig", "float", 0, "weights are never offloaded"),
    "offload_backend": Unsupported("OffloadConfig", "text", "auto", "weights are never offloaded"),
    # LoRAConfig
    "enable_lora": Unsupported("LoRAConfig", "bool", False, _NO_LORA),
    "max_loras": _warn("LoRAConfig", "int", 1, _NO_LORA),
    "max_lora_rank": _warn("LoRAConfig", "int", 16, _NO_LORA),
    "max_cpu_loras": _warn("LoRAConfig", "int", None, _NO_LORA),
    "lora_dtype": _warn("LoRAConfig", "text", "auto", _NO_LORA),
    "fully_sharded_loras": _warn("LoRAConfig", "bool", False, _NO_LORA),
    # MultiModalConfig
    "limit_mm_per_prompt": _warn("MultiModalConfig", "json", {}, _MEDIA),
    "mm_processor_kwargs": _warn("MultiModalConfig", "json", None, _MEDIA),
    "media_io_kwargs": _warn("MultiModalConfig", "json", {}, _MEDIA),
    "mm_processor_cache_gb": _warn("MultiModalConfig", "float", 4, _MEDIA),
    "language_model_only": _warn(
        "MultiModalConfig", "bool", False, "the language model is all that is ever loaded"
    ),
    "interleave_mm_strings": _warn("MultiModalConfig", "bool", False, _MEDIA),
    "skip_mm_profiling": _warn("MultiModalConfig", "bool", False, _MEDIA),
    # Whole features given as JSON
    "speculative_config": Unsupported(
        "VllmConfig", "json", None, "speculative decoding is not part of this build", flag=Flag(short="sc")
    ),
    "ec_transfer_config": Unsupported("VllmConfig", "json", None, _MEDIA),
    "weight_transfer_config": Unsupported(
        "VllmConfig", "json", None, "weights cannot be replaced while running"
    ),
    "profiler_config": Unsupported(
        "VllmConfig", "json", {}, "there is no built-in profiler; use an external one"
    ),
    "compilation_config": _warn("VllmConfig", "json", {}, _COMPILE, Flag(short="cc")),
    "kernel_config": _warn("VllmConfig", "json", {}, _COMPILE),
    "optimization_level": _warn("VllmConfig", "int", 2, _COMPILE),
    "performance_mode": _warn("VllmConfig", "text", "balanced", "there is one mode"),
    "mamba_backend": _warn("VllmConfig", "text", "triton", "there is one implementation per device"),
    "moe_backend": _warn("VllmConfig", "text", "auto", "there is one implementation per device"),
    "linear_backend": _warn("VllmConfig", "text", "auto", "there is one implementation per device"),
    "cudagraph_capture_sizes": _warn("CompilationConfig", "int*", None, _GRAPHS),
    "max_cudagraph_capture_size": _warn("CompilationConfig", "int", None, _GRAPHS),
    # ObservabilityConfig, LoggingConfig
    "otlp_traces_endpoint": Unsupported("ObservabilityConfig", "text", None, "traces are not exported"),
    "collect_detailed_traces": Unsupported("ObservabilityConfig", "text*", None, "traces are not exported"),
    "cudagraph_metrics": _warn("ObservabilityConfig", "bool", False, _GRAPHS),
    "enable_mfu_metrics": _warn("ObservabilityConfig", "bool", False, "FLOPs are not estimated"),
    "enable_logging_iteration_details": _warn(
        "ObservabilityConfig", "bool", False, "steps are not logged one by one"
    ),
    "aggregate_engine_logging": _warn("ObservabilityConfig", "bool", False, "there is one engine per server"),
    "logging_config": Unsupported(
        "LoggingConfig", "json", None, "use --log-level, --log-config-file or VLLM_LOGGING_CONFIG_PATH"
    ),
}


def check_unsupported(values: Mapping[str, Any]) -> None:
    """Answer every given setting that has no feature behind it. Raises ValueError for the first that is refused."""
    for name, entry in UNSUPPORTED.items():
        value = values.get(name, entry.default)
        if value == entry.default or value is None or value in entry.accepted or value in ({}, []):
            continue
        flag = f"--{name.replace('_', '-')}"
        if entry.refuse:
            raise ValueError(f"{flag}={value!r} is not supported: {entry.reason}")
        logger.warning_once("%s has no effect: %s", flag, entry.reason)
