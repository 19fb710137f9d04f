"""A step while it is planned, and the `SchedulerOutput` made of it.

Owns the accumulators of one pass.  Must not decide anything.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.budget import StepBudget
from vllm.v1.core.sched.output import (
    BlockIds,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.request import Request


class StepPlan:
    """What one pass has decided so far.

    ``may_fill``: running requests of which this step may fill a block.  ``new_blocks``: what running requests got.
    """

    __slots__ = (
        "admitted",
        "budget",
        "cap",
        "carries_prefill",
        "hold_prefills",
        "may_fill",
        "new_blocks",
        "num_scheduled",
        "preempted",
        "resumed_ids",
        "running",
        "spec_tokens",
        "starved",
        "sync_loads",
    )

    def __init__(self, budget: StepBudget, cap: int, hold_prefills: bool) -> None:
        self.budget = budget
        self.cap = cap
        self.hold_prefills = hold_prefills
        self.num_scheduled: dict[str, int] = {}
        self.running: list[Request] = []
        self.new_blocks: dict[str, KVCacheBlocks] = {}
        self.may_fill: list[Request] = []
        self.admitted: list[Request] = []
        self.resumed_ids: set[str] = set()
        self.spec_tokens: dict[str, list[int]] = {}
        self.preempted = False
        self.starved = False
        self.sync_loads: dict[str, int] = {}
        self.carries_prefill = False

    def add_running(self, request: Request, num_tokens: int, blocks: KVCacheBlocks) -> None:
        """A running request goes on with ``num_tokens`` tokens and these additional blocks."""
        self.running.append(request)
        self.may_fill.append(request)
        self.new_blocks[request.request_id] = blocks
        self.num_scheduled[request.request_id] = num_tokens
        self.budget.spend(num_tokens)

    def remove_running(self, request: Request) -> None:
        """Undo :meth:`add_running` where it happened in this pass."""
        num_tokens = self.num_scheduled.pop(request.request_id, None)
        if num_tokens is None:
            return
        self.running.remove(request)
        self.new_blocks.pop(request.request_id, None)
        self.spec_tokens.pop(request.request_id, None)
        self.budget.refund(num_tokens)

    def add_admitted(self, request: Request, num_tokens: int, resumed: bool) -> None:
        """A waiting request starts, or starts again, with ``num_tokens`` tokens."""
        self.admitted.append(request)
        if resumed:
            self.resumed_ids.add(request.request_id)
        self.num_scheduled[request.request_id] = num_tokens
        self.budget.spend(num_tokens)

    def resend(self, request: Request) -> None:
        """Have a running request sent in full."""
        self.running.remove(request)
        self.new_blocks.pop(request.request_id, None)
        self.admitted.append(request)
        self.resumed_ids.add(request.request_id)


class OutputStyle:
    """Which form of request data the workers expect."""

    __slots__ = ("new_token_ids", "resend_as_new")

    def __init__(self, resend_as_new: bool, new_token_ids: bool) -> None:
        self.resend_as_new = resend_as_new
        self.new_token_ids = new_token_ids


def new_request_data(plan: StepPlan, manager: KVCacheManager, style: OutputStyle) -> list[NewRequestData]:
    """The requests that the workers get in full."""
    return [
        NewRequestData.from_request(
            request,
            manager.get_block_ids(request.request_id),
            request._all_token_ids.copy() if style.resend_as_new else None,
        )
        for request in plan.admitted
        if style.resend_as_new or request.request_id not in plan.resumed_ids
    ]


def cached_request_data(
    plan: StepPlan, manager: KVCacheManager, style: OutputStyle, previous_ids: set[str]
) -> CachedRequestData:
    """The requests that the workers know.  ``previous_ids`` took part in the previous step."""
    requests = plan.running
    new_block_ids: list[BlockIds | None] = [None] * len(requests)
    if plan.new_blocks:
        for index, request in enumerate(requests):
            blocks = plan.new_blocks.get(request.request_id)
            if blocks is not None:
                new_block_ids[index] = blocks.get_block_ids(allow_none=True)
    resumed: list[Request] = []
    if not style.resend_as_new and plan.resumed_ids:
        resumed = [request for request in plan.admitted if request.request_id in plan.resumed_ids]
        requests = requests + resumed
        new_block_ids += [manager.get_block_ids(request.request_id) for request in resumed]
    new_token_ids: list[list[int]] = []
    if style.new_token_ids:
        for request in requests:
            start = request.num_computed_tokens
            new_token_ids.append(
                request._all_token_ids[start : start + plan.num_scheduled[request.request_id]]
            )
    all_token_ids: dict[str, list[int]] = {}
    if not style.resend_as_new:
        all_token_ids = {
            request.request_id: request._all_token_ids.copy()
            for request in requests
            if request.request_id not in previous_ids
        }
    return CachedRequestData(
        req_ids=[request.request_id for request in requests],
        resumed_req_ids={request.request_id for request in resumed},
        new_token_ids=new_token_ids,
        all_token_ids=all_token_ids,
        new_block_ids=new_block_ids,
        num_computed_tokens=[request.num_computed_tokens for request in requests],
        # Sampled tokens without an id yet count as well: the worker has them.
        num_output_tokens=[
            len(request._output_token_ids) + request.num_output_placeholders for request in requests
        ],
    )


def build_output(
    plan: StepPlan, manager: KVCacheManager, style: OutputStyle, previous_ids: set[str]
) -> SchedulerOutput:
    """The output of the pass, without connector metadata.  Call it before the counters advance."""
    num_scheduled = plan.num_scheduled
    return SchedulerOutput(
        scheduled_new_reqs=new_request_data(plan, manager, style) if plan.admitted else [],
        scheduled_cached_reqs=cached_request_data(plan, manager, style, previous_ids),
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        scheduled_spec_decode_tokens=plan.spec_tokens,
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        has_sync_kv_loads=bool(plan.sync_loads),
        kv_cache_block_copies=[(copy[0], copy[1]) for copy in manager.take_kv_cache_block_copies()] or None,
    )
