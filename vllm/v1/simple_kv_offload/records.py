"""Public records of the offload manager that outside code constructs or reads. Layer L4.

They describe; nothing inside is decided by them.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId
from vllm.v1.request import Request


@dataclass
class BlockStoreMeta:
    """What the event of a stored hash says besides the hash."""

    token_ids: list[int]
    parent_block_hash: BlockHash | None
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[object, ...] | None
    block_size: int | None = None


@dataclass
class TransferMeta:
    """Block ids of both sides, pairwise; ``block_meta[i]`` belongs to pair i."""

    gpu_block_ids: list[int]
    cpu_block_ids: list[int]
    block_meta: list[dict[BlockHashWithGroupId, BlockStoreMeta]] | None = None


@dataclass
class LoadRequestState:
    """A load from its acceptance until its end; ``finished`` = the request ended first."""

    request: Request
    transfer_meta: TransferMeta
    load_event: int | None = None
    finished: bool = False


@dataclass
class BoundaryStoreStats:
    """What became of the state hand-offs: ``published`` of them, each with one of the other outcomes."""

    published: int = 0
    stored: int = 0
    dropped_cpu_full: int = 0
    dropped_request_gone: int = 0
    skipped_already_cached: int = 0
    skipped_in_flight: int = 0
    dropped_null_block: int = 0
    dropped_not_hashed: int = 0


@dataclass(slots=True)
class Ledger:
    """Blocks of one direction since the start: ``scheduled = done + failed + dropped`` once nothing is in flight."""

    scheduled: int = 0
    done: int = 0
    failed: int = 0
    dropped: int = 0

    @property
    def in_flight(self) -> int:
        """Blocks whose copy is planned or under way, wanted or not."""
        return self.scheduled - self.done - self.failed - self.dropped


@dataclass(slots=True)
class StoreDeclines:
    """Blocks that got no copy, by reason, and store plans that were cut short by the bound on stores under way.

    ``reuse``: not offered often enough; ``queue``: too many stores under way when the request ended; ``full``: no slot.
    """

    reuse: int = 0
    queue: int = 0
    full: int = 0
    cut_plans: int = 0


@dataclass(slots=True)
class DiskCounts:
    """Requests that waited for the disk, those that did so in vain, failed reads, slots with wrong bytes."""

    waits: int = 0
    timeouts: int = 0
    failed_reads: int = 0
    bad_blocks: int = 0
