"""`/kv_cache/lookup`, `/kv_cache/stats`, and in development mode the page `/cache` that draws them. Layer: L8."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from vllm.entrypoints.openai.bodies import ControlRoute
from vllm.entrypoints.openai.kv_cache.protocol import CacheLookupRequest
from vllm.entrypoints.openai.kv_cache.serving import lookup, stats
from vllm.entrypoints.openai.replies import reply
from vllm.entrypoints.openai.state import serving

router = APIRouter(route_class=ControlRoute)
page_router = APIRouter()
# The page asks nobody but the server that it came from.
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@router.post("/kv_cache/lookup")
async def post_lookup(request: CacheLookupRequest, raw_request: Request) -> Response:
    """How much of a prompt is cached on which tier, without running it and without a trace in the cache."""
    return await reply(lookup(request, serving(raw_request)), raw_request)


@router.get("/kv_cache/lookup")
async def get_lookup(
    raw_request: Request, prompt: str, model: str | None = None, cache_salt: str | None = None
) -> Response:
    """The same for a text in the query."""
    fields = {"prompt": prompt, "model": model, "cache_salt": cache_salt}
    given = {name: value for name, value in fields.items() if value is not None}
    request = CacheLookupRequest.model_validate(given)
    return await reply(lookup(request, serving(raw_request)), raw_request)


@router.get("/kv_cache/stats")
async def get_stats(raw_request: Request) -> Response:
    """Pools, tiers, groups, hit rates and transfers."""
    return await reply(stats(serving(raw_request)), raw_request)


@page_router.get("/cache")
async def cache_page() -> Response:
    """A page that draws `/kv_cache/stats` live."""
    return HTMLResponse(_page(), headers={"Content-Security-Policy": PAGE_POLICY})


@cache
def _page() -> str:
    return files(__package__).joinpath("cache.html").read_text(encoding="utf-8")
