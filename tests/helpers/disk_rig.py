"""A rig with a disk below the host tier, and a disk that moves blocks when the test says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.offload_rig import Rig, full, prompt
from tests.helpers.sched import ManualClock
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.copy_backends.base import CopyBackend, CopyError, CopyResult, EventsList
from vllm.v1.simple_kv_offload.disk_moves import DiskMoves


class DiskRig(Rig):
    """A rig with a disk of some blocks below few host blocks."""

    def __init__(self, folder: Path, *, host_blocks: int = 9, disk_blocks: int = 65, **fields: Any) -> None:
        specs = fields.get("specs") or [full()]
        page = sum(spec.page_size_bytes for spec in specs)
        extra = {
            "disk_tier": True,
            "disk_path": str(folder / "kv"),
            "disk_capacity_bytes": disk_blocks * page,
            **fields.pop("extra", {}),
        }
        super().__init__(host_blocks=host_blocks, extra=extra, **fields)
        self.chain.clock = self.disk_clock = ManualClock()

    def sink(self, seed: int = 0, length: int = 16) -> Request:
        """A prompt that only the disk holds."""
        request = self.generate(prompt(length, seed), max_tokens=1)
        filler = seed + 500
        while self.in_tier(request):
            self.generate(prompt(16, filler), max_tokens=1)
            filler += 1
        self.evict_device()
        return request

    def write_something(self) -> None:
        """Go on until a move to the disk is under way."""
        for seed in range(600, 604):
            self.add(prompt(12, seed), max_tokens=1)
            for _ in range(6):
                if self.chain.down.live:
                    return
                self.step(copies=False)
                self.mover().release()
        raise AssertionError("nothing goes down")

    def hold_disk(self) -> HeldDisk:
        """From now on moves wait for the test."""
        moves = self.worker()._moves
        assert moves is not None
        assert moves.backend is not None
        held = HeldDisk(moves.backend)
        self.worker()._moves = DiskMoves(held)
        return held


class HeldDisk(CopyBackend):
    """Hands moves to a real disk when the test says so."""

    def __init__(self, disk: CopyBackend) -> None:
        self._disk = disk
        self._waiting: list[tuple[Any, ...]] = []

    def launch_copy(
        self,
        src_blocks: Any,
        dst_blocks: Any,
        is_store: bool,
        event_idx: int,
        events_list: EventsList,
        wait_event: Any = None,
    ) -> None:
        self._waiting.append((src_blocks, dst_blocks, is_store, event_idx, events_list))

    def __len__(self) -> int:
        return len(self._waiting)

    def release(self, error: CopyError | None = None) -> None:
        """Carry out all moves so far, or end them with this error; returns when they have ended."""
        waiting, self._waiting = self._waiting, []
        for *job, events in waiting:
            if error is None:
                self._disk.launch_copy(*job, events)
                assert events[-1][1].synchronize(10.0)
            else:
                events.append((job[-1], CopyResult()))
                events[-1][1].resolve(error)

    def shutdown(self) -> None:
        self._disk.shutdown()


def flip_a_byte(folder: Path, slot: int, slot_bytes: int) -> None:
    """One bit of a slot of the only file there changes."""
    (path,) = folder.iterdir()
    with path.open("r+b") as file:
        file.seek(slot * slot_bytes + 3)
        (value,) = file.read(1)
        file.seek(slot * slot_bytes + 3)
        file.write(bytes([value ^ 0x10]))
