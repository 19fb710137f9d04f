"""Which manager class serves which KV cache spec class, and which specs may share one uniform group. Layer: L2.

Built-in kinds are strings here, so that this file imports neither specs nor managers; outside packages add a kind with
`KVCacheSpecRegistry.register` or with an entry point of group "vllm.kv_cache_kinds", whose name is the full name of the
spec class ("package.module.Class") and whose value is the manager ("package.module:Class"). A new built-in kind is one
line in `_KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from vllm.utils.registry import Registry, resolve_object

_FULL = "vllm.v1.kv_cache_spec_attention.FullAttentionSpec"
_KV_KINDS = "vllm.v1.core.kv_kinds"

# Full name of the spec class -> (manager, full name of its uniform base type; None = the class itself).
_KINDS: dict[str, tuple[str, str | None]] = {
    _FULL: (f"{_KV_KINDS}.full:FullAttentionManager", None),
    "vllm.v1.kv_cache_spec_attention.MLAAttentionSpec": (f"{_KV_KINDS}.full:FullAttentionManager", _FULL),
    "vllm.v1.kv_cache_spec_attention.HiddenStateCacheSpec": (f"{_KV_KINDS}.full:FullAttentionManager", _FULL),
    "vllm.v1.kv_cache_spec_attention.RSWASpec": (f"{_KV_KINDS}.full:RSWAManager", _FULL),
    "vllm.v1.kv_cache_spec_attention.SinkFullAttentionSpec": (
        f"{_KV_KINDS}.full:SinkFullAttentionManager",
        _FULL,
    ),
    "vllm.v1.kv_cache_spec_attention.CrossAttentionSpec": (f"{_KV_KINDS}.cross:CrossAttentionManager", None),
    "vllm.v1.kv_cache_spec_attention.EncoderOnlyAttentionSpec": (
        f"{_KV_KINDS}.cross:EncoderOnlyAttentionManager",
        None,
    ),
    "vllm.v1.kv_cache_spec_window.SlidingWindowSpec": (
        f"{_KV_KINDS}.sliding_window:SlidingWindowManager",
        None,
    ),
    "vllm.v1.kv_cache_spec_window.SlidingWindowMLASpec": (
        f"{_KV_KINDS}.sliding_window:SlidingWindowManager",
        None,
    ),
    "vllm.v1.kv_cache_spec_window.ChunkedLocalAttentionSpec": (
        f"{_KV_KINDS}.chunked_local:ChunkedLocalAttentionManager",
        None,
    ),
    "vllm.v1.kv_cache_spec_window.CircularBufferSpec": (
        f"{_KV_KINDS}.circular:CircularBufferManager",
        None,
    ),
    "vllm.v1.kv_cache_spec_state.MambaSpec": (f"{_KV_KINDS}.mamba:MambaManager", None),
    "vllm.v1.kv_cache_spec_state.HiSparseHotSpec": (f"{_KV_KINDS}.circular:HiSparseHotManager", None),
    "vllm.v1.kv_cache_spec_state.HiSparseResidentSpec": (
        f"{_KV_KINDS}.circular:HiSparseResidentManager",
        None,
    ),
}

ENTRY_POINT_GROUP = "vllm.kv_cache_kinds"

_T = TypeVar("_T", bound=type)


class RegisteredSpec(Protocol):
    """What the registry needs of a spec: the spec that stands for its kind (a uniform group names a member)."""

    @property
    def kind_spec(self) -> object: ...


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class KVCacheSpecRegistry:
    """Process-wide table spec class -> manager class. Lookups walk the method resolution order of the spec class."""

    _builtin = Registry(
        "KV cache kind",
        {name: manager for name, (manager, _) in _KINDS.items()},
        entry_point_group=ENTRY_POINT_GROUP,
    )
    _managers: dict[type, type | str] = {}
    _uniform_bases: dict[type, type] = {}
    _role_managers: dict[object, type | str] = {}

    @classmethod
    def register(
        cls, spec_cls: type, manager_class: type | str, uniform_type_base_spec: type | None = None
    ) -> None:
        """Serve `spec_cls` (and subclasses without an own entry) with `manager_class`, a class or "module:Class".

        `uniform_type_base_spec` is the type that specs of one uniform group must share; default: `spec_cls`.
        Registering a class again replaces its entry.
        """
        cls._managers[spec_cls] = manager_class
        cls._uniform_bases[spec_cls] = uniform_type_base_spec or spec_cls

    @classmethod
    def register_role_manager(cls, role: object, manager_class: type | str) -> None:
        """Serve every group of this `KVCacheGroupRole` with `manager_class`, whatever its spec."""
        cls._role_managers[role] = manager_class

    @classmethod
    def get_manager_reference(cls, spec: RegisteredSpec, role: object | None = None) -> type | str:
        """The manager as registered: a class, or "module:Class" not loaded yet. ValueError if unknown."""
        if role is not None and role in cls._role_managers:
            return cls._role_managers[role]
        for spec_cls in type(spec.kind_spec).__mro__:
            if spec_cls in cls._managers:
                return cls._managers[spec_cls]
            target = cls._builtin.find(_full_name(spec_cls))
            if target is not None:
                return target
        raise ValueError(f"No KV cache manager is registered for {type(spec.kind_spec).__name__}")

    @classmethod
    def get_manager_class(cls, spec: RegisteredSpec, role: object | None = None) -> type:
        """The manager class for `spec`; an entry for `role` wins. ValueError for an unregistered spec class."""
        manager = cls.get_manager_reference(spec, role)
        if isinstance(manager, type):
            return manager
        resolved = resolve_object(manager)
        if not isinstance(resolved, type):
            raise ValueError(f"KV cache manager {manager!r} of {type(spec).__name__} is not a class")
        return resolved

    @classmethod
    def get_uniform_type_base_spec(cls, spec: RegisteredSpec) -> type:
        """The spec type that all members of a uniform group with `spec` must share. ValueError if unknown."""
        mro = type(spec.kind_spec).__mro__
        for spec_cls in mro:
            if spec_cls in cls._uniform_bases:
                return cls._uniform_bases[spec_cls]
            name = _full_name(spec_cls)
            if name in _KINDS:
                base_name = _KINDS[name][1] or name
                return next(base for base in mro if _full_name(base) == base_name)
            if cls._builtin.find(name) is not None:
                return spec_cls
        raise ValueError(f"KV cache spec class {type(spec.kind_spec).__name__} is not registered")

    @classmethod
    def check_kv_cache_spec_registry(cls, kv_cache_spec: Mapping[str, RegisteredSpec]) -> None:
        """Raise ValueError naming the first layer whose spec class no manager is registered for."""
        for layer_name, spec in kv_cache_spec.items():
            try:
                cls.get_manager_reference(spec)
            except ValueError as error:
                raise ValueError(f"Layer {layer_name!r}: {error}") from None


def register_kv_cache_spec(
    manager_class: type | str, uniform_type_base_spec: type | None = None
) -> Callable[[_T], _T]:
    """Class decorator form of `KVCacheSpecRegistry.register`."""

    def decorate(spec_cls: _T) -> _T:
        KVCacheSpecRegistry.register(spec_cls, manager_class, uniform_type_base_spec)
        return spec_cls

    return decorate
