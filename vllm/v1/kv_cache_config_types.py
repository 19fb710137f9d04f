"""The plan of a KV cache as data: tensors, groups, and the whole configuration. Layer: L2.

All three are mutable by contract; derived members are computed when they are read, so they are never stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_cache_spec_base import KVCacheGroupRole, KVCacheSpec, KVCacheSpecKind
from vllm.v1.kv_cache_spec_uniform import iter_layer_specs


@dataclass
class KVCacheTensor:
    """Placement of same-shaped layers in one shared allocation of `size` bytes.

    The page of block b of `layers[i]` starts at `offset + i * layer_stride + b * block_stride` (bytes). Tensors of
    different groups may overlap: a block id belongs to one group at a time.
    """

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False

    @property
    def shared_by(self) -> list[str]:
        """The name that a neighbouring version gives `layers`."""
        return self.layers

    def page_start(self, layer_index: int, block_id: int) -> int:
        """First byte of a page inside the allocation."""
        return self.offset + layer_index * self.layer_stride + block_id * self.block_stride


@dataclass
class KVCacheGroupSpec:
    """Layers that share one block table.

    `bytes_per_block` is set where `kv_cache_spec` stands for layers of different page sizes and so cannot tell it.
    `num_sharing_layers`: layers that read the caches of these without having one; they are not among `layer_names`.
    """

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False
    host_resident: bool = False
    enable_kv_transfer: bool = True
    role: KVCacheGroupRole = KVCacheGroupRole.DEFAULT
    bytes_per_block: int | None = field(default=None, init=False, repr=False, compare=False)
    num_sharing_layers: int = field(default=0, init=False, repr=False, compare=False)


@dataclass
class KVCacheConfig:
    """The KV cache of one rank. `kv_cache_tensors` may be empty where only the scheduler uses it."""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    prefix_cache_retention_interval: int | None = None
    kv_cache_layout: str | None = None
    hash_block_size: int | None = None
    cache_hit_alignment_tokens: int | None = None
    hisparse_host_num_blocks: int | None = None
    hisparse_host_block_stride: int | None = None
    hisparse_shared_host_pool: bool = False
    kv_tp_replicas: int = field(default=1)

    @property
    def transfer_group_ids(self) -> tuple[int, ...]:
        """Ids of the groups that connectors may see."""
        return tuple(i for i, group in enumerate(self.kv_cache_groups) if group.enable_kv_transfer)

    @property
    def transfer_groups(self) -> list[KVCacheGroupSpec]:
        """The groups that connectors may see."""
        return [group for group in self.kv_cache_groups if group.enable_kv_transfer]

    @property
    def prefix_cacheable_group_ids(self) -> tuple[int, ...]:
        """Ids of the transfer groups whose blocks can be found again by hash."""
        return tuple(
            i
            for i, group in enumerate(self.kv_cache_groups)
            if group.enable_kv_transfer and group.kv_cache_spec.prefix_cacheable
        )

    @property
    def prefix_cacheable_groups(self) -> list[KVCacheGroupSpec]:
        """The transfer groups whose blocks can be found again by hash."""
        return [self.kv_cache_groups[i] for i in self.prefix_cacheable_group_ids]

    @property
    def transfer_group_index_by_layer(self) -> dict[str, int]:
        """Layer name -> index within `transfer_groups`."""
        return {name: i for i, group in enumerate(self.transfer_groups) for name in group.layer_names}

    @property
    def host_group_ids(self) -> tuple[int, ...]:
        """Ids of the groups whose blocks live in host memory."""
        return tuple(i for i, group in enumerate(self.kv_cache_groups) if group.host_resident)

    def select_transfer_block_ids(self, block_ids: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
        """The block ids of the transfer groups, in their order. ValueError unless there is one list per group."""
        if len(block_ids) != len(self.kv_cache_groups):
            raise ValueError(
                f"expected block ids of {len(self.kv_cache_groups)} KV cache groups, got {len(block_ids)}"
            )
        return tuple(list(block_ids[i]) for i in self.transfer_group_ids)

    def num_blocks_of(self, tensor: KVCacheTensor) -> int:
        """Blocks that the pool behind `tensor` has."""
        if not tensor.host_resident:
            return self.num_blocks
        if self.hisparse_host_num_blocks is None:
            raise ValueError("a host-resident KV cache tensor needs hisparse_host_num_blocks")
        return self.hisparse_host_num_blocks

    @property
    def has_mamba_layers(self) -> bool:
        """Some layer keeps a recurrent state."""
        return any(
            spec.kv_cache_spec_kind is KVCacheSpecKind.MAMBA
            for group in self.kv_cache_groups
            for spec in iter_layer_specs(group.kv_cache_spec)
        )

    @property
    def has_mixed_precision_kv_cache(self) -> bool:
        """Layers store rows of more than one (dtype, quantisation mode)."""
        precisions = {
            spec.precision
            for group in self.kv_cache_groups
            for spec in iter_layer_specs(group.kv_cache_spec)
            if spec.precision is not None
        }
        return len(precisions) > 1

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Stale bytes of another group could be read as wild numbers, so fresh blocks must be zeroed."""
        return self.has_mamba_layers or self.has_mixed_precision_kv_cache
