"""The workers of all ranks as one fake: request rows and the forward; what they copy is in copy_worker.py.

Keeps its own copy of tokens and block tables, as real workers do, so that a scheduler which forgets to tell them
something is found out. Steps run in order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.sim.content import NONSENSE, Chain, guess_tokens, next_token, root
from tests.sim.copy_worker import CopyWorker, FaultDraw, Step
from tests.sim.device import Rows, forward
from tests.sim.drafts import DraftMarks
from tests.sim.failure import require
from tests.sim.kept_rows import KeptRows
from tests.sim.kinds import mark_kinds
from tests.sim.marks import Marks
from tests.sim.params import SimParams
from tests.sim.rank_memory import groups_of_ranks
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


@dataclass
class WorkerRequest:
    """One request as the workers know it."""

    chain: Chain
    tables: list[list[int]]
    replay_start: int
    cached_end: int
    """Tokens that were cached when the request was admitted; replay does not rewrite them."""
    state_end: int
    state_row: int = 0
    """Where the last state is; see `Rows`."""
    drafts: list[int] = field(default_factory=list)
    """What the drafter says comes next."""
    prompt_end: int = 0
    encoder: tuple[int, ...] = ()
    encodes: bool = True
    """See `Rows`."""


class SimWorker(CopyWorker):
    """All ranks together; memory and lanes per rank, request rows once."""

    def __init__(self, params: SimParams, marks: Marks, fault: FaultDraw) -> None:
        super().__init__(params, marks, fault)
        self.rank_groups = groups_of_ranks(params)
        self.groups = self.rank_groups[0]
        """Those of the first rank, for what is the same on all."""
        self.requests: dict[str, WorkerRequest] = {}
        self._draft_marks = DraftMarks(marks)
        self.ghosts: set[str] = set()
        """Requests whose step failed: what later steps compute for them is void."""
        self._replay_tokens = max((s.prefix_replay_tokens for s in params.specs), default=0)
        self.identities: dict[str, tuple[str | None, str | None, str | None]] = {}
        """(salt, adapter, encoder input) by request: workers are not told the salt, but fingerprints need it."""
        self.version = 0

    def after_a_kill(self) -> SimWorker:
        """The workers of the next engine on the same disks."""
        after = SimWorker(self.params, self.marks, self.fault)
        after.disks = self.disks
        for lanes, disk in zip(after.lanes, self.disks, strict=True):
            lanes.disk = disk
        if self.params.disk:
            after.hosts = self.hosts
            for lanes, host in zip(after.lanes, self.hosts, strict=True):
                lanes.host = host
        after.kept = [KeptRows(table.rows) for table in self.kept]
        after.identities, after.version = self.identities, self.version
        return after

    # --- one step -------------------------------------------------------------------------------------------------

    def execute(self, step: Step, rng: random.Random) -> None:
        """Run one step on all ranks; leaves the sampled tokens by request in it, or None if it fails."""
        output, fails = step.output, step.fails
        self._apply_requests(output)
        batch = [] if fails else self._batch(output, step.version, step.shadowed)
        for memory, groups in zip(self.devices, self.rank_groups, strict=True):
            for block_id in output.new_block_ids_to_zero or ():
                memory.page(block_id).poison()
            for source, target in output.kv_cache_block_copies or ():
                memory.page(target).copy(memory.page(source))
                self.marks.hit("copy on write")
            if not fails:
                forward(memory, groups, batch)
        sampled = {rows.request_id: self._sample(rows) for rows in batch}
        self._accept(batch, sampled)
        self._mark_kinds(batch)
        self.submit_copies(step, rng)
        step.executed = True
        # A worker collects what has ended while it runs the step; one that fails has no output to put it in.
        step.reports = [None] * len(self.lanes) if fails else self.reports(rng, output)
        if fails:
            self.ghosts |= set(output.num_scheduled_tokens)
            return
        step.sampled = sampled
        step.drafts = {request_id: self.requests[request_id].drafts for request_id in sampled}

    def _apply_requests(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
            self.ghosts.discard(request_id)
        for request_id in output.preempted_req_ids or ():
            preempted = self.requests.pop(request_id, None)
            if preempted is not None and preempted.state_row:
                self.marks.hit("preempted behind accepted drafts")
            self.ghosts.discard(request_id)
        for new in output.scheduled_new_reqs:
            self._add(new)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            request = self.requests.get(request_id)
            require(
                request is not None,
                "I6",
                f"the workers hear of {request_id} for the first time in a cached row",
            )
            new_ids = cached.new_block_ids[i]
            assert request is not None
            if request_id in cached.resumed_req_ids:
                require(new_ids is not None, "I6", f"resumed {request_id} has no block table")
                request.tables = [list(ids) for ids in new_ids or ()]
                request.encodes = True
            elif new_ids is not None:
                for table, ids in zip(request.tables, new_ids, strict=True):
                    table.extend(ids)

    def _add(self, new: NewRequestData) -> None:
        tokens = list(new.prefill_token_ids or new.prompt_token_ids or ())
        require(
            len(new.block_ids) == len(self.groups),
            "I6",
            f"{new.req_id} has tables of {len(new.block_ids)} groups",
        )
        replay_end = new.replay_start + self._replay_tokens if new.replay_start else 0
        request = self.requests[new.req_id] = WorkerRequest(
            Chain(root(*self.identities[new.req_id]), tokens),
            [list(ids) for ids in new.block_ids],
            new.replay_start,
            replay_end,
            new.num_computed_tokens,
        )
        if new.num_computed_tokens:
            self._draft_marks.admitted(request.chain.prints[new.num_computed_tokens], self.groups)
        request.prompt_end = len(new.prompt_token_ids or ())
        request.encoder = tuple(p for clip in new.mm_features for p in clip.prints())

    def _batch(self, output: SchedulerOutput, version: int, shadowed: bool) -> list[Rows]:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        require(
            set(starts) == set(output.num_scheduled_tokens),
            "I8",
            f"step names rows of {sorted(starts)} but tokens of {sorted(output.num_scheduled_tokens)}",
        )
        batch = []
        for request_id, count in output.num_scheduled_tokens.items():
            if request_id in self.ghosts:
                continue
            request = self.requests[request_id]
            start, end = starts[request_id], starts[request_id] + count
            counted_end = end
            drafts = self._drafts(request, output.scheduled_spec_decode_tokens.get(request_id, []))
            known = len(request.chain.tokens)
            if self.params.num_spec_tokens and self.params.async_scheduling and end - len(drafts) > known:
                # Scheduled as if all drafts under way were accepted; the workers know better.
                start, end = start - (end - len(drafts) - known), known + len(drafts)
                self.marks.hit("start behind refused drafts")
            require(
                end == known + len(drafts) if drafts else end <= known,
                "I6",
                f"{request_id} is to compute [{start}, {end}) of {known} known tokens",
            )
            batch.append(
                Rows(
                    request_id,
                    request.chain.followed_by(drafts) if drafts else request.chain,
                    request.tables,
                    start,
                    end,
                    request.replay_start,
                    request.cached_end,
                    version,
                    version == self.version,
                    shadowed,
                    drafts=drafts,
                    prompt_end=request.prompt_end,
                    encoder=request.encoder,
                    encodes=request.encodes,
                    counted_end=counted_end,
                    state_end=request.state_end,
                    state_row=request.state_row,
                )
            )
            request.encodes = False
        return batch

    def _drafts(self, request: WorkerRequest, scheduled: list[int]) -> list[int]:
        """Placeholders stand for the workers' own drafts; where there are none, for tokens that are always refused."""
        own = request.drafts if self.params.async_scheduling else []
        return [own[i] if token < 0 and i < len(own) else token for i, token in enumerate(scheduled)]

    def _sample(self, rows: Rows) -> list[int]:
        request, drafts = self.requests[rows.request_id], rows.drafts
        known = len(request.chain.tokens)
        if rows.end < known + len(drafts):
            return []
        tokens = []
        for guess in [*drafts, None]:
            tokens.append(NONSENSE if rows.void else next_token(request.chain.prints[-1]))
            request.chain.append(tokens[-1])
            if rows.void or guess != tokens[-1]:
                break
        if drafts:
            self.marks.hit("drafts refused" if len(tokens) <= len(drafts) else "drafts accepted")
            if self.params.pipeline_stages > 1:
                self.marks.hit("drafts beside pipeline stages")
        request.drafts = guess_tokens(request.chain.prints[-1], self.params.num_spec_tokens)
        return tokens

    def _accept(self, batch: list[Rows], sampled: dict[str, list[int]]) -> None:
        """The drafts that were right are computed tokens now, and a state is in the row of the last of them."""
        for rows in batch:
            request, num_accepted = self.requests[rows.request_id], max(0, len(sampled[rows.request_id]) - 1)
            if self.params.num_spec_tokens:
                for memory, groups in zip(self.devices, self.rank_groups, strict=True):
                    for group in groups:
                        group.accept(memory, rows, num_accepted)
            request.state_end, request.state_row = rows.counted_end, num_accepted
            self._draft_marks.accepted(rows, num_accepted, self.groups)

    @staticmethod
    def drafts_after(step: Step) -> DraftTokenIds:
        """What an engine without look-ahead asks for after a step."""
        return DraftTokenIds(list(step.drafts), [list(drafts) for drafts in step.drafts.values()])

    def _mark_kinds(self, batch: list[Rows]) -> None:
        mark_kinds(self.marks, self.groups, batch)
        for rows in batch:
            if rows.replay_end:
                self.marks.hit("bounded replay")
            for group in self.groups:
                spec = group.spec.kind_spec
                if (
                    isinstance(spec, SlidingWindowSpec)
                    and rows.start >= spec.sliding_window + group.block_size
                ):
                    self.marks.hit("window slid")
                if isinstance(spec, MambaSpec) and rows.start > 0:
                    self.marks.hit("state kept")
                if isinstance(spec, CircularBufferSpec):
                    self.marks.hit("ring used")
                if not spec.transferable:
                    self.marks.hit("scratch used")

    def runner_outputs(self, step: Step) -> list[ModelRunnerOutput]:
        """The outputs of all ranks for one step that ran."""
        ids = list(step.output.num_scheduled_tokens)
        return [
            ModelRunnerOutput(
                req_ids=list(ids),
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=[list(step.sampled.get(request_id, [])) for request_id in ids],
                kv_connector_output=report,
            )
            for report in step.reports
        ]
