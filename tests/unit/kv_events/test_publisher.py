"""The ZMQ publisher: frames, sequence numbers, replay, overflow, addresses."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import zmq

from vllm.config import KVEventsConfig
from vllm.config.kv_events import check_port_ranges
from vllm.distributed.kv_event_publisher import EventPublisher
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    EventPublisherFactory,
    KVEventBatch,
    NullEventPublisher,
    ZmqEventPublisher,
)

END = b"\xff" * 8


def batch(number: int) -> KVEventBatch:
    return KVEventBatch(float(number), [BlockRemoved([number], "GPU", 0)])


def address() -> str:
    return f"inproc://events-{uuid4()}"


class Subscriber:
    """A strict consumer of the live stream."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.socket.connect(endpoint)
        time.sleep(0.05)

    def receive(self, timeout_ms: int = 2000) -> list[bytes] | None:
        if not self.socket.poll(timeout_ms):
            return None
        frames = self.socket.recv_multipart()
        assert len(frames) == 3
        return frames

    def numbers(self, count: int) -> list[int]:
        return [int.from_bytes(frames[1], "big") for _ in range(count) if (frames := self.receive())]


def replay(endpoint: str, start: int, frames: list[bytes] | None = None) -> list[list[bytes]]:
    """Ask for a replay; all replies up to the end marker, without the delimiter."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart(frames or [b"", start.to_bytes(8, "big")])
    replies = []
    while socket.poll(1000):
        empty, *rest = socket.recv_multipart()
        assert empty == b""
        replies.append(rest)
        if rest[1] == END:
            break
    socket.close(linger=0)
    return replies


@pytest.fixture
def made() -> Iterator[list[Any]]:
    things: list[Any] = []
    yield things
    for thing in things:
        if isinstance(thing, EventPublisher):
            thing.shutdown()
        else:
            thing.socket.close(linger=0)


def test_frames_and_payload(made: list[Any]) -> None:
    endpoint = address()
    publisher = ZmqEventPublisher(2, endpoint=endpoint, topic="kv")
    subscriber = Subscriber(f"{endpoint}_dp2", topic="kv")
    made += [publisher, subscriber]
    publisher.publish(batch(5))
    frames = subscriber.receive()
    assert frames is not None
    assert frames[:2] == [b"kv", bytes(8)]
    assert msgspec.msgpack.decode(frames[2]) == [
        5.0, [{"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0}], 2,
    ]  # fmt: skip


def test_sequence_numbers_rise_by_one(made: list[Any]) -> None:
    endpoint = address()
    publisher, subscriber = ZmqEventPublisher(0, endpoint=endpoint), None
    subscriber = Subscriber(endpoint)
    made += [publisher, subscriber]
    for number in range(20):
        publisher.publish(batch(number))
    assert subscriber.numbers(20) == list(range(20))


def test_evt_08_replay_repeats_the_frames_byte_for_byte(made: list[Any]) -> None:
    endpoint, again = address(), address()
    publisher = ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=again, topic="pod")
    subscriber = Subscriber(endpoint, topic="pod")
    made += [publisher, subscriber]
    for number in range(10):
        publisher.publish(batch(number))
    live = [subscriber.receive() for _ in range(10)]
    replies = replay(again, 5)
    assert replies[:-1] == live[5:]
    assert replies[-1] == [b"", END, b""]
    assert publisher.get_counters().replay_requests == 1


def test_evt_08_asking_below_the_ring_is_told(made: list[Any]) -> None:
    endpoint, again = address(), address()
    publisher = ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=again, buffer_steps=4)
    subscriber = Subscriber(endpoint)
    made += [publisher, subscriber]
    for number in range(10):
        publisher.publish(batch(number))
    subscriber.numbers(10)
    replies = replay(again, 0)
    assert [int.from_bytes(reply[1], "big") for reply in replies[:-1]] == [6, 7, 8, 9]
    assert replies[-1] == [b"", END, (6).to_bytes(8, "big"), b""]
    assert replay(again, 6)[-1] == [b"", END, b""]
    assert replay(again, 99) == [[b"", END, b""]]


def test_no_batch_is_lost_from_the_counters_while_core_and_thread_count(made: list[Any]) -> None:
    publisher = ZmqEventPublisher(0, endpoint=address(), max_queue_size=1)
    made.append(publisher)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(5000):
            publisher.publish(batch(number))
    finally:
        sys.setswitchinterval(interval)
    publisher.shutdown()
    counters = publisher.get_counters()
    assert counters.batches_sent + counters.batches_dropped + counters.queue_depth == 5000


def test_replay_works_for_a_plain_req_socket(made: list[Any]) -> None:
    endpoint, again = address(), address()
    publisher = ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=again)
    made.append(publisher)
    publisher.publish(batch(0))
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.connect(again)
    deadline = time.monotonic() + 2.0
    while publisher.get_counters().batches_sent == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    socket.send(bytes(8))
    assert socket.poll(2000)
    assert socket.recv_multipart()[1] == bytes(8)
    socket.close(linger=0)


def test_malformed_replay_requests_are_ignored(made: list[Any]) -> None:
    again = address()
    publisher = ZmqEventPublisher(0, endpoint=address(), replay_endpoint=again)
    made.append(publisher)
    assert replay(again, 0, frames=[b"", b"a", b"b"]) == []
    assert replay(again, 0) == [[b"", END, b""]]


def test_a_slow_reader_gets_a_whole_replay(made: list[Any]) -> None:
    endpoint, again = address(), address()
    publisher = ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=again, buffer_steps=3000)
    made.append(publisher)
    for number in range(3000):
        publisher.publish(batch(number))
    deadline = time.monotonic() + 10.0
    while publisher.get_counters().batches_sent < 3000 and time.monotonic() < deadline:
        time.sleep(0.02)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(again)
    socket.send_multipart([b"", bytes(8)])
    time.sleep(0.3)  # reads nothing while everything is sent
    count = 0
    while socket.poll(1000):
        if socket.recv_multipart()[2] == END:
            break
        count += 1
    socket.close(linger=0)
    assert count == 3000


def test_evt_09_overflow_drops_whole_batches_and_leaves_a_gap(made: list[Any]) -> None:
    endpoint = address()
    publisher = ZmqEventPublisher(0, endpoint=endpoint, max_queue_size=3)
    subscriber = Subscriber(endpoint)
    made += [publisher, subscriber]
    gate = threading.Event()
    encode = publisher._codec.encode

    def slow(events: Any) -> bytes:
        gate.wait(5.0)
        return encode(events)

    publisher._codec = SimpleNamespace(encode=slow)  # type: ignore[assignment]
    publisher.publish(batch(0))
    time.sleep(0.1)  # the thread is busy with the first one
    started = time.monotonic()
    for number in range(1, 8):
        publisher.publish(batch(number))
    assert time.monotonic() - started < 1.0, "publish never blocks the core"
    gate.set()
    assert subscriber.numbers(4) == [0, 1, 2, 3]
    publisher.publish(batch(8))
    assert subscriber.numbers(1) == [8], "numbers 4..7 are the gap"
    publisher.shutdown()  # the thread counts a batch after it is sent
    counters = publisher.get_counters()
    assert (counters.batches_sent, counters.batches_dropped) == (5, 4)
    assert counters.events_sent == {"BlockRemoved": 5}
    assert counters.queue_depth == 0


def test_a_batch_that_cannot_be_encoded_is_lost_alone(made: list[Any]) -> None:
    endpoint = address()
    publisher = ZmqEventPublisher(0, endpoint=endpoint)
    subscriber = Subscriber(endpoint)
    made += [publisher, subscriber]
    publisher.publish(KVEventBatch(0.0, [object()]))  # type: ignore[list-item]
    publisher.publish(batch(1))
    assert subscriber.numbers(1) == [1]
    assert publisher.get_counters().batches_dropped == 1


def test_shutdown_sends_what_is_queued(made: list[Any]) -> None:
    endpoint = address()
    publisher = ZmqEventPublisher(0, endpoint=endpoint)
    subscriber = Subscriber(endpoint)
    made.append(subscriber)
    for number in range(50):
        publisher.publish(batch(number))
    publisher.publish(KVEventBatch(1.0, [AllBlocksCleared()]))
    publisher.shutdown()
    publisher.shutdown()
    assert subscriber.numbers(51) == list(range(51))
    with pytest.raises(RuntimeError, match="Publisher is closed"):
        publisher.publish(batch(0))
    assert not [thread for thread in threading.enumerate() if thread.name == "zmq-publisher"]


def test_an_idle_publisher_sends_at_once(made: list[Any]) -> None:
    endpoint = address()
    publisher = ZmqEventPublisher(0, endpoint=endpoint)
    subscriber = Subscriber(endpoint)
    made += [publisher, subscriber]
    time.sleep(0.2)
    started = time.monotonic()
    publisher.publish(batch(0))
    assert subscriber.receive() is not None
    assert time.monotonic() - started < 0.1


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", None, "tcp://*:5557"),
        ("tcp://*:5557", 2, "tcp://*:5559"),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("inproc://cache", 1, "inproc://cache_dp1"),
        ("ipc:///tmp/kv", 2, "ipc:///tmp/kv_dp2"),
        (None, 2, None),
    ],
)
def test_evt_09_every_rank_has_its_own_address(endpoint: str, rank: int, expected: str) -> None:
    assert ZmqEventPublisher.offset_endpoint_port(endpoint, rank) == expected


def test_evt_09_two_ranks_publish_and_replay_side_by_side(made: list[Any]) -> None:
    base, again = free_ports(2), free_ports(2)
    ranks = [
        ZmqEventPublisher(rank, endpoint=f"tcp://*:{base}", replay_endpoint=f"tcp://*:{again}", topic="kv")
        for rank in range(2)
    ]
    readers = [Subscriber(f"tcp://127.0.0.1:{base + rank}", topic="kv") for rank in range(2)]
    made += [*ranks, *readers]
    time.sleep(0.3)
    for rank, (publisher, reader) in enumerate(zip(ranks, readers, strict=True)):
        publisher.publish(batch(rank))
        frames = reader.receive()
        assert frames is not None
        assert frames[:2] == [b"kv", bytes(8)]
        assert msgspec.msgpack.decode(frames[2])[2] == rank
        assert replay(f"tcp://127.0.0.1:{again + rank}", 0) == [frames, [b"", END, b""]]


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody uses."""
    while True:
        probes = [socket.socket() for _ in range(count)]
        try:
            probes[0].bind(("", 0))
            first = int(probes[0].getsockname()[1])
            for offset, probe in enumerate(probes[1:], 1):
                probe.bind(("", first + offset))
        except (OSError, OverflowError):
            continue
        finally:
            for probe in probes:
                probe.close()
        return first


@pytest.mark.parametrize("endpoint", ["udp://host:5", "tcp://host"])
def test_addresses_that_cannot_be_offset(endpoint: str) -> None:
    with pytest.raises(ValueError, match="Invalid endpoint"):
        ZmqEventPublisher.offset_endpoint_port(endpoint, 1)


def test_evt_09_overlapping_port_ranges_are_refused() -> None:
    check_port_ranges("tcp://*:5557", "tcp://*:5558", 0)
    with pytest.raises(ValueError, match="overlap"):
        check_port_ranges("tcp://*:5557", "tcp://*:5558", 1)
    with pytest.raises(ValueError, match="overlap"):
        check_port_ranges("tcp://*:5557", "tcp://*:5557", 0)
    with pytest.raises(ValueError, match="overlap"):  # at start-up, before anything is bound
        ZmqEventPublisher(1, endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")
    with pytest.raises(ValueError, match="must differ"):
        check_port_ranges("ipc:///tmp/a", "ipc:///tmp/a", 0)
    check_port_ranges("tcp://*:0", "tcp://*:0", 7)
    check_port_ranges("tcp://*:65535", None, 0)
    with pytest.raises(ValueError, match=r"endpoint='tcp://\*:65535' needs port 65536"):
        check_port_ranges("tcp://*:65535", None, 1)
    with pytest.raises(ValueError, match="replay_endpoint='tcp://h:80808080'"):
        check_port_ranges("tcp://*:5557", "tcp://h:80808080", 0)
    check_port_ranges("ipc:///tmp/a", "tcp://*:5557", 7)


def test_a_free_port_is_chosen_and_reported(made: list[Any]) -> None:
    publisher = ZmqEventPublisher(0, endpoint="tcp://*:0", replay_endpoint="tcp://127.0.0.1:0")
    made.append(publisher)
    config = publisher.get_publisher_config()
    assert config.endpoint.startswith("tcp://")
    assert config.replay_endpoint is not None
    assert config.replay_endpoint.startswith("tcp://127.0.0.1:")
    assert not config.endpoint.endswith(":0")
    subscriber = Subscriber(config.endpoint)
    made.append(subscriber)
    time.sleep(0.2)
    publisher.publish(batch(0))
    assert subscriber.numbers(1) == [0]
    assert len(replay(config.replay_endpoint, 0)) == 2


def test_a_plain_address_is_connected_to(made: list[Any]) -> None:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    publisher = ZmqEventPublisher(0, endpoint=f"tcp://127.0.0.1:{port}")
    made.append(publisher)
    assert not socket.poll(300), "a bound subscriber subscribes while it is polled"
    time.sleep(0.1)
    publisher.publish(batch(0))
    assert socket.poll(2000)
    socket.close(linger=0)


def test_binding_can_be_forced(made: list[Any]) -> None:
    probe = zmq.Context.instance().socket(zmq.PUB)
    port = probe.bind_to_random_port("tcp://127.0.0.1")
    probe.close(linger=0)
    time.sleep(0.1)
    publisher = ZmqEventPublisher(0, endpoint=f"tcp://127.0.0.1:{port}", bind=True)
    subscriber = Subscriber(f"tcp://127.0.0.1:{port}")
    made += [publisher, subscriber]
    time.sleep(0.2)
    publisher.publish(batch(0))
    assert subscriber.numbers(1) == [0]


@pytest.mark.parametrize("bind", [True, False])
def test_binding_can_be_asked_for_in_the_config(bind: bool, made: list[Any], tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"  # bound, if nobody says otherwise
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, bind=bind)
    made.append(EventPublisherFactory.create(config))
    assert (tmp_path / "events").exists() is bind
    reported = made[-1].get_publisher_config()
    assert (reported.endpoint, reported.bind) == (endpoint, bind)


def test_an_address_in_use_fails_at_start_up(made: list[Any]) -> None:
    endpoint = address()
    made.append(ZmqEventPublisher(0, endpoint=endpoint))
    with pytest.raises(zmq.ZMQError, match=f"^endpoint='{re.escape(endpoint)}' .* already in use"):
        ZmqEventPublisher(0, endpoint=endpoint)


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_address_that_is_none_is_named_with_its_setting(name: str) -> None:
    with pytest.raises(zmq.ZMQError, match=f"^{name}='nowhere' cannot be used: Invalid argument"):
        ZmqEventPublisher(0, **({"endpoint": "inproc://unused"} | {name: "nowhere"}))  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"max_queue_size": 0}, {"buffer_steps": -1}])
def test_bounds_are_checked(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        ZmqEventPublisher(0, endpoint=address(), **changes)  # type: ignore[arg-type]


def test_the_factory(made: list[Any]) -> None:
    assert isinstance(EventPublisherFactory.create(None), NullEventPublisher)
    assert isinstance(EventPublisherFactory.create(KVEventsConfig()), NullEventPublisher)
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=address(), topic="t")
    publisher = EventPublisherFactory.create(config, 0)
    made.append(publisher)
    assert isinstance(publisher, ZmqEventPublisher)
    reported = publisher.get_publisher_config()
    assert (reported.endpoint, reported.topic, reported.publisher) == (config.endpoint, "t", "zmq")
    null = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    assert isinstance(EventPublisherFactory.create(null), NullEventPublisher)
    unknown = KVEventsConfig(enable_kv_cache_events=True, publisher="carrier pigeon")
    with pytest.raises(ValueError, match="carrier pigeon"):
        EventPublisherFactory.create(unknown)


def test_outside_publishers_get_the_config_as_keywords() -> None:
    seen: dict[str, object] = {}

    def construct(**options: object) -> EventPublisher:
        seen.update(options)
        return NullEventPublisher()

    name = f"mine-{uuid4()}"
    EventPublisherFactory.register_publisher(name, construct)
    with pytest.raises(KeyError, match=name):
        EventPublisherFactory.register_publisher(name, construct)
    EventPublisherFactory.create(KVEventsConfig(enable_kv_cache_events=True, publisher=name), 3)
    assert seen == {
        "data_parallel_rank": 3, "endpoint": "tcp://*:5557", "replay_endpoint": None, "buffer_steps": 10000,
        "hwm": 100000, "max_queue_size": 100000, "topic": "",
    }  # fmt: skip


def test_the_null_publisher_is_silent() -> None:
    publisher = NullEventPublisher()
    publisher.publish(batch(0))
    assert publisher.get_publisher_config() is None
    assert publisher.get_counters().batches_sent == 0
    publisher.shutdown()


def test_a_socket_file_of_another_publisher_is_not_taken_away(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    first = ZmqEventPublisher(0, endpoint)
    try:
        with pytest.raises(zmq.ZMQError, match="already in use"):
            ZmqEventPublisher(0, endpoint)
    finally:
        first.shutdown()
    ZmqEventPublisher(0, endpoint).shutdown()


def test_a_socket_file_that_was_left_behind_is_used_again(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "events"))
    ZmqEventPublisher(0, f"ipc://{tmp_path}/events").shutdown()
