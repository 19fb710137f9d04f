"""What every worker offers, and the wrapper that chooses a worker's class.

Owns: the life cycle's method names and their neutral answers; resolution of `parallel_config.worker_cls` and of
`worker_extension_cls`. Must not know: devices, models, executors. Layer L6.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.registry import resolve_object
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_connector_types import KVConnectorMetadata
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """`ValueError` for features that no worker of this engine has."""
    if vllm_config.model_config is None:
        raise ValueError("a worker needs a model_config")
    if vllm_config.speculative_config is not None:
        raise ValueError("speculative_config: speculative decoding is not supported")
    if vllm_config.lora_config is not None:
        raise ValueError("lora_config: LoRA adapters are not supported")
    if vllm_config.model_config.runner_type != "generate":
        raise ValueError(
            f"runner={vllm_config.model_config.runner_type!r} is not supported; only generation is"
        )


class WorkerBase(ABC):
    """One rank: a device, a model, a KV cache.

    Life cycle: `init_device` → `load_model` → `get_kv_cache_spec` → `set_kv_cache_layout` →
    `determine_available_memory` → `initialize_from_config` → `compile_or_warm_up_model`; then per step `execute_model`
    and, when that answers None, `sample_tokens`. A step that raised leaves the worker usable for the next one.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.local_rank = local_rank
        self.rank = rank
        # Whoever is handed this process's configuration, as a connector is, can tell the ranks apart.
        vllm_config.parallel_config.rank = rank
        self.distributed_init_method = distributed_init_method
        self.is_driver_worker = is_driver_worker
        self.kv_cache_layout = KVCacheLayout.BLHNC

    # -- life cycle -------------------------------------------------------------------------------

    @abstractmethod
    def init_device(self) -> None:
        """Take the device and seed its generators."""

    @abstractmethod
    def load_model(self) -> None:
        """Build the model and read its weights."""

    @abstractmethod
    def get_model(self) -> nn.Module:
        """The loaded model."""

    @abstractmethod
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Every cache of the model with its spec."""

    def get_kv_sharing_layers(self) -> dict[str, str]:
        """Layers that read the cache of another layer and own none, with that layer's name."""
        return {}

    def get_supported_kv_cache_layouts(self) -> list[KVCacheLayout]:
        """Layouts this worker can serve, best first."""
        return [KVCacheLayout.BLHNC]

    def set_kv_cache_layout(self, layout_name: str, cp_kv_cache_interleave_size: int = 1) -> None:
        """Fix the layout of pages. `ValueError` for one that this worker cannot serve."""
        layout = KVCacheLayout[layout_name]
        supported = self.get_supported_kv_cache_layouts()
        if layout not in supported:
            names = ", ".join(known.name for known in supported)
            raise ValueError(f"KV cache layout {layout_name} is not supported here; supported: {names}")
        self.kv_cache_layout = layout

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Bytes for the KV cache."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Create the connector's worker half, allocate the pages and bind them into the model."""

    def compile_or_warm_up_model(self) -> None:
        """Do now what the first step should not wait for."""
        return

    def shutdown(self) -> None:
        """Release connector, caches and model. Idempotent."""
        return

    # -- one step ---------------------------------------------------------------------------------

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the forward pass; None when `sample_tokens` must follow."""

    @abstractmethod
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | None:
        """Sample from the logits that `execute_model` kept."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for the next step; None without a drafter."""
        return None

    def execute_dummy_batch(self) -> None:
        """Run a forward pass without requests."""
        return

    # -- the rest ---------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise if the device is unusable."""
        return

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> Any:
        """`fn(model)`, for callers that inspect weights."""
        return fn(self.get_model())

    def get_kv_connector_handshake_metadata(self) -> dict[int, Any] | None:
        """What the connector's worker half wants its peers to know, by rank."""
        if not has_kv_transfer_group():
            return None
        metadata = get_kv_transfer_group().get_handshake_metadata()
        return None if metadata is None else {self.rank: metadata}

    def apply_kv_withdrawal(self, withdrawal: KVConnectorMetadata) -> str | None:
        """See `KVConnectorBase_V1.apply_withdrawal`."""
        return get_kv_transfer_group().apply_withdrawal(withdrawal) if has_kv_transfer_group() else None

    def get_simple_cpu_offload_num_blocks(self) -> int | None:
        """Host blocks that the offload connector agreed on with the other ranks, or None."""
        if not has_kv_transfer_group():
            return None
        # Only the offload connector has this method; connectors are an open set, so it is looked up by name.
        ask = getattr(get_kv_transfer_group(), "get_aligned_num_cpu_blocks", None)
        count: int | None = None if ask is None else ask()
        return count

    def update_max_model_len(self, max_model_len: int) -> None:
        """The engine lowered the limit to what fits memory."""
        assert self.vllm_config.model_config is not None
        self.vllm_config.model_config.max_model_len = max_model_len

    def profile(self, is_start: bool = True) -> None:
        """Start or stop a profiler, where one is configured."""
        return

    def check_sleep(self, level: int = 1) -> None:
        """ValueError if `sleep(level)` would be refused; nothing changes."""
        return

    def sleep(self, level: int = 1) -> None:
        """Give memory back."""
        raise RuntimeError(
            f"{type(self).__name__} cannot sleep: its memory cannot be given back and taken again"
        )

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back."""
        return

    def reset_mm_cache(self) -> None:
        """Drop cached multimodal inputs; none are kept."""
        return

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write this rank's weights."""
        raise RuntimeError("saving sharded weights is not supported")

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter."""
        raise RuntimeError("this engine runs without LoRA adapters")

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; none is ever loaded."""
        return False

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter; none is ever loaded."""
        return False

    def list_loras(self) -> set[int]:
        """Ids of loaded adapters."""
        return set()


def _argument_error(
    name: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ValueError | None:
    """The error for arguments that `target` does not take; None if it takes them."""
    try:
        inspect.signature(target).bind(*args, **kwargs)
    except TypeError as error:
        return ValueError(f"the workers' method {name!r} does not take these arguments: {error}")
    return None


class WorkerWrapperBase:
    """Holds a worker whose class is decided late: by platform, by name, with an outside mix-in.

    `execute_method` calls a method of the wrapper, else of the worker, or a given function with the worker as its
    first argument.
    """

    def __init__(self, vllm_config: VllmConfig, rpc_rank: int = 0, global_rank: int | None = None) -> None:
        self.vllm_config = vllm_config
        self.rpc_rank = rpc_rank
        self.global_rank = rpc_rank if global_rank is None else global_rank
        self.worker: WorkerBase | None = None

    def init_worker(self, kwargs: dict[str, Any]) -> None:
        """Build the worker. `TypeError` if the configured class is no worker or the mix-in clashes with it."""
        load_general_plugins()
        parallel_config = self.vllm_config.parallel_config
        target = parallel_config.worker_cls
        worker_class = resolve_object(current_platform.worker_cls if target == "auto" else target)
        if not (isinstance(worker_class, type) and issubclass(worker_class, WorkerBase)):
            raise TypeError(f"worker_cls {target!r} must name a subclass of WorkerBase, got {worker_class!r}")
        extension = getattr(
            parallel_config, "worker_extension_cls", ""
        )  # an optional setting of outside callers
        if extension:
            worker_class = _with_extension(worker_class, extension)
        self.worker = worker_class(**kwargs)

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Hand the worker the config of its rank."""
        self._worker().initialize_from_config(kv_cache_configs[self.global_rank])

    def execute_method(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `method` here, on the worker, or with the worker. ValueError: no such method, or not with these arguments."""
        if callable(method):
            return method(self._worker(), *args, **kwargs)
        own = getattr(self, method, None)
        target = own if own is not None else getattr(self._worker(), method, None)
        if not callable(target) or method.startswith("_"):
            raise ValueError(f"the workers have no method {method!r}")
        try:
            return target(*args, **kwargs)
        except TypeError:
            unfit = _argument_error(method, target, args, kwargs)
            if unfit is None:
                raise
            raise unfit from None

    def shutdown(self) -> None:
        """Let the worker release what it holds."""
        if self.worker is not None:
            self.worker.shutdown()

    def _worker(self) -> WorkerBase:
        if self.worker is None:
            raise RuntimeError("the worker is not initialised; call init_worker first")
        return self.worker


def _with_extension(worker_class: type[WorkerBase], extension_path: str) -> type[WorkerBase]:
    extension = resolve_object(extension_path)
    if not isinstance(extension, type):
        raise TypeError(f"worker_extension_cls {extension_path!r} must name a class, got {extension!r}")
    clashes = [name for name in vars(extension) if not name.startswith("__") and hasattr(worker_class, name)]
    if clashes:
        raise TypeError(f"worker_extension_cls {extension_path!r} redefines {', '.join(sorted(clashes))}")
    return type(f"{worker_class.__name__}With{extension.__name__}", (worker_class, extension), {})
