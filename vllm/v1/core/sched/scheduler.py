"""The scheduling pass: loads that ended, running requests, waiting requests, orders to the workers.

Owns the loop, and is the only place that applies the decisions of a pass.  Must not know what a step returns.
Layer: L5 (scheduler).
"""

from __future__ import annotations

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.sched import connector_calls
from vllm.v1.core.sched.budget import StepBudget
from vllm.v1.core.sched.chunking import fit_chunk, long_prefill_cap
from vllm.v1.core.sched.in_flight import StepRecord
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.remote_wait import COMPLETED_WAITING, LoadEnd, start_after_load
from vllm.v1.core.sched.results import LOAD_FAILED
from vllm.v1.core.sched.running import choose_victim, is_certain_to_finish, tokens_wanted
from vllm.v1.core.sched.step_output import OutputStyle, StepPlan, build_output
from vllm.v1.core.sched.waiting_pass import WaitingPass
from vllm.v1.message_types import PauseState
from vllm.v1.request import Request, RequestStatus


class Scheduler(WaitingPass):
    """Continuous batching with chunked prefill, preemption by recomputing, and external loads.

    One pass hands out tokens in this order: running requests, oldest first; waiting requests that hold blocks; all
    other waiting requests.  A request that cannot get memory while it runs makes others give way; one that waits does
    not, but a few behind it may go ahead, a bounded number of times.
    """

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.current_step += 1
        plan = self._new_plan(throttle_prefills)
        self.kv_cache_manager.new_step_starts(len(self._in_flight))
        self._end_loads()
        if self._pause_state is not PauseState.PAUSED_ALL:
            self._schedule_running(plan)
            self._hash_scheduled(plan)
            if not plan.preempted and not plan.starved:
                self._schedule_waiting(plan)
        return self._finish_pass(plan)

    def _new_plan(self, throttle_prefills: bool) -> StepPlan:
        params = self.params
        budget = StepBudget(
            self.max_num_scheduled_tokens,
            params.max_num_batched_tokens,
            params.num_spec_tokens,
            params.max_loras,
        )
        holds = False
        if throttle_prefills or params.local_prefill_interval > 1:
            decodes = any(not request.is_prefill_chunk for request in self.running)
            holds = (throttle_prefills and decodes) or self._cadence.holds(decodes)
        cap = long_prefill_cap(params, sum(self.get_request_counts()))
        return StepPlan(budget, cap, holds)

    # --- loads that ended -------------------------------------------------------------------------------------------

    def _end_loads(self) -> None:
        """Every load that has ended takes effect now, whatever else can be scheduled."""
        if not self._remote.finished:
            return
        for request in list(self.kv_holding_waiting):
            if request.request_id in self._remote.finished:
                self._end_load(request)

    def _end_load(self, request: Request) -> None:
        end = self._remote.take(request.request_id, self.recompute_kv_load_failures)
        if end is LoadEnd.FAIL:
            self.kv_holding_waiting.remove_request(request)
            self._end_with_error(request, LOAD_FAILED)
            return
        request.move_to(RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING)
        if end is LoadEnd.RETRY:
            self._release_holder(request)
            return
        self._offer_hashes(request, request.num_computed_tokens)
        request.num_computed_tokens, request.replay_start = start_after_load(request, self.params.cache)
        self._remote.enter_stage(request, COMPLETED_WAITING)

    # --- running requests -------------------------------------------------------------------------------------------

    def _schedule_running(self, plan: StepPlan) -> None:
        running, index, budget = self.running, 0, plan.budget
        num_scheduled, going_on, may_fill = plan.num_scheduled, plan.running, plan.may_fill
        simple, max_model_len, unit = self._decodes_are_simple, self.max_model_len, self.hash_block_size
        while index < len(running) and budget.tokens > 0:
            request = running[index]
            end = request.num_computed_tokens + 1
            if (
                simple
                and end <= request.num_slot_tokens
                and end == len(request._all_token_ids) + request.num_output_placeholders
                and end < max_model_len
                and end < request.num_prompt_tokens + request.max_tokens
                and not request.is_prefill_chunk
            ):
                # The usual case by far: one more token, for which there is a slot.  What follows is `_schedule_one`
                # for it, written out because it runs for every request in every step.
                num_scheduled[request.request_id] = 1
                going_on.append(request)
                if end % unit == 0:
                    may_fill.append(request)
                budget.tokens -= 1
                budget.input_tokens -= 1
                index += 1
            else:
                index = self._schedule_one(request, index, plan)

    def _schedule_one(self, request: Request, index: int, plan: StepPlan) -> int:
        """Schedule the running request at ``index``, making room for it if need be.  Returns the next index."""
        num_new = self._running_chunk(request, plan)
        if num_new <= 0:
            return index + 1
        allocate, lookahead = self.kv_cache_manager.allocate_slots, self.params.num_lookahead_tokens
        # A request further on may still take this one's place, so its blocks get their hashes only afterwards.
        blocks = allocate(request, num_new, num_lookahead_tokens=lookahead, delay_cache_blocks=True)
        while blocks is None:
            victim = self._choose_victim(plan)
            if victim is None:
                break
            if victim is request and self._is_alone(plan):
                num_new = self._shorter_chunk(request, num_new, plan)
                if num_new <= 0:
                    self._wait_or_end(request, plan)
                    break
                blocks = allocate(request, num_new, num_lookahead_tokens=lookahead, delay_cache_blocks=True)
                continue
            index -= self._give_way(victim, index, plan)
            if victim is request:
                break
            blocks = allocate(request, num_new, num_lookahead_tokens=lookahead, delay_cache_blocks=True)
        if blocks is not None:
            self._go_on(request, num_new, blocks, plan)
        # A request that gave way itself has left its place to the next one.
        return index + (request.status is RequestStatus.RUNNING)

    def _running_chunk(self, request: Request, plan: StepPlan) -> int:
        """Tokens the running request gets in this pass."""
        params = self.params
        if request.is_prefill_chunk:
            if plan.hold_prefills:
                return 0
        elif self.looks_ahead and (
            request.next_decode_eligible_step > self.current_step
            or is_certain_to_finish(request, self.max_model_len, params.num_spec_tokens)
        ):
            return 0
        num_new = tokens_wanted(request, self.max_model_len, 0 if request.sampling_params is None else 1)
        num_new = min(num_new, plan.cap, plan.budget.limit())
        if num_new > 1 and self._has_chunk_rules:
            num_new = fit_chunk(
                request, request.num_computed_tokens, num_new, params, self._chunk_limits(plan)
            )
        return num_new

    def _shorter_chunk(self, request: Request, num_new: int, plan: StepPlan) -> int:
        """Half a chunk of a request that has all memory for itself; 0 if there is no such thing.

        What a request holds at most is reckoned from whole steps: where chunks of attention and blocks do not begin
        together it can be a block more.
        """
        if not request.is_prefill_chunk or num_new <= 1:
            return 0
        if not self._has_chunk_rules:
            return num_new // 2
        limits = self._chunk_limits(plan)
        return fit_chunk(request, request.num_computed_tokens, num_new // 2, self.params, limits)

    def _go_on(self, request: Request, num_new: int, blocks: KVCacheBlocks, plan: StepPlan) -> None:
        plan.add_running(request, num_new, blocks)
        if request.is_prefill_chunk:
            plan.carries_prefill = True
            request.num_slot_tokens = 0
        else:
            request.num_slot_tokens = self.kv_cache_manager.num_slots(request.request_id)
        if request.spec_token_ids:
            known = request.num_tokens + request.num_output_placeholders
            num_drafts = request.num_computed_tokens + num_new - known
            if num_drafts > 0:
                plan.spec_tokens[request.request_id] = request.spec_token_ids[:num_drafts]
            request.spec_token_ids = []

    def _choose_victim(self, plan: StepPlan) -> Request | None:
        """Who gives way to a request that cannot get memory.

        None where memory comes back by itself, or where nobody can give any in this pass: the request waits one step.
        """
        waits = bool(self.deferred_frees)
        if not waits and self.connector is not None:
            waits = self.connector.has_pending_block_frees()
        victim = None if waits else choose_victim(self.running, self.policy, self._fenced_ids())
        plan.starved |= victim is None
        return victim

    def _wait_or_end(self, request: Request, plan: StepPlan) -> None:
        """Giving way helps nobody where nobody else runs: wait for what may come back, else it can never fit."""
        if self._fills_the_pool(request):
            self.running.remove(request)
            self._end_stalled(request)
        plan.starved = True

    def _give_way(self, victim: Request, index: int, plan: StepPlan) -> bool:
        """Take the victim out of the pass; True if it stood before ``index``."""
        position = self.running.index(victim)
        plan.remove_running(victim)
        self._preempt_request(victim, self.clock.monotonic())
        self._pressure.note_preemption(self.current_step)
        plan.preempted = True
        return position < index

    def _fenced_ids(self) -> frozenset[str]:
        """Running requests whose blocks would come back only after a step in flight."""
        if not self.defer_block_free:
            return frozenset()
        processed = self.processed_step_seq
        return frozenset(request.request_id for request in self.running if request.last_sched_seq > processed)

    def _hash_scheduled(self, plan: StepPlan) -> None:
        """Nobody is taken out of the step any more: what it computes may be found by its hash from now on."""
        if not self.params.prefix_caching:
            return
        num_scheduled = plan.num_scheduled
        for request in plan.may_fill:
            num_new = num_scheduled.get(request.request_id, 0)
            if num_new:
                end = request.num_computed_tokens + num_new
                self._offer_hashes(request, min(end, len(request._all_token_ids)))

    # --- the step ---------------------------------------------------------------------------------------------------

    def _finish_pass(self, plan: StepPlan) -> SchedulerOutput:
        """Build the output, let the connector add its orders, and count the step's tokens as computed."""
        manager = self.kv_cache_manager
        new_token_ids = self.params.pipeline_parallel_size > 1 and not self.looks_ahead
        style = OutputStyle(self.use_v2_model_runner, new_token_ids)
        if self._resend_ids:
            self._resend_tables(plan)
        output = build_output(plan, manager, style, self._previous_step_ids)
        output.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
        output.preempted_req_ids, self._preempted_ids = self._preempted_ids, set()
        if self._zeroes_blocks:
            output.new_block_ids_to_zero = manager.take_new_block_ids() or None
        self._flag_structured(plan, output)
        if self.params.num_spec_tokens:
            output.num_spec_tokens_to_schedule = self.params.num_spec_tokens
            output.skip_drafts = self._skips_drafts(plan)
        if self.connector is not None:
            connector_calls.build_metadata(self.connector, manager, output)
        if not self.use_v2_model_runner:
            self._previous_step_ids = set(plan.num_scheduled)
        self._advance(plan, output)
        left_waiting = bool(self.waiting or self.deferred_waiting)
        self._cadence.note_step(output.total_num_scheduled_tokens, plan.carries_prefill, left_waiting)
        return output

    def _resend_tables(self, plan: StepPlan) -> None:
        """Running requests whose blocks were exchanged are sent like resumed ones: the workers forget their tables."""
        for request in [r for r in plan.running if r.request_id in self._resend_ids]:
            request_id = request.request_id
            self._resend_ids.discard(request_id)
            self._preempted_ids.add(request_id)
            plan.resend(request)

    def _advance(self, plan: StepPlan, output: SchedulerOutput) -> None:
        """Count the tokens as computed now; until the results arrive they are in flight."""
        self.sched_step_seq += 1
        seq, num_scheduled = self.sched_step_seq, plan.num_scheduled
        partial: set[str] = set()
        for requests in (plan.running, plan.admitted):
            for request in requests:
                num_new = num_scheduled[request.request_id]
                computed = request.num_computed_tokens + num_new
                request.num_computed_tokens = computed
                request.num_in_flight_tokens += num_new
                request.last_sched_seq = seq
                if computed < len(request._all_token_ids) + request.num_output_placeholders:
                    request.is_prefill_chunk = True
                    partial.add(request.request_id)
                else:
                    request.is_prefill_chunk = False
        if self._inflight_prefills:
            self._inflight_prefills = {r for r in self._inflight_prefills if r.is_prefill_chunk}
        self._in_flight.push(StepRecord(output, seq, partial, sync_loads=plan.sync_loads))
        self._look_ahead(plan, partial)

    def _look_ahead(self, plan: StepPlan, partial: set[str]) -> None:
        """Prepare the next step before this one's tokens are known; nothing without look-ahead."""

    def _flag_structured(self, plan: StepPlan, output: SchedulerOutput) -> None:
        for requests in (plan.running, plan.admitted):
            for request in requests:
                if request.structured_output_request is not None:
                    output.has_structured_output_requests = True
                    if request.num_output_placeholders > 0:
                        output.pending_structured_output_tokens = True

    def _skips_drafts(self, plan: StepPlan) -> bool:
        if not self.use_v2_model_runner or not plan.num_scheduled:
            return False
        return all(
            self._drafts_unused(request, request.num_computed_tokens, plan.num_scheduled[request.request_id])
            for requests in (plan.running, plan.admitted)
            for request in requests
        )

    def _drafts_unused(self, request: Request, num_computed: int, num_new: int) -> bool:
        """True if no later step can verify drafts made after this one: the request certainly ends with it."""
        if num_computed + num_new < request.num_tokens:
            return False
        under_way = cdiv(request.num_output_placeholders, 1 + self.params.num_spec_tokens)
        certain = request.num_tokens + under_way + 1
        return certain >= min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)


__all__ = ["Scheduler"]
