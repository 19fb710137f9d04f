"""The store half of the manager: tracked requests, planned and running stores, and their ends.

Owns cursors, leases of stores and the ledger. It must not know loads, lookups or configuration. Layer L4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.v1.core.block_hash import BlockHashWithGroupId, get_block_hash
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.block_ops import make_key_set
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.admission import DEFAULT_MAX_TRACKER_SIZE, ReuseFilter
from vllm.v1.simple_kv_offload.boundary import BoundaryStores, HandOff
from vllm.v1.simple_kv_offload.patrol import HolePatrol
from vllm.v1.simple_kv_offload.records import Ledger, StoreDeclines
from vllm.v1.simple_kv_offload.selection import Selection
from vllm.v1.simple_kv_offload.store_policy import (
    BlockTable,
    Endangered,
    StoreRequestState,
    Stores,
    bind_find_endangered,
    confirmed_tokens,
    keys_between,
    num_full_blocks,
    select_idle,
    select_new,
    select_tail,
    stable_groups,
)
from vllm.v1.simple_kv_offload.tier import Tier
from vllm.v1.simple_kv_offload.transfer import Candidates, StoreTable, Transfer, TransferState
from vllm.v1.simple_kv_offload.unsettled import Unsettled


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What stays the same: the workers' number, steps that may be in flight together, and the policy."""

    hash_block_size: int
    num_ranks: int
    max_steps_in_flight: int
    is_eager: bool
    prompt_only: bool = False
    """Whether generated tokens are left out."""
    store_threshold: int = 0
    """How many requests must have had a block before it is stored."""
    max_tracker_size: int = DEFAULT_MAX_TRACKER_SIZE
    max_pending_blocks: int | None = None
    """Blocks of stores under way beyond which nothing is planned; None = as many as there are slots."""


class StoreSide:
    """Plans stores during a step, submits them with it, ends them when all ranks have reported.

    At most one store per key is planned or running. What is tracked of a request vanishes with it;
    stores in flight are bounded by the slots of the tier.
    """

    def __init__(self, tier: Tier, device: BlockPool, settings: StoreSettings) -> None:
        self.in_flight = make_key_set()
        self.unsettled = Unsettled(tier.group_ids, settings.hash_block_size)
        self.stores = Stores(
            device,
            tier,
            self.in_flight,
            self.unsettled,
            settings.hash_block_size,
            settings.prompt_only,
            ReuseFilter(settings.store_threshold, settings.max_tracker_size),
        )
        # When a request ends, its blocks are copied although a step in flight may be to compute them for another: the
        # copy comes after that step, and gets no key if the step fails.
        self._stores_at_end = replace(self.stores, unsettled=Unsettled((), settings.hash_block_size))
        self.find_endangered = bind_find_endangered(self.stores)
        if not settings.is_eager:
            device.keep_order()
        self.states: dict[str, StoreRequestState] = {}
        self.requests: dict[str, Request] = {}
        self.planned: list[Transfer] = []
        self.table = StoreTable(settings.num_ranks)
        self.boundary = BoundaryStores()
        self.patrol = HolePatrol(tier.guarded)
        self.ledger = Ledger()
        self.declines = StoreDeclines()
        self.num_preempted_blocks = 0
        """Blocks planned for preempted requests so far."""
        self._tier = tier
        self._settings = settings
        self._step = 0
        self._preempted: list[Request] = []
        self._unwanted: set[int] = set()
        self._num_groups = len(tier.config.kv_cache_groups)
        self._stable = stable_groups(tier)
        self._stable_sizes = [(group, tier.coordinator.group_block_sizes[group]) for group in self._stable]
        self._unstable = tuple(group for group in tier.group_ids if group not in self._stable)

    # -- tracking -----------------------------------------------------------------------------

    def track(self, request: Request) -> None:
        """The request takes part in steps from now on, until it ends; eager mode stores its blocks meanwhile."""
        self.requests[request.request_id] = request
        if self._settings.is_eager and request.request_id not in self.states:
            self._new_state(request)

    def settle(self, scheduled: Mapping[str, int]) -> None:
        """Find out anew what steps in flight, and the one being built, are still to compute."""
        self.unsettled.settle(self.requests, scheduled, self._step)

    def _leave_behind(self, request: Request, num_confirmed: int) -> None:
        self.unsettled.leave_behind(request, num_confirmed, self._step + self._settings.max_steps_in_flight)

    def begin_step(self, output: SchedulerOutput) -> None:
        """Follow the block tables of the step; a preempted request starts over."""
        self._step += 1
        for req_id in sorted(output.preempted_req_ids) if output.preempted_req_ids else ():
            request = self.requests.get(req_id)
            if request is not None:
                self._leave_behind(request, request.num_tokens_at_preemption)
                self._preempted.append(request)
            if req_id in self.states:
                self.states[req_id].replace_table(())
        if not (self._settings.is_eager or self.states):
            return  # lazy stores do not follow requests
        for req_id, block_ids, is_full_table in yield_req_data(output):
            if block_ids is None and not is_full_table and req_id in self.states:
                continue  # most requests in most steps
            state = self.states.get(req_id)
            if state is None:
                # Forgotten by a reset, but still running: its later blocks are stored again.
                if not self._settings.is_eager or req_id not in self.requests:
                    continue
                state = self._new_state(self.requests[req_id])
            if is_full_table:
                state.replace_table(block_ids or ())
            elif block_ids is not None:
                state.extend_table(block_ids)

    def _new_state(self, request: Request) -> StoreRequestState:
        start = request.num_computed_tokens
        state = StoreRequestState(request, (), [0] * self._num_groups, start_tokens=start)
        self.states[request.request_id] = state
        return state

    # -- planning -----------------------------------------------------------------------------

    def plan_step(self, output: SchedulerOutput) -> None:
        """Plan the confirmed blocks of the scheduled requests and the state hand-offs of the step."""
        states = self.states
        for req_id in output.num_scheduled_tokens if self.stores.reuse.is_on else ():
            if req_id in states:
                self._offer(states[req_id].request)
        block_state = output.kv_connector_block_state
        hand_offs = dict(block_state.boundary_state_offloads) if block_state is not None else {}
        scheduled: Iterable[str] = output.num_scheduled_tokens
        if preempted := output.preempted_req_ids:
            scheduled = [req_id for req_id in scheduled if req_id not in preempted]
        patrolled = self._patrolled(scheduled)
        if not (patrolled or hand_offs):
            # A few of them in most steps, while all are looked at in every step.
            scheduled = [
                req_id
                for req_id in scheduled
                if (known := states.get(req_id)) is not None
                and known.request.num_computed_tokens >= known.quiet_below
            ]
        for req_id in scheduled:
            state = states.get(req_id)
            if state is None:
                continue
            patrol = req_id in patrolled
            own_hand_offs = hand_offs.pop(req_id, ()) if hand_offs else ()
            has_new = state.request.num_computed_tokens >= state.quiet_below and self._has_new_blocks(state)
            if not (patrol or has_new or own_hand_offs):
                continue
            table: BlockTable = state.block_ids
            # A table is as long as the request: it is only asked for where something is to be walked.
            if block_state is not None and (patrol or has_new):
                table = block_state.get_block_ids(req_id) or table
            self._plan_running(state, table, own_hand_offs, patrol)
        for left in hand_offs.values():
            self.boundary.drop(left)

    def _patrolled(self, scheduled: Iterable[str]) -> Collection[str]:
        """The requests whose blocks are to be looked at again in this step."""
        if not (self._tier.evictions or self._tier.guard_losses):
            return ()
        states = self.states
        turns = self.patrol.turns([req_id for req_id in scheduled if req_id in states])
        return [req_id for req_id in turns if self.patrol.has_work(self.stores, states[req_id])]

    def plan_preempted(self) -> None:
        """Before anything else in the step: what preempted requests computed and no tier has.

        At most half of the device's free blocks, which the scheduler has just made room with.
        """
        preempted, self._preempted = self._preempted, []
        for request in preempted:
            chosen = self.new_selection(self.states.get(request.request_id))
            chosen.room = min(chosen.room, self.stores.device.get_num_free_blocks() // 2)
            # The request will want all of that again.
            num_tokens = request.num_tokens_at_preemption
            select_idle(self.stores, request, num_tokens, self._tier.group_ids, chosen)
            self.num_preempted_blocks += len(chosen.candidates)
            self.plan(chosen.candidates, request.request_id)

    def count_unwanted(self, endangered: Endangered) -> None:
        """Count the endangered blocks that were not offered often enough, each once while it stays endangered."""
        stores = self.stores
        unwanted = {
            block.block_id
            for block, key in endangered.blocks
            if not (stores.reuse.admits(get_block_hash(key)) or stores.is_copied(key))
        }
        self.declines.reuse += len(unwanted - self._unwanted)
        self._unwanted = unwanted

    def _offer(self, request: Request, num_tokens: int = 0) -> None:
        """The request has what is confirmed of it, and will have ``num_tokens`` when the step is over."""
        reuse = self.stores.reuse
        if reuse.is_on:
            tokens = max(num_tokens, confirmed_tokens(request))
            reuse.offer(request, tokens // self.stores.hash_block_size)

    def _has_new_blocks(self, state: StoreRequestState) -> bool:
        """Whether some cursor may move in this step. Tells the state until when none can."""
        confirmed = confirmed_tokens(state.request)
        ends = [(state.num_stored_blocks[group] + 1) * size for group, size in self._stable_sizes]
        state.quiet_below = min(ends, default=0)
        if confirmed < state.quiet_below:
            return False  # no block is full
        storable = self.stores.storable_tokens(state.request)
        return any(
            confirmed >= end
            and state.num_stored_blocks[group] < num_full_blocks(self.stores, state.request, group, storable)
            for (group, _), end in zip(self._stable_sizes, ends, strict=True)
        )

    def _plan_running(
        self, state: StoreRequestState, table: BlockTable, hand_offs: Sequence[HandOff], patrol: bool
    ) -> None:
        chosen = self.new_selection(state)
        if hand_offs:
            self._offer(state.request, max(num_tokens for _, _, num_tokens in hand_offs))
            self.boundary.select(self.stores, hand_offs, state, chosen)
        if table:
            num_chosen = len(chosen.candidates)
            advance = select_new(self.stores, state, table, self._stable, chosen)
            # What was passed over has a copy that this request does not guard yet, or none.
            state.may_lack_copies |= sum(advance) > len(chosen.candidates) - num_chosen
            state.num_stored_blocks = [
                cursor + step for cursor, step in zip(state.num_stored_blocks, advance, strict=True)
            ]
            if patrol:
                self.patrol.select_holes(self.stores, state, table, self._stable, chosen)
        self.declines.cut_plans += chosen.was_cut and chosen.is_bounded
        self.plan(chosen.candidates, state.request.request_id)

    def new_selection(self, state: StoreRequestState | None) -> Selection:
        """An empty selection with the present room; a request never evicts what it counts on itself."""
        return Selection(
            self._tier,
            None if state is None else lambda slot: self.patrol.counts_on(state, slot),
            self.max_new_blocks,
        )

    @property
    def max_new_blocks(self) -> int | None:
        """How many blocks may be planned beside the stores under way; None = any number."""
        limit = self._settings.max_pending_blocks
        return None if limit is None else max(0, limit - self.ledger.in_flight)

    def plan(self, candidates: Candidates, request_id: str | None, *, to_front: bool = False) -> None:
        """Lease the device blocks and stage a slot for each; the order leaves with the next `submit`.

        ``to_front``: as they stand in the queue, and go back to it.
        """
        if not candidates.blocks:
            return
        owner = f"store of {request_id}" if request_id is not None else "lazy store"
        blocks, keys = candidates.blocks, candidates.contents
        self.stores.device.touch(blocks)
        device = Lease.adopt(self.stores.device, blocks, owner, to_front=to_front)
        slots = Lease.adopt(self._tier.pool, self._tier.stage_for(keys), owner, in_order=to_front)
        self.planned.append(Transfer(owner, device, slots, keys, request_id=request_id))
        self.in_flight.update(keys.all_keys())
        self.ledger.scheduled += len(blocks)

    def submit(self) -> tuple[int, list[Transfer]] | None:
        """Hand out everything planned under one event; None if there is nothing."""
        if not self.planned:
            return None
        transfers, self.planned = self.planned, []
        event = self.table.submit(transfers)
        for transfer in transfers:
            state = self.states.get(transfer.request_id or "")
            if state is not None:
                state.store_events.add(event)
        return event, transfers

    # -- ends ---------------------------------------------------------------------------------

    def finish_request(self, request: Request, block_ids: BlockTable) -> None:
        """The request ends well: plan what is confirmed and not stored yet, while its blocks are still held."""
        state = self.states.get(request.request_id)
        self._offer(request)
        if state is not None:
            stores = self._stores_at_end
            chosen = self.new_selection(state)
            if len(block_ids) == self._num_groups and any(block_ids):
                advance = select_new(stores, state, block_ids, self._stable, chosen)
                ends = [cursor + step for cursor, step in zip(state.num_stored_blocks, advance, strict=True)]
                select_tail(stores, state, block_ids, self._positional_ends(ends), chosen)
                if self.stores.reuse.is_on:
                    # States that it has found here were handed over when they were not wanted yet.
                    select_idle(stores, request, request.num_tokens, self._unstable, chosen)
                self._count_left_out(request, ends, chosen)
            self.plan(chosen.candidates, request.request_id)
        self.forget_request(request.request_id)

    def _count_left_out(self, request: Request, ends: Sequence[int], chosen: Selection) -> None:
        """The request ends, its cursors at ``ends``: what they have not reached gets no copy from it."""
        confirmed = confirmed_tokens(request)
        if self.stores.prompt_only:
            confirmed = min(confirmed, request.num_prompt_tokens)
        for group in self._stable:
            wanted = num_full_blocks(self.stores, request, group)
            if self.stores.reuse.is_on:
                self.declines.reuse += num_full_blocks(self.stores, request, group, confirmed) - wanted
            if chosen.was_cut and chosen.is_bounded:
                self.declines.queue += max(0, wanted - ends[group])
            elif chosen.was_cut:
                self.declines.full += max(0, wanted - ends[group])

    def fail_request(self, request: Request) -> list[BlockHashWithGroupId]:
        """The request ends in an error: what it has read or written is not to be trusted, whoever stored it.

        Returns the keys of that content.
        """
        request_id = request.request_id
        poisoned = set(keys_between(self.stores, request, 0, request.num_tokens))
        for transfer in [t for t in self.planned if t.request_id == request_id]:
            self.planned.remove(transfer)
            self._discard(transfer)
        for transfer in self.table.transfers:
            if transfer.request_id == request_id and transfer.state is TransferState.SUBMITTED:
                self._abandon(transfer)
        for transfer in (*self.planned, *self.table.transfers):
            transfer.strip(poisoned)
        self.in_flight.difference_update(poisoned)
        self._tier.forget(sorted(poisoned))
        self.forget_request(request_id)
        return sorted(poisoned)

    def forget_request(self, request_id: str) -> None:
        """Drop everything tracked of a request. Its stores in flight go on."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._leave_behind(request, confirmed_tokens(request))
        self.stores.reuse.forget_request(request_id)
        state = self.states.pop(request_id, None)
        if state is not None:
            state.finished = True
            self.patrol.dismiss(state)

    def report(self, counts: Mapping[int, int], *, ok: bool) -> None:
        """Ranks reported store events as completed or failed."""
        for event, count in counts.items():
            complete = self.table.report(event, count, ok=ok)
            if complete is None:
                continue
            transfers, all_ok = complete
            for transfer in transfers:
                self._end(event, transfer, all_ok)

    def _end(self, event: int, transfer: Transfer, ok: bool) -> None:
        state = self.states.get(transfer.request_id or "")
        if state is not None:
            state.store_events.discard(event)
        size = len(transfer)
        if transfer.state is TransferState.ABANDONED:
            self.ledger.dropped += size
        elif ok:
            self._commit(transfer, state)
            self.ledger.done += size
        else:
            self.ledger.failed += size
        if state is not None and not (ok and transfer.state is TransferState.SUBMITTED):
            state.may_lack_copies = True
        if transfer.state is TransferState.SUBMITTED:
            self._leave_flight(transfer)
        transfer.finish(ok=ok)

    def _commit(self, transfer: Transfer, state: StoreRequestState | None) -> None:
        if self._tier.shared is not None and transfer.request_id is None:
            self.stores.lately.note(transfer.keys.all_keys(), self.stores.device.num_evicted)
        for slot, keys in transfer.trusted_keys():
            self._tier.commit(slot, keys)
            if state is not None:
                self.patrol.guard(state, slot)

    def _discard(self, transfer: Transfer) -> None:
        self._leave_flight(transfer)
        self.ledger.dropped += len(transfer)
        transfer.discard()

    def _abandon(self, transfer: Transfer) -> None:
        self._leave_flight(transfer)
        transfer.abandon()

    def _leave_flight(self, transfer: Transfer) -> None:
        self.in_flight.difference_update(transfer.keys.all_keys())

    def reset(self) -> bool:
        """Drop what was not sent, abandon what runs, start tracking anew; True if nothing is running."""
        planned, self.planned = self.planned, []
        for transfer in planned:
            self._discard(transfer)
        for transfer in self.table.transfers:
            if transfer.state is TransferState.SUBMITTED:
                self._abandon(transfer)
        for state in self.states.values():
            self.patrol.dismiss(state)
        self.states.clear()
        return len(self.table) == 0

    # -- figures ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a store is planned, running or abandoned but not over."""
        return bool(self.planned) or len(self.table) > 0

    @property
    def num_pending_blocks(self) -> int:
        """Blocks of stores that are planned or running."""
        return sum(map(len, self.planned)) + sum(map(len, self.table.transfers))

    @property
    def num_returning_blocks(self) -> int:
        """Device blocks that come back to the front of the free list when a copy ends, whoever copies them.

        They are part of what is about to be handed out.
        """
        leases = self.stores.device.leases
        return sum(len(hold.blocks) for hold in leases.values() if hold.to_front) if leases else 0

    def copied_by_others(self) -> list[BlockHashWithGroupId]:
        """What other connectors copy of that: about to be handed out like the rest, but out of sight meanwhile."""
        if not self.stores.device.leases:
            return []
        own = {id(transfer.device_lease) for transfer in (*self.planned, *self.table.transfers)}
        return [
            block.block_hash
            for lease, hold in self.stores.device.leases.items()
            if hold.to_front and lease not in own
            for block in hold.blocks
            if block.block_hash is not None
        ]

    def holds_idle_device_blocks(self) -> bool:
        """Whether a running store is the only holder of some device block."""
        return any(
            block.ref_cnt == 1 for transfer in self.table.transfers for block in transfer.device_blocks
        )

    def _positional_ends(self, ends: Sequence[int]) -> list[int]:
        """Where each group's table was walked up to; 0 where tables are not positional."""
        return [end if group in self._stable else 0 for group, end in enumerate(ends)]
