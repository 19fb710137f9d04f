"""What a waiting request finds in the caches, and whether it may be tried now.

Owns the look-up before an admission.  It changes no queue, no block and no request; the scheduler applies what is
decided here.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.params import LOAD_ATTEMPTS_MAX, CacheShape
from vllm.v1.kv_cache_report import CacheLookup, ExternalHit
from vllm.v1.metrics.cache_hit_source import CacheHitSource, limit_by_source
from vllm.v1.request import Request, RequestStatus

AskConnector = Callable[[Request, int], tuple[int | None, bool]]
"""(request, local tokens) → (external tokens behind them, whether they load asynchronously)."""


class Verdict(Enum):
    """Outcome of trying a waiting request."""

    ADMITTED = auto()
    LOADING = auto()
    """Its external KV is being loaded; it waits with its blocks."""
    SKIP = auto()
    """Cannot be tried now, through no fault of memory; others may go ahead."""
    MISFIT = auto()
    """There is not enough memory for it now."""
    STOP = auto()
    """Nothing can be admitted any more in this pass."""
    ENDED = auto()
    """It failed and has left the queues."""


@dataclass(slots=True)
class Hit:
    """Cached tokens of a request.

    ``blocks`` are the local ones and are not held yet.  ``num_computed`` is where computing starts: the hit, less the
    window that has to be replayed.  ``load_async``: the external part arrives later, so the request has to wait.
    """

    blocks: KVCacheBlocks
    num_local: int = 0
    num_external: int = 0
    load_async: bool = False
    num_computed: int = 0
    replay_start: int = 0
    shared_prefix_boundary: int = 0

    @property
    def num_cached(self) -> int:
        """Local and external tokens."""
        return self.num_local + self.num_external


@dataclass(frozen=True, slots=True)
class LookupContext:
    """Where to look.  ``block_size`` is the scheduler's block in tokens."""

    manager: KVCacheManager
    connector: KVConnectorBase_V1 | None
    block_size: int
    cache: CacheShape


def is_blocked(request: Request) -> bool:
    """True while the request waits for something that no pass can give it.

    Sampled tokens still under way when it was preempted belong to its prompt now, so their ids have to be known.
    """
    if request.num_stale_output_tokens > 0:
        return True
    return request.status in (
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
    )


def no_hit(context: LookupContext) -> Hit:
    """The answer of an empty cache."""
    return Hit(context.manager.empty_kv_cache_blocks)


def look_up(request: Request, context: LookupContext) -> Hit | None:
    """The longest usable hit over all tiers; None if the connector wants to be asked again later.

    At least one token is left to compute, and computing starts where every group can start.
    """
    connector = context.connector
    return _look_up(request, context, None if connector is None else connector.get_num_new_matched_tokens)


def _look_up(request: Request, context: LookupContext, ask: AskConnector | None) -> Hit | None:
    blocks, num_local, boundary = context.manager.get_computed_blocks(request)
    hit = Hit(blocks, num_local=num_local, shared_prefix_boundary=boundary)
    if ask is not None and _may_ask(request):
        answer = _ask_connector(request, hit, context, ask)
        if answer is None:
            return None
        hit = answer
    return _after_replay(hit, context)


def peek(request: Request, context: LookupContext) -> CacheLookup:
    """What `look_up` would find now for this request, which nobody else knows. Holds, counts and promises nothing."""
    connector = context.connector
    found = ExternalHit({}, {}, False)

    def ask(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        nonlocal found
        assert connector is not None
        found = connector.peek_matched_tokens(request, num_computed_tokens) or found
        return found.num_tokens, found.loads_async

    hit = _look_up(request, context, None if connector is None else ask) or no_hit(context)
    on_device = context.manager.get_computed_blocks(request)[1]
    below = None if connector is None else connector.peek_matched_tokens(request, 0)
    return CacheLookup(
        prompt_tokens=request.num_tokens,
        cached_tokens=hit.num_cached,
        cached_tokens_by_source={
            CacheHitSource.DEVICE: hit.num_local,
            **limit_by_source(found.offered, hit.num_external),
        },
        tokens_by_tier={CacheHitSource.DEVICE: on_device, **({} if below is None else below.held)},
        complete=connector is None or below is not None,
    )


def _may_ask(request: Request) -> bool:
    return not request.skip_reading_prefix_cache and request.num_load_failures < LOAD_ATTEMPTS_MAX


def _ask_connector(request: Request, hit: Hit, context: LookupContext, ask: AskConnector) -> Hit | None:
    aligned = hit.num_local // context.block_size * context.block_size
    num_external, load_async = ask(request, aligned)
    if num_external is None:
        return None
    num_external = _limit_external(request, aligned, num_external, load_async, context)
    # A local tail inside a scheduler block and a load cannot be combined: the longer one wins.
    if num_external <= hit.num_local - aligned:
        return hit
    if aligned < hit.num_local:
        hit.blocks = context.manager.truncate_computed_blocks(hit.blocks, aligned)
        hit.num_local = aligned
    hit.num_external, hit.load_async = num_external, load_async
    return hit


def _limit_external(
    request: Request, num_local: int, num_external: int, load_async: bool, context: LookupContext
) -> int:
    """Accept no more than leaves a token to compute from a position where computing can start.

    An asynchronous load may cover the whole prompt where any position will do: its last token is given back when
    the load has ended.
    """
    cache = context.cache
    limit = request.num_tokens
    if not load_async or cache.restart_alignment > 1:
        limit = cache.restart_position(limit - 1)
    num_external = max(0, min(num_external, limit - num_local))
    if cache.replay_tokens:
        num_external -= num_external % context.block_size
    return num_external


def _after_replay(hit: Hit, context: LookupContext) -> Hit:
    """Start early enough to recompute a window that no cache keeps; a hit inside that window is worth nothing."""
    replay = context.cache.replay_tokens
    hit.num_computed = hit.num_cached
    if replay == 0 or hit.num_cached == 0:
        return hit
    if hit.num_cached <= replay:
        nothing = no_hit(context)
        nothing.shared_prefix_boundary = hit.shared_prefix_boundary
        return nothing
    if not hit.load_async:
        hit.num_computed = hit.replay_start = hit.num_cached - replay
    return hit
