"""What the workers of a real engine hold in their pages, watched and told by `collective_rpc`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.v1.attention.backend import GroupMeta, StepMeta
from vllm.v1.attention.pages import RingPages, RowPages, StatePages
from vllm.v1.simple_kv_offload.copy_backends.base import CopyJob
from vllm.v1.simple_kv_offload.copy_backends.host_copy import HostCopier


@dataclass
class Seen:
    """Of this process: the last step, preempted requests, blocks stored, and rings among them when they were."""

    meta: StepMeta | None = None
    rings: set[int] = field(default_factory=set)
    preempted: int = 0
    stored: int = 0
    stored_rings: int = 0


_seen = Seen()


def watch(worker: Any) -> None:
    """From now on look at every step and every store of this worker."""
    model, runner = worker.get_model(), worker.model_runner
    forward, execute, copy = model.forward, runner.execute_model, HostCopier.copy
    rings = [name for name, layer in model.cache_layers.items() if isinstance(layer, RingPages)]

    def watched_forward(input_ids: Any, positions: Any, meta: StepMeta) -> Any:
        _seen.meta = meta
        _seen.rings = {block for name in rings for block in meta.groups[name].block_table[:, 0].tolist()}
        return forward(input_ids, positions, meta)

    def watched_execute(scheduler_output: Any) -> Any:
        _seen.preempted += len(scheduler_output.preempted_req_ids or ())
        return execute(scheduler_output)

    def watched_copy(copier: HostCopier, job: CopyJob) -> None:
        if job.is_store:
            _seen.stored += len(job.src_blocks)
            _seen.stored_rings += len(_seen.rings.intersection(job.src_blocks))
        copy(copier, job)

    model.forward, runner.execute_model = watched_forward, watched_execute
    HostCopier.copy = watched_copy  # type: ignore[method-assign]


def seen(worker: Any) -> tuple[int, int, int]:
    """Preempted requests, blocks stored, and how many of these were a ring."""
    return _seen.preempted, _seen.stored, _seen.stored_rings


def digests(worker: Any) -> dict[str, str]:
    """Of every cache: what the first request of the last step has in it."""
    meta = _seen.meta
    assert meta is not None
    layers = worker.get_model().cache_layers
    return {
        name: hashlib.sha256(_bytes(layer, meta, meta.groups[name])).hexdigest()
        for name, layer in layers.items()
    }


def _bytes(layer: Any, meta: StepMeta, group: GroupMeta) -> bytes:
    table, length = group.block_table[0], meta.seq_lens[0]
    if isinstance(layer, RowPages):
        parts = [layer.gather(table, length // layer.tokens_per_row)]
    elif isinstance(layer, RingPages):
        parts = [layer.pages[int(table[0])]]
    else:
        assert isinstance(layer, StatePages)
        block = int(table[(length - 1) // group.block_size])
        parts = [state[block] for state in layer.states]
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
