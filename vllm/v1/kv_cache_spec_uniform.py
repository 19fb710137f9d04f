"""A group of layers with one block table but different pages, and questions about possibly wrapped specs. Layer: L2."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from functools import cached_property
from typing import TypeVar

from vllm.v1.kv_cache_spec_attention import FullAttentionSpec
from vllm.v1.kv_cache_spec_base import KVCacheSpec, KVCacheSpecKind, SizingContext
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

SpecT = TypeVar("SpecT", bound=KVCacheSpec)


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one base type and block size whose pages differ. A page of this spec is all members' pages together."""

    kv_cache_specs: dict[str, KVCacheSpec]

    def __hash__(self) -> int:
        return hash((self.block_size, tuple(self.kv_cache_specs.items())))

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """The layers can share one block table: base type, manager, block size and sharing rules agree."""
        return len({group_sharing_key(spec) for spec in kv_cache_specs.values()}) == 1

    @classmethod
    def from_specs(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> UniformTypeKVCacheSpecs | None:
        """The group of these layers, or None if they cannot share one block table."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        first = next(iter(kv_cache_specs.values()))
        return cls(
            first.block_size,
            dict(kv_cache_specs),
            dcp_sharded=first.dcp_sharded,
            is_draft=any(spec.is_draft for spec in kv_cache_specs.values()),
        )

    @property
    def first_spec(self) -> KVCacheSpec:
        """The member that stands for the group where only the common part matters."""
        return next(iter(self.kv_cache_specs.values()))

    @property
    def kind_spec(self) -> KVCacheSpec:
        return self.first_spec

    @cached_property
    def _kind(self) -> KVCacheSpecKind:
        kinds = {spec.kv_cache_spec_kind for spec in self.kv_cache_specs.values()}
        if len(kinds) == 1:
            return kinds.pop()
        return KVCacheSpecKind.FULL_ATTENTION if is_full_attention_spec(self) else KVCacheSpecKind.UNKNOWN

    @property
    def kv_cache_spec_kind(self) -> KVCacheSpecKind:
        return self._kind

    @property
    def event_sliding_window(self) -> int | None:
        windows = {spec.event_sliding_window for spec in self.kv_cache_specs.values()}
        return windows.pop() if len(windows) == 1 else None

    @property
    def sharing_key(self) -> tuple[object, ...]:
        return self.first_spec.sharing_key

    @cached_property
    def _prefix_cacheable(self) -> bool:
        return all(spec.prefix_cacheable for spec in self.kv_cache_specs.values())

    @property
    def prefix_cacheable(self) -> bool:
        return self._prefix_cacheable

    @property
    def transferable(self) -> bool:
        return all(spec.transferable for spec in self.kv_cache_specs.values())

    @property
    def keeps_aligned_states(self) -> bool:
        return self.first_spec.keeps_aligned_states

    @property
    def keeps_all_tokens(self) -> bool:
        return all(spec.keeps_all_tokens for spec in self.kv_cache_specs.values())

    @property
    def prefix_replay_tokens(self) -> int:
        return max(spec.prefix_replay_tokens for spec in self.kv_cache_specs.values())

    @property
    def num_heads(self) -> int:
        return 1

    @property
    def tokens_per_state(self) -> int | Fraction:
        return -1

    @property
    def state_content_size_bytes(self) -> int:
        return self.page_size_bytes

    @cached_property
    def _page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    @property
    def page_size_bytes(self) -> int:
        return self._page_size_bytes

    @property
    def block_table_token_alignment(self) -> int | None:
        return self.first_spec.block_table_token_alignment

    @property
    def has_layer_views(self) -> bool:
        return self.first_spec.has_layer_views

    @property
    def uses_slot_mapping(self) -> bool:
        return self.first_spec.uses_slot_mapping

    def get_block_stride_alignment(self) -> int:
        return math.lcm(*(spec.get_block_stride_alignment() for spec in self.kv_cache_specs.values()))

    def max_blocks_per_request(self, vllm_config: SizingContext) -> int:
        return max(spec.max_blocks_per_request(vllm_config) for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, vllm_config: SizingContext) -> int:
        return self.max_blocks_per_request(vllm_config) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: SizingContext, max_len: int) -> int:
        return max(spec.max_num_blocks_per_req(vllm_config, max_len) for spec in self.kv_cache_specs.values())

    def tp_replicas(self, tp_size: int, dcp_size: int) -> int:
        return math.gcd(*(spec.tp_replicas(tp_size, dcp_size) for spec in self.kv_cache_specs.values()))

    def copy_with_new_block_size(self, block_size: int) -> UniformTypeKVCacheSpecs:
        members = {
            name: spec.copy_with_new_block_size(block_size) for name, spec in self.kv_cache_specs.items()
        }
        return UniformTypeKVCacheSpecs(
            block_size, members, dcp_sharded=self.dcp_sharded, is_draft=self.is_draft
        )


def group_sharing_key(spec: KVCacheSpec) -> tuple[object, ...]:
    """Layers with equal keys can share one block table."""
    return (
        KVCacheSpecRegistry.get_uniform_type_base_spec(spec),
        KVCacheSpecRegistry.get_manager_reference(spec),
        spec.block_size,
        spec.dcp_sharded,
        *spec.sharing_key,
    )


def iter_layer_specs(spec: KVCacheSpec) -> Iterable[KVCacheSpec]:
    """The specs of the layers behind a group's spec: the members of a uniform group, else the spec itself."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs.values()
    return (spec,)


def is_full_attention_spec(spec: KVCacheSpec) -> bool:
    """Every layer behind the spec keeps all its tokens."""
    return all(isinstance(member, FullAttentionSpec) for member in iter_layer_specs(spec))


def get_kv_cache_spec_kind(spec: KVCacheSpec) -> KVCacheSpecKind:
    """The kind that KV events name for a group with this spec."""
    return spec.kv_cache_spec_kind


def get_kv_cache_spec_sliding_window(spec: KVCacheSpec) -> int | None:
    """The window of sliding-window kinds (the common one of a uniform group), else None."""
    return spec.event_sliding_window


def replace_as(spec: KVCacheSpec, cls: type[SpecT], *, drop: Iterable[str] = (), **changes: object) -> SpecT:
    """Rebuild `spec` as another class: its fields except `drop`, then `changes`. TypeError for unknown fields."""
    if not is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    dropped = frozenset(drop)
    values: dict[str, object] = {
        f.name: spec.__dict__[f.name] for f in fields(spec) if f.init and f.name not in dropped
    }
    values.update(changes)
    return cls(**values)  # type: ignore[arg-type]  # field names are data here; the constructor checks them
