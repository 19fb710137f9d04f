"""Bodies of `/kv_cache/lookup` and `/kv_cache/stats`. Layer: L8."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from vllm.entrypoints.openai.field_types import Objects, TokenIds
from vllm.exceptions import VLLMValidationError

PROMPT_FIELDS = ("prompt", "token_ids", "messages")


class AdapterChoice(BaseModel):
    """The adapter that a request would run with; cached content depends on name and path."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


class CacheLookupRequest(BaseModel):
    """A prompt as text, token ids or conversation.

    Further fields are those of `/v1/completions` or `/v1/chat/completions`: what shapes the prompt counts, the rest is
    ignored, so that the body of a request can be sent as it is.
    """

    model_config = ConfigDict(extra="allow")

    prompt: Any = None
    token_ids: TokenIds | None = None
    messages: Objects | None = None
    lora: AdapterChoice | str | None = None

    @model_validator(mode="after")
    def _check(self) -> CacheLookupRequest:
        given = [name for name in PROMPT_FIELDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise VLLMValidationError(
                f"exactly one of {', '.join(PROMPT_FIELDS)} must be given, got {', '.join(given) or 'none'}",
                parameter=given[-1] if given else "prompt",
            )
        return self

    def generation_fields(self) -> dict[str, Any]:
        """The fields that a generating endpoint would take, without the prompt."""
        return self.model_dump(exclude_unset=True, exclude={*PROMPT_FIELDS, "lora"})


class EngineLookup(BaseModel):
    """What one engine has of the prompt, in tokens.

    `cached_tokens_by_source`: what a request sent now would report; adds up to `cached_tokens`. `tokens_by_tier`: how
    long a usable prefix each tier holds by itself. `complete` False: a connector cannot tell, so that tiers are missing.
    """

    engine: int = 0
    cached_tokens: int
    cached_tokens_by_source: dict[str, int]
    tokens_by_tier: dict[str, int]
    complete: bool


class CacheLookupResponse(EngineLookup):
    """The engine that has most, and every engine."""

    model: str
    prompt_tokens: int
    engines: list[EngineLookup]


class CachePool(BaseModel):
    """One pool of blocks of one engine; `blocks_free + blocks_held = blocks_total`. Bytes count all ranks.

    `shared`: this is the engine's view of a pool that others of the node use too (do not add the views up).
    """

    engine: int
    tier: str
    medium: str
    blocks_total: int
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    entries_cached: int
    blocks_evicted: int
    block_bytes: int
    entries_protected: int = 0
    entries_protected_max: int = 0
    protections_refused: int = 0
    shared: bool = False


class CacheGroup(BaseModel):
    """One KV cache group. `use`: "cache", or "scratch" for memory that is never found again.

    `num_layers` own a cache in this group, `num_sharing_layers` read those without having one.
    """

    group: int
    kind: str
    spec: str
    block_size: int
    use: str
    sliding_window: int | None
    num_layers: int
    block_bytes: int
    num_sharing_layers: int = 0


class CacheTier(BaseModel):
    """Tokens asked of a tier and found there, since the start. `mode`: eager or lazy, for a tier that is copied to.

    `tokens_asked`, `tokens_hit` count each look-up that led to an admission; `tokens_reported` is the sum of what the
    `usage` of requests says.
    """

    tier: str
    mode: str | None = None
    tokens_asked: int
    tokens_hit: int
    tokens_reported: int = 0
    hit_rate: float | None


class CacheTransfers(BaseModel):
    """Copies in one direction: `blocks_scheduled = in_flight + done + failed + dropped`."""

    tier: str
    direction: str
    blocks_scheduled: int
    blocks_in_flight: int
    blocks_done: int
    blocks_failed: int
    blocks_dropped: int
    bytes_done: int


class CacheRequests(BaseModel):
    """Requests now; `admitted` since the start, without those that come back after a preemption."""

    running: int
    waiting: int
    loading: int
    admitted: int


class CacheStats(BaseModel):
    """The KV cache of all engines; pools are listed per engine, everything else is added up."""

    engines: int
    prefix_caching: bool
    block_size: int
    pools: list[CachePool]
    tiers: list[CacheTier]
    groups: list[CacheGroup]
    transfers: list[CacheTransfers]
    pending_store_blocks: int
    requests: CacheRequests
