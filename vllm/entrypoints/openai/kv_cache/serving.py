"""What prompts would find in the KV cache, and what the cache holds and did. Layer: L8.

Owns the rendering of look-ups (as the generating endpoints render) and how several engines become one answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.kv_cache.protocol import (
    AdapterChoice,
    CacheLookupRequest,
    CacheLookupResponse,
    CachePool,
    CacheRequests,
    CacheStats,
    CacheTier,
    CacheTransfers,
    EngineLookup,
)
from vllm.entrypoints.openai.render import RenderedPrompt
from vllm.entrypoints.openai.serving_base import truncation_of
from vllm.entrypoints.openai.state import ServingState
from vllm.exceptions import VLLMNotImplementedError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.metrics.cache_hit_source import CacheHitSource

Report = Mapping[str, Any]
CANNOT_TELL = "the engine's scheduler cannot look into its cache"


async def lookup(body: CacheLookupRequest, state: ServingState) -> CacheLookupResponse:
    """How much of the prompt is cached where, without running it. Raises what the generating endpoint would raise."""
    if state.engine_client.errored:
        raise state.engine_client.dead_error
    rendered, salt = await _render(body, state)
    prompt = {"prompt_token_ids": rendered.token_ids}
    try:
        answers = await state.engine_client.lookup_kv_cache(
            prompt, cache_salt=salt, lora_request=_adapter(body.lora)
        )
    except VLLMValidationError as error:
        raise _by_given_name(error, body) from None
    engines = [EngineLookup(engine=i, **answer) for i, answer in enumerate(answers) if answer is not None]
    if not engines:
        raise VLLMNotImplementedError(CANNOT_TELL)
    best = max(engines, key=lambda engine: engine.cached_tokens)
    return CacheLookupResponse(
        model=state.models.model_name(),
        prompt_tokens=len(rendered.token_ids),
        engines=engines,
        **best.model_dump(),
    )


async def _render(body: CacheLookupRequest, state: ServingState) -> tuple[RenderedPrompt, str | None]:
    """Token ids as the generating endpoint would see them, and the salt."""
    fields = body.generation_fields()
    if body.messages is not None:
        chat = ChatCompletionRequest.model_validate({**fields, "messages": body.messages})
        state.models.check_model(chat.model)
        return await state.chat.render(chat), chat.cache_salt
    prompt = body.prompt if body.token_ids is None else body.token_ids
    completion = CompletionRequest.model_validate({**fields, "prompt": prompt})
    state.models.check_model(completion.model)
    prompts = completion.prompts()
    if len(prompts) != 1:
        raise VLLMValidationError(f"one prompt can be looked up, got {len(prompts)}", parameter="prompt")
    rendered = await state.renderer.render_prompt(
        prompts[0], completion.add_special_tokens, truncation_of(completion)
    )
    return rendered, completion.cache_salt


def _by_given_name(error: VLLMValidationError, body: CacheLookupRequest) -> VLLMValidationError:
    """The engine's complaint with the names that the body has for its arguments."""
    names = {"lora_request": "lora"} | ({"prompt": "token_ids"} if body.token_ids is not None else {})
    given = names.get(error.parameter or "", error.parameter)
    message = error.message.replace("lora_request", "lora") if given == "lora" else error.message
    return VLLMValidationError(message, parameter=given, value=error.value)


def _adapter(choice: AdapterChoice | str | None) -> LoRARequest | None:
    if choice is None:
        return None
    if isinstance(choice, str):
        choice = AdapterChoice(lora_name=choice)
    try:
        return LoRARequest(**choice.model_dump())
    except ValueError as error:
        raise VLLMValidationError(f"lora: {error}", parameter="lora") from None


async def stats(state: ServingState) -> CacheStats:
    """The KV cache of all engines, from counters. Raises VLLMNotImplementedError where no engine can tell."""
    reports = await state.engine_client.get_kv_cache_reports()
    transfer = state.engine_client.vllm_config.kv_transfer_config
    is_shared = transfer is not None and transfer.has_option("shared_pool")
    return join_reports(
        [report for report in reports if report is not None], [CacheHitSource.HOST] if is_shared else ()
    )


def join_reports(reports: Sequence[Report], shared_tiers: Collection[str] = ()) -> CacheStats:
    """The reports of all engines, in order, as one. Engines of one server have the same groups and tiers."""
    if not reports:
        raise VLLMNotImplementedError(CANNOT_TELL)
    first = reports[0]
    return CacheStats(
        engines=len(reports),
        prefix_caching=first["prefix_caching"],
        block_size=first["block_size"],
        pools=[
            CachePool(engine=i, **pool, shared=pool["tier"] in shared_tiers)
            for i, report in enumerate(reports)
            for pool in report["pools"]
        ],
        tiers=[_tier(hits, first["modes"].get(hits["tier"])) for hits in _added(reports, "hits", ("tier",))],
        groups=first["groups"],
        transfers=[
            CacheTransfers(**transfer) for transfer in _added(reports, "transfers", ("tier", "direction"))
        ],
        pending_store_blocks=sum(report["pending_store_blocks"] for report in reports),
        requests=CacheRequests(
            **{name: sum(report["requests"][name] for report in reports) for name in first["requests"]}
        ),
    )


def _tier(hits: Report, mode: str | None) -> CacheTier:
    asked, hit = hits["tokens_asked"], hits["tokens_hit"]
    return CacheTier(mode=mode, hit_rate=hit / asked if asked else None, **hits)


def _added(reports: Sequence[Report], field: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """The entries of all reports, added up where their names agree."""
    total: dict[tuple[str, ...], dict[str, Any]] = {}
    for report in reports:
        for entry in report[field]:
            key = tuple(entry[name] for name in names)
            present = total.get(key)
            if present is None:
                total[key] = dict(entry)
                continue
            for name, value in entry.items():
                if name not in names:
                    present[name] += value
    return list(total.values())
