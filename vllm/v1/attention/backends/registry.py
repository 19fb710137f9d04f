"""Table of attention backends: name → "module:Class", imported when chosen.

Owns: the table. Must not know: a backend's insides, platforms. Layer L6.
"""

from __future__ import annotations

from enum import Enum
from typing import cast

from vllm.utils.registry import resolve_object
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.compute import ComputeBackend

__all__ = ["AttentionBackendEnum", "get_attention_backend", "get_compute_backend", "register_backend"]

_BACKENDS = "vllm.v1.attention.backends"


class AttentionBackendEnum(Enum):
    """Names of the built-in backends; the value is where the class lives."""

    TORCH_REF = f"{_BACKENDS}.torch_ref:TorchRefBackend"
    CPU_ATTN = f"{_BACKENDS}.cpu_attn:CpuAttentionBackend"
    KPOOL_TAIL = f"{_BACKENDS}.mla.indexer:KpoolTailBackend"


_TABLE: dict[str, str] = {member.name: member.value for member in AttentionBackendEnum}


def register_backend(name: str, target: str) -> None:
    """Adds or replaces a backend; `target` is "module:Class"."""
    if target.count(":") != 1:
        raise ValueError(f"attention backend {name!r}: target must be 'module:Class', got {target!r}")
    _TABLE[name.upper()] = target


def get_attention_backend(name: str) -> type[AttentionBackend]:
    """The class behind a name in any case; `ValueError` names the known ones."""
    target = _TABLE.get(name.upper())
    if target is None:
        raise ValueError(f"attention backend {name!r} is unknown; known: {', '.join(sorted(_TABLE))}")
    return cast("type[AttentionBackend]", resolve_object(target))


def get_compute_backend(choice: str | AttentionBackendEnum | None) -> type[ComputeBackend]:
    """The backend that the models' attention layers call; None means the platform's own (CPU_ATTN).

    `ValueError` for an unknown name and for a backend that only stores.
    """
    if choice is None:
        choice = AttentionBackendEnum.CPU_ATTN
    name = choice.name if isinstance(choice, AttentionBackendEnum) else str(choice)
    backend = get_attention_backend(name)
    if not issubclass(backend, ComputeBackend):
        raise ValueError(
            f"attention_backend {name!r} only stores rows; models need one that computes attention"
        )
    return backend
