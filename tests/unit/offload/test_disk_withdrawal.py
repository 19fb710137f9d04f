"""What a reset or an error takes back from a kept disk stays gone, even if the engine is killed right after its answer."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.kept_rig import KeptRig, crash_after, served
from tests.helpers.offload_rig import prompt
from vllm.v1.simple_kv_offload.copy_backends import kept, lane
from vllm.v1.simple_kv_offload.copy_backends.kept_table import KeptTable
from vllm.v1.simple_kv_offload.metadata import KeptOrder, KeptSlot


@pytest.fixture(autouse=True, params=["tier", "backend"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk lies below host memory, or is the only tier below the device."""
    monkeypatch.setattr(KeptRig, "is_direct", request.param == "backend")


def filled(folder: Path, **fields: Any) -> KeptRig:
    """An engine that has two prompts on its disk, and in its table."""
    rig = KeptRig(folder, **fields)
    for seed in range(2):
        rig.generate(prompt(17, seed), max_tokens=1)
    rig.settle()
    return rig


@pytest.mark.parametrize("ranks", [1, 2])
def test_pfx_14_a_reset_is_durable_when_it_is_answered(tmp_path: Path, ranks: int) -> None:
    rig = filled(tmp_path, ranks=ranks)
    assert rig.connector.reset_cache() is True
    assert rig.withdraw() == [None] * ranks
    rig.crash()
    again = KeptRig(tmp_path, ranks=ranks)
    assert [served(again, prompt(17, seed)) for seed in range(2)] == [0, 0]
    again.crash()


def test_without_the_withdrawal_a_kill_brings_the_entries_back(tmp_path: Path) -> None:
    """What the tests here would miss if they could not fail."""
    rig = filled(tmp_path)
    assert rig.connector.reset_cache() is True
    rig.crash()
    again = KeptRig(tmp_path)
    assert served(again, prompt(17)) == 16
    again.crash()


def test_pfx_14_what_is_stored_after_the_reset_is_kept(tmp_path: Path) -> None:
    rig = filled(tmp_path)
    rig.connector.reset_cache()
    rig.evict_device()
    assert rig.withdraw() == [None]
    assert not rig.manager.kept.has_work, "the next step has nothing to add"  # type: ignore[union-attr]
    rig.generate(prompt(17, 1), max_tokens=1)
    rig.settle()
    rig.crash()
    again = KeptRig(tmp_path)
    assert [served(again, prompt(17, seed)) for seed in range(2)] == [0, 16]
    again.crash()


def test_pfx_14_orders_that_were_sent_before_the_reset_bring_nothing_back(tmp_path: Path) -> None:
    """Steps are under way when the reset comes; the workers take it behind them."""
    rig = KeptRig(tmp_path)
    rig.generate(prompt(17), max_tokens=1)
    rig.add(prompt(17, 1), max_tokens=3)
    sent = rig.scheduler.schedule()
    rig.connector.reset_cache()
    withdrawal = rig.connector.take_withdrawal()
    assert isinstance(withdrawal, KeptOrder)
    rig.finish_step(sent)
    assert [a.kv_connector.apply_withdrawal(withdrawal) for a in rig.workers] == [None]
    rig.crash()
    again = KeptRig(tmp_path)
    assert served(again, prompt(17)) == 0
    again.crash()


def test_what_an_error_made_suspect_is_gone_when_the_error_is_told(tmp_path: Path) -> None:
    rig = KeptRig(tmp_path)
    request = rig.add(prompt(17), max_tokens=8)
    while request.num_output_tokens < 3:
        rig.step()
    rig.settle()
    assert rig.on_disk(request)
    rig.step(nan=[request.request_id])
    assert rig.withdraw() == [None]
    rig.crash()
    again = KeptRig(tmp_path)
    assert again.on_disk(again.make_request(prompt(17))) == []
    again.crash()


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_evicted_before_an_error_is_gone_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Nobody finds it any more, but the disk takes its time to write that down, or cannot."""
    rig = KeptRig(tmp_path)
    request = rig.add(prompt(17), max_tokens=8)
    while request.num_output_tokens < 3:
        rig.step()
    rig.settle()
    awake, write = threading.Event(), KeptTable._write

    def slow(self: KeptTable, data: bytes, offset: int) -> None:
        awake.wait(10.0)
        if fails:
            raise OSError(5, "Input/output error")
        write(self, data, offset)

    slots = [rig.disk.get(rig.key(request, index)) for index in rig.on_disk(request)]
    assert len(slots) >= 4
    rig.disk.evict(slot.block_id for slot in slots if slot is not None)
    with monkeypatch.context() as patched:
        patched.setattr(KeptTable, "_write", slow)
        rig.step(nan=[request.request_id])
        threading.Timer(0.1, awake.set).start()
        (problem,) = rig.withdraw()
        assert awake.is_set(), "the answer came before the disk had it"
    if fails:
        assert problem is not None
        assert ".index cannot be written: [Errno 5] Input/output error" in problem
    else:
        assert problem is None
        rig.crash()
        rig = KeptRig(tmp_path)
        assert rig.on_disk(rig.make_request(prompt(17))) == []
    rig.crash()


def test_a_withdrawal_survives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header and rows are on the medium before the answer: each is synchronised after it was written."""
    rig = filled(tmp_path)
    calls: list[str] = []
    write, sync = os.pwrite, os.fdatasync
    keeper = rig.backend().keeper
    assert keeper is not None
    table = keeper._table._fd
    monkeypatch.setattr(
        os, "pwrite", lambda fd, *args: (fd == table and calls.append("write"), write(fd, *args))[1]
    )
    monkeypatch.setattr(os, "fdatasync", lambda fd: (fd == table and calls.append("sync"), sync(fd))[1])
    rig.connector.reset_cache()
    assert rig.withdraw() == [None]
    assert calls[-1] == "sync"
    assert calls.count("write") == 1, "the header says it for all rows"
    rig.crash()


def test_a_reset_that_the_disk_does_not_take_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = filled(tmp_path)

    def refuse(self: KeptTable, data: bytes, offset: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(KeptTable, "_write", refuse)
        rig.connector.reset_cache()
        (problem,) = rig.withdraw()
        assert problem is not None
        assert ".index cannot be written: [Errno 5] Input/output error" in problem
    rig.connector.reset_cache()
    assert rig.withdraw() == [None], "the second try gets through"
    rig.crash()
    again = KeptRig(tmp_path)
    assert served(again, prompt(17)) == 0
    again.crash()


def test_a_reset_waits_for_a_disk_that_hangs_once_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "WITHDRAW_WAIT_S", 0.2)
    rig = filled(tmp_path)
    awake = threading.Event()
    write = KeptTable._write

    def hang(self: KeptTable, data: bytes, offset: int) -> None:
        awake.wait(10.0)
        write(self, data, offset)

    monkeypatch.setattr(KeptTable, "_write", hang)
    rig.connector.reset_cache()
    (problem,) = rig.withdraw()
    assert problem is not None
    assert "was not written within 0.2 s" in problem
    began = time.monotonic()
    rig.connector.reset_cache()
    (problem,) = rig.withdraw()
    assert problem is not None
    assert time.monotonic() - began < 0.15, "the disk has had its time"
    awake.set()
    rig.settle()
    rig.connector.reset_cache()
    assert rig.withdraw() == [None]
    rig.crash()
    again = KeptRig(tmp_path)
    assert served(again, prompt(17)) == 0
    again.crash()


def test_a_thread_that_hung_writes_nothing_when_it_wakes_up_after_a_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update belongs to the time before the reset; another thread has replaced it."""
    rig = KeptRig(tmp_path, extra={"transfer_timeout_s": 0.1})
    sync, hangs, awake = os.fdatasync, [True], threading.Event()
    keeper = rig.backend().keeper
    assert keeper is not None

    def slow(fd: int) -> None:
        sync(fd)
        if hangs:
            hangs.clear()
            awake.wait(10.0)

    monkeypatch.setattr(os, "fdatasync", slow)
    key = rig.key(rig.make_request(prompt(17)), 0)
    rig.backend()._file.restore(3, 7)  # type: ignore[union-attr]
    keeper.bind(KeptOrder(1, 1, [KeptSlot(3, ((key, 4),))]))
    time.sleep(0.2)
    keeper.check_health()
    keeper.take_lost()
    assert keeper.withdraw(KeptOrder(2, 1, [])) is None
    awake.set()
    time.sleep(0.1)
    assert KeptTable(keeper._table.path, keeper._table._digest, 65, 32).rows() == []
    rig.crash()


def test_a_table_that_a_hanging_disk_does_not_let_go_of_is_not_called_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some failed updates nothing is kept any more; one that hangs then leaves the file for the next start."""
    monkeypatch.setattr(lane, "SHUTDOWN_TIMEOUT_S", 0.1)
    rig = filled(tmp_path)
    keeper = rig.backend().keeper
    assert keeper is not None
    failures, hangs, awake = iter(range(kept.FAILURES_MAX)), threading.Event(), threading.Event()

    def write(self: KeptTable, data: bytes, offset: int) -> None:
        if next(failures, None) is not None:
            raise OSError(5, "Input/output error")
        hangs.set()
        awake.wait(10.0)

    with monkeypatch.context() as patched:
        patched.setattr(KeptTable, "_write", write)
        for _ in range(kept.FAILURES_MAX + 1):
            rig.connector.reset_cache()
            withdrawal = rig.connector.take_withdrawal()
            assert isinstance(withdrawal, KeptOrder)
            keeper.bind(withdrawal)
        assert hangs.wait(10.0)
        keeper.take_lost()
        rig.connector.reset_cache()
        (problem,) = rig.withdraw()
        assert problem is not None
        assert problem.endswith(".index could not be removed")
        awake.set()
    rig.crash()


def test_a_slot_that_cannot_be_read_is_not_found_again(tmp_path: Path) -> None:
    """Its row goes with the next step; before that the checksum does not match what is there."""
    crash_after(tmp_path, [prompt(17)])
    data = next(path for path in tmp_path.iterdir() if not path.name.endswith(".index"))
    os.truncate(data, 0)
    rig = KeptRig(tmp_path)
    rig.generate(prompt(17), max_tokens=1)
    rig.run()
    rig.settle()
    failures = rig.failed_reads
    assert failures >= 1
    rig.crash()
    again = KeptRig(tmp_path)
    again.generate(prompt(17), max_tokens=1)
    assert again.failed_reads == 0, "what was computed instead is kept under the same keys"
    again.crash()


def test_nothing_is_withdrawn_while_nothing_is_reset(tmp_path: Path) -> None:
    """Stores, evictions and bad slots can wait for the next step."""
    rig = KeptRig(tmp_path, disk_blocks=9)
    for seed in range(6):
        rig.add(prompt(17, seed), max_tokens=1)
        while rig.scheduler.has_requests():
            rig.step()
            assert rig.connector.take_withdrawal() is None
    rig.crash()
