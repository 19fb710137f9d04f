"""Queues keep their order, whatever is added, taken, put back or removed."""

from __future__ import annotations

import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import (
    FCFSRequestQueue,
    PriorityRequestQueue,
    RequestQueue,
    SchedulingPolicy,
    create_request_queue,
)
from vllm.v1.request import Request


def request(name: str, priority: int = 0, arrival: float = 0.0) -> Request:
    return Request(name, [1], SamplingParams(), None, priority=priority, arrival_time=arrival)


def names(queue: RequestQueue) -> list[str]:
    return [entry.request_id for entry in queue]


def test_create_request_queue_follows_the_policy() -> None:
    assert isinstance(create_request_queue(SchedulingPolicy.FCFS), FCFSRequestQueue)
    assert isinstance(create_request_queue(SchedulingPolicy.PRIORITY), PriorityRequestQueue)
    assert SchedulingPolicy("fcfs") is SchedulingPolicy.FCFS


def test_fcfs_keeps_arrival_order_and_gives_places_back() -> None:
    queue = FCFSRequestQueue()
    a, b, c, d = (request(name) for name in "abcd")
    for entry in (a, b, c):
        queue.add_request(entry)
    assert queue.peek_request() is a
    assert queue.pop_request() is a
    queue.prepend_request(d)
    queue.prepend_requests([a])
    assert names(queue) == ["a", "d", "b", "c"]
    queue.remove_requests([d, c, request("other")])
    assert names(queue) == ["a", "b"]
    queue.remove_request(b)
    assert len(queue) == 1
    assert bool(queue)


def test_fcfs_prepends_a_whole_queue_in_its_order() -> None:
    queue, front = FCFSRequestQueue(), FCFSRequestQueue()
    queue.add_request(request("x"))
    for name in "ab":
        front.add_request(request(name))
    queue.prepend_requests(front)
    assert names(queue) == ["a", "b", "x"]


def test_priority_orders_by_priority_arrival_and_id() -> None:
    queue = PriorityRequestQueue()
    late, early = request("late", 1, 2.0), request("early", 1, 1.0)
    urgent, twin = request("urgent", 0, 9.0), request("a-twin", 1, 1.0)
    for entry in (late, early, urgent, twin):
        queue.add_request(entry)
    assert names(queue) == ["urgent", "a-twin", "early", "late"]
    assert names(queue) == ["urgent", "a-twin", "early", "late"], "iterating must not change the queue"
    queue.remove_request(early)
    assert queue.pop_request() is urgent
    queue.prepend_requests([early, urgent])
    assert queue.peek_request() is urgent
    queue.remove_requests([urgent, late])
    assert names(queue) == ["a-twin", "early"]


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
def test_an_empty_queue_raises_index_error(policy: SchedulingPolicy) -> None:
    queue = create_request_queue(policy)
    assert not queue
    with pytest.raises(IndexError):
        queue.pop_request()
    with pytest.raises(IndexError):
        queue.peek_request()
