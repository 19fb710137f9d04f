"""How the model is spread over workers and engines. Layer: L1."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from vllm.config.setting import HIDDEN, Flag, config, setting, state

EXECUTOR_BACKENDS = ("uni", "mp", "ray", "external_launcher")


@config
class ParallelConfig:
    """Degrees of parallelism and the executor that runs the workers."""

    pipeline_parallel_size: Annotated[int, Field(ge=1)] = setting(
        default=1, doc="Pipeline stages.", flag=Flag(short="pp")
    )
    tensor_parallel_size: Annotated[int, Field(ge=1)] = setting(
        default=1, doc="Tensor-parallel ranks.", flag=Flag(short="tp")
    )
    prefill_context_parallel_size: Annotated[int, Field(ge=1)] = setting(
        default=1, doc="Ranks that share the context during prefill.", flag=Flag(short="pcp")
    )
    decode_context_parallel_size: Annotated[int, Field(ge=1)] = setting(
        default=1, doc="Ranks among the tensor-parallel ones that share the KV cache.", flag=Flag(short="dcp")
    )
    data_parallel_size: Annotated[int, Field(ge=1)] = setting(
        default=1, doc="Engine replicas.", flag=Flag(short="dp")
    )
    data_parallel_rank: Annotated[int, Field(ge=0)] = setting(
        default=0, doc="Rank of this replica.", flag=Flag(short="dpn", unset=True)
    )
    # A name, a dotted path or an executor class.
    distributed_executor_backend: Any = setting(
        default=None,
        doc="uni, mp, ray, external_launcher or a class path; chosen by world size when not given.",
    )
    cp_kv_cache_interleave_size: Annotated[int, Field(ge=1)] = setting(
        default=1, doc="Consecutive tokens kept by one context-parallel rank.", flag=HIDDEN
    )
    worker_cls: str = setting(default="auto", doc="Dotted path of the worker class; auto is the platform's.")
    worker_extension_cls: str = setting(default="", doc="Dotted path of a class mixed into the worker.")
    rank: int = setting(default=0, doc="Global rank of this worker.", flag=HIDDEN)

    world_size: int = state(default=1, doc="Workers of one engine.")
    data_parallel_index: int = state(default=0, doc="Index of this replica among all.")
    replicas_on_node: int = state(
        default=1, doc="Engines of this server, which share the node's memory, processors and devices."
    )

    def __post_init__(self) -> None:
        self.world_size = (
            self.pipeline_parallel_size * self.tensor_parallel_size * self.prefill_context_parallel_size
        )
        self.data_parallel_index = self.data_parallel_rank
        self.replicas_on_node = self.data_parallel_size
        backend = self.distributed_executor_backend
        if isinstance(backend, str) and backend not in EXECUTOR_BACKENDS and "." not in backend:
            raise ValueError(
                f"distributed_executor_backend={backend!r} is neither one of {', '.join(EXECUTOR_BACKENDS)} "
                "nor a dotted class path"
            )
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError(
                f"data_parallel_rank={self.data_parallel_rank} must be below "
                f"data_parallel_size={self.data_parallel_size}"
            )
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} must be a multiple of "
                f"decode_context_parallel_size={self.decode_context_parallel_size}"
            )

    @property
    def world_size_across_dp(self) -> int:
        """Workers of all engine replicas."""
        return self.world_size * self.data_parallel_size

    @property
    def first_local_rank(self) -> int:
        """Where this replica's ranks begin among those of the node: on GPUs the device of its first one."""
        return self.data_parallel_index * self.world_size

    def become_replica(self, index: int) -> None:
        """Configure replica `index` of several: an engine of its own, told apart from the others by its index alone."""
        self.data_parallel_index = index
        self.data_parallel_size, self.data_parallel_rank = 1, 0
