"""What the runner returned for a step, applied to the requests.

Owns the order in which a step's results take effect: failed loads, tokens, the connector's report, ended transfers,
statistics, events.  Must not decide who is scheduled.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections import defaultdict

from vllm.logger import init_logger
from vllm.outputs import RequestError
from vllm.v1.core.sched.in_flight import BlockUse, StepRecord
from vllm.v1.core.sched.load_failures import (
    Affected,
    Damage,
    Reach,
    RewindPlan,
    assess,
    block_use,
    plan_rewind,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.stop import check_stop
from vllm.v1.core.sched.token_results import (
    Drafted,
    add_end,
    append_until_stop,
    combine_connector_stats,
    is_worth_sending,
    make_output,
    settle_counters,
)
from vllm.v1.core.sched.upkeep import Upkeep
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.messages import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SpecDecodingStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)

ClientOutputs = dict[int, list[EngineCoreOutput]]

LOAD_FAILED = RequestError(
    "kv_load_failed",
    "KV cache data of the request could not be loaded; with kv_load_failure_policy='recompute' it would be computed",
)
NAN_LOGITS = RequestError("nan_logits", "the model produced no finite logits for the request")
CONTRADICTION = RequestError(
    "validation_error",
    "the request's grammar and its allowed_token_ids or bad_words leave no token to go on with",
)
GRAMMAR_VIOLATED = RequestError("grammar_violated", "the model's output left the grammar of the request")

_NO_TOKENS: list[int] = []


def _has_token_bans(request: Request) -> bool:
    params = request.sampling_params
    return params is not None and bool(params.allowed_token_ids or params.bad_words)


class Results(Upkeep):
    """Applies step results."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        record = self._begin_results(scheduler_output)
        kv_output = model_runner_output.kv_connector_output
        if kv_output is not None and kv_output.invalid_block_ids:
            record.dropped |= self._handle_invalid_blocks(kv_output.invalid_block_ids, record)
        outputs: ClientOutputs = defaultdict(list)
        self._apply_tokens(record, model_runner_output, outputs)
        if kv_output is not None:
            self._apply_connector_report(kv_output)
        return self._end_results(outputs, model_runner_output)

    def fail_step(
        self, scheduler_output: SchedulerOutput, error: RequestError
    ) -> dict[int, EngineCoreOutputs]:
        """The executor raised for this step: its requests end with ``error``, all others go on.

        Called in the place of :meth:`update_from_output`.  Nothing the step was to compute stays in any cache.
        """
        record = self._begin_results(scheduler_output)
        ended, spoilt = [], set()
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.is_finished() or request_id in record.dropped:
                continue
            if request_id in record.stale:
                self._drop_stale_tokens(request_id)
                continue
            # What this step and those after it were to compute is unconfirmed.
            self._forget_unconfirmed(request)
            spoilt |= block_use(self.kv_cache_manager, request).blocks_after(request.num_computed_tokens)
            ended.append(request)
        for use in self._departed_tables(record):
            if use.request_id in scheduler_output.num_scheduled_tokens:
                spoilt |= use.blocks_after(use.num_confirmed)
        # Whether its block copies took place is not known either.
        spoilt |= {target for _, target in scheduler_output.kv_cache_block_copies or ()}
        self._leave_queues(ended)
        self._restart_affected(record, spoilt)
        for request in ended:
            self._end_with_error(request, error)
        return self._end_results(defaultdict(list), None)

    # --- around the results of a step -------------------------------------------------------------------------------

    def _begin_results(self, scheduler_output: SchedulerOutput) -> StepRecord:
        record = self._in_flight.pop(scheduler_output)
        if record is None:
            # Outside code may hand in a step of its own making: its numbers are taken as they are.
            return StepRecord(scheduler_output, self.processed_step_seq, set())
        self.processed_step_seq = max(self.processed_step_seq, record.seq)
        return record

    def _end_results(
        self, outputs: ClientOutputs, model_runner_output: ModelRunnerOutput | None
    ) -> dict[int, EngineCoreOutputs]:
        self._settle_deferred_frees()
        self._in_flight.forget_departed(self.processed_step_seq)
        if len(self._in_flight) == 0:
            # Nothing executes any more, so that block copies need not be held until the next step.
            self.kv_cache_manager.new_step_starts()
        for client_index, output in self._ended_outputs:
            outputs[client_index].append(output)
        self._ended_outputs = []
        timestamp = self.clock.monotonic()
        messages = {
            client: EngineCoreOutputs(outputs=client_outputs, timestamp=timestamp)
            for client, client_outputs in outputs.items()
        }
        if self.finished_req_ids_dict:
            for client, finished in self.finished_req_ids_dict.items():
                message = messages.setdefault(client, EngineCoreOutputs(timestamp=timestamp))
                message.finished_requests = finished
            self.finished_req_ids_dict = defaultdict(set)
        if self.log_stats:
            self._add_stats(messages, model_runner_output, timestamp)
        self.flush_events()
        return messages

    def _add_stats(
        self,
        messages: dict[int, EngineCoreOutputs],
        runner_output: ModelRunnerOutput | None,
        timestamp: float,
    ) -> None:
        """One client gets the statistics of the step."""
        stats = self.make_stats()
        if stats is None:
            return
        if runner_output is not None:
            stats.cudagraph_stats = runner_output.cudagraph_stats
            kv_output = runner_output.kv_connector_output
            worker_stats = None if kv_output is None else kv_output.kv_connector_stats
            stats.kv_connector_stats = combine_connector_stats(worker_stats, self.connector)
        message = next(iter(messages.values()), None)
        if message is None:
            message = messages[0] = EngineCoreOutputs(timestamp=timestamp)
        message.scheduler_stats = stats

    # --- tokens -----------------------------------------------------------------------------------------------------

    def _apply_tokens(self, record: StepRecord, runner: ModelRunnerOutput, outputs: ClientOutputs) -> None:
        """Apply the tokens of every scheduled request, in the order of the step."""
        requests, dropped = self.requests, record.dropped
        rows, sampled = runner.req_id_to_index, runner.sampled_token_ids
        spec_tokens = record.output.scheduled_spec_decode_tokens
        plain_step = not (record.stale or spec_tokens or runner.num_nans_in_logits or runner.sampling_masks)
        stopped: list[Request] = []
        for request_id, num_scheduled in record.output.num_scheduled_tokens.items():
            request = requests.get(request_id)
            if request is None or request.status > RequestStatus.PREEMPTED or request_id in dropped:
                continue
            row = rows.get(request_id)
            tokens = sampled[row] if sampled and row is not None else _NO_TOKENS
            if plain_step and len(tokens) == 1 and request.has_plain_output:
                output: EngineCoreOutput | None = self._apply_plain(request, num_scheduled, tokens)
            else:
                output = self._apply_any(record, request, tokens, runner)
            status = request.status
            if status > RequestStatus.PREEMPTED or status is RequestStatus.WAITING_FOR_STREAMING_REQ:
                stopped.append(request)
            if output is not None:
                outputs[request.client_index].append(output)
        if stopped:
            self._remove_stopped(stopped)

    def _apply_plain(self, request: Request, num_scheduled: int, tokens: list[int]) -> EngineCoreOutput:
        """The usual case: one token of a request without extras."""
        request.num_in_flight_tokens = max(0, request.num_in_flight_tokens - num_scheduled)
        if request.num_output_placeholders > 0:
            request.num_output_placeholders -= 1
        lookahead = self.params.hash_lookahead_tokens
        request.append_sampled_token(tokens[0], self.hash_block_size, lookahead)
        confirmed = request.num_computed_tokens - request.num_in_flight_tokens
        may_fill = num_scheduled > 1 or lookahead > 0 or confirmed % self.hash_block_size == 0
        if self._hash_on_arrival and may_fill:
            self._offer_hashes(request, min(confirmed, len(request._all_token_ids)))
        output = EngineCoreOutput(request.request_id, tokens)
        if request.prefill_stats is not None:
            output.prefill_stats = request.take_prefill_stats()
        if request.events:
            output.events = request.take_events()
        if check_stop(request, self.max_model_len):
            add_end(output, request, self._finish(request), None)
        return output

    def _apply_any(
        self, record: StepRecord, request: Request, tokens: list[int], runner: ModelRunnerOutput
    ) -> EngineCoreOutput | None:
        """The general case; returns the message for the client, if there is anything to say."""
        request_id, row = request.request_id, runner.req_id_to_index.get(request.request_id)
        num_scheduled = record.output.num_scheduled_tokens[request_id]
        is_stale = request_id in record.stale
        if is_stale:
            request.num_stale_output_tokens -= request_id not in record.partial
        else:
            self._observe_drafts(request, settle_counters(request, record, num_scheduled, len(tokens)))
        if runner.num_nans_in_logits and runner.num_nans_in_logits.get(request_id, 0) > 0:
            return self._end_corrupted(request, runner.num_nans_in_logits[request_id])
        kept, stopped = append_until_stop(request, tokens, self.max_model_len)
        if not is_stale:
            request.num_computed_tokens -= len(tokens) - len(kept)
            if self._hash_on_arrival:
                self._offer_hashes(request, min(request.num_confirmed_tokens, request.num_tokens))
        error = None
        if kept and not self.structured_output_manager.accept_tokens(request, kept):
            request.status, stopped = RequestStatus.FINISHED_ERROR, True
            error = self._grammar_error(request)
        output = make_output(request, kept, runner, row)
        if output.pooling_output is not None:
            request.status, stopped = RequestStatus.FINISHED_STOPPED, True
        if stopped:
            self._end_or_pause(request, output, error)
        return output if is_worth_sending(output) else None

    def _grammar_error(self, request: Request) -> RequestError:
        failure = self.structured_output_manager.failure(request)
        if failure is None:
            return GRAMMAR_VIOLATED
        return RequestError(
            "grammar_too_complex", f"the grammar of the request became too complex: {failure}"
        )

    def _end_or_pause(self, request: Request, output: EngineCoreOutput, error: RequestError | None) -> None:
        if error is None and request.resumable:
            output.finish_reason, output.stop_reason = request.get_finished_reason(), request.stop_reason
            self._pause_session(request)
            return
        add_end(output, request, self._finish(request), error)

    def _pause_session(self, request: Request) -> None:
        """The session has answered; the token sampled last is not part of what it goes on from."""
        has_run_on = request.num_computed_tokens >= request.num_tokens
        self._in_flight.drop_request(request.request_id)
        self._forget_unconfirmed(request)
        request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        if has_run_on and self.params.cache.overwrites_state:
            # A step in flight takes the running state beyond that token: it is computed again, as far as need be.
            request.num_tokens_at_preemption = request.num_computed_tokens
            self._start_over(request)

    def _end_corrupted(self, request: Request, num_nans: int) -> EngineCoreOutput:
        """Logits were not finite: nothing the request has read or written may be reused."""
        self._num_corrupted += 1
        self.kv_cache_manager.forget_content(request)
        request.status = RequestStatus.FINISHED_ERROR
        output = EngineCoreOutput(
            request.request_id, [], num_nans_in_logits=num_nans, events=request.take_events()
        )
        contradicts = request.use_structured_output and _has_token_bans(request)
        add_end(output, request, self._finish(request), CONTRADICTION if contradicts else NAN_LOGITS)
        return output

    def _remove_stopped(self, stopped: list[Request]) -> None:
        """Take stopped requests out of their queues; sessions among them wait for input, in the order of the step."""
        self.running = remove_all(self.running, set(stopped))
        for queue in (self.waiting, self.deferred_waiting):
            if queue:
                queue.remove_requests(stopped)
        for request in stopped:
            if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
                self._preempted_ids.add(request.request_id)
                self.kv_holding_waiting.add_request(request)
                self._sessions.pause(request)
                if self._sessions.has_input(request):
                    self._resume_session(request)

    def _observe_drafts(self, request: Request, drafted: Drafted | None) -> None:
        if drafted is None:
            return
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics.observe_draft(drafted.num_drafts, drafted.num_accepted)
        if self.log_stats:
            if self._spec_stats is None:
                self._spec_stats = SpecDecodingStats.new(self.params.num_spec_tokens)
            self._spec_stats.observe_draft(drafted.num_drafts, drafted.num_accepted)

    # --- loads and sends --------------------------------------------------------------------------------------------

    def _handle_invalid_blocks(self, invalid: set[int], record: StepRecord) -> set[str]:
        """Blocks could not be loaded: every request that counts on one goes back before it, or ends.

        Returns the requests whose tokens of this step are void.
        """
        damage = self._assess_damage(record, invalid)
        for entry in damage.affected:
            entry.request.num_load_failures += 1
        void = damage.departed_ids | {entry.request.request_id for entry in damage.affected}
        if not self.recompute_kv_load_failures:
            requests = [entry.request for entry in damage.affected]
            self._leave_queues(requests)
            for request in requests:
                self._end_with_error(request, LOAD_FAILED)
            return void
        can_cut = self.params.cache.can_cut_anywhere
        running = []
        for entry in damage.affected:
            if entry.request.status is RequestStatus.RUNNING:
                running.append(entry)
            else:
                self._rewind_waiting(entry, can_cut)
        self._rewind_running(plan_rewind(running, can_cut))
        return void

    def _restart_affected(self, record: StepRecord, spoilt: set[int]) -> None:
        """Requests that have found spoilt blocks by their hashes start again."""
        timestamp = self.clock.monotonic()
        for entry in reversed(self._assess_damage(record, spoilt).affected):
            if entry.request.status is RequestStatus.RUNNING:
                self._preempt_request(entry.request, timestamp, drop_stale=True)
            else:
                self._rewind_waiting(entry, can_cut=False)

    def _assess_damage(self, record: StepRecord, spoilt: set[int]) -> Damage:
        """Find everything that depends on the ``spoilt`` blocks, and make it unreachable."""
        manager = self.kv_cache_manager
        live = [
            (request, block_use(manager, request)) for request in [*self.kv_holding_waiting, *self.running]
        ]
        copies = [*(record.output.kv_cache_block_copies or ()), *self._in_flight.block_copies()]
        damage = assess(Reach(live, self._departed_tables(record), copies), spoilt)
        manager.evict_blocks(sorted(damage.blocks))
        for entry in damage.affected:
            manager.evict_unconfirmed(entry.request, entry.position)
            self._limit_hit(entry.request, entry.position)
        for request_id in sorted(damage.departed_ids):
            self._drop_stale_tokens(request_id)
        return damage

    def _limit_hit(self, request: Request, position: int) -> None:
        """What the request had found from ``position`` on is of no use: unless it was reported already, it was no hit."""
        stats = request.prefill_stats
        if stats is None or position >= request.num_cached_tokens:
            return
        request.num_cached_tokens = position
        stats.limit(position)
        stats.num_cache_creation_tokens = self._newly_cached_tokens(request, position)

    def _newly_cached_tokens(self, request: Request, num_cached: int) -> int:
        if not self.params.prefix_caching:
            return 0
        cacheable = request.num_prompt_tokens // self.hash_block_size * self.hash_block_size
        return max(0, cacheable - num_cached)

    def _departed_tables(self, record: StepRecord) -> list[BlockUse]:
        """Tables given back while the step was in flight, and those that ended requests still have."""
        held = [r for r in self.requests.values() if r.is_finished()]
        return self._in_flight.departed_since(record.seq) + [
            block_use(self.kv_cache_manager, r) for r in held
        ]

    def _rewind_running(self, plan: RewindPlan) -> None:
        for entry in [*plan.in_place, *plan.with_own_blocks]:
            self._in_flight.drop_request(entry.request.request_id)
            self._forget_unconfirmed(entry.request)
            entry.request.num_computed_tokens = entry.position
            entry.request.num_hash_offered_tokens = entry.position
        for entry in plan.with_own_blocks:
            self.kv_cache_manager.truncate(entry.request, entry.position)
            entry.request.num_slot_tokens = 0
            self._resend_ids.add(entry.request.request_id)
        timestamp = self.clock.monotonic()
        for entry in reversed(plan.restart):
            self._preempt_request(entry.request, timestamp, drop_stale=True)

    def _drop_stale_tokens(self, request_id: str) -> None:
        """Tokens still under way were sampled from spoilt content."""
        self._in_flight.drop_stale(request_id)
        request = self.requests.get(request_id)
        if request is not None:
            request.num_stale_output_tokens = 0

    def _rewind_waiting(self, entry: Affected, can_cut: bool) -> None:
        """A request that waits with its blocks keeps the good part, or starts again once the load has ended."""
        request = entry.request
        if can_cut:
            request.num_computed_tokens = entry.position
            self._remote.note_cut(request.request_id)
        elif request.request_id in self._remote.loading:
            # Its load is not to blame: it does not count as failed, and no policy for failed loads applies.
            self._remote.unwanted.add(request.request_id)
        else:
            self._release_holder(request)

    def _apply_connector_report(self, kv_output: KVConnectorOutput) -> None:
        if self.connector is not None:
            self.connector.update_connector_output(kv_output)
        for request_id in sorted(kv_output.finished_recving or ()):
            self._end_receiving(request_id, request_id in kv_output.failed_recving)
        for request_id in sorted(kv_output.finished_sending or ()):
            if request_id not in self._delayed_sends:
                logger.warning("A send of request %s has ended which nobody waits for", request_id)
                continue
            self._delayed_sends.discard(request_id)
            self._release_finished(self.requests[request_id])

    def _end_receiving(self, request_id: str, failed: bool) -> None:
        if not self._remote.report(request_id, failed):
            logger.warning("A load of request %s has ended which nobody waits for", request_id)
            return
        request = self.requests[request_id]
        request.num_load_failures += failed
        if request.is_finished():
            self._remote.forget(request)
            self._release_finished(request)


__all__ = ["GRAMMAR_VIOLATED", "LOAD_FAILED", "NAN_LOGITS", "Results"]
