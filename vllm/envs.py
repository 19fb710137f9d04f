"""The environment variables of the engine: one table of name, type, default and doc. Layer: L0.

Values are read from the process environment each time an attribute is read (`envs.VLLM_API_KEY`), so a change made
by a test or a launcher is seen at once. Read them at the doors (config, worker start, entry points), never deeper.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

PREFIX = "VLLM_"


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One variable: how its text is parsed, the value without it, and what it is for."""

    parse: Callable[[str], object]
    default: object
    doc: str
    # Why setting it changes nothing here; such names exist so that an environment made for another engine of this
    # interface is understood and answered.
    unused: str = ""


def _flag(text: str) -> bool:
    value = text.strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"expected 0 or 1, got {text!r}")


def _choice(*names: str) -> Callable[[str], object]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"expected one of {', '.join(names)}, got {text!r}")
        return text

    return parse


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


VARIABLES: dict[str, EnvVar] = {
    "VLLM_ALLOW_CROWDED_REPLICAS": EnvVar(
        _flag, False, "On the CPU, start more replicas than there are processors for them."
    ),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": EnvVar(
        _flag, False, "Let callables and pickled objects cross processes."
    ),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": EnvVar(
        _flag, False, "Accept max_model_len beyond what config.json states."
    ),
    "VLLM_API_KEY": EnvVar(str, None, "API key of the HTTP server when --api-key is not given."),
    "VLLM_CACHE_ROOT": EnvVar(str, "~/.cache/vllm", "Folder of fetched and made demo checkpoints (scripts)."),
    "VLLM_COMPUTE_NANS_IN_LOGITS": EnvVar(
        _flag, False, "Count NaN logits per request and export the counter."
    ),
    "VLLM_CONFIGURE_LOGGING": EnvVar(_flag, True, "0 leaves the `vllm` logger to the embedding program."),
    "VLLM_CPU_KVCACHE_SPACE": EnvVar(float, None, "Size of the KV cache on the CPU device, in GiB."),
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": EnvVar(_flag, False, "Use client request ids unchanged inside."),
    "VLLM_ENABLE_V1_MULTIPROCESSING": EnvVar(_flag, True, "0 runs the engine core in the caller's process."),
    "VLLM_ENGINE_READY_TIMEOUT_S": EnvVar(int, 600, "Seconds to wait for an engine process to become ready."),
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": EnvVar(
        int, 300, "Seconds a step may take in worker processes before the engine gives them up."
    ),
    "VLLM_HOST_IP": EnvVar(str, "", "Address of this node, where it cannot be found by itself."),
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": EnvVar(
        int,
        33554432,
        "Largest accepted request body in bytes; unset: 4 MiB + 128 bytes per token of max_model_len, at most this.",
    ),
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": EnvVar(int, 5, "Seconds an idle HTTP connection is kept open."),
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": EnvVar(_flag, False, "Keep the HTTP server up after the engine died."),
    "VLLM_KV_CACHE_LAYOUT": EnvVar(_choice("NHD", "HND"), None, "Order of head and token inside a KV page."),
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": EnvVar(
        _flag, True, "KV events carry 64-bit integers, not full hashes."
    ),
    "VLLM_LOGGING_CONFIG_PATH": EnvVar(str, None, "JSON file for `logging.config.dictConfig`."),
    "VLLM_LOGGING_LEVEL": EnvVar(str, "INFO", "Level of the `vllm` logger."),
    "VLLM_LOGGING_PREFIX": EnvVar(str, "", "Text put before every log line."),
    "VLLM_LOGGING_STREAM": EnvVar(str, "stdout", "Where log lines go: stdout or stderr."),
    "VLLM_LOG_STATS_INTERVAL": EnvVar(float, 10.0, "Seconds between two statistics lines."),
    "VLLM_MAX_COMPLETION_PROMPTS": EnvVar(int, 1024, "Most prompts in one completion request."),
    "VLLM_MAX_N_SEQUENCES": EnvVar(int, 16384, "Largest accepted `n`."),
    "VLLM_MAX_NUM_BAD_WORDS": EnvVar(int, 128, "Most `bad_words` in one HTTP request."),
    "VLLM_MAX_STOP_STRINGS": EnvVar(int, 4, "Most stop strings in one HTTP request."),
    "VLLM_MSGPACK_ZERO_COPY_THRESHOLD": EnvVar(
        int, 256, "Tensors of at least this many bytes travel uncopied."
    ),
    "VLLM_NO_NATIVE": EnvVar(
        _flag,
        False,
        "Neither build (at installation) nor load the native libraries: the references are used.",
    ),
    "VLLM_PLUGINS": EnvVar(_names, None, "Comma list of plugins to load; unset loads all."),
    "VLLM_RPC_BASE_PATH": EnvVar(
        str,
        None,
        "Folder below which engine processes make their sockets; unset: the system's for temporary files.",
    ),
    "VLLM_SERVER_DEV_MODE": EnvVar(_flag, False, "Serve the development routes (cache reset, pause, sleep)."),
    "VLLM_SKIP_MODEL_NAME_VALIDATION": EnvVar(_flag, False, "Accept any model name in requests."),
    "VLLM_TARGET_DEVICE": EnvVar(_choice("cuda", "cpu"), None, "Device to run on; unset detects one."),
    "VLLM_USE_SIMPLE_KV_OFFLOAD": EnvVar(
        _flag, False, "--kv-offloading-size uses SimpleCPUOffloadConnector."
    ),
    "VLLM_USE_V2_MODEL_RUNNER": EnvVar(_flag, None, "0 selects the V1 convention for resumed requests."),
    "VLLM_WORKER_MULTIPROC_METHOD": EnvVar(
        _choice("fork", "spawn"), "spawn", "How worker processes are started."
    ),
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": EnvVar(
        float,
        5.0,
        "Seconds an engine process has to end by itself before it is killed; its workers have 3/5 of them.",
    ),
    "PYTHONHASHSEED": EnvVar(str, None, "Root of the block hash chain, so that processes agree."),
}

_NO_DP = "one server starts all replicas (--data-parallel-size)"
_NO_MEDIA = "the engine fetches no media"
_NO_COMPILE = "models run as they are written, nothing is compiled"
_NO_USAGE = "the engine reports its use to nobody"
_NO_CONNECTOR = "the connector that reads it is not in this version"

# Names of the interface that change nothing here.
_UNUSED: dict[str, EnvVar] = {
    name: EnvVar(parse, default, f"No effect: {reason}.", reason)
    for name, parse, default, reason in (
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", _flag, False, "there is no LoRA in this version"),
        ("VLLM_AUDIO_FETCH_TIMEOUT", int, 10, _NO_MEDIA),
        ("VLLM_BATCH_INVARIANT", _flag, False, "in float32 on the CPU results never depend on the batch"),
        ("VLLM_CONFIG_ROOT", str, "~/.config/vllm", "no file of settings is read or written"),
        (
            "VLLM_CPU_OMP_THREADS_BIND",
            str,
            "auto",
            "threads run where the process may; start it with taskset",
        ),
        ("VLLM_DISABLE_COMPILE_CACHE", _flag, False, _NO_COMPILE),
        ("VLLM_DO_NOT_TRACK", _flag, False, _NO_USAGE),
        ("VLLM_DP_MASTER_IP", str, "127.0.0.1", _NO_DP),
        ("VLLM_DP_MASTER_PORT", int, 0, _NO_DP),
        ("VLLM_DP_RANK", int, 0, _NO_DP),
        ("VLLM_DP_SIZE", int, 1, _NO_DP),
        ("VLLM_ENABLE_RESPONSES_API_STORE", _flag, False, "there is no Responses API in this version"),
        ("VLLM_IMAGE_FETCH_TIMEOUT", int, 5, _NO_MEDIA),
        ("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", int, 0, "the number of copies in a batch has no limit"),
        ("VLLM_LOGGING_COLOR", str, "auto", "log lines have no colour"),
        ("VLLM_MOONCAKE_BOOTSTRAP_PORT", int, 8998, _NO_CONNECTOR),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", str, "localhost", _NO_CONNECTOR),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", int, 5600, _NO_CONNECTOR),
        ("VLLM_NO_USAGE_STATS", _flag, False, _NO_USAGE),
        ("VLLM_PORT", int, None, "engine processes talk over sockets in a folder of their own"),
        ("VLLM_USE_MODELSCOPE", _flag, False, "models are folders on this machine"),
        ("VLLM_VIDEO_FETCH_TIMEOUT", int, 30, _NO_MEDIA),
    )
}
VARIABLES |= _UNUSED

# The same names for the type checker; without a value, so that `__getattr__` below answers.
VLLM_ALLOW_CROWDED_REPLICAS: bool
VLLM_ALLOW_INSECURE_SERIALIZATION: bool
VLLM_ALLOW_LONG_MAX_MODEL_LEN: bool
VLLM_ALLOW_RUNTIME_LORA_UPDATING: bool
VLLM_API_KEY: str | None
VLLM_AUDIO_FETCH_TIMEOUT: int
VLLM_BATCH_INVARIANT: bool
VLLM_CACHE_ROOT: str
VLLM_COMPUTE_NANS_IN_LOGITS: bool
VLLM_CONFIGURE_LOGGING: bool
VLLM_CONFIG_ROOT: str
VLLM_CPU_KVCACHE_SPACE: float | None
VLLM_CPU_OMP_THREADS_BIND: str
VLLM_DISABLE_COMPILE_CACHE: bool
VLLM_DISABLE_REQUEST_ID_RANDOMIZATION: bool
VLLM_DO_NOT_TRACK: bool
VLLM_DP_MASTER_IP: str
VLLM_DP_MASTER_PORT: int
VLLM_DP_RANK: int
VLLM_DP_SIZE: int
VLLM_ENABLE_RESPONSES_API_STORE: bool
VLLM_ENABLE_V1_MULTIPROCESSING: bool
VLLM_ENGINE_READY_TIMEOUT_S: int
VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: int
VLLM_HOST_IP: str
VLLM_HTTP_MAX_REQUEST_BODY_SIZE: int
VLLM_HTTP_TIMEOUT_KEEP_ALIVE: int
VLLM_IMAGE_FETCH_TIMEOUT: int
VLLM_KEEP_ALIVE_ON_ENGINE_DEATH: bool
VLLM_KV_CACHE_LAYOUT: str | None
VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES: bool
VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS: int
VLLM_LOGGING_COLOR: str
VLLM_LOGGING_CONFIG_PATH: str | None
VLLM_LOGGING_LEVEL: str
VLLM_LOGGING_PREFIX: str
VLLM_LOGGING_STREAM: str
VLLM_LOG_STATS_INTERVAL: float
VLLM_MAX_COMPLETION_PROMPTS: int
VLLM_MAX_NUM_BAD_WORDS: int
VLLM_MAX_N_SEQUENCES: int
VLLM_MAX_STOP_STRINGS: int
VLLM_MOONCAKE_BOOTSTRAP_PORT: int
VLLM_MSGPACK_ZERO_COPY_THRESHOLD: int
VLLM_NIXL_SIDE_CHANNEL_HOST: str
VLLM_NIXL_SIDE_CHANNEL_PORT: int
VLLM_NO_NATIVE: bool
VLLM_NO_USAGE_STATS: bool
VLLM_PLUGINS: list[str] | None
VLLM_PORT: int | None
VLLM_RPC_BASE_PATH: str | None
VLLM_SERVER_DEV_MODE: bool
VLLM_SKIP_MODEL_NAME_VALIDATION: bool
VLLM_TARGET_DEVICE: str | None
VLLM_USE_MODELSCOPE: bool
VLLM_USE_SIMPLE_KV_OFFLOAD: bool
VLLM_USE_V2_MODEL_RUNNER: bool | None
VLLM_VIDEO_FETCH_TIMEOUT: int
VLLM_WORKER_MULTIPROC_METHOD: str
VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS: float
PYTHONHASHSEED: str | None


def __getattr__(name: str) -> object:
    variable = VARIABLES.get(name)
    if variable is None:
        raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")
    text = os.environ.get(name)
    if text is None:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"Environment variable {name}: {error}") from error


def __dir__() -> list[str]:
    return sorted(VARIABLES)


def is_set(name: str) -> bool:
    """Whether the variable is present in the environment at all."""
    return name in os.environ


def disable_envs_cache() -> None:
    """Kept for callers of the public interface: values are never cached here, so there is nothing to do."""


def unused_variables() -> dict[str, str]:
    """Variables in the environment that differ from their default but change nothing here, each with the reason.

    Raises:
        ValueError: one that cannot be parsed.
    """
    names = sorted(name for name in _UNUSED if name in os.environ)
    return {name: _UNUSED[name].unused for name in names if __getattr__(name) != _UNUSED[name].default}


def unknown_variables() -> dict[str, str | None]:
    """`VLLM_*` names in the environment that the table lacks, each with the nearest known name or None."""
    unknown = [name for name in os.environ if name.startswith(PREFIX) and name not in VARIABLES]
    return {name: next(iter(get_close_matches(name, VARIABLES, n=1)), None) for name in sorted(unknown)}
