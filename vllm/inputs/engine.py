"""Prompts as the engine takes them, after tokenisation. Layer: L1."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class EmbedsInput(TypedDict):
    """A prompt as embeddings, together with what is known of its token ids."""

    type: Literal["embeds"]
    # A torch.Tensor [tokens, hidden size] and a list of flags: this layer only passes them on.
    prompt_embeds: Any
    prompt_token_ids: NotRequired[list[int]]
    is_token_ids: NotRequired[Any]
    cache_salt: NotRequired[str]


def embeds_input(
    embeds: Any, *, prompt_token_ids: list[int] | None = None, is_token_ids: Any | None = None
) -> EmbedsInput:
    """A prompt of embeddings; `is_token_ids[i]` tells that position i is an ordinary token of `prompt_token_ids`."""
    result: EmbedsInput = {"type": "embeds", "prompt_embeds": embeds}
    if prompt_token_ids is not None:
        result["prompt_token_ids"] = prompt_token_ids
    if is_token_ids is not None:
        result["is_token_ids"] = is_token_ids
    return result
