"""What the engine asks of the workers, whatever process they live in.

Owns: the executor interface, the choice of the class, and the calls that are plain broadcasts. Must not know: how a
call reaches a worker, what a worker does with it, scheduling. Layer L7.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.registry import resolve_object
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_connector_types import KVConnectorMetadata
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

# What a worker method takes and returns is that method's business, hence `Any` in the broadcast calls.
FailureCallback = Callable[[], None]
StepResult = ModelRunnerOutput | Future[ModelRunnerOutput | None] | None

_BUILT_IN = {
    "uni": "vllm.v1.executor.uniproc_executor:UniProcExecutor",
    "mp": "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
}
_NOT_OFFERED = {
    "ray": "this engine has no Ray executor",
    "external_launcher": "this engine cannot be started by an external launcher",
}


def _check_sizes(parallel_config: ParallelConfig, backend: str) -> None:
    """ValueError for ranks that the built-in executors cannot run."""
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        size: int = vars(parallel_config)[name]
        if size > 1:
            raise ValueError(
                f"{name}={size} is not supported: only tensor_parallel_size and data_parallel_size may exceed 1"
            )
    if backend == "uni" and parallel_config.world_size > 1:
        raise ValueError(
            f"distributed_executor_backend='uni' runs one rank, not {parallel_config.world_size}; use 'mp'"
        )


class Executor(ABC):
    """Runs each step on all workers and answers with the output of the rank that samples.

    Built with the model loaded; then, in this order: `get_kv_cache_specs` → `set_kv_cache_layout` →
    `determine_available_memory` → `initialize_from_config` → steps. `execute_model` returns None when sampling is a
    separate call; then `sample_tokens` completes the step. With `non_block=True` both return a future, and calls are
    carried out in the order they were made. An exception out of a step ends that step only, unless `is_failed`.
    """

    uses_ray: ClassVar[bool] = False
    supports_pp: ClassVar[bool] = False

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.kv_output_aggregator: KVOutputAggregator | None = None
        self.is_failed = False
        self.is_sleeping = False
        self._init_executor()

    @staticmethod
    def get_class(vllm_config: VllmConfig) -> type[Executor]:
        """The executor class that `parallel_config.distributed_executor_backend` names.

        `TypeError` for a wrong type, `ValueError` for an unknown name or a choice this engine does not offer.
        """
        parallel_config = vllm_config.parallel_config
        backend = parallel_config.distributed_executor_backend
        if backend is None:
            backend = "uni" if parallel_config.world_size == 1 else "mp"
        if backend in _BUILT_IN:
            _check_sizes(parallel_config, backend)
        if isinstance(backend, str):
            if backend in _NOT_OFFERED:
                raise ValueError(
                    f"distributed_executor_backend={backend!r} (world_size={parallel_config.world_size}): "
                    f"{_NOT_OFFERED[backend]}"
                )
            if backend not in _BUILT_IN and "." not in backend:
                known = ", ".join(sorted(_BUILT_IN | _NOT_OFFERED))
                raise ValueError(
                    f"Unknown distributed_executor_backend {backend!r}; known: {known}, or a dotted class path"
                )
            backend = resolve_object(_BUILT_IN.get(backend, backend))
        if not (isinstance(backend, type) and issubclass(backend, Executor)):
            raise TypeError(f"distributed_executor_backend must be a subclass of Executor, got {backend!r}")
        return backend

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Whether a step may be submitted while the previous one still runs."""
        return False

    # -- to be provided ---------------------------------------------------------------------------

    @abstractmethod
    def _init_executor(self) -> None:
        """Start the workers and load the model."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a worker method, or `method(worker, …)`, on every worker; results in rank order (or a future of them)."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise if a worker is gone."""

    # -- one step ---------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> StepResult:
        """Run the forward pass of one step. None: call `sample_tokens` next."""
        result: StepResult = self._step("execute_model", scheduler_output, non_block)
        return result

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> StepResult:
        """Complete the step whose `execute_model` answered None."""
        result: StepResult = self._step("sample_tokens", grammar_output, non_block)
        return result

    def _step(self, method: str, argument: Any, non_block: bool) -> Any:
        if not non_block:
            return self._combine(self.collective_rpc(method, args=(argument,)))
        gathered = self.collective_rpc(method, args=(argument,), non_block=True)
        done: Future[ModelRunnerOutput | None] = Future()

        def pass_on(source: Future[list[ModelRunnerOutput | None]]) -> None:
            try:
                done.set_result(self._combine(source.result()))
            except BaseException as error:  # a future carries whatever the step raised to its reader
                done.set_exception(error)

        gathered.add_done_callback(pass_on)
        return done

    def _combine(self, outputs: Sequence[ModelRunnerOutput | None]) -> ModelRunnerOutput | None:
        if self.kv_output_aggregator is None:
            return outputs[0]
        return self.kv_output_aggregator.aggregate(list(outputs), output_rank=0)

    def execute_dummy_batch(self) -> None:
        """Run a forward pass without requests."""
        self.collective_rpc("execute_dummy_batch")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for the next step, if a drafter runs in the workers."""
        drafts: DraftTokenIds | None = self.collective_rpc("take_draft_token_ids")[0]
        return drafts

    # -- start-up ---------------------------------------------------------------------------------

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once."""
        return int(self.vllm_config.max_concurrent_batches)

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Every cache of every rank's model with its spec."""
        specs: list[dict[str, KVCacheSpec]] = self.collective_rpc("get_kv_cache_spec")
        return specs

    def get_kv_sharing_layers(self) -> list[dict[str, str]]:
        """The layers of every rank's model that read another layer's cache, with that layer."""
        layers: list[dict[str, str]] = self.collective_rpc("get_kv_sharing_layers")
        return layers

    def get_supported_kv_cache_layouts(self) -> list[KVCacheLayout]:
        """Layouts all workers can serve, best first."""
        per_rank: list[list[KVCacheLayout]] = self.collective_rpc("get_supported_kv_cache_layouts")
        return [layout for layout in per_rank[0] if all(layout in others for others in per_rank)]

    def set_kv_cache_layout(self, layout_name: str, cp_kv_cache_interleave_size: int = 1) -> None:
        """Tell the workers how pages are laid out, before memory is measured."""
        self.collective_rpc("set_kv_cache_layout", args=(layout_name, cp_kv_cache_interleave_size))

    def determine_available_memory(self) -> list[int]:
        """Bytes each rank can give to the KV cache."""
        sizes: list[int] = self.collective_rpc("determine_available_memory")
        return sizes

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the KV caches, one config per rank, and warm the model up."""
        self.collective_rpc("initialize_from_config", args=(kv_cache_configs,))
        self.compile_or_warm_up_model()

    def compile_or_warm_up_model(self) -> None:
        """Run and capture what should not happen inside the first step."""
        self.collective_rpc("compile_or_warm_up_model")

    def get_simple_cpu_offload_num_blocks(self) -> int | None:
        """Host blocks that the workers' offload connectors agreed on, or None without such a connector.

        `RuntimeError` if only some ranks report one.
        """
        counts: list[int | None] = self.collective_rpc("get_simple_cpu_offload_num_blocks")
        known = [count for count in counts if count is not None]
        if known and len(known) != len(counts):
            raise RuntimeError(f"only some workers report a number of host blocks: {counts}")
        return min(known) if known else None

    def get_kv_connector_handshake_metadata(self) -> list[dict[int, Any]]:
        """What the workers' connectors want their peers to know, by rank."""
        metadata: list[dict[int, Any]] = self.collective_rpc("get_kv_connector_handshake_metadata")
        return metadata

    def apply_kv_withdrawal(self, withdrawal: KVConnectorMetadata) -> str | None:
        """Have every rank's connector forget for good what was withdrawn; what stands in the way, None if nothing."""
        problems: list[str | None] = self.collective_rpc("apply_kv_withdrawal", args=(withdrawal,))
        return "; ".join(problem for problem in problems if problem is not None) or None

    def init_kv_output_aggregator(self, connector: KVConnectorBase_V1) -> None:
        """From now on, combine the connector reports of all ranks."""
        world_size = self.vllm_config.parallel_config.world_size
        self.kv_output_aggregator = KVOutputAggregator.from_connector(connector, world_size)

    # -- life -------------------------------------------------------------------------------------

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Call `callback` when a worker dies. In-process workers die with the engine: nothing to call."""
        return

    def end_after(self, seconds: float) -> None:
        """The engine is to end; steps may go on for so long. After that and a grace none may be waited for any more.

        Called from a signal handler; `shutdown` follows.
        """
        return

    def shutdown(self) -> None:
        """End the workers. Idempotent."""
        self.collective_rpc("shutdown")

    def check_sleep(self, level: int = 1) -> None:
        """ValueError if the workers cannot sleep at this level; asked before anything is stopped for it."""
        self.collective_rpc("check_sleep", args=(level,))

    def sleep(self, level: int = 1) -> None:
        """Give device memory back: level 1 drops the KV cache, level 2 the weights too."""
        self.collective_rpc("sleep", args=(level,))
        self.is_sleeping = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back after `sleep`."""
        self.collective_rpc("wake_up", args=(tags,))
        self.is_sleeping = False

    def profile(self, is_start: bool = True) -> None:
        """Start or stop the workers' profiler."""
        self.collective_rpc("profile", args=(is_start,))

    def reset_mm_cache(self) -> None:
        """Drop cached multimodal inputs."""
        self.collective_rpc("reset_mm_cache")

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write each rank's weights below `path`."""
        self.collective_rpc("save_sharded_state", args=(path, pattern, max_size))

    # -- adapters ---------------------------------------------------------------------------------

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter on every rank."""
        return all(self.collective_rpc("add_lora", args=(lora_request,)))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        return all(self.collective_rpc("remove_lora", args=(lora_id,)))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded."""
        return all(self.collective_rpc("pin_lora", args=(lora_id,)))

    def list_loras(self) -> set[int]:
        """Ids of the loaded adapters."""
        loaded: list[set[int]] = self.collective_rpc("list_loras")
        return loaded[0]
