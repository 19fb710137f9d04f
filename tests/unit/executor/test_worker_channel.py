"""Frames between executor and worker: whole, in order, and an end that is noticed."""

from __future__ import annotations

import socket
import threading

import pytest

from vllm.v1.executor.worker_channel import (
    Channel,
    answer,
    answer_call,
    decode_reply,
    encode_call,
    number_call,
)


@pytest.fixture
def ends():
    here, there = (Channel(end) for end in socket.socketpair())
    yield here, there
    here.close()
    there.close()


def test_frames_arrive_whole_whatever_their_size(ends) -> None:
    here, there = ends
    frames = [b"", b"x", bytes(5_000_000), b"last"]
    sender = threading.Thread(target=lambda: [here.send(frame) for frame in frames])
    sender.start()
    assert [there.receive() for _ in frames] == frames
    sender.join()


def test_the_end_of_the_other_side_is_no_frame(ends) -> None:
    here, there = ends
    here.send(b"one")
    here.stop_sending()
    here.stop_sending()
    assert there.receive() == b"one"
    assert there.receive() is None
    there.send(b"still")
    assert here.receive() == b"still"


def test_an_end_in_the_middle_of_a_frame_is_an_end() -> None:
    here, there = socket.socketpair()
    channel = Channel(there)
    here.send((100).to_bytes(8, "little") + b"only this")
    here.close()
    assert channel.receive() is None
    channel.close()


def test_a_side_that_stalls_counts_as_gone() -> None:
    here, there = socket.socketpair()
    channel = Channel(there, stall_s=1)
    here.send(b"\x01")
    assert channel.receive() is None
    here.close()
    channel.close()


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def _execute(method, *args, **kwargs):
    if method == "odd error":
        raise Unpicklable(1, 2)
    if method == "odd result":
        return lambda: None
    return method, args, kwargs


@pytest.mark.parametrize(
    ("method", "error"),
    [("odd error", "RuntimeError('Unpicklable: 1 and 2')"), ("odd result", "Can't")],
)
def test_whatever_a_call_does_is_answered(method, error) -> None:
    frame = bytearray(number_call(3, encode_call(method, (), {})))
    call_id, reply = decode_reply(1, bytearray(answer_call(frame, _execute, lambda: 9)))
    assert (call_id, reply.rank, reply.operations, reply.value) == (3, 1, 9, None)
    assert error in repr(reply.error)
    assert "In the worker process" in reply.error.__notes__[0]


def test_a_call_and_its_answer() -> None:
    frame = bytearray(number_call(4, encode_call("name", (1,), {"two": 2})))
    assert decode_reply(0, bytearray(answer_call(frame, _execute, lambda: 0)))[1].value == (
        "name",
        (1,),
        {"two": 2},
    )
    assert decode_reply(0, bytearray(answer(0, lambda: "there", lambda: 0)))[1].value == "there"


def test_a_call_that_cannot_be_read_is_answered_too() -> None:
    frame = bytearray(number_call(6, b"not a pickle"))
    call_id, reply = decode_reply(0, bytearray(answer_call(frame, _execute, lambda: 0)))
    assert call_id == 6
    assert reply.error is not None
