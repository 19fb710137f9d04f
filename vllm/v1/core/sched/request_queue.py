"""Queues of waiting requests: first come first served, and by priority.

Owns order and nothing else.  Must not know why a request waits.  Layer: L5 (scheduler).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum

from vllm.v1.request import Request


class SchedulingPolicy(Enum):
    """Order in which waiting requests are admitted."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class RequestQueue(ABC):
    """A queue of waiting requests.  Taking from an empty queue raises ``IndexError``."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Add a request that just arrived."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Take the first request."""

    @abstractmethod
    def peek_request(self) -> Request:
        """The first request, which stays."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Give a request its place at the front back."""

    @abstractmethod
    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put all requests in front, in their order."""

    @abstractmethod
    def remove_request(self, request: Request) -> None:
        """Take out one request (``ValueError`` if it is not here)."""

    @abstractmethod
    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take out all of the requests that are here."""

    @abstractmethod
    def __bool__(self) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All requests in the order in which they would be popped; the queue does not change."""


class FCFSRequestQueue(deque[Request], RequestQueue):
    """First come, first served."""

    def add_request(self, request: Request) -> None:
        self.append(request)

    def pop_request(self) -> Request:
        return self.popleft()

    def peek_request(self) -> Request:
        if not self:
            raise IndexError("peek from an empty queue")
        return self[0]

    def prepend_request(self, request: Request) -> None:
        self.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self.extendleft(reversed(list(requests)))

    def remove_request(self, request: Request) -> None:
        self.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        if not gone:
            return
        kept = [request for request in self if request not in gone]
        self.clear()
        self.extend(kept)

    def __bool__(self) -> bool:
        return len(self) > 0

    def __len__(self) -> int:
        return deque.__len__(self)

    def __iter__(self) -> Iterator[Request]:
        return deque.__iter__(self)


class PriorityRequestQueue(RequestQueue):
    """Lowest priority value first, then earliest arrival; putting in front is the same as adding."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add_request(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def pop_request(self) -> Request:
        if not self._heap:
            raise IndexError("pop from an empty queue")
        return heapq.heappop(self._heap)

    def peek_request(self) -> Request:
        if not self._heap:
            raise IndexError("peek from an empty queue")
        return self._heap[0]

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        self._heap.remove(request)
        heapq.heapify(self._heap)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        if not gone:
            return
        self._heap = [request for request in self._heap if request not in gone]
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._heap))


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty queue for the policy (``ValueError`` for an unknown one)."""
    if policy is SchedulingPolicy.PRIORITY:
        return PriorityRequestQueue()
    if policy is SchedulingPolicy.FCFS:
        return FCFSRequestQueue()
    raise ValueError(f"unknown scheduling policy: {policy!r}")
