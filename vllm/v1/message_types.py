"""Small types shared by messages, requests and statistics: finish reasons and request events.

Owns their names, numbers and order (all are on the wire).  Must not know requests or sockets.  Layer: L2 (values).
"""

from enum import IntEnum

import msgspec

from vllm.utils.clock import MonotonicClock


class FinishReason(IntEnum):
    """Why a request ended.  An integer on the wire, a lower-case word in the HTTP API.

    ``error`` always means that the request has to be answered with HTTP 500.
    """

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return _FINISH_REASON_WORDS[self.value]


_FINISH_REASON_WORDS = ("stop", "length", "abort", "error", "repetition")


class EngineCoreEventType(IntEnum):
    """What happened to a request inside the core."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct):
    """A timestamped event of one request.

    ``timestamp`` is in seconds of the core's monotonic clock; it may only be compared with other timestamps of the
    same process.
    """

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def new_event(cls, event_type: EngineCoreEventType, timestamp: float | None = None) -> "EngineCoreEvent":
        """The event at ``timestamp``, or now where no timestamp is given."""
        return cls(event_type, MonotonicClock().monotonic() if timestamp is None else timestamp)


class PauseState(IntEnum):
    """How much of the scheduler is held back."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    """Requests that hold KV blocks go on; nothing else is admitted."""
    PAUSED_ALL = 2
    """Nothing is scheduled."""
