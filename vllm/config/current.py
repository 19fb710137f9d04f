"""The configuration in whose scope code runs, for constructors that are not handed one (model layers). Layer: L1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vllm.config.vllm import VllmConfig

_current: ContextVar[VllmConfig | None] = ContextVar("current_vllm_config", default=None)


@contextmanager
def set_current_vllm_config(vllm_config: VllmConfig) -> Iterator[None]:
    """Make `vllm_config` the current configuration inside the `with` block."""
    token = _current.set(vllm_config)
    try:
        yield
    finally:
        _current.reset(token)


def get_current_vllm_config() -> VllmConfig:
    """The configuration of the enclosing `set_current_vllm_config`; a default one outside of any."""
    return _current.get() or VllmConfig()
