"""A reader of the interface's own making: structs written from its description alone decode all that an engine publishes.

Nothing of `vllm.distributed` decodes here, so that a change of a field's name, type or place is seen as a router would see it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal
from uuid import uuid4

import msgspec
import pytest
import zmq

from tests.helpers.kv_core import lora
from tests.helpers.offload_rig import Rig, full, mamba, prompt, window
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

END = b"\xff" * 8
KINDS = {"full_attention", "sliding_window", "mamba"}


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As readers of the interface declare it."""


class BlockStored(Event):
    """The fifteen fields in their order; the first seven have no default."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: Literal["LOCAL", "REMOTE"] | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(Event):
    """Five fields, two without a default."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: Literal["LOCAL", "REMOTE"] | None = None
    ownership: str | None = None


class AllBlocksCleared(Event):
    """No fields: what else the map holds is skipped."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An array of three."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


Residency = tuple[int | None, str | None, int | None, bytes | int]


class Reader:
    """Keeps the residencies that a stream tells, by the rules for consumers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, again: str) -> None:
        self.live = context.socket(zmq.SUB)
        self.live.setsockopt_string(zmq.SUBSCRIBE, "pod")
        self.live.connect(endpoint)
        self.again = context.socket(zmq.DEALER)
        self.again.connect(again)
        self.present: Counter[Residency] = Counter()
        self.seen: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self.next_seq = 0
        self.gaps: list[int] = []

    def read(self, frames: list[bytes]) -> None:
        topic, sequence, payload = frames
        assert topic == b"pod"
        seq = int.from_bytes(sequence, "big")
        if seq > self.next_seq:
            self.gaps.append(self.next_seq)
            for missed in self.replay(self.next_seq):
                if int.from_bytes(missed[1], "big") < seq:
                    self.read(missed)
        assert seq == self.next_seq
        self.next_seq += 1
        self.apply(msgspec.msgpack.decode(payload, type=Batch))

    def replay(self, start: int) -> Iterator[list[bytes]]:
        self.again.send_multipart([b"", start.to_bytes(8, "big")])
        while self.again.poll(5000):
            _, *frames = self.again.recv_multipart()
            if frames[1] == END:
                return
            yield frames
        raise AssertionError("no end of the replay")

    def apply(self, batch: Batch) -> None:
        for event in batch.events:
            self.seen.append(event)
            if isinstance(event, AllBlocksCleared):
                self.present.clear()
                continue
            change = 1 if isinstance(event, BlockStored) else -1
            for block_hash in event.block_hashes:
                self.present[batch.data_parallel_rank, event.medium, event.group_idx, block_hash] += change

    def catch_up(self, until: int, *, lose: int = 0) -> None:
        """Read the live stream up to the batch before `until`; the first `lose` messages never arrive."""
        while self.next_seq < until:
            assert self.live.poll(5000), f"batch {self.next_seq} of {until} does not come"
            frames = self.live.recv_multipart()
            if lose:
                lose -= 1
            else:
                self.read(frames)

    def held(self, medium: str) -> set[tuple[int | None, bytes | int]]:
        assert all(count >= 0 for count in self.present.values())
        assert {key[0] for key in self.present} <= {3}
        return {(key[2], key[3]) for key, count in self.present.items() if count and key[1] == medium}

    def close(self) -> None:
        self.live.close(linger=0)
        self.again.close(linger=0)


def content(pool: BlockPool) -> set[tuple[int | None, bytes | int]]:
    keys = [block.block_hash for block in pool.cached_block_hash_to_block.blocks()]
    return {
        (get_group_id(key), maybe_convert_block_hash(get_block_hash(key))) for key in keys if key is not None
    }


@pytest.fixture
def stream() -> Iterator[tuple[Rig, ZmqEventPublisher, Reader]]:
    endpoint, again = f"inproc://events-{uuid4()}", f"inproc://again-{uuid4()}"
    rig = Rig([full(), window(), mamba()], device_blocks=40, host_blocks=20, events=True)
    publisher = ZmqEventPublisher(3, endpoint=endpoint, replay_endpoint=again, topic="pod")
    rig.scheduler.kv_event_publisher = publisher
    reader = Reader(zmq.Context.instance(), f"{endpoint}_dp3", f"{again}_dp3")
    time.sleep(0.1)  # a subscription takes a moment
    yield rig, publisher, reader
    publisher.shutdown()
    reader.close()


def fill(rig: Rig) -> None:
    """Prompts of several identities, some twice: hits, evictions on both tiers, loads."""
    identities = [{}, {"cache_salt": "pepper"}, {"lora_request": lora("n", 3, "/p")}, {"session_id": "s"}, {}]
    for turn in range(2):
        for seed, identity in enumerate(identities):
            rig.generate(prompt(26 + turn, seed), max_tokens=3, **identity)


@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_reader_made_from_the_description_holds_what_the_engine_holds(
    stream: tuple[Rig, ZmqEventPublisher, Reader], switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", switch)
    rig, publisher, reader = stream
    fill(rig)
    reader.catch_up(publisher._next_seq)
    device, tier = rig.scheduler.kv_cache_manager.block_pool, rig.manager.tier.pool
    assert reader.held("GPU") == content(device)
    assert reader.held("CPU") == content(tier)
    assert content(device)
    assert content(tier)
    stored = [event for event in reader.seen if isinstance(event, BlockStored)]
    assert {event.medium for event in stored} == {"GPU", "CPU"}
    assert {event.group_idx for event in stored} == {0, 1, 2}
    assert {event.kv_cache_spec_kind for event in stored} == KINDS
    assert {event.kv_cache_spec_sliding_window for event in stored} == {None, window().sliding_window}
    assert {event.lora_name for event in stored} == {None, "n"}
    assert {event.session_id for event in stored if event.medium == "GPU"} == {None, "s"}
    assert {keys for event in stored for keys in event.extra_keys or ()} == {None, ("pepper",), ("n",)}
    assert {type(h) for event in stored for h in event.block_hashes} == {int if switch == "1" else bytes}
    for event in stored:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
    assert any(isinstance(event, BlockRemoved) and event.medium == "CPU" for event in reader.seen)
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    reader.catch_up(publisher._next_seq)
    assert isinstance(reader.seen[-1], AllBlocksCleared)
    assert reader.held("GPU") == reader.held("CPU") == set() == content(device)


def test_a_reader_that_misses_batches_fills_the_gap_by_a_replay(
    stream: tuple[Rig, ZmqEventPublisher, Reader],
) -> None:
    rig, publisher, reader = stream
    fill(rig)
    reader.catch_up(publisher._next_seq, lose=3)
    assert reader.gaps == [0]
    assert reader.held("GPU") == content(rig.scheduler.kv_cache_manager.block_pool)
    assert reader.held("CPU") == content(rig.manager.tier.pool)


def test_a_reader_that_comes_late_is_told_the_present_state_in_the_same_words(
    stream: tuple[Rig, ZmqEventPublisher, Reader],
) -> None:
    rig, publisher, reader = stream
    fill(rig)
    reader.again.send_multipart([b"", ZmqEventPublisher.SNAPSHOT])
    deadline = time.monotonic() + 5
    while not publisher.wants_snapshot:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    rig.scheduler.flush_events()
    assert reader.again.poll(5000)
    _, topic, sequence, payload = reader.again.recv_multipart()
    assert topic == b"pod"
    reader.apply(msgspec.msgpack.decode(payload, type=Batch))
    reader.next_seq = int.from_bytes(sequence, "big") + 1
    assert reader.next_seq == publisher._next_seq
    assert reader.held("GPU") == content(rig.scheduler.kv_cache_manager.block_pool)
    assert reader.held("CPU") == content(rig.manager.tier.pool)
    rig.generate(prompt(30, 9), max_tokens=2)  # and goes on from there with the live stream
    while reader.next_seq < publisher._next_seq:
        assert reader.live.poll(5000)
        frames = reader.live.recv_multipart()
        if int.from_bytes(frames[1], "big") >= reader.next_seq:
            reader.read(frames)
    assert not reader.gaps
    assert reader.held("GPU") == content(rig.scheduler.kv_cache_manager.block_pool)
