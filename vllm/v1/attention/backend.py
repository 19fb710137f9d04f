"""The contract between the model runner, the models and the attention ops.

Owns: the per-step metadata records (`StepMeta`, `GroupMeta`), the protocols of cache-owning layers and of models, and
the small public class `AttentionBackend` through which a backend states what it supports.
Must not know: a concrete model, how the runner builds the metadata, how pages are allocated. Layer L6.

Packed batch. A step processes `T` tokens of `R` requests with no batch axis: `input_ids[T]`, `positions[T]`,
`hidden[T, D]`. Row `r` owns the tokens `query_start[r] : query_start[r + 1]`; these are the positions
`context_lens[r] : seq_lens[r]` of its request. Rows are ordered so that the first `num_decodes` have exactly one new
token and a context (they can share one decode kernel call).

Pages. Each cache name is bound once to raw pages (`int8 [num_blocks, page_bytes]`); block 0 is the null block: it is
never written and its content is undefined. Paged caches write a token's row to `slot_mapping[t]` (−1: leave it) and
read the rows of a request through its `block_table` row. Recurrent states read the page of
`block_table[r, (context − 1) // block_size]` (zeros without a context) and write that of
`block_table[r, (seq_len − 1) // block_size]`; both may be the same page, and a source page that differs from the
target is left as it is, since other requests may share it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from vllm.v1.kv_cache_interface import KVCacheSpec, MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout

__all__ = [
    "AttentionBackend",
    "CacheLayer",
    "GroupMeta",
    "MultipleOf",
    "ServableModel",
    "StepMeta",
]


@dataclass(slots=True)
class GroupMeta:
    """Metadata of one KV cache group for one step; shared by all of its layers.

    `block_table` is int32 `[R, W]` with physical block ids, 0 for "nothing here". `slot_mapping` is int64 `[T]`:
    `block · block_size + position % block_size`, or −1 where nothing may be written (padding, replayed rows whose
    bytes are already cached, null blocks); `None` for recurrent-state groups. Ring groups hold one block per request
    and map position `p` to `block · capacity + p % capacity`.
    """

    block_size: int
    block_table: Tensor
    slot_mapping: Tensor | None = None


@dataclass(slots=True)
class StepMeta:
    """What one forward pass needs to know about its batch.

    The lists are plain Python so that layers can branch without reading device memory. `groups` maps every cache
    name to the metadata of its group (the same object for all layers of a group). `replay_starts` is 0 unless a
    request recomputes a bounded window after a prefix hit; then window attention reads nothing below that position.
    `derived` is scratch: ops keep values here that are the same for all layers of the step. A new step brings a
    new `StepMeta`, so nothing in it can go stale.
    """

    num_reqs: int
    num_tokens: int
    query_start: Tensor
    query_lens: list[int]
    context_lens: list[int]
    seq_lens: list[int]
    positions: Tensor
    num_decodes: int
    groups: dict[str, GroupMeta]
    replay_starts: list[int] = field(default_factory=list)
    derived: dict[str, Any] = field(default_factory=dict)  # opaque: each op owns its keys


@runtime_checkable
class CacheLayer(Protocol):
    """One named KV cache of a model: it alone knows what its page looks like inside."""

    cache_name: str

    def kv_spec(self) -> KVCacheSpec:
        """The spec under which the planner sizes and groups this cache."""

    def bind_kv_cache(self, raw: Tensor, spec: KVCacheSpec | None = None) -> None:
        """Takes `int8 [num_blocks, page_bytes]` (rows may be strided, 64-byte aligned) and makes typed views.

        `spec` is the layer's spec after planning, where it differs from `kv_spec()` (a changed block size).
        """


@runtime_checkable
class ServableModel(Protocol):
    """What the runner asks of a model. Construction is `Model(vllm_config)`; no weights are needed for the specs.

    `cache_layers` are in the order in which they run. One that shares the cache of another is among them under a name
    of its own, is bound to the pages and the spec of that other and never writes to them.
    """

    cache_layers: dict[str, CacheLayer]

    def kv_specs(self) -> dict[str, KVCacheSpec]:
        """Every cache name with its spec; not those that share a cache."""

    def kv_sharing(self) -> dict[str, str]:
        """Cache names that share the cache of another, with that other's name."""

    def bind_kv_caches(
        self, caches: Mapping[str, Tensor], specs: Mapping[str, KVCacheSpec] | None = None
    ) -> None:
        """Hands each cache its raw pages and its spec after planning; `ValueError` names missing and unknown caches."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copies checkpoint tensors in; returns the names of the parameters that were filled."""

    def forward(self, input_ids: Tensor, positions: Tensor, meta: StepMeta) -> Tensor:
        """`[T]`, `[T]` → final hidden states `[T, D]`."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[N, D]` → fp32 `[N, vocab]`."""


class AttentionBackend(ABC):
    """Static description of a backend: its name and which layouts and kernel block sizes it can serve."""

    supported_kv_cache_layouts: ClassVar[tuple[KVCacheLayout, ...]] = (KVCacheLayout.BLHNC,)

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The registry name, upper case."""

    @classmethod
    def get_supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts in order of preference."""
        return cls.supported_kv_cache_layouts

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head sizes with a kernel; empty means any."""
        return []

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Kernel page sizes in tokens; `MultipleOf(1)` means any."""
        return [MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether a block of `block_size` tokens can be cut into kernel pages."""
        if block_size is None:
            return True
        sizes = cls.get_supported_kernel_block_sizes()
        return not sizes or any(block_size % (s.base if isinstance(s, MultipleOf) else s) == 0 for s in sizes)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether a kernel exists for this head size."""
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes
