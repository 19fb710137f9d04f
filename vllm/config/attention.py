"""Choice of the attention implementation. Layer: L1."""

from __future__ import annotations

from typing import Any

from vllm.config.setting import HIDDEN, Flag, config, setting


@config
class AttentionConfig:
    """Attention backend and its options."""

    # A registered name, or an enum member of the backend registry.
    backend: Any = setting(
        default=None,
        doc="Attention backend; the platform's when not given.",
        flag=Flag(name="attention_backend"),
    )
    # Options of the sparse host-resident cache; read by the KV planner.
    hisparse_config: Any = setting(default=None, doc="Host-resident sparse KV cache.", flag=HIDDEN)
