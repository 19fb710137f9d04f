"""Prompt types of the public interface."""

from vllm.inputs.engine import EmbedsInput, embeds_input
from vllm.inputs.prompts import (
    EmbedsPrompt,
    PromptType,
    SingletonPrompt,
    TextPrompt,
    TokensPrompt,
)

__all__ = [
    "EmbedsInput",
    "EmbedsPrompt",
    "PromptType",
    "SingletonPrompt",
    "TextPrompt",
    "TokensPrompt",
    "embeds_input",
]
