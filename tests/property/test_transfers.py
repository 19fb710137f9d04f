"""Transfers against a naive model: whatever happens in whatever order, each ends once and gives everything back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import data, integers

from vllm.utils.checks import InvariantError
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.simple_kv_offload.transfer import StoreTable, Transfer, TransferState

RANKS = 2


class Transfers(RuleBasedStateMachine):
    """Plans, submits, abandons and ends transfers between two pools."""

    def __init__(self) -> None:
        super().__init__()
        self.device, self.tier = BlockPool(9, True, 4), BlockPool(9, True, 4, medium="CPU")
        self.table = StoreTable(RANKS)
        self.planned: list[Transfer] = []
        self.running: dict[int, list[Transfer]] = {}
        self.reports: dict[int, int] = {}
        self.ended: list[Transfer] = []

    @rule(count=integers(1, 3))
    def plan(self, count: int) -> None:
        if min(self.device.get_num_free_blocks(), self.tier.get_num_free_blocks()) < count:
            return
        device = Lease(self.device, self.device.free_block_queue.get_all_free_blocks()[:count], "t")
        tier = Lease.adopt(self.tier, self.tier.get_new_blocks(count), "t")
        self.planned.append(Transfer("t", device, tier))

    @precondition(lambda self: self.planned)
    @rule()
    def submit(self) -> None:
        event = self.table.submit(self.planned)
        assert event not in self.running
        self.running[event], self.planned = self.planned, []
        self.reports[event] = 0

    @precondition(lambda self: self.planned)
    @rule()
    def discard(self) -> None:
        transfer = self.planned.pop()
        transfer.discard()
        self.ended.append(transfer)

    @precondition(lambda self: self.running)
    @rule(choice=data())
    def abandon(self, choice: object) -> None:
        event = choice.draw(integers(0, len(self.running) - 1))  # type: ignore[attr-defined]
        for transfer in list(self.running.values())[event]:
            if transfer.state is TransferState.SUBMITTED:
                transfer.abandon()

    @precondition(lambda self: self.running)
    @rule(choice=data(), ok=integers(0, 3))
    def report(self, choice: object, ok: int) -> None:
        index = choice.draw(integers(0, len(self.running) - 1))  # type: ignore[attr-defined]
        event = list(self.running)[index]
        self.reports[event] += 1
        complete = self.table.report(event, 1, ok=ok > 0)
        assert (complete is not None) == (self.reports[event] == RANKS)
        if complete is None:
            return
        transfers, all_ok = complete
        assert transfers == self.running.pop(event)
        for transfer in transfers:
            abandoned = transfer.state is TransferState.ABANDONED
            state = transfer.finish(ok=all_ok)
            expected = TransferState.DONE if all_ok else TransferState.FAILED
            assert state is (TransferState.DISCARDED if abandoned else expected)
            self.ended.append(transfer)

    @precondition(lambda self: self.ended)
    @rule()
    def an_end_is_final(self) -> None:
        transfer = self.ended[-1]
        for action in (transfer.submit, transfer.abandon, transfer.discard, lambda: transfer.finish(ok=True)):
            with pytest.raises(InvariantError):
                action()

    @invariant()
    def references_match(self) -> None:
        live = [*self.planned, *(t for batch in self.running.values() for t in batch)]
        held = sum(len(transfer) for transfer in live)
        for pool in (self.device, self.tier):
            assert pool.get_num_free_blocks() == 8 - held
            assert all(block.ref_cnt in (0, 1) for block in pool.blocks[1:])
        assert all(transfer.ended and len(transfer) == 0 for transfer in self.ended)
        assert len(self.table) == len(self.running)


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_sides_must_pair_up() -> None:
    pool = BlockPool(5, True, 4)
    with pytest.raises(InvariantError, match="1 device blocks, 2 tier blocks"):
        Transfer("t", Lease(pool, pool.blocks[1:2], "a"), Lease(pool, pool.blocks[2:4], "b"))


def test_reports_of_unknown_events_are_ignored() -> None:
    assert StoreTable(1).report(5, 1, ok=True) is None
