"""What is cached now, for a consumer that comes late: asked for on the replay socket, answered to who asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from uuid import uuid4

import msgspec
import pytest
import zmq

from vllm.distributed.kv_events import BlockRemoved, KVEventBatch, ZmqEventPublisher

END = b"\xff" * 8


def removal(number: int) -> KVEventBatch:
    return KVEventBatch(float(number), [BlockRemoved([number], "GPU", 0)])


def address() -> str:
    return f"inproc://events-{uuid4()}"


@pytest.fixture
def closing() -> Iterator[list[ZmqEventPublisher]]:
    publishers: list[ZmqEventPublisher] = []
    yield publishers
    for publisher in publishers:
        publisher.shutdown()


def dealer(endpoint: str) -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    return socket


def test_who_asks_gets_the_present_state_and_nobody_else_does(closing: list[ZmqEventPublisher]) -> None:
    endpoint, again = address(), address()
    publisher = ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=again, topic="pod", buffer_steps=1)
    closing.append(publisher)
    live = zmq.Context.instance().socket(zmq.SUB)
    live.setsockopt_string(zmq.SUBSCRIBE, "pod")
    live.connect(endpoint)
    time.sleep(0.05)
    woken = threading.Event()
    publisher.wake_core = woken.set
    askers = [dealer(again) for _ in range(2)]
    for number in range(3):
        publisher.publish(removal(number))
    assert not publisher.wants_snapshot
    for one in askers:
        for _ in range(2):  # asking again does not bring a second answer
            one.send_multipart([b"", ZmqEventPublisher.SNAPSHOT])
    assert woken.wait(2)
    while publisher.get_counters().replay_requests < 4:
        time.sleep(0.001)
    assert publisher.wants_snapshot
    publisher.publish_snapshot(removal(77))
    assert not publisher.wants_snapshot
    publisher.publish(removal(3))
    for one in askers:
        assert one.poll(2000)
        empty, topic, seq, payload = one.recv_multipart()
        assert (empty, topic, int.from_bytes(seq, "big")) == (b"", b"pod", 2)
        assert msgspec.msgpack.decode(payload)[1][0]["block_hashes"] == [77]
        assert one.recv_multipart() == [b"", b"", END, b""]
        assert not one.poll(50)
    # The live stream and the ring know nothing of it.
    assert [int.from_bytes(live.recv_multipart()[1], "big") for _ in range(4) if live.poll(2000)] == [
        0,
        1,
        2,
        3,
    ]
    askers[0].send_multipart([b"", bytes(8)])
    assert askers[0].poll(2000)
    assert int.from_bytes(askers[0].recv_multipart()[2], "big") == 3
    for socket in (*askers, live):
        socket.close(linger=0)


def test_before_the_first_batch_there_is_only_the_end_marker(closing: list[ZmqEventPublisher]) -> None:
    again = address()
    publisher = ZmqEventPublisher(0, endpoint=address(), replay_endpoint=again)
    closing.append(publisher)
    asker = dealer(again)
    asker.send_multipart([b"", ZmqEventPublisher.SNAPSHOT])
    while not publisher.wants_snapshot:
        time.sleep(0.001)
    publisher.publish_snapshot(KVEventBatch(0.0, []))
    assert asker.poll(2000)
    assert asker.recv_multipart() == [b"", b"", END, b""]
    asker.close(linger=0)


def test_one_that_cannot_be_encoded_ends_neither_the_thread_nor_the_stream(
    closing: list[ZmqEventPublisher], caplog: pytest.LogCaptureFixture
) -> None:
    again = address()
    publisher = ZmqEventPublisher(0, endpoint=address(), replay_endpoint=again)
    closing.append(publisher)
    asker = dealer(again)
    publisher.publish(removal(0))
    for snapshot in (KVEventBatch(0.0, [object()]), removal(5)):  # type: ignore[list-item]
        asker.send_multipart([b"", ZmqEventPublisher.SNAPSHOT])
        while not publisher.wants_snapshot:
            time.sleep(0.001)
        publisher.publish_snapshot(snapshot)
    assert asker.poll(2000)
    assert msgspec.msgpack.decode(asker.recv_multipart()[3])[1][0]["block_hashes"] == [5]
    asker.close(linger=0)
    publisher.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish_snapshot(removal(1))
