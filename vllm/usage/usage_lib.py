"""How the engine is being used. Chooses defaults only; nothing is ever reported to anyone. Layer: L1."""

from __future__ import annotations

from enum import StrEnum


class UsageContext(StrEnum):
    """The kind of program around the engine."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
