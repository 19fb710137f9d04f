"""Token counts of replies, and how streams add them up. Layer: L8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from vllm.outputs import RequestOutput


class PromptTokensDetails(BaseModel):
    """What became of the prompt tokens. `cached_tokens_by_source` adds up to `cached_tokens`."""

    cached_tokens: int | None = None
    cached_tokens_by_source: dict[str, int] | None = None
    created_cache_tokens: int | None = None
    multimodal_tokens: dict[str, int] | None = None


class CompletionTokensDetails(BaseModel):
    """What the generated tokens are."""

    reasoning_tokens: int = 0


class UsageInfo(BaseModel):
    """Token counts of one reply."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


@dataclass
class UsageCounter:
    """Adds up the tokens of all prompts and samples of one HTTP request, as their outputs arrive.

    `with_details`: report cached tokens (`--enable-prompt-tokens-details`).
    """

    with_details: bool = False
    reasoning_tokens: int | None = None
    _prompt: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _by_source: dict[int, dict[str, int]] = field(default_factory=dict)
    _created: dict[int, int] = field(default_factory=dict)
    _generated: dict[tuple[int, int], int] = field(default_factory=dict)

    def see_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        """Note what an output says about its prompt."""
        if output.prompt_token_ids is not None:
            self._prompt[prompt_index] = len(output.prompt_token_ids)
        if output.num_cached_tokens is not None:
            self._cached.setdefault(prompt_index, output.num_cached_tokens)
        if output.cached_tokens_by_source is not None:
            self._by_source.setdefault(prompt_index, output.cached_tokens_by_source)
        if output.num_cache_creation_tokens is not None:
            self._created.setdefault(prompt_index, output.num_cache_creation_tokens)

    def set_prompt_length(self, prompt_index: int, tokens: int) -> None:
        """Note a prompt's length before its first output."""
        self._prompt[prompt_index] = tokens

    def add_generated(self, prompt_index: int, sample: int, tokens: int) -> None:
        """Note new tokens of one sample."""
        key = (prompt_index, sample)
        self._generated[key] = self._generated.get(key, 0) + tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, over all samples."""
        return sum(self._generated.values())

    def usage(self) -> UsageInfo:
        """The counts as they stand."""
        prompt, completion = sum(self._prompt.values()), self.completion_tokens
        info = UsageInfo(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
        if self.with_details:
            info.prompt_tokens_details = details = PromptTokensDetails(
                cached_tokens=sum(self._cached.values())
            )
            if self._by_source:
                details.cached_tokens_by_source = summed(self._by_source.values())
            if self._created:
                details.created_cache_tokens = sum(self._created.values())
        if self.reasoning_tokens is not None:
            info.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=self.reasoning_tokens)
        return info


def summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts added up by name."""
    total: dict[str, int] = {}
    for part in parts:
        for name, tokens in part.items():
            total[name] = total.get(name, 0) + tokens
    return total


def joined_details(parts: Iterable[UsageInfo]) -> PromptTokensDetails | None:
    """The details of several replies as one; None if they have none."""
    details = [part.prompt_tokens_details for part in parts if part.prompt_tokens_details is not None]
    if not details:
        return None
    created = [d.created_cache_tokens for d in details if d.created_cache_tokens is not None]
    by_source = [d.cached_tokens_by_source for d in details if d.cached_tokens_by_source is not None]
    return PromptTokensDetails(
        cached_tokens=sum(d.cached_tokens or 0 for d in details),
        cached_tokens_by_source=summed(by_source) if by_source else None,
        created_cache_tokens=sum(created) if created else None,
    )
