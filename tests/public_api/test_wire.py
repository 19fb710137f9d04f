"""Bytes on the wire: written out here, so that no change of a struct can move them unnoticed."""

from __future__ import annotations

import struct
import uuid

import msgspec
import pytest
import zmq

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisherFactory,
    KVEventBatch,
    NullEventPublisher,
    ZmqEventPublisher,
)
from vllm.outputs import RequestError
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)


def text(value: str) -> bytes:
    return (
        bytes([0xA0 | len(value)]) + value.encode()
        if len(value) < 32
        else b"\xd9" + bytes([len(value)]) + value.encode()
    )


def pairs(*items: tuple[str, bytes]) -> bytes:
    return bytes([0x80 | len(items)]) + b"".join(text(name) + value for name, value in items)


def long_pairs(*items: tuple[str, bytes]) -> bytes:
    """A map whose header has room for more than 15 pairs, as a struct with that many fields is encoded."""
    return b"\xde" + len(items).to_bytes(2, "big") + b"".join(text(name) + value for name, value in items)


def array(*items: bytes) -> bytes:
    return (
        bytes([0x90 | len(items)]) if len(items) < 16 else b"\xdc" + len(items).to_bytes(2, "big")
    ) + b"".join(items)


def float64(value: float) -> bytes:
    return b"\xcb" + struct.pack(">d", value)


NIL, FALSE, TRUE = b"\xc0", b"\xc2", b"\xc3"
BIG = 0xFEDCBA9876543210
STORED_MINIMUM = long_pairs(
    ("type", text("BlockStored")),
    ("block_hashes", array(b"\xcf" + BIG.to_bytes(8, "big"))),
    ("parent_block_hash", NIL),
    ("token_ids", array(b"\x01", b"\x02")),
    ("block_size", b"\x10"),
    ("lora_id", NIL),
    ("medium", text("GPU")),
    ("lora_name", NIL),
    ("group_idx", b"\x00"),
    ("kv_cache_spec_kind", text("full_attention")),
)
REMOVED = pairs(
    ("type", text("BlockRemoved")),
    ("block_hashes", array(b"\xc4\x02\xab\xcd")),
    ("medium", text("GPU")),
    ("group_idx", b"\x00"),
)
CLEARED = pairs(("type", text("AllBlocksCleared")))

stored = BlockStored(
    [BIG], None, [1, 2], 16, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
)
removed = BlockRemoved([b"\xab\xcd"], "GPU", group_idx=0)


def test_batch_of_events() -> None:
    batch = KVEventBatch(ts=1.5, events=[stored, removed, AllBlocksCleared()], data_parallel_rank=0)
    expected = array(float64(1.5), array(STORED_MINIMUM, REMOVED, CLEARED), b"\x00")
    assert msgspec.msgpack.encode(batch) == expected
    assert msgspec.msgpack.decode(expected, type=KVEventBatch) == batch


def test_rank_slot_is_always_there() -> None:
    assert msgspec.msgpack.encode(KVEventBatch(0.0, [])) == array(float64(0.0), array(), NIL)


def test_all_fields_of_a_stored_event_in_order() -> None:
    full = BlockStored(
        block_hashes=[b"h"],
        parent_block_hash=1,
        token_ids=[],
        block_size=4,
        lora_id=2,
        medium="CPU",
        lora_name="l",
        extra_keys=[("s",), None],
        group_idx=3,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=8,
        locality="LOCAL",
        ownership="o",
        session_id="x",
        lookahead_token_ids=[[5]],
    )
    assert msgspec.msgpack.encode(full) == long_pairs(
        ("type", text("BlockStored")),
        ("block_hashes", array(b"\xc4\x01h")),
        ("parent_block_hash", b"\x01"),
        ("token_ids", array()),
        ("block_size", b"\x04"),
        ("lora_id", b"\x02"),
        ("medium", text("CPU")),
        ("lora_name", text("l")),
        ("extra_keys", array(array(text("s")), NIL)),
        ("group_idx", b"\x03"),
        ("kv_cache_spec_kind", text("sliding_window")),
        ("kv_cache_spec_sliding_window", b"\x08"),
        ("locality", text("LOCAL")),
        ("ownership", text("o")),
        ("session_id", text("x")),
        ("lookahead_token_ids", array(array(b"\x05"))),
    )


def test_events_are_hashable_by_their_content() -> None:
    assert hash(stored) == hash(msgspec.structs.replace(stored))
    assert hash(stored) != hash(msgspec.structs.replace(stored, lookahead_token_ids=[[1]]))
    assert len({removed, BlockRemoved([b"\xab\xcd"], "GPU", group_idx=0)}) == 1


def test_unknown_keys_are_ignored_by_readers() -> None:
    newer = pairs(("type", text("AllBlocksCleared")), ("brand_new", b"\x01"))
    assert msgspec.msgpack.decode(newer, type=AllBlocksCleared) == AllBlocksCleared()


def test_engine_messages_are_positional() -> None:
    request = EngineCoreRequest("r", [1, 2], None, None, None, 2.5, None, None, None)
    assert msgspec.msgpack.encode(request) == array(
        text("r"), array(b"\x01", b"\x02"), NIL, NIL, NIL, float64(2.5), NIL, NIL, NIL,
        NIL, NIL, b"\x00", b"\x00", b"\x00", NIL, FALSE, NIL, NIL, NIL, FALSE, NIL, NIL,
    )  # fmt: skip
    output = EngineCoreOutput("r", [7], finish_reason=FinishReason.LENGTH, stop_reason="x")
    output.events = [EngineCoreEvent(EngineCoreEventType.PREEMPTED, 1.0)]
    output.error = RequestError("c", "m", True)
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(output))
    assert packed[:7] == ["r", [7], None, None, None, 1, "x"]
    assert packed[7][0] in ([3, 1.0], {"type": 3, "timestamp": 1.0})
    assert len(packed) == 19
    assert packed[13] == 0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=EngineCoreOutput) == output
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(EngineCoreOutputs(engine_index=2, timestamp=1.0)))
    assert batch == [2, [], None, 1.0, None, None, None, None, None]
    assert msgspec.msgpack.encode(UtilityOutput(5)) == array(b"\x05", NIL, NIL)


def test_outputs_are_stamped() -> None:
    assert EngineCoreOutputs().timestamp > 0.0


@pytest.fixture
def endpoints() -> tuple[str, str, zmq.Context[zmq.Socket[bytes]]]:
    name = uuid.uuid4().hex
    return f"inproc://events-{name}", f"inproc://replay-{name}", zmq.Context.instance()


class Custom(msgspec.Struct, tag=True):
    """An event type of the caller's own."""

    value: int


class CustomBatch(EventBatch):
    """A batch of the caller's own events."""

    events: list[Custom]


def test_frames_of_a_publisher_and_its_replay(
    endpoints: tuple[str, str, zmq.Context[zmq.Socket[bytes]]],
) -> None:
    endpoint, replay_endpoint, context = endpoints
    publisher = ZmqEventPublisher(
        1, endpoint=endpoint, replay_endpoint=replay_endpoint, topic="kv", buffer_steps=10
    )
    subscriber, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        subscriber.connect(f"{endpoint}_dp1")
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        subscriber.setsockopt(zmq.RCVTIMEO, 5000)
        dealer.setsockopt(zmq.RCVTIMEO, 5000)
        dealer.connect(f"{replay_endpoint}_dp1")
        publisher.publish(KVEventBatch(1.5, [removed]))
        topic, sequence, payload = subscriber.recv_multipart()
        assert (topic, sequence) == (b"kv", bytes(8))
        assert payload == array(float64(1.5), array(REMOVED), b"\x01")
        publisher.publish(CustomBatch(2.0, [Custom(3)]))
        topic, sequence, payload = subscriber.recv_multipart()
        assert sequence == (1).to_bytes(8, "big")
        assert msgspec.msgpack.decode(payload) == [2.0, [{"type": "Custom", "value": 3}], 1]
        dealer.send_multipart([b"", (1).to_bytes(8, "big")])
        assert dealer.recv_multipart() == [b"", b"kv", sequence, payload]
        end = dealer.recv_multipart()
        assert end[:4] == [b"", b"", b"\xff" * 8, b""]
        config = publisher.get_publisher_config()
        assert (config.endpoint, config.replay_endpoint, config.topic) == (
            f"{endpoint}_dp1", f"{replay_endpoint}_dp1", "kv",
        )  # fmt: skip
    finally:
        publisher.shutdown()
        subscriber.close(linger=0)
        dealer.close(linger=0)
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish(KVEventBatch(0.0, []))


def test_factory() -> None:
    assert isinstance(EventPublisherFactory.create(None), NullEventPublisher)
    with pytest.raises(KeyError):
        EventPublisherFactory.register_publisher("zmq", ZmqEventPublisher)
