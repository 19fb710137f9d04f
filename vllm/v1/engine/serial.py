"""msgpack codec for messages between processes.  Layer L7.

Owns how arrays, tensors and slices travel: small ones inside the message, large ones as extra frames that are neither
copied by the sender nor by the receiver. Must not know sockets or what a message means. Arrays are tagged with an
extension code, so they decode the same whether a field is typed or opaque. Pickle is refused unless
`VLLM_ALLOW_INSECURE_SERIALIZATION=1`.

An extension holds `[dtype, shape, data]`, where data is the number of a frame or the bytes themselves.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from vllm import envs

EXT_NDARRAY = 1
EXT_TENSOR = 2
EXT_SLICE = 3
EXT_PICKLE = 4
# numpy kinds that are plain bytes: booleans, integers, floats, complex numbers.
_PLAIN_KINDS = "biufc"

# What a socket accepts as one frame.
Frame = bytes | bytearray | memoryview | zmq.Frame


class SerializationError(TypeError):
    """The object cannot cross a process boundary."""


def _torch() -> Any | None:
    """torch if this process has it loaded: an object can only be a tensor then."""
    return sys.modules.get("torch")


class MsgpackEncoder:
    """Encodes one object into one or more frames; the first holds the message, the others large buffers.

    Not thread-safe. Buffers in the frames alias the arrays that were encoded: do not write to these until sent.
    `size_threshold`: buffers of at least this many bytes get their own frame.
    """

    def __init__(self, size_threshold: int | None = None) -> None:
        self.size_threshold = (
            envs.VLLM_MSGPACK_ZERO_COPY_THRESHOLD if size_threshold is None else size_threshold
        )
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)
        self._frames: list[Frame] | None = None

    def encode(self, obj: Any) -> list[Frame]:
        """Frames of `obj`. Raises SerializationError naming the type that cannot be encoded."""
        return self._encode(obj, None)

    def encode_into(self, obj: Any, buffer: bytearray) -> list[Frame]:
        """Like `encode`, with the first frame written into `buffer`, which is reused."""
        return self._encode(obj, buffer)

    def _encode(self, obj: Any, buffer: bytearray | None) -> list[Frame]:
        frames: list[Frame] = [b""]
        self._frames = frames
        try:
            if buffer is None:
                frames[0] = self._encoder.encode(obj)
            else:
                self._encoder.encode_into(obj, buffer)
                frames[0] = buffer
        finally:
            self._frames = None
        return frames

    def _hook(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            return self._array(obj, EXT_NDARRAY, obj.dtype.str)
        if isinstance(obj, np.generic):
            return obj.item()
        torch = _torch()
        if torch is not None and isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if isinstance(obj, slice):
            return msgspec.msgpack.Ext(EXT_SLICE, msgspec.msgpack.encode([obj.start, obj.stop, obj.step]))
        if isinstance(obj, (set, frozenset)):
            return sorted(obj)
        if envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            return msgspec.msgpack.Ext(EXT_PICKLE, pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
        raise SerializationError(
            f"objects of type {type(obj).__module__}.{type(obj).__qualname__} cannot be sent to another process "
            "(VLLM_ALLOW_INSECURE_SERIALIZATION=1 permits pickle for trusted set-ups)"
        )

    def _tensor(self, tensor: Any) -> Any:
        dtype = str(tensor.dtype).removeprefix("torch.")
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(_torch().uint8)  # type: ignore[union-attr]
        return self._array(flat.numpy(), EXT_TENSOR, dtype, list(tensor.shape))

    def _array(
        self, array: np.ndarray[Any, Any], code: int, dtype: str, shape: list[int] | None = None
    ) -> Any:
        if array.dtype.kind not in _PLAIN_KINDS:
            raise SerializationError(f"arrays of dtype {array.dtype} cannot be sent to another process")
        shape = list(array.shape) if shape is None else shape
        data: int | bytes
        if array.nbytes < self.size_threshold:
            data = array.tobytes()
        else:
            assert self._frames is not None
            data = len(self._frames)
            self._frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode([dtype, shape, data]))


class MsgpackDecoder:
    """Decodes frames made by `MsgpackEncoder`, into plain objects or into the type `t`.

    Not thread-safe. Arrays alias the frames and are read-only where the frames are; tensors are copied unless the
    frame is writable.
    """

    def __init__(self, t: Any = Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(t, ext_hook=self._ext_hook, dec_hook=_dec_hook)
        self._frames: Sequence[Frame] = ()

    def decode(self, frames: Frame | Sequence[Frame]) -> Any:
        """The object. Raises msgspec.DecodeError (or ValidationError) for bytes that are no such object."""
        if isinstance(frames, (bytes, bytearray, memoryview, zmq.Frame)):
            frames = (frames,)
        self._frames = frames
        try:
            return self._decoder.decode(_buffer(frames[0]))
        finally:
            self._frames = ()

    def _ext_hook(self, code: int, payload: memoryview) -> Any:
        if code in (EXT_NDARRAY, EXT_TENSOR):
            dtype, shape, data = msgspec.msgpack.decode(payload)
            raw = self._frame(data) if isinstance(data, int) else memoryview(data)
            return _to_array(dtype, shape, raw) if code == EXT_NDARRAY else _to_tensor(dtype, shape, raw)
        if code == EXT_SLICE:
            return slice(*msgspec.msgpack.decode(payload))
        if code == EXT_PICKLE:
            if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
                raise SerializationError(
                    "a pickled object was received, but VLLM_ALLOW_INSECURE_SERIALIZATION is off"
                )
            return pickle.loads(payload)
        raise msgspec.ValidationError(f"unknown msgpack extension code {code}")

    def _frame(self, number: int) -> memoryview:
        if not 0 < number < len(self._frames):
            raise msgspec.ValidationError(f"message refers to frame {number} of {len(self._frames)}")
        return _buffer(self._frames[number])


def _buffer(frame: Frame) -> memoryview:
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def _to_array(dtype: str, shape: list[int], raw: memoryview) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    if kind.kind not in _PLAIN_KINDS:
        raise msgspec.ValidationError(f"arrays of dtype {dtype!r} are not accepted")
    return np.frombuffer(raw, dtype=kind).reshape(shape)


def _to_tensor(dtype: str, shape: list[int], raw: memoryview) -> Any:
    torch = importlib.import_module("torch")
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise msgspec.ValidationError(f"{dtype!r} is not a tensor dtype")
    data = raw if not raw.readonly else bytearray(raw)
    if not len(data):
        return torch.empty(shape, dtype=torch_dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype).reshape(shape)


def _dec_hook(wanted: Any, obj: Any) -> Any:
    """Fields of a custom type: extensions have become the right object already, sets arrive as lists."""
    origin = getattr(wanted, "__origin__", wanted)
    if origin is np.ndarray and not isinstance(obj, np.ndarray):
        return np.asarray(obj)
    return obj
