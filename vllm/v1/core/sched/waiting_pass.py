"""Waiting requests in a pass: who is admitted, who starts a load, who may go ahead of whom.

Owns the order in which waiting requests are tried and applies what admission decides.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.outputs import RequestError
from vllm.v1.core.sched.admission import Hit, LookupContext, Verdict, is_blocked, look_up, no_hit
from vllm.v1.core.sched.chunking import ChunkLimits, fit_chunk
from vllm.v1.core.sched.connector_calls import external_hit_sources, given_up_blocks, reported_cached_tokens
from vllm.v1.core.sched.load_failures import block_use
from vllm.v1.core.sched.params import (
    MISFIT_PASSES_MAX,
    OVERTAKE_CANDIDATES_MAX,
    OVERTAKES_PER_REQUEST_MAX,
)
from vllm.v1.core.sched.remote_wait import WAITING_TO_START
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.results import Results
from vllm.v1.core.sched.running import blocks_between, blocks_missing
from vllm.v1.core.sched.step_output import StepPlan
from vllm.v1.message_types import EngineCoreEventType, PauseState
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request, RequestStatus


class WaitingPass(Results):
    """The second half of a pass."""

    def _schedule_waiting(self, plan: StepPlan) -> None:
        if self.params.max_loras:
            for request in plan.running:
                plan.budget.add_lora(request)
        if self.kv_holding_waiting:
            self._admit_holders(plan)
        if self._pause_state is PauseState.UNPAUSED and not plan.hold_prefills:
            self._admit_from_queues(plan)

    def _has_seat(self) -> bool:
        used = len(self.running) + self._sessions.num_paused
        return used < min(self.params.max_num_active_seqs, self.max_num_running_reqs)

    def _admit_holders(self, plan: StepPlan) -> None:
        """Requests that hold blocks come first, and all of them are tried: each can free memory once it runs.

        Where none of them fits and nothing else goes on, the last one gives its blocks back.
        """
        while True:
            misfits = []
            for request in list(self.kv_holding_waiting):
                if plan.budget.tokens <= 0 or not self._has_seat():
                    return
                if self._admit_holder(request, plan) is Verdict.MISFIT:
                    misfits.append(request)
            if not misfits or self.running or plan.num_scheduled:
                return
            if len(misfits) == 1 and self._memory_may_return():
                return
            self._release_holder(misfits[-1])

    def _admit_holder(self, request: Request, plan: StepPlan) -> Verdict:
        if is_blocked(request) or not plan.budget.allows_lora(request):
            return Verdict.SKIP
        num_new = self._waiting_chunk(request, request.num_computed_tokens, plan)
        if num_new <= 0 or (plan.hold_prefills and num_new > 1):
            return Verdict.SKIP
        padding = self._padding(request, request.num_computed_tokens, plan)
        blocks = self.kv_cache_manager.allocate_slots(
            request,
            num_new + padding,
            num_lookahead_tokens=self.params.num_lookahead_tokens - padding,
            num_encoder_tokens=self._encoder_tokens(request),
            has_scheduled_reqs=bool(self.running),
        )
        if blocks is None:
            return Verdict.MISFIT
        request.num_hash_offered_tokens = request.num_computed_tokens + num_new
        self.kv_holding_waiting.remove_request(request)
        if self.connector is not None:
            blocks = self.kv_cache_manager.get_blocks(request.request_id)
            self.connector.update_state_after_alloc(request, blocks, 0)
        self._start(request, num_new, padding, plan)
        return Verdict.ADMITTED

    def _admit_from_queues(self, plan: StepPlan) -> None:
        """Admit in queue order.  One that does not fit may be overtaken by a few others, a bounded number of times."""
        skipped: list[Request] = []
        misfits: list[Request] = []
        while plan.budget.tokens > 0 and self._has_seat():
            request = self._pop_candidate()
            if request is None:
                break
            verdict = self._try_admit(request, plan)
            if verdict is Verdict.SKIP:
                skipped.append(request)
            elif verdict is Verdict.STOP:
                misfits.append(request)
                break
            elif verdict is Verdict.MISFIT:
                if self._can_never_fit(plan, misfits):
                    self._end_stalled(request)
                    continue
                misfits.append(request)
                if not self._may_overtake(misfits):
                    break
            else:
                for overtaken in misfits:
                    overtaken.num_overtaken += 1
        if not misfits and not self.waiting:
            self._pressure.note_relief()
        self.waiting.prepend_requests(misfits)
        self.deferred_waiting.prepend_requests(skipped)

    def _pop_candidate(self) -> Request | None:
        """The next waiting request; those that could not be tried before keep their place in front."""
        deferred, waiting = self.deferred_waiting, self.waiting
        if not deferred:
            return waiting.pop_request() if waiting else None
        if (
            self.policy is SchedulingPolicy.PRIORITY
            and waiting
            and waiting.peek_request() < deferred.peek_request()
        ):
            return waiting.pop_request()
        return deferred.pop_request()

    def _may_overtake(self, misfits: Sequence[Request]) -> bool:
        if self.policy is not SchedulingPolicy.FCFS or len(misfits) > OVERTAKE_CANDIDATES_MAX:
            return False
        return misfits[0].num_overtaken < OVERTAKES_PER_REQUEST_MAX

    def _try_admit(self, request: Request, plan: StepPlan) -> Verdict:
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            verdict = self._check_grammar(request)
            if verdict is not None:
                return verdict
        if is_blocked(request) or not plan.budget.allows_lora(request):
            return Verdict.SKIP
        if self._surely_misfits(request):
            return Verdict.MISFIT
        context = LookupContext(self.kv_cache_manager, self.connector, self.block_size, self.params.cache)
        hit = look_up(request, context)
        if hit is None:
            self._remote.enter_stage(request, WAITING_TO_START)
            return Verdict.SKIP
        verdict = self._admit_with(request, hit, plan)
        if verdict is Verdict.MISFIT and hit.num_cached and self._can_never_fit(plan, ()):
            # A hit can need more blocks than computing everything does.
            verdict = self._admit_with(request, no_hit(context), plan)
        request.misfit = self._note_misfit(hit) if verdict is Verdict.MISFIT else None
        return verdict

    def _note_misfit(self, hit: Hit) -> tuple[int, int, int]:
        next_end = (hit.num_local // self.block_size + 1) * self.block_size
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return free, next_end // self.hash_block_size - 1, self.current_step + MISFIT_PASSES_MAX

    def _surely_misfits(self, request: Request) -> bool:
        """True if the request did not fit lately, no block has come free since, and nothing more of its prefix is cached.

        Saves the look-ups, which take time for long prompts, here and in the connector. Where nothing runs, or after a
        few passes, it is tried in any case: what a connector has got meanwhile is not seen here.
        """
        if request.misfit is None or not self.running:
            return False
        free, index, retry_pass = request.misfit
        pool = self.kv_cache_manager.block_pool
        if pool.get_num_free_blocks() > free or self.current_step >= retry_pass:
            return False
        if index >= len(request.block_hashes):
            return True
        following = request.block_hashes[index]
        groups = self.kv_cache_config.prefix_cacheable_group_ids
        return all(pool.get_cached_block(following, (group,)) is None for group in groups)

    def _check_grammar(self, request: Request) -> Verdict | None:
        structured = request.structured_output_request
        if structured is None or not structured.is_grammar_ready:
            return Verdict.SKIP
        if structured.error is not None:
            self._end_with_error(request, RequestError("invalid_grammar", structured.error))
            return Verdict.ENDED
        request.move_to(RequestStatus.WAITING)
        return None

    def _admit_with(self, request: Request, hit: Hit, plan: StepPlan) -> Verdict:
        """Allocate for the request with this hit, and start it or its load."""
        request.shared_prefix_boundary = hit.shared_prefix_boundary
        if hit.load_async and hit.num_external:
            return self._start_load(request, hit, plan)
        num_new = self._waiting_chunk(request, hit.num_computed, plan)
        if num_new <= 0:
            return Verdict.STOP
        end = hit.num_computed + num_new
        padding = self._padding(request, hit.num_computed, plan)
        request.replay_start = hit.replay_start
        blocks = self.kv_cache_manager.allocate_slots(
            request,
            # Tokens that are only replayed have their slots already.
            max(0, end + padding - hit.num_cached),
            num_new_computed_tokens=hit.num_local,
            new_computed_blocks=hit.blocks,
            num_lookahead_tokens=self.params.num_lookahead_tokens - padding,
            num_external_computed_tokens=hit.num_external,
            num_encoder_tokens=self._encoder_tokens(request),
            full_sequence_must_fit=self.params.reserve_full_isl,
            reserved_blocks=self._room_to_grow() + self._owed_to_prefills(),
            has_scheduled_reqs=bool(self.running),
        )
        if blocks is None:
            return Verdict.MISFIT
        request.num_computed_tokens = hit.num_computed
        request.num_hash_offered_tokens = min(max(end, hit.num_cached), request.num_tokens)
        if hit.num_external:
            plan.sync_loads[request.request_id] = hit.num_local
        self._note_hit(request, hit)
        self._start(request, num_new, padding, plan)
        return Verdict.ADMITTED

    def _encoder_tokens(self, request: Request) -> int:
        """Tokens of the encoder's output that cross attention keeps: all of them, from the request's first step on."""
        if not self.kv_cache_manager.counts_encoder_tokens:
            return 0
        return sum(request.get_num_encoder_embeds(i) for i in range(len(request.mm_features)))

    def _waiting_chunk(self, request: Request, start: int, plan: StepPlan) -> int:
        """Tokens a waiting request would get in this pass, starting at ``start``; 0 if it has to wait."""
        params = self.params
        limit = plan.budget.limit()
        num_new = min(request.num_tokens - start, plan.cap)
        if not params.enable_chunked_prefill and num_new > limit:
            return 0
        num_new = min(num_new, limit)
        if num_new > 1 and self._has_chunk_rules:
            num_new = fit_chunk(request, start, num_new, params, self._chunk_limits(plan))
        return num_new

    def _chunk_limits(self, plan: StepPlan) -> ChunkLimits:
        return ChunkLimits(min(plan.cap, plan.budget.largest), self._fine_grained_hits)

    def _start_load(self, request: Request, hit: Hit, plan: StepPlan) -> Verdict:
        """Order the load of the external part.  Room for the request's first step afterwards is kept free, and for
        what admitted requests and other loads still need: nobody is left holding memory that does not suffice.
        """
        connector = self.connector
        assert connector is not None
        self._remote.enter_stage(request, WAITING_TO_START)
        blocks = self.kv_cache_manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=hit.num_local,
            new_computed_blocks=hit.blocks,
            num_external_computed_tokens=hit.num_external,
            delay_cache_blocks=True,
            num_encoder_tokens=self._encoder_tokens(request),
            reserved_blocks=self._blocks_spoken_for(request, hit) + self._room_to_grow(),
            has_scheduled_reqs=bool(self.running),
            skip_zeroing_group_ids=connector.get_loaded_kv_cache_group_ids(request)
            if self._zeroes_blocks
            else (),
        )
        if blocks is None:
            return Verdict.MISFIT
        request.num_computed_tokens = hit.num_cached
        request.num_hash_offered_tokens = hit.num_local
        self._note_hit(request, hit)
        request.move_to(RequestStatus.WAITING_FOR_REMOTE_KVS)
        self.kv_holding_waiting.add_request(request)
        self._remote.start(request)
        return Verdict.LOADING

    def _room_to_grow(self) -> int:
        """Blocks that must stay free for what runs, where admissions have led to preemptions lately."""
        return self._pressure.reserve(len(self.running), self.kv_cache_manager.num_kv_cache_groups)

    def _owed_to_prefills(self) -> int:
        """Blocks that admitted prompts still lack, where whole prompts have to fit: nobody else is admitted into them."""
        if not self.params.reserve_full_isl:
            return 0
        manager = self.kv_cache_manager
        return sum(blocks_missing(manager, one, one.num_tokens) for one in self._inflight_prefills)

    def _blocks_spoken_for(self, request: Request, hit: Hit) -> int:
        """Blocks that must stay free beside a load: for what follows it (the first step, or the whole prompt where that
        has to fit), first steps after other loads, and the rest of admitted prompts.
        """
        manager, lookahead = self.kv_cache_manager, self.params.num_lookahead_tokens
        end = self._first_step_end(request, hit.num_cached)
        if self.params.reserve_full_isl:
            end = max(end, request.num_tokens)
        total = blocks_between(manager, request, hit.num_cached, end)
        for holder in self.kv_holding_waiting:
            if holder.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
                end = self._first_step_end(holder, holder.num_computed_tokens)
                total += blocks_missing(manager, holder, end)
        for prefill in self._inflight_prefills:
            total += blocks_missing(manager, prefill, prefill.num_tokens + lookahead)
        return total

    def _first_step_end(self, request: Request, start: int) -> int:
        end = min(request.num_tokens, start + self.params.max_num_batched_tokens)
        return min(end + self.params.num_lookahead_tokens, self.max_model_len)

    def _note_hit(self, request: Request, hit: Hit) -> None:
        """The request has got its blocks: tell the connector, and count the hit once."""
        request.num_external_computed_tokens = hit.num_external
        preempted = request.num_preemptions > 0
        if self.connector is not None:
            blocks = self.kv_cache_manager.get_blocks(request.request_id)
            self.connector.update_state_after_alloc(request, blocks, hit.num_external)
        sources = external_hit_sources(self.connector, request, hit.num_external)
        if not preempted:
            request.num_cached_tokens = hit.num_cached
            if request.prefill_stats is not None:
                local, external = reported_cached_tokens(request, hit.num_local, sources)
                request.prefill_stats.set(request.num_prompt_tokens, local, sum(external.values()), external)
                request.prefill_stats.num_cache_creation_tokens = self._newly_cached_tokens(
                    request, hit.num_cached
                )
        self._count_hit(request, hit, sources)

    def _count_hit(self, request: Request, hit: Hit, sources: dict[CacheHitSource, int]) -> None:
        """Count the look-up, for the intervals and since the start; ``sources`` split the external hit."""
        preempted = request.num_preemptions > 0
        looked_up = request.num_tokens - hit.num_local if self.connector is not None else 0
        if not preempted:
            skips = request.skip_reading_prefix_cache
            self.cache_use.record(
                0 if skips else request.num_tokens,
                looked_up,
                {CacheHitSource.DEVICE: hit.num_local, **sources},
            )
        if not self.log_stats:
            return
        self.kv_cache_manager.record_prefix_cache_stats(request, hit.num_local)
        if self.connector_prefix_cache_stats is not None:
            self.connector_prefix_cache_stats.record(looked_up, hit.num_external, preempted, sources)

    def _start(self, request: Request, num_new: int, padding: int, plan: StepPlan) -> None:
        """The request runs from this step on, with ``padding`` drafts that are void (−1)."""
        resumed = request.status is RequestStatus.PREEMPTED
        request.move_to(RequestStatus.RUNNING)
        request.admitted_seq = self.sched_step_seq + 1
        self.running.append(request)
        self._remote.enter_stage(request, None)
        if num_new > 1:
            plan.carries_prefill = True
        elif padding:
            plan.spec_tokens[request.request_id] = [-1] * padding
            num_new += padding
        plan.add_admitted(request, num_new, resumed)
        plan.budget.add_lora(request)
        if request.num_computed_tokens + num_new < request.num_tokens:
            self._inflight_prefills.add(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, self.clock.monotonic())

    def _padding(self, request: Request, start: int, plan: StepPlan) -> int:
        """Void drafts that give a request which needs one token, from ``start`` on, the shape of the running decodes.

        They take the slots of the lookahead, and are computed like any others: a state needs its rows for them.
        """
        num_drafts = self.params.num_spec_tokens
        if num_drafts == 0 or request.num_tokens - start > 1 or plan.carries_prefill:
            return 0
        room = min(plan.budget.limit(), self.max_model_len - start - 1) - 1
        has_slots = self.params.num_lookahead_tokens >= num_drafts
        return num_drafts if has_slots and room >= num_drafts else 0

    # --- memory that does not suffice -------------------------------------------------------------------------------

    def _memory_may_return(self) -> bool:
        """True while something under way holds blocks that nobody has to give up for."""
        if self.deferred_frees or self._delayed_sends or self._remote.loading or self._in_flight.has_tokens():
            return True
        connector = self.connector
        return connector is not None and (
            connector.has_pending_push_work() or connector.has_pending_block_frees()
        )

    def _can_never_fit(self, plan: StepPlan, misfits: Sequence[Request]) -> bool:
        """True if the whole pool is free, but for what nobody can be sure of ever getting back, and a request still
        does not fit.
        """
        if self.running or plan.num_scheduled or self.kv_holding_waiting or misfits:
            return False
        return not self._memory_may_return() and self._all_is_free_but(())

    def _all_is_free_but(self, block_ids: Iterable[int]) -> bool:
        """True if these blocks and those of copies that were given up are all that are held."""
        pool = self.kv_cache_manager.block_pool
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return held == len({*block_ids, *given_up_blocks(self.connector)})

    def _is_alone(self, plan: StepPlan) -> bool:
        """True if no request but one running one holds any block."""
        return not plan.num_scheduled and len(self.running) == 1 and not self.kv_holding_waiting

    def _fills_the_pool(self, request: Request) -> bool:
        """True if the only running request holds every block that is not free, and none will come back."""
        if self._memory_may_return():
            return False
        return self._all_is_free_but(block_use(self.kv_cache_manager, request).spans)

    def _end_stalled(self, request: Request) -> None:
        """Waiting for ever helps nobody: the request ends with an error that names the limit."""
        self._num_stalled += 1
        blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        message = (
            f"the request of {request.num_tokens} tokens does not fit into the KV cache of {blocks} blocks"
        )
        error = RequestError("kv_cache_too_small", message)
        lost = len(given_up_blocks(self.connector))
        if lost:
            message += f", of which KV transfers that were given up and have not ended hold {lost}"
            error = RequestError("kv_cache_blocked", message, retryable=True)
        self._end_with_error(request, error)


__all__ = ["WaitingPass"]
