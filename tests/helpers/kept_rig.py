"""A rig whose disk outlives it, below host memory or in its place, and that may be killed."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from tests.helpers.offload_rig import Rig, full
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.copy_backends.disk import DiskBackend
from vllm.v1.simple_kv_offload.records import Ledger
from vllm.v1.simple_kv_offload.tier import Tier
from vllm.v1.worker.kv_connector_step import ActiveKVConnector


class KeptRig(Rig):
    """An engine whose disk is kept in `folder`. With `is_direct` there is no host memory between it and the device."""

    is_direct = False

    def __init__(self, folder: Path, *, host_blocks: int = 17, disk_blocks: int = 65, **fields: Any) -> None:
        specs = fields.get("specs") or [full()]
        extra = {
            "disk_persist": True,
            "disk_path": str(folder / "kv"),
            "disk_capacity_bytes": disk_blocks * sum(spec.page_size_bytes for spec in specs),
            **fields.pop("extra", {}),
        }
        if self.is_direct:
            extra |= {"kv_offload_backend": "disk", "use_page_cache": True}
            host_blocks = disk_blocks
        else:
            extra["disk_tier"] = True
        super().__init__(host_blocks=host_blocks, extra=extra, **fields)
        found = {
            rank: active.kv_connector.get_handshake_metadata() for rank, active in enumerate(self.workers)
        }
        self.connector.set_xfer_handshake_metadata({rank: each for rank, each in found.items() if each})

    def _make_worker(self, rank: int) -> ActiveKVConnector:
        config = copy.copy(self.config)
        # Ranks are processes, elsewhere; here the index of the engine keeps their files apart.
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.data_parallel_index = rank
        config.model_config = None  # type: ignore[assignment]  # the rig's has no weights
        assert config.kv_transfer_config is not None
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.engine_id = f"rig{rank}-{id(self)}"
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.kv_config)
        connector.register_kv_caches(self.memories[rank])
        if not self.is_direct:
            self._hold(connector)
        return ActiveKVConnector(connector)

    @property
    def disk(self) -> Tier:
        """What is on the disk."""
        return self.manager.tier if self.is_direct else self.chain.disk

    @property
    def failed_reads(self) -> int:
        """Copies upwards that found no usable bytes."""
        return self.manager.load_side.failures if self.is_direct else self.chain.counts.failed_reads

    @property
    def writes(self) -> Ledger:
        """The blocks that went to the disk."""
        return self.manager.store_side.ledger if self.is_direct else self.chain.down.ledger

    def on_disk(self, request: Request, group: int = 0) -> list[int]:
        return self.in_tier(request, group) if self.is_direct else super().on_disk(request, group)

    def withdraw(self) -> list[str | None]:
        """What the engine has the ranks do before it answers a reset or an error; what each of them says."""
        withdrawal = self.connector.take_withdrawal()
        if withdrawal is None:
            return []
        return [active.kv_connector.apply_withdrawal(withdrawal) for active in self.workers]

    def backend(self, rank: int = 0) -> DiskBackend:
        worker = self.worker(rank)
        backend = worker._backend if worker._moves is None else worker._moves.backend
        assert isinstance(backend, DiskBackend)
        return backend

    def settle(self) -> None:
        """Wait until the table says what it was told."""
        for rank in range(self.ranks):
            keeper = self.backend(rank).keeper
            assert keeper is not None
            for result in keeper._open:
                assert result.synchronize(5.0)

    def crash(self) -> None:
        """kill -9: what was written is written, the lock goes, nothing is tidied up."""
        for rank in range(self.ranks):
            backend = self.backend(rank)
            file, keeper = backend._file, backend.keeper
            assert file is not None
            for lane in backend._lanes.values():
                lane.shutdown()
            if backend._mover is not None:
                backend._mover.close(5.0)
            if keeper is not None and keeper._lane is not None:
                keeper._lane.shutdown()
                keeper._lane = None
                os.close(keeper._table._fd)
            os.close(file._fd)
            file._fd = -1
            backend._lanes = {}


def crash_after(folder: Path, prompts: list[list[int]], **fields: Any) -> None:
    """An engine that served these prompts, and was killed when it had nothing to do."""
    rig = KeptRig(folder, **fields)
    for tokens in prompts:
        rig.generate(tokens, max_tokens=1)
    rig.settle()
    rig.crash()


def served(rig: Rig, tokens: list[int]) -> int:
    """Tokens that the request did not compute; its output is checked."""
    count = rig.generate(tokens, max_tokens=2).num_cached_tokens
    rig.assert_at_rest()
    return count
