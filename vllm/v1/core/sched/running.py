"""Running requests: how many tokens each wants, and who has to give way.

Owns decisions only; the scheduler applies them.  Must not know waiting requests.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request


def tokens_wanted(request: Request, max_model_len: int, reserve: int) -> int:
    """Tokens until the request has caught up with what is known of it; at most up to the model's length.

    ``reserve`` is 1 where a sampled token follows, 0 for pooling.
    """
    computed = request.num_computed_tokens
    wanted = request.num_tokens_with_spec + request.num_output_placeholders - computed
    return min(wanted, max_model_len - computed - reserve)


def is_certain_to_finish(request: Request, max_model_len: int, num_spec_tokens: int) -> bool:
    """True if the tokens in flight bring the request to its length limit, so that nothing more is needed."""
    placeholders = request.num_output_placeholders
    if placeholders == 0:
        return False
    # Drafts may be refused: each step in flight brings at least one token, and only that is certain.
    certain = cdiv(placeholders, 1 + num_spec_tokens)
    return (
        request.num_output_tokens + certain >= request.max_tokens
        or request.num_tokens + certain >= max_model_len
    )


def choose_victim(
    running: Sequence[Request], policy: SchedulingPolicy, fenced: frozenset[str]
) -> Request | None:
    """Who is preempted next: the last one, or the least important one.

    Requests in ``fenced`` would give nothing back in this pass and are spared.
    """
    candidates = [request for request in running if request.request_id not in fenced]
    if not candidates:
        return None
    if policy is SchedulingPolicy.PRIORITY:
        # The order of the queue to the last tie: samples of one prompt arrive at the same moment, and would else take
        # turns in preempting one another for ever.
        return max(candidates)
    return candidates[-1]


def blocks_missing(manager: KVCacheManager, request: Request, num_tokens: int) -> int:
    """Blocks the request has to get until ``num_tokens`` of its tokens have a slot."""
    return _need(manager, request.request_id, num_tokens, request.num_computed_tokens)


def blocks_between(manager: KVCacheManager, request: Request, start: int, end: int) -> int:
    """Blocks that a request without any needs for ``end`` tokens beyond those for the first ``start``."""
    request_id = request.request_id
    return max(0, _need(manager, request_id, end, start) - _need(manager, request_id, start, start))


def _need(manager: KVCacheManager, request_id: str, num_tokens: int, num_computed: int) -> int:
    nothing = manager.empty_kv_cache_blocks.blocks
    return manager.coordinator.get_num_blocks_to_allocate(
        request_id, num_tokens, nothing, 0, num_computed, num_computed, num_tokens, apply_admission_cap=True
    )
