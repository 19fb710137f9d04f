"""What scheduler half and worker half of a KV connector exchange: base classes only.

Owns the opaque record types that `SchedulerOutput` and `KVConnectorOutput` carry. It must not know
any connector nor how records travel. Layer L2.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_event_types import KVConnectorKVEvents


class KVConnectorRole(enum.Enum):
    """Which half of a connector an instance is."""

    SCHEDULER = 0
    WORKER = 1


@dataclass(frozen=True, slots=True)
class HostPool:
    """Host memory that all ranks of one engine will have together for a connector.

    ``setting`` sizes it. Engines with the same ``shared_name`` have one such pool; of its bytes ``bytes_there`` are taken.
    """

    setting: str
    num_bytes: int
    shared_name: str | None = None
    bytes_there: int = 0


class KVConnectorMetadata(ABC):  # noqa: B024 (an open base: connectors define the fields)
    """Orders of one step from the scheduler half to the worker half."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024 (an open base: connectors define the fields)
    """What a worker publishes once so that peers can reach it."""


class KVConnectorWorkerMetadata(ABC):
    """Reports of one step from the worker half to the scheduler half."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Combine the report of another rank of the same step; may return self."""


@dataclass
class KVConnectorStats:
    """Counters of one interval. ``data`` is the payload that crosses processes (plain values).

    The base adds numbers by key; connectors with richer payloads override the methods.
    """

    data: dict[str, Any] = field(default_factory=dict)  # layout is the connector's own

    def to_dict(self) -> dict[str, Any]:
        """The payload itself."""
        return self.data

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counters of ``other`` and return self."""
        for key, value in other.data.items():
            self.data[key] = self.data[key] + value if key in self.data else value
        return self

    def levels(self) -> KVConnectorStats | None:
        """A copy of what tells how things stand, not what happened in the interval; None where there is no such thing."""
        return None

    def add_levels(self, levels: KVConnectorStats) -> None:
        """Count in how things stand with another connector of the same engine. The base has no such figures."""

    def reduce(self) -> dict[str, int | float]:
        """A flat summary for the log line."""
        return {key: value for key, value in self.data.items() if isinstance(value, int | float)}

    def is_empty(self) -> bool:
        """True if nothing happened in the interval."""
        return not self.data


@dataclass
class KVConnectorTransferResults:
    """Request ids whose transfers ended on this worker since the last call.

    ``finished_sending``/``finished_recving`` may be None (nothing); ids in ``failed_recving`` are
    also listed in ``finished_recving``.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] = field(default_factory=set)


def merge_worker_meta(
    mine: KVConnectorWorkerMetadata | None, theirs: KVConnectorWorkerMetadata | None
) -> KVConnectorWorkerMetadata | None:
    """Both reports as one; a worker without a report adds nothing."""
    if mine is None or theirs is None:
        return mine if theirs is None else theirs
    return mine.aggregate(theirs)


# (source tensors, target tensors, source block ids, target block ids, direction); tensors are opaque here.
CopyBlocksOp = Callable[[dict[str, Any], dict[str, Any], list[int], list[int], str], None]

__all__ = [
    "CopyBlocksOp",
    "KVConnectorHandshakeMetadata",
    "KVConnectorKVEvents",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "merge_worker_meta",
]
