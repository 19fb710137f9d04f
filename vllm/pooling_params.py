"""Parameters of pooling requests; here a record of the interface, as this engine serves generation. Layer: L1."""

from __future__ import annotations

from typing import Any

import msgspec


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """What a pooling request asks for."""

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool | None = None
    # Options for plugins: any JSON values.
    extra_kwargs: dict[str, Any] | None = None

    def clone(self) -> PoolingParams:
        """A copy that can be changed independently."""
        return msgspec.structs.replace(self)
