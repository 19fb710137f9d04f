"""Weight files → a ready model. Skeleton; see the functions below."""

from __future__ import annotations

from typing import Any

__all__ = ["get_model"]


def get_model(vllm_config: Any) -> Any:
    """Builds the model class of `vllm_config.model_config` and fills it by `load_config.load_format`."""
    raise RuntimeError("loading is being written")
