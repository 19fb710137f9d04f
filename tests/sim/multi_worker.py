"""Workers behind two offload connectors. Each has its own memory below the device, lanes and reports.

Forward and request rows are those of one worker; what is told twice here is the half that copies.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace

from tests.sim.copies import Lanes
from tests.sim.copy_worker import CopyWorker, FaultDraw, Step
from tests.sim.device import Memory
from tests.sim.failure import require
from tests.sim.marks import Marks
from tests.sim.params import SimParams
from tests.sim.worker import SimWorker
from vllm.distributed.kv_transfer.kv_connector.v1.multi_records import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput


class MultiWorker(SimWorker):
    """The first connector's copies are the inherited ones, the second's those of `second`."""

    def __init__(self, params: SimParams, marks: Marks, fault: FaultDraw) -> None:
        super().__init__(params, marks, fault)
        self.second = CopyWorker(
            replace(params, host_blocks=params.second_host_blocks, disk_blocks=0), marks, fault
        )
        self.second.devices = self.devices
        self.second.lanes = [
            Lanes(device, host, disk)
            for device, host, disk in zip(self.devices, self.second.hosts, self.second.disks, strict=True)
        ]

    @property
    def all_lanes(self) -> list[Lanes]:
        return [*self.lanes, *self.second.lanes]

    def memories_below(self, connector: int) -> tuple[list[Memory], list[Memory]]:
        return super().memories_below(0) if connector == 0 else self.second.memories_below(0)

    def copying(self) -> bool:
        return super().copying() or self.second.copying()

    def device_targets(self) -> dict[int, str]:
        first, second = super().device_targets(), self.second.device_targets()
        both = first.keys() & second.keys()
        require(not both, "I3", f"loads of two connectors write device blocks {sorted(both)}")
        return first | second

    def check_host_targets(self) -> None:
        super().check_host_targets()
        self.second.check_host_targets()

    def send_load(self, step: Step, rng: random.Random) -> None:
        first, second = _parts(step)
        super().send_load(first, rng)
        self.second.send_load(second, rng)

    def submit_copies(self, step: Step, rng: random.Random) -> None:
        first, second = _parts(step)
        super().submit_copies(first, rng)
        self.second.submit_copies(second, rng)

    def reports(self, rng: random.Random, output: SchedulerOutput) -> list[KVConnectorOutput | None]:
        first, second = (_output_for(output, index) for index in range(2))
        pairs = zip(super().reports(rng, first), self.second.reports(rng, second), strict=True)
        return [_merged(*pair) for pair in pairs]


def _parts(step: Step) -> list[Step]:
    """The step as each connector's worker sees it."""
    if not step.parts:
        step.parts = [replace(step, output=_output_for(step.output, index), parts=[]) for index in range(2)]
    for part in step.parts:
        part.fails = step.fails
    return step.parts


def _output_for(output: SchedulerOutput, connector: int) -> SchedulerOutput:
    meta = output.kv_connector_metadata
    assert isinstance(meta, MultiKVConnectorMetadata)
    own = copy.copy(output)
    own.kv_connector_metadata = meta.metadata[connector]
    return own


def _merged(first: KVConnectorOutput | None, second: KVConnectorOutput | None) -> KVConnectorOutput | None:
    told = [report for report in (first, second) if report is not None]
    if not told:
        return None
    metas = tuple(None if report is None else report.kv_connector_worker_meta for report in (first, second))
    received: set[str] = set().union(*(report.finished_recving or () for report in told))
    failed: set[str] = set().union(*(report.failed_recving for report in told))
    return KVConnectorOutput(
        finished_recving=received or None,
        failed_recving=failed,
        kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(metas),
    )
