"""Per-forward metadata for code that is called inside a forward pass without having it as an argument.

Owns: the one current `ForwardContext` and the context manager that sets it; nesting is an error.
Must not know: models, runners, how metadata is built. Layer L6.

Our own models receive `StepMeta` as an argument and never read this. It exists for KV connectors, whose worker half
is handed the context of the pass (`start_load_kv(forward_context)`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "ForwardContext",
    "get_forward_context",
    "is_forward_context_available",
    "override_forward_context",
    "set_forward_context",
]


@dataclass
class ForwardContext:
    """State of one forward pass. `no_compile_layers` maps cache names to the layers that own them."""

    no_compile_layers: dict[str, Any]
    attn_metadata: Any
    slot_mapping: Any = None
    virtual_engine: int = 0
    dp_metadata: Any = None
    batch_descriptor: Any = None
    skip_compiled: bool = False
    additional_kwargs: dict[str, Any] = field(default_factory=dict)


_current: ForwardContext | None = None


def get_forward_context() -> ForwardContext:
    """The context of the running pass; `AssertionError` outside of one."""
    if _current is None:
        raise AssertionError("no forward context is set; wrap the forward pass in set_forward_context(...)")
    return _current


def is_forward_context_available() -> bool:
    """Whether a pass is running."""
    return _current is not None


@contextmanager
def override_forward_context(context: ForwardContext | None) -> Iterator[None]:
    """Replaces the current context for the block, also inside a running pass."""
    global _current
    previous = _current
    _current = context
    try:
        yield
    finally:
        _current = previous


@contextmanager
def set_forward_context(
    attn_metadata: Any,
    vllm_config: Any,
    num_tokens: int | None = None,
    *,
    slot_mapping: Any = None,
    **extra: Any,
) -> Iterator[None]:
    """Sets the context of one forward pass; a second one inside it is a programming error.

    The layers come from `vllm_config.compilation_config.static_forward_context` where the caller's config has one.
    Unknown keywords are kept in `additional_kwargs`, so that callers with wider needs still work.
    """
    if _current is not None:
        raise AssertionError("set_forward_context must not be nested")
    # The config may be None or any record (a public convention), hence the tolerant reads.
    compilation = getattr(vllm_config, "compilation_config", None)
    layers = getattr(compilation, "static_forward_context", None) or {}
    kwargs = dict(extra)
    if num_tokens is not None:
        kwargs["num_tokens"] = num_tokens
    context = ForwardContext(layers, attn_metadata, slot_mapping, additional_kwargs=kwargs)
    with override_forward_context(context):
        yield
