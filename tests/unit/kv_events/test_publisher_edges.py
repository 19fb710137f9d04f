"""A publisher whose socket refuses a batch, and an address of all hosts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from uuid import uuid4

import msgspec
import zmq

from vllm.distributed.kv_events import BlockRemoved, KVEventBatch, ZmqEventPublisher


def test_a_batch_whose_sending_fails_can_be_replayed() -> None:
    endpoint, again = f"inproc://events-{uuid4()}", f"inproc://again-{uuid4()}"
    publisher = ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=again)
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    try:
        # Called with frames, this one takes none: the sending fails.
        publisher._pub = SimpleNamespace(send_multipart=list.clear, close=publisher._pub.close)  # type: ignore[assignment]
        publisher.publish(KVEventBatch(1.0, [BlockRemoved([7], "GPU", 0)]))
        deadline = time.monotonic() + 5.0
        while publisher.get_counters().batches_dropped == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        dealer.connect(again)
        dealer.send_multipart([b"", bytes(8)])
        assert dealer.poll(5000)
        _, _, sequence, payload = dealer.recv_multipart()
        assert sequence == bytes(8)
        assert msgspec.msgpack.decode(payload)[1][0]["block_hashes"] == [7]
        assert dealer.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
    finally:
        publisher.shutdown()
        dealer.close(linger=0)


def test_an_address_of_all_hosts_is_bound() -> None:
    publisher = ZmqEventPublisher(0, endpoint="tcp://0.0.0.0:0")
    try:
        assert not publisher.get_publisher_config().endpoint.endswith(":0"), (
            "a port was chosen, so it is bound"
        )
    finally:
        publisher.shutdown()
