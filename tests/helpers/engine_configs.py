"""Configurations of a tiny model for tests of the engine: config.json and tokenizer only, or with random weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.model_executor.model_loader.tiny import make_tiny


@cache
def tiny_folder(name: str = "llama") -> Path:
    """A folder with a tiny random checkpoint; made once per test process."""
    folder = Path(mkdtemp(prefix=f"tiny-{name}-"))
    make_tiny(name, folder)
    return folder


def engine_args(name: str = "llama", **overrides: Any) -> EngineArgs:
    """Flags of a small CPU engine."""
    settings: dict[str, Any] = {
        "model": str(tiny_folder(name)),
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 16 << 20,
        "enforce_eager": True,
        "dtype": "float32",
        **overrides,
    }
    return EngineArgs(**settings)


def engine_config(name: str = "llama", **overrides: Any) -> VllmConfig:
    """The configuration of these flags."""
    return engine_args(name, **overrides).create_engine_config()


def async_engine_args(name: str = "llama", **overrides: Any) -> AsyncEngineArgs:
    """The same flags for the asyncio engine."""
    args = engine_args(name, **overrides)
    return AsyncEngineArgs(**{field: getattr(args, field) for field in EngineArgs.__dataclass_fields__})


def offload_settings(cpu_bytes: int = 32 << 20) -> dict[str, Any]:
    """Flags that add the CPU tier."""
    extra = {"cpu_bytes_to_use": cpu_bytes}
    return {
        "kv_transfer_config": {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Tokens of the tiny vocabulary, which no other seed starts with."""
    return [3 + (7 * i + 31 * seed + i * i % 11) % 250 for i in range(length)]
