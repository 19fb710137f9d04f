"""Constrained generation: which library, which defaults. Layer: L1."""

from __future__ import annotations

from typing import Literal

from vllm.config.setting import HIDDEN, Flag, config, setting


@config
class StructuredOutputsConfig:
    """Defaults of structured outputs (`--structured-outputs-config`)."""

    backend: Literal["auto", "guidance"] = setting(
        default="auto", doc="Grammar library; llguidance (guidance) is the one that is built in.", flag=HIDDEN
    )
    disable_any_whitespace: bool = setting(default=False, doc="No free white space in JSON.", flag=HIDDEN)
    disable_additional_properties: bool = setting(
        default=False, doc="JSON objects hold the listed properties only.", flag=HIDDEN
    )
    reasoning_parser: str = setting(
        default="", doc="Parser that separates reasoning from the answer.", flag=Flag(name="reasoning_parser")
    )
