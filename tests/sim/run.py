"""One run: the world, its outside view, and every action that may be taken in it.

An action takes its chance from a stream of its own, named by its place in the list, so that actions can be dropped
from the list (to shorten a failure) without changing what the others do.
"""

from __future__ import annotations

import random
from collections import deque

from tests.sim.copy_worker import Step
from tests.sim.corruption import pages_below, spoil
from tests.sim.device import HotGroup, RingGroup, StateGroup
from tests.sim.events import Consumer
from tests.sim.failure import SimFailure, require
from tests.sim.grammar import BAD, check_masks
from tests.sim.marks import Marks
from tests.sim.outside import Surroundings
from tests.sim.outside_worker import worker_class
from tests.sim.params import SimParams
from tests.sim.policies import PolicyMarks
from tests.sim.promises import watch_promises
from tests.sim.registry import HashRegistry
from tests.sim.restart import carry_out_withdrawal, kill, kill_weight, taint_kept
from tests.sim.rng import Streams
from tests.sim.shared_run import SharedRun
from tests.sim.tier_resets import TierResetRun
from tests.sim.worker import SimWorker
from tests.sim.workload import Truth, Workload, make_request
from tests.sim.world import build_world
from vllm.outputs import RequestError
from vllm.v1.core.block_hash import BlockHashWithGroupId, make_block_hash_with_group_id
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.message_types import FinishReason
from vllm.v1.messages import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata

LIVE_REQUESTS_MAX = 9


class Run(TierResetRun, SharedRun):
    """State of one run. Nothing here decides what happens next; see driver.py."""

    def __init__(self, params: SimParams) -> None:
        self.params = params
        self.streams = Streams(params.seed)
        self.marks = Marks()
        self.workload = Workload(params, self.streams.stream("workload"))
        self.truths: dict[str, Truth] = {}
        self._open: dict[str, Truth] = {}
        self.requests: dict[str, Request] = {}
        self.start_engine(worker_class(params)(params, self.marks, self.fault))
        self.registry = HashRegistry(self.world.hash_block_size)
        self.registry.is_terse = params.outside is not None
        self.must_be_stored: set[bytes] = set()
        self.unkeyed: set[bytes] = set()
        """Content that lost its keys on the device while a block of it was held: no store can tell what is in it."""
        self.store_excuse: str | None = None
        """Why something may rightly be missing below: a fault, a reset."""
        self.full_tiers: set[int] = set()
        """Connectors, by their order, whose first tier had no empty slot to give or evicted something."""
        self.draining = False
        self.policy_marks = PolicyMarks(params, self.marks)

    def start_engine(self, worker: SimWorker) -> None:
        """Everything that dies with an engine."""
        self.worker = worker
        self.world = build_world(self.params)
        self.scheduler = self.world.scheduler
        self.steps: deque[Step] = deque()
        self.consumer = Consumer(self.world.publisher)
        self.seen_entries: dict[str, list[tuple[int, BlockHashWithGroupId]]] = {}
        self.idle_steps = 0
        self._waited: set[str] = set()
        self._writes: dict[int, dict[str, dict[int, int]]] = {}
        self.asked: dict[str, int] = {}
        if self.shelf is not None:
            self.shelf.around = Surroundings(self.fault, self.streams.stream, self.marks, worker.hosts)
            worker.clock = self.world.clock
        if self.world.connector is not None:
            watch_promises(self, self.world.connector)

    # --- views ----------------------------------------------------------------------------------------------------

    def written_blocks(self, step: Step) -> dict[str, set[int]]:
        """Device blocks that a scheduled step may write, by request."""
        return {request_id: set(ends) for request_id, ends in self._writes.get(id(step), {}).items()}

    def live(self) -> list[Truth]:
        """Requests whose client still waits."""
        for request_id in [request_id for request_id, truth in self._open.items() if truth.done]:
            del self._open[request_id]
        return list(self._open.values())

    def fault(self, site: str, rng: random.Random) -> bool:
        """Whether the fault at this site happens now."""
        if self.draining or site not in self.params.faults:
            return False
        if rng.random() >= self.params.fault_probability(site):
            return False
        self.store_excuse = self.store_excuse or site
        return True

    # --- actions --------------------------------------------------------------------------------------------------

    def enabled(self) -> dict[str, int]:
        """Actions that make sense now, with their weights."""
        is_stuck = self.worker.is_stuck
        waits_below = is_stuck or self.put_off_since or (self.chain is not None and self.chain.waiting)
        weights: dict[str, int] = {"tick": 30 if waits_below else 4}
        live, lanes = len(self.live()), self.worker.all_lanes
        if live < LIVE_REQUESTS_MAX:
            weights["arrive"] = 80 if live < 3 else 30
        if live and "abort" not in self.params.actions_off:
            weights["abort"] = 7
        if len(self.steps) < self.params.depth and self.has_work:
            weights["schedule"] = 150
        if any(not step.executed for step in self.steps):
            weights["execute"] = 120
        if self.steps and self.steps[0].executed:
            weights["finish"] = 120
        if self.world.grammars.pending:
            weights["compile"] = 40
        if any(lane.running for lane in lanes):
            if any(lane.movable() for lane in lanes):
                weights["copy"] = 100
            if not self.worker.hangs and any(job.stalled for lane in lanes for job in lane.running):
                weights["unstall"] = 2 if is_stuck else 10
        if "poison" in self.params.faults:
            weights["poison"] = 20
        if "reset" not in self.params.actions_off:
            weights["reset"] = 12 if self.has_jobs_outside and "nan" not in self.params.faults else 3
        if self.params.empties_tiers:
            is_loading = any(offload.load_side.loads for offload in self.offloads)
            weights["empty"] = 24 if is_loading or self.moves() else 5
        if self.offload is not None and "cool" not in self.params.actions_off:
            weights["cool"] = 12
            if self.params.reads_below:
                weights["cool"] = 60 if self.idle_with_a_copy() else 0
        if self.params.disk_persist and "kill" not in self.params.actions_off:
            weights["kill"] = kill_weight(self)
        if "pause" not in self.params.actions_off:
            weights["pause"] = 5 if self.scheduler.pause_state is PauseState.UNPAUSED else 40
        if self.shelf is not None and self.shelf.ready:
            weights["drop"] = 5
        return weights | ({"other": 100} if self.params.shared else {})

    def act(self, name: str, place: int, *, is_enabled: bool = False) -> None:
        """Take one action; one that is not possible (any more) does nothing."""
        if not is_enabled and name not in self.enabled():
            return
        rng = self.streams.stream(f"{place}/{name}")
        if self.shelf is not None:
            self.shelf.begin(f"{place}/{name}")
        try:
            getattr(self, f"_do_{name}")(rng)
        except SimFailure:
            raise
        except Exception as error:
            raise SimFailure("CRASH", f"{name}: {type(error).__name__}: {error}") from error

    def _do_tick(self, rng: random.Random) -> None:
        self.world.clock.advance(rng.choice((0.001, 0.1, 5.0)))

    def _do_arrive(self, rng: random.Random) -> None:
        truth = self.workload.draw(rng)
        if truth.request_id in self.truths:
            return
        self.truths[truth.request_id] = self._open[truth.request_id] = truth
        self.worker.identities[truth.request_id] = truth.identity
        request = make_request(truth, self.world.clock.time(), self.world.hasher)
        self.requests[truth.request_id] = request
        self.registry.learn(request)
        self.scheduler.add_request(request)
        if truth.salt is not None:
            self.marks.hit("salted request")
        if truth.adapter is not None:
            self.marks.hit("adapter request")

    def _do_compile(self, rng: random.Random) -> None:
        """The grammar of some request, which may have ended meanwhile, is ready or refused."""
        self.world.grammars.compile_one(rng)

    def _do_abort(self, rng: random.Random) -> None:
        truth = rng.choice(self.live())
        request = self.requests[truth.request_id]
        self._mark_abort(request)
        truth.ended_by = "abort"
        self.scheduler.finish_requests(truth.request_id, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.2:
            self.scheduler.finish_requests(truth.request_id, RequestStatus.FINISHED_ABORTED)

    def _mark_abort(self, request: Request) -> None:
        status = request.status
        if status is RequestStatus.RUNNING:
            self.marks.hit("abort while running")
        elif status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.marks.hit("abort during load")
        elif status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self.marks.hit("abort while the grammar is compiled")
        elif status is RequestStatus.WAITING:
            self.marks.hit("abort while waiting")
            if self.chain is not None and request.request_id in self.chain.waiting:
                self.marks.hit("abort while blocks come up")
        if any(t.owner and request.request_id in t.owner for t in self.store_transfers()):
            self.marks.hit("abort with a store in flight")

    def _do_schedule(self, rng: random.Random) -> None:
        preempted_before = {r: q.num_preemptions for r, q in self.scheduler.requests.items()}
        running_stores = any(not t.ended for t in self.store_transfers())
        output = self.scheduler.schedule()
        self._check_step(output)
        step = Step(output, self.worker.version, shadowed=any(ahead.fails for ahead in self.steps))
        self.steps.append(step)
        self._writes[id(step)] = self._plan_writes(output)
        if self.fault("step fails", rng) and output.num_scheduled_tokens:
            step.fails = True
            self.marks.hit("step failed")
            if (
                isinstance(orders := output.kv_connector_metadata, SimpleCPUOffloadMetadata)
                and orders.load_gpu_blocks
            ):
                self.marks.hit("step with a load failed")
        if self.params.early_loads:
            self.worker.send_load(step, rng)
        if len(self.steps) > 1:
            self.marks.hit("two steps in flight")
        if len(self.steps) > 2:
            self.marks.hit("three steps in flight")
        for request_id, request in self.scheduler.requests.items():
            if request.num_preemptions > preempted_before.get(request_id, 0):
                self.marks.hit("preempt")
                if running_stores:
                    self.marks.hit("preempt with a store in flight")
        self.mark_step(output)

    def _plan_writes(self, output: SchedulerOutput) -> dict[str, dict[int, int]]:
        """By request: block → where the positions end that the step may write in it."""
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        writes = {}
        for request_id, count in output.num_scheduled_tokens.items():
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            start, end = starts[request_id], starts[request_id] + count
            start = max(0, start - self.params.num_spec_tokens * self.params.depth)  # drafts may be refused
            ends: dict[int, int] = {}
            for group, table in zip(self.worker.groups, tables, strict=True):
                size = group.block_size
                first, last = start // size, (end - 1) // size
                if isinstance(group.kind, RingGroup | HotGroup):
                    first, last = 0, len(table) - 1
                elif isinstance(group.kind, StateGroup) and self.params.num_spec_tokens == 0:
                    first = last
                elif isinstance(group.kind, StateGroup):
                    last += self.params.num_spec_tokens
                by_position = not isinstance(group.kind, RingGroup | HotGroup)
                for column in range(first, min(last + 1, len(table))):
                    if table[column]:
                        ends[table[column]] = min((column + 1) * size, end) if by_position else end
            writes[request_id] = ends
        return writes

    def _narrow_writes(self, step: Step) -> None:
        """A step has told how many drafts were right: later ones write nothing before what is confirmed now."""
        for request_id in step.output.num_scheduled_tokens:
            confirmed = self.requests[request_id].num_confirmed_tokens
            for later in self.steps:
                ends = self._writes[id(later)].get(request_id, {})
                for block in [block for block, end in ends.items() if end <= confirmed]:
                    del ends[block]

    def _check_step(self, output: SchedulerOutput) -> None:
        """I8 for one step, and I10's idle steps."""
        params, counts = self.params, output.num_scheduled_tokens
        total = sum(counts.values())
        if total != output.total_num_scheduled_tokens:
            raise SimFailure("I8", f"total {output.total_num_scheduled_tokens} != {total}")
        if total > params.max_num_batched_tokens:
            raise SimFailure("I8", f"{total} tokens in a step of {params.max_num_batched_tokens}")
        if len(counts) > params.max_num_seqs:
            raise SimFailure("I8", f"{len(counts)} requests in a step of {params.max_num_seqs}")
        if min(counts.values(), default=1) <= 0:
            raise SimFailure("I8", f"a request without tokens in {counts}")
        if counts and self.scheduler.pause_state is PauseState.PAUSED_ALL:
            raise SimFailure("I8", f"{sorted(counts)} scheduled while all is paused")
        for new in output.scheduled_new_reqs:
            truth = self.truths[new.req_id]
            tokens = list(new.prefill_token_ids or new.prompt_token_ids or ())
            known = [*truth.prompt, *truth.output]
            require(
                tokens == known[: len(tokens)],
                "I9",
                f"{new.req_id} resumes with tokens {tokens}, expected {known}",
            )
            self.mark_admission(new, len(tokens), self.requests[new.req_id].num_preemptions)
        self._count_idle(bool(counts))

    def _count_idle(self, busy: bool) -> None:
        """I10: steps without tokens although requests wait and nothing is under way that could free them."""
        paused = self.scheduler.pause_state is not PauseState.UNPAUSED
        waits = self.world.grammars.pending or self.put_off_since
        is_under_way = self.steps or self.worker.is_waited_for or waits
        waited, self._waited = self._waited, set(self.scheduler.requests)
        some_ended = not waited <= self._waited  # a step that ends whom nothing can help is none that idles
        if busy or paused or is_under_way or some_ended or not self._waited:
            self.idle_steps = 0
            return
        self.idle_steps += 1
        require(self.idle_steps < 8, "I10", f"{self.idle_steps} idle steps in a row with requests waiting")

    def _excuse(self, mark: str) -> None:
        self.marks.hit(mark)
        self.store_excuse = self.store_excuse or mark

    def _do_execute(self, rng: random.Random) -> None:
        step = next(step for step in self.steps if not step.executed)
        self.worker.execute(step, rng)

    def _do_finish(self, rng: random.Random) -> None:
        step = self.steps.popleft()
        self._writes.pop(id(step), None)
        outputs = self.worker.runner_outputs(step)
        if step.fails:
            self._fail_step(step, outputs)
            carry_out_withdrawal(self, rng)
            return
        combined = self.world.aggregator.aggregate(outputs)
        assert combined is not None
        corrupted = self._inject_nan(step, combined, rng)
        lost = () if corrupted is None else pages_below(self, corrupted)
        report = combined.kv_connector_output
        failed = set() if report is None else set(report.failed_recving)
        for request_id in failed:
            self._note_failed_load(request_id)
        masks = self.scheduler.get_grammar_bitmask(step.output)
        messages = self.scheduler.update_from_output(step.output, combined)
        check_masks(masks, step.output, messages.values())
        self._narrow_writes(step)
        self._take(messages)
        if self.params.num_spec_tokens and not self.params.async_scheduling:
            self.scheduler.update_draft_token_ids(self.worker.drafts_after(step))
        if corrupted is not None and corrupted.status is RequestStatus.FINISHED_ERROR:
            spoil(self, lost)  # else the step was void already, and so were its logits
        carry_out_withdrawal(self, rng)

    def _fail_step(self, step: Step, outputs: list) -> None:
        for request_id in step.output.num_scheduled_tokens:
            truth = self.truths[request_id]
            if not truth.done:
                truth.ended_by = truth.ended_by or "step failed"
        self.world.aggregator.ft_defer_kv_connector_outputs(outputs)
        error = RequestError("step_failed", "the step failed")
        self._take(self.scheduler.fail_step(step.output, error))

    def _inject_nan(self, step: Step, combined: object, rng: random.Random) -> Request | None:
        sampled = [request_id for request_id, tokens in step.sampled.items() if tokens]
        if not sampled or not self.fault("nan", rng):
            return None
        victim = rng.choice(sampled)
        if self.truths[victim].done or self.requests[victim].is_finished():
            return None
        self.truths[victim].ended_by = "NaN"
        combined.num_nans_in_logits = {victim: 1}
        self.marks.hit("NaN logits")
        return self.requests[victim]

    def _note_failed_load(self, request_id: str) -> None:
        truth = self.truths[request_id]
        self.mark_failed_load(bool(self.steps))
        if self.params.recompute_failed_loads:
            self.marks.hit("failed load, recompute")
        elif not truth.done:
            truth.ended_by = truth.ended_by or "load failed"
            self.marks.hit("failed load, error")

    def _take(self, messages: dict[int, EngineCoreOutputs]) -> None:
        """What the clients hear."""
        for message in messages.values():
            for output in message.outputs:
                truth = self.truths[output.request_id]
                require(
                    truth.finish_reason is None,
                    "I9",
                    f"{output.request_id} gets output after its end ({truth.finish_reason})",
                )
                if truth.ended_by == "abort":
                    continue
                truth.delivered += output.new_token_ids
                expected = truth.output[: len(truth.delivered)]
                require(
                    truth.delivered == expected,
                    "I9",
                    f"{output.request_id} answers {truth.delivered}, expected {truth.output}",
                )
                if output.finish_reason is not None:
                    truth.ended_by = truth.ended_by or ("held up" if self.is_held_up(output) else None)
                    self._note_end(truth, output.finish_reason)
        for request in list(self.scheduler.requests.values()):
            self.registry.learn(request)

    def _note_end(self, truth: Truth, reason: FinishReason) -> None:
        truth.finish_reason = str(reason)
        if truth.grammar == BAD:
            require(
                str(reason) == "error" and not truth.delivered,
                "I9",
                f"{truth.request_id} ends with {reason} and {truth.delivered} although its grammar is none",
            )
            truth.ended_by = truth.ended_by or "grammar"
            self.marks.hit("grammar refused")
        self.registry.learn(self.requests[truth.request_id])
        if any(truth.request_id in step.output.num_scheduled_tokens for step in self.steps):
            self.marks.hit("finish with a step in flight")
        require(
            str(reason) != "error" or truth.ended_by is not None,
            "I9",
            f"{truth.request_id} ends with an error although nothing failed",
        )
        self._expect_stored(truth)

    def _expect_stored(self, truth: Truth) -> None:
        """Full-attention blocks that a request held until it ended well must be below when all has come to rest."""
        if truth.ended_by is not None or truth.cooled or self.offload is None:
            return
        request = self.requests[truth.request_id]
        group_id = self.offload.fa_gidx
        size = self.worker.groups[group_id].block_size
        let_go = self.worker.groups[group_id].let_go(len(truth.prompt), request.num_tokens)
        coordinator = self.scheduler.kv_cache_manager.coordinator
        confirmed = coordinator.get_num_cacheable_tokens(request.num_tokens - 1, group_id)
        for end in range(size, confirmed + 1, size):
            index = end // self.world.hash_block_size - 1
            if index < len(request.block_hashes) and end // size - 1 not in let_go:
                self.must_be_stored.add(make_block_hash_with_group_id(request.block_hashes[index], group_id))

    def _do_copy(self, rng: random.Random) -> None:
        rng.choice([lanes for lanes in self.worker.all_lanes if lanes.movable()]).advance(rng)

    def _do_unstall(self, rng: random.Random) -> None:
        jobs = [job for lanes in self.worker.all_lanes for job in lanes.running if job.stalled]
        rng.choice(jobs).stalled = False

    def _do_poison(self, rng: random.Random) -> None:
        """Overwrite what nobody may ever read: free blocks without a cache entry, while the device is idle."""
        if any(not step.executed for step in self.steps) or self.worker.copying():
            return
        for block in self.device_pool.free_block_queue.get_all_free_blocks():
            if block.block_hash is None and rng.random() < 0.5:
                for memory in self.worker.devices:
                    memory.page(block.block_id).poison()

    def _do_reset(self, rng: random.Random) -> None:
        running, connector = rng.random() < 0.5, rng.random() < 0.6
        if self.steps:
            self.marks.hit("reset in flight")
        self.marks.hit("reset with running requests" if running else "reset")
        if (running and connector) or (running and self.offload is None):
            # From here on the old bytes are wrong: reset is what callers use after a change of weights.
            self.worker.version += 1
        if connector:
            self.mark_connector_reset()
            taint_kept(self)
        if not self.scheduler.reset_prefix_cache(running, connector):
            self.marks.hit("reset refused")
        carry_out_withdrawal(self, rng)
        self._excuse("reset")
        self.must_be_stored.clear()

    def _do_cool(self, rng: random.Random) -> None:
        """Forget the device's cache only, so that the tier below has to serve."""
        pool = self.device_pool
        if self.params.reads_below:
            pool.evict_blocks(self.idle_with_a_copy())
            if self.offload is not None and self.chain is not None and rng.random() < 0.7:
                self.offload.tier.evict(self.idle_with_a_copy(of_the_host=True))
                self.full_tiers.add(0)
            return
        held = [block for block in pool.blocks if block.ref_cnt]
        self.unkeyed |= {key for block in held for key, _ in pool.get_keys(block)}
        self.scheduler.reset_prefix_cache()
        for truth in self.live():  # what lost its hash while it was computed is not stored
            truth.cooled = True

    def _do_drop(self, rng: random.Random) -> None:
        assert self.shelf is not None
        self.shelf.drop_some(rng)

    def _do_kill(self, rng: random.Random) -> None:
        kill(self, rng)

    def _do_pause(self, rng: random.Random) -> None:
        if self.scheduler.pause_state is PauseState.UNPAUSED:
            self.scheduler.set_pause_state(rng.choice((PauseState.PAUSED_NEW, PauseState.PAUSED_ALL)))
            self.marks.hit("paused")
        else:
            self.scheduler.set_pause_state(PauseState.UNPAUSED)
