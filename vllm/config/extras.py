"""Records of the public interface for parts that this engine does not run: encoder transfer, diffusion, reasoning. Layer: L1.

They hold values for outside code; `config/vllm.py` refuses to start with one of the first two.
"""

from __future__ import annotations

from typing import Any

from vllm.config.setting import config, setting


@config
class ECTransferConfig:
    """Transfer of encoder caches between engines."""

    ec_connector: str | None = setting(default=None, doc="Connector name.")
    ec_role: str | None = setting(default=None, doc="Side this engine takes.")
    # Connector specific.
    ec_connector_extra_config: dict[str, Any] = setting(default_factory=dict, doc="Options of the connector.")


@config
class DiffusionConfig:
    """Block-wise diffusion decoding."""

    canvas_length: int | None = setting(default=None, doc="Tokens generated together.")


@config
class ReasoningConfig:
    """Markers of the reasoning part of an answer."""

    reasoning_parser: str = setting(default="", doc="Parser name.")
    think_start_str: str | None = setting(default=None, doc="Text that opens the reasoning part.")
    think_end_str: str | None = setting(default=None, doc="Text that closes the reasoning part.")
