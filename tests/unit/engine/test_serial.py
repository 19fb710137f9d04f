"""The codec between processes: round trips, zero-copy frames, refusals."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.engine.serial import MsgpackDecoder, MsgpackEncoder, SerializationError


class Pair(NamedTuple):
    ids: np.ndarray[Any, Any]
    opaque: Any


@dataclass
class Record:
    names: set[str]
    pair: Pair | None = None


class Message(msgspec.Struct, array_like=True, omit_defaults=True):
    number: int
    record: Record | None = None
    payload: Any = None


def round_trip(obj: Any, wanted: Any = Any, threshold: int = 256) -> Any:
    return MsgpackDecoder(wanted).decode(MsgpackEncoder(threshold).encode(obj))


def test_typed_message_with_arrays_comes_back_equal() -> None:
    ids = np.arange(1000, dtype=np.int32).reshape(10, 100)
    message = Message(
        7, Record({"a", "b"}, Pair(ids, np.float32([1.5, -2.0]))), payload=[1, {"x": slice(1, 9, 2)}]
    )
    back = round_trip(message, Message)
    assert back.record.names == {"a", "b"}
    assert back.payload == [1, {"x": slice(1, 9, 2)}]
    np.testing.assert_array_equal(back.record.pair.ids, ids)
    np.testing.assert_array_equal(back.record.pair.opaque, [1.5, -2.0])
    assert back.record.pair.ids.dtype == np.int32


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (7, 129), (2, 0, 3)])
def test_tensors_come_back_equal(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 10).to(dtype)
    back = round_trip({"t": tensor})["t"]
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_non_contiguous_tensors_and_arrays_come_back_equal() -> None:
    tensor, array = torch.rand(40, 50).t(), np.random.default_rng(0).random((40, 50)).T
    back = round_trip([tensor, array, array[::2, 1::3]])
    assert torch.equal(back[0], tensor)
    np.testing.assert_array_equal(back[1], array)
    np.testing.assert_array_equal(back[2], array[::2, 1::3])


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 600), max_size=6), threshold=st.sampled_from([0, 1, 256, 10**9]))
def test_large_arrays_travel_as_frames_and_small_ones_inside(sizes: list[int], threshold: int) -> None:
    arrays = [np.arange(size, dtype=np.uint8) for size in sizes]
    frames = MsgpackEncoder(threshold).encode(arrays)
    assert len(frames) == 1 + sum(size >= threshold for size in sizes)
    for sent, received in zip(arrays, MsgpackDecoder().decode(frames), strict=True):
        np.testing.assert_array_equal(sent, received)


def test_large_buffers_are_not_copied_on_either_side() -> None:
    array = np.zeros(1024, dtype=np.uint8)
    frames = MsgpackEncoder(256).encode(array)
    array[5] = 77
    received = MsgpackDecoder().decode(frames)
    assert received[5] == 77
    array[6] = 88
    assert received[6] == 88


def test_encode_into_reuses_the_buffer() -> None:
    encoder, buffer = MsgpackEncoder(), bytearray(64)
    for value in ({"long": "x" * 100}, [1], np.zeros(300)):
        frames = encoder.encode_into(value, buffer)
        assert frames[0] is buffer
        np.testing.assert_equal(MsgpackDecoder().decode(frames), value)


def test_unknown_objects_are_refused_by_name() -> None:
    with pytest.raises(SerializationError, match="builtins.object"):
        MsgpackEncoder().encode({"x": object()})
    with pytest.raises(SerializationError, match="dtype object"):
        MsgpackEncoder().encode(np.array([object()]))


def test_pickle_needs_the_switch_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    frames = MsgpackEncoder().encode(round_trip)
    assert MsgpackDecoder().decode(frames) is round_trip
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    with pytest.raises(SerializationError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        MsgpackDecoder().decode(frames)


@pytest.mark.parametrize(
    "payload",
    [["|O", [1], b"12345678"], ["<f4", [1], 5], ["<f4", [3], b"1234"]],
    ids=["object", "frame", "short"],
)
def test_damaged_arrays_are_an_error_not_a_crash(payload: list[Any]) -> None:
    frame = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(payload)))
    with pytest.raises((msgspec.DecodeError, ValueError)):
        MsgpackDecoder().decode(frame)
