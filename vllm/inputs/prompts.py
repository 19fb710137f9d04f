"""The forms in which a caller may give a prompt. Layer: L1."""

from __future__ import annotations

from typing import Any, NotRequired, TypeAlias, TypedDict


class _PromptOptions(TypedDict):
    """What every form of prompt may carry."""

    # Text mixed into the first block's hash, so that only prompts with the same salt share cached blocks.
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]


class TextPrompt(_PromptOptions):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt as token ids; `prompt` is the text they came from, if known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings: a tensor [tokens, hidden size]."""

    # A torch.Tensor: this layer only passes it on.
    prompt_embeds: Any
    prompt_token_ids: NotRequired[list[int]]
    cache_salt: NotRequired[str]


SingletonPrompt: TypeAlias = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
PromptType: TypeAlias = SingletonPrompt
