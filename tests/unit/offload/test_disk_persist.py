"""A disk that is kept, below host memory or in its place: what is found again after a crash, and what must never be."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.kept_rig import KeptRig, crash_after, served
from tests.helpers.offload_rig import full, mamba, prompt, window
from vllm.distributed.kv_event_types import MEDIUM_STORAGE, AllBlocksCleared, BlockStored
from vllm.v1.simple_kv_offload.copy_backends import disk_file
from vllm.v1.simple_kv_offload.copy_backends.disk_file import SlotFile, remove_outdated_files
from vllm.v1.simple_kv_offload.copy_backends.kept_table import HEADER_BYTES, RECORD_BYTES, KeptTable
from vllm.v1.simple_kv_offload.metadata import KeptOrder, KeptSlot, SimpleCPUOffloadWorkerMetadata

PAGE = full().page_size_bytes


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(disk_file, "KEPT_LOCK_PATIENCE_S", 0.1)


@pytest.fixture(autouse=True, params=["tier", "backend"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the disk lies: below host memory, or as the only tier below the device."""
    monkeypatch.setattr(KeptRig, "is_direct", request.param == "backend")
    chosen: str = request.param
    return chosen


@pytest.mark.parametrize(
    ("kinds", "ranks"), [([full()], 1), ([full()], 2), ([full(), window()], 1), ([full(), mamba()], 2)]
)
def test_tier_11_a_killed_engine_leaves_its_prompts_to_the_next(
    tmp_path: Path, kinds: list[Any], ranks: int
) -> None:
    fields: dict[str, Any] = {"specs": kinds, "ranks": ranks, "host_blocks": 33, "device_blocks": 64}
    crash_after(tmp_path, [prompt(17, seed) for seed in range(4)], **fields)
    rig = KeptRig(tmp_path, **fields)
    assert [served(rig, prompt(17, seed)) for seed in range(4)] == [16] * 4
    assert rig.failed_reads == 0
    rig.crash()


def test_tier_11_what_is_hot_in_the_host_tier_is_on_the_disk_too(tmp_path: Path) -> None:
    """A prefix that the host never evicts is the one that matters most after a restart."""
    rig = KeptRig(tmp_path, host_blocks=17, disk_blocks=33)
    common = prompt(8)
    for seed in range(1, 40):
        rig.generate([*common, *prompt(9, seed)], max_tokens=1)
        rig.evict_device()
    rig.settle()
    rig.crash()
    again = KeptRig(tmp_path, host_blocks=17, disk_blocks=33)
    assert served(again, [*common, *prompt(9, 77)]) == 8
    assert served(again, [*common, *prompt(9, 39)]) == 16
    again.crash()


def test_tier_11_a_clean_stop_keeps_the_files_private(tmp_path: Path) -> None:
    rig = KeptRig(tmp_path)
    rig.generate(prompt(17), max_tokens=1)
    rig.close()
    data, table = sorted(tmp_path.iterdir())
    assert table.name == f"{data.name}.index"
    assert data.name.startswith("kv.kept-")
    assert {path.stat().st_mode & 0o777 for path in (data, table)} == {0o600}
    again = KeptRig(tmp_path)
    assert served(again, prompt(17)) == 16
    again.close()


def test_tier_11_entries_found_again_are_announced(tmp_path: Path) -> None:
    crash_after(tmp_path, [prompt(17)])
    rig = KeptRig(tmp_path, events=True)
    rig.step()
    stored = [event for event in rig.publisher.events if isinstance(event, BlockStored)]
    assert [event.medium for event in stored] == [MEDIUM_STORAGE] * 4
    rig.crash()


def only(folder: Path, suffix: str = "") -> Path:
    (path,) = [p for p in folder.iterdir() if p.name.endswith(".index") == bool(suffix)]
    return path


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 1]))


def test_tier_11_a_bit_that_flipped_meanwhile_is_found(tmp_path: Path) -> None:
    crash_after(tmp_path, [prompt(17)])
    flip(only(tmp_path), 3 * PAGE + 5)
    rig = KeptRig(tmp_path)
    rig.generate(prompt(17), max_tokens=2)
    assert rig.failed_reads == 1
    rig.evict_device()
    rig.crash()


def test_tier_11_damage_that_a_killed_engine_had_not_heard_of_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is still there when a rank has read the slot in vain and the engine is killed before it is told."""
    crash_after(tmp_path, [prompt(17)])
    flip(only(tmp_path), 3 * PAGE + 5)
    rig = KeptRig(tmp_path)
    rig.add(prompt(17))
    aggregate = rig.aggregator.aggregate

    def killed_by_damage(results: list[Any]) -> Any:
        output = results[0].kv_connector_output
        meta = None if output is None else output.kv_connector_worker_meta
        if isinstance(meta, SimpleCPUOffloadWorkerMetadata) and (meta.bad_cpu_blocks or meta.bad_disk_blocks):
            raise InterruptedError
        return aggregate(results)

    monkeypatch.setattr(rig.aggregator, "aggregate", killed_by_damage)
    with pytest.raises(InterruptedError):
        rig.run()
    rig.crash()
    again = KeptRig(tmp_path)
    assert again.on_disk(again.make_request(prompt(17))) == [0, 1, 2, 3]
    again.generate(prompt(17), max_tokens=2)
    assert again.failed_reads == 1
    again.settle()
    again.crash()
    mended = KeptRig(tmp_path)
    assert served(mended, prompt(17)) == 16
    assert mended.failed_reads == 0
    mended.crash()


def test_tier_11_a_data_file_that_became_shorter_costs_only_its_blocks(tmp_path: Path) -> None:
    crash_after(tmp_path, [prompt(17), prompt(17, 1)])
    os.truncate(only(tmp_path), 5 * PAGE)
    rig = KeptRig(tmp_path)
    assert served(rig, prompt(17)) == 16
    lost = rig.generate(prompt(17, 1), max_tokens=2)
    assert lost.num_cached_tokens == 0
    assert rig.failed_reads == 1
    rig.crash()


def test_tier_11_a_record_written_in_part_is_skipped(tmp_path: Path) -> None:
    crash_after(tmp_path, [prompt(17)])
    flip(only(tmp_path, ".index"), HEADER_BYTES + 3 * RECORD_BYTES + 60)
    rig = KeptRig(tmp_path)
    assert len([b for b in rig.disk.pool.blocks if b.block_hash is not None]) == 3
    assert served(rig, prompt(17)) == 8
    assert rig.failed_reads == 0
    rig.crash()


@pytest.mark.parametrize("size", [0, 20, HEADER_BYTES + 100])
def test_tier_11_a_short_table_is_no_obstacle(tmp_path: Path, size: int) -> None:
    crash_after(tmp_path, [prompt(17)])
    os.truncate(only(tmp_path, ".index"), size)
    rig = KeptRig(tmp_path)
    assert served(rig, prompt(17)) == 0
    rig.crash()


def test_tier_11_a_table_of_another_cache_is_emptied_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crash_after(tmp_path, [prompt(17)])
    flip(only(tmp_path, ".index"), 50)
    rig = KeptRig(tmp_path)
    assert "of another model, layout or version; what was kept is not used" in caplog.text
    assert served(rig, prompt(17)) == 0
    rig.crash()


@pytest.mark.parametrize(
    "other",
    [
        {"specs": [full(8)]},
        {"specs": [full(), window()]},
    ],
)
def test_tier_11_another_layout_never_uses_it_and_clears_it_away(
    tmp_path: Path, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    crash_after(tmp_path, [prompt(17)])
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    rig = KeptRig(tmp_path, **other)
    assert rig.generate(prompt(17), max_tokens=1).num_cached_tokens == 0
    assert "was kept by another model, layout or version and is removed" in caplog.text
    assert len(list(tmp_path.iterdir())) == 2
    rig.crash()


def test_tier_11_what_only_some_ranks_have_is_not_used(tmp_path: Path) -> None:
    crash_after(tmp_path, [prompt(17)], ranks=2)
    (table,) = [path for path in tmp_path.iterdir() if path.name.endswith("-1-0.index")]
    flip(table, HEADER_BYTES + 2 * RECORD_BYTES + 60)
    rig = KeptRig(tmp_path, ranks=2)
    assert served(rig, prompt(17)) == 4
    assert rig.failed_reads == 0
    rig.crash()


def test_tier_11_a_reset_is_not_undone_by_a_restart(tmp_path: Path) -> None:
    rig = KeptRig(tmp_path, events=True)
    rig.generate(prompt(17), max_tokens=1)
    assert rig.connector.reset_cache() is True
    assert rig.connector.has_pending_push_work(), "the ranks have to hear of it"
    rig.evict_device()
    rig.run()
    rig.generate(prompt(17, 1), max_tokens=1)
    rig.settle()
    rig.crash()
    again = KeptRig(tmp_path)
    assert served(again, prompt(17)) == 0
    assert served(again, prompt(17, 1)) == 16
    assert any(isinstance(event, AllBlocksCleared) for event in rig.publisher.events)
    again.crash()


def test_tier_11_what_an_error_made_suspect_stays_forgotten(tmp_path: Path) -> None:
    rig = KeptRig(tmp_path)
    request = rig.add(prompt(17), max_tokens=8)
    while request.num_output_tokens < 3:
        rig.step()
    rig.step(nan=[request.request_id])
    rig.run()
    assert rig.writes.done > 0
    rig.settle()
    rig.crash()
    again = KeptRig(tmp_path)
    assert again.on_disk(again.make_request(prompt(17))) == []
    again.crash()


def test_tier_11_a_slot_used_again_is_found_under_its_last_content(tmp_path: Path) -> None:
    seeds = range(12)
    crash_after(tmp_path, [prompt(17, seed) for seed in seeds], disk_blocks=17)
    rig = KeptRig(tmp_path, disk_blocks=17)
    assert [served(rig, prompt(17, seed)) for seed in reversed(seeds)][:3] == [16, 16, 16]
    assert rig.failed_reads == 0
    rig.crash()


def test_tier_11_a_smaller_file_forgets_the_slots_that_went(tmp_path: Path) -> None:
    crash_after(tmp_path, [prompt(17, seed) for seed in range(4)])
    small = KeptRig(tmp_path, disk_blocks=9)
    assert [served(small, prompt(17, seed)) for seed in range(2)] == [16, 16]
    small.crash()
    large = KeptRig(tmp_path)
    assert served(large, prompt(17, 3)) == 0
    assert large.failed_reads == 0
    large.crash()


def test_tier_11_a_second_engine_gets_a_file_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = KeptRig(tmp_path)
    first.generate(prompt(17), max_tokens=1)
    second = KeptRig(tmp_path)
    assert "another engine has" in caplog.text
    assert served(second, prompt(17)) == 0
    second.close()
    first.close()
    assert len(list(tmp_path.iterdir())) == 2, "the second one's file went with it"
    third = KeptRig(tmp_path)
    assert served(third, prompt(17)) == 16
    third.close()


def test_tier_11_an_order_that_a_rank_missed_empties_its_table_and_is_made_good(tmp_path: Path) -> None:
    rig = KeptRig(tmp_path, ranks=2)
    rig.generate(prompt(17), max_tokens=1)
    rig.add(prompt(17, 1), max_tokens=1)
    while rig.manager.kept is None or not rig.manager.kept.has_work:
        rig.step()
    rig.fail_step()
    rig.run()
    rig.generate(prompt(17, 2), max_tokens=1)
    rig.settle()
    rig.crash()
    again = KeptRig(tmp_path, ranks=2)
    assert served(again, prompt(17)) == 16
    assert served(again, prompt(17, 2)) == 16
    again.crash()


def test_tier_11_a_table_that_cannot_be_written_is_given_up_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = KeptRig(tmp_path)

    def no_space(self: KeptTable, data: bytes, offset: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(KeptTable, "_write", no_space)
        for seed in range(8):
            rig.generate(prompt(17, seed), max_tokens=1)
            rig.settle()
    assert "nothing is kept for the next start any more" in caplog.text
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".index")]
    rig.evict_device()
    assert served(rig, prompt(17, 1)) == 16, "the disk itself is as good as before"
    rig.crash()


def test_tier_11_one_failed_write_of_the_table_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = KeptRig(tmp_path)
    rig.generate(prompt(17), max_tokens=1)
    write = KeptTable._write
    failed = []

    def once(self: KeptTable, data: bytes, offset: int) -> None:
        if not failed:
            failed.append(offset)
            raise OSError(5, "Input/output error")
        write(self, data, offset)

    monkeypatch.setattr(KeptTable, "_write", once)
    rig.generate(prompt(17, 1), max_tokens=1)
    rig.settle()
    rig.generate(prompt(17, 2), max_tokens=1)
    assert failed
    rig.settle()
    rig.crash()
    again = KeptRig(tmp_path)
    assert [served(again, prompt(17, seed)) for seed in range(3)] == [16] * 3
    again.crash()


def test_tier_11_a_disk_that_hangs_holds_up_neither_the_engine_nor_the_table_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = KeptRig(tmp_path, extra={"transfer_timeout_s": 0.2})
    write, hangs, awake = KeptTable._write, [True], threading.Event()

    def slow(self: KeptTable, data: bytes, offset: int) -> None:
        if hangs:
            hangs.clear()
            awake.wait(10.0)
        write(self, data, offset)

    monkeypatch.setattr(KeptTable, "_write", slow)
    began = time.monotonic()
    rig.generate(prompt(17), max_tokens=1)
    assert time.monotonic() - began < 2.0, "the steps do not wait for the table"
    time.sleep(0.3)
    rig.generate(prompt(17, 1), max_tokens=1)
    rig.generate(prompt(17, 2), max_tokens=1)
    rig.settle()
    assert not hangs
    rig.crash()
    again = KeptRig(tmp_path)
    assert [served(again, prompt(17, seed)) for seed in range(3)] == [16] * 3
    again.crash()
    awake.set()


@pytest.mark.parametrize("error", [28, 30])
def test_tier_11_a_disk_that_takes_no_more_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """ENOSPC, EROFS: what was kept before is there after the restart, and the counters tell."""
    rig = KeptRig(tmp_path)
    rig.generate(prompt(17), max_tokens=1)

    def refuse(self: SlotFile, first_slot: int, data: Any) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "write", refuse)
        for seed in range(1, 9):
            rig.generate(prompt(17, seed), max_tokens=1)
    assert rig.is_direct or rig.chain.writes_off
    assert rig.writes.failed > 0
    rig.settle()
    rig.crash()
    again = KeptRig(tmp_path)
    assert served(again, prompt(17)) == 16
    again.crash()


def test_tier_11_a_place_that_is_not_ours_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crash_after(tmp_path, [prompt(17)])
    os.chmod(only(tmp_path), 0o644)
    if KeptRig.is_direct:  # without its only tier the engine does not start
        with pytest.raises(PermissionError, match="not a private file"):
            KeptRig(tmp_path)
        return
    rig = KeptRig(tmp_path)
    assert "the disk tier is off" in caplog.text
    assert "not a private file" in caplog.text
    assert served(rig, prompt(17)) == 0
    rig.close()


@pytest.mark.parametrize("content", [b"", b"kept"])
def test_a_kept_file_that_cannot_grow_leaves_no_empty_one(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv.kept-0123456789abcdef-0-0"
    if content:
        path.write_bytes(content)
        path.chmod(0o600)

    def too_large(fd: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(disk_file.os, "ftruncate", too_large)
    with pytest.raises(OSError, match="File too large"):
        SlotFile(str(path), 2, 4096, use_page_cache=True, is_kept=True)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == ([content] if content else [])


def test_tier_11_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"precious")
    link = tmp_path / "kv.kept-0123456789abcdef-0-0"
    link.symlink_to(foreign)
    with pytest.raises(OSError, match="symbolic links"):
        SlotFile(str(link), 2, 4096, use_page_cache=True, is_kept=True)
    assert foreign.read_bytes() == b"precious"


def test_tier_07_files_kept_by_others_are_removed_by_the_rules(tmp_path: Path) -> None:
    names = {
        "own": "kv.kept-aaaaaaaaaaaaaaaa-0-0",
        "dead": "kv.kept-bbbbbbbbbbbbbbbb-0-0",
        "live": "kv.kept-cccccccccccccccc-0-0",
        "rank": "kv.kept-bbbbbbbbbbbbbbbb-0-1",
        "other": "x.kept-bbbbbbbbbbbbbbbb-0-0",
    }
    for name in names.values():
        for path in (tmp_path / name, tmp_path / f"{name}.index"):
            path.write_bytes(b"x")
            os.utime(path, (time.time() - 3600,) * 2)
    fresh = tmp_path / "kv.kept-dddddddddddddddd-0-0"
    fresh.write_bytes(b"x")
    with (tmp_path / names["live"]).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        removed = remove_outdated_files(str(tmp_path / names["own"]))
    dead = str(tmp_path / names["dead"])
    assert removed == [dead, f"{dead}.index"]
    assert len(list(tmp_path.iterdir())) == 9


def test_a_restart_reads_the_table_and_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_after(tmp_path, [prompt(17)])
    reads: list[int] = []
    monkeypatch.setattr(SlotFile, "read", lambda self, first, data: reads.append(first))
    rig = KeptRig(tmp_path)
    assert rig.on_disk(rig.make_request(prompt(17))) == [0, 1, 2, 3]
    assert reads == []
    rig.crash()


def test_a_number_that_skips_empties_the_table(tmp_path: Path) -> None:
    rig = KeptRig(tmp_path)
    rig.generate(prompt(17), max_tokens=1)
    keeper = rig.backend().keeper
    assert keeper is not None
    number = keeper._seen.number
    keeper.bind(KeptOrder(0, number + 2, [KeptSlot(1, ())]))
    assert keeper.take_lost()
    assert not keeper.take_lost()
    rig.settle()
    assert keeper._table.rows() == []
    rig.crash()
